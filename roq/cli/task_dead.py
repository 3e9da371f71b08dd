"""`roq task dead …`: dead letters of a work queue or a group."""

from __future__ import annotations

import time
from typing import Annotated

import msgspec
import typer

from roq.blocking import WorkQueue
from roq.cli.address import JsonOption
from roq.cli.headers import headers_row
from roq.cli.output import age, console, print_json, say, table, working
from roq.cli.task_address import AddressArgument, CountOption, PayloadRow, opened, payload_row, shown
from roq.errors import CallError, TaskNotFound
from roq.wire.task import TaskView

app = typer.Typer(help="Dead letters: list, requeue, remove.", no_args_is_help=True)
IdsArgument = Annotated[list[str] | None, typer.Argument(metavar="[ID…]", help="Which ones.", show_default=False)]
AllOption = Annotated[bool, typer.Option("--all", help="All of them.")]


class ChangedTasks(msgspec.Struct):
    """How many a command has changed, for JSON."""

    tasks: int


class DeadRow(msgspec.Struct):
    """A dead letter for JSON."""

    id: str
    attempts: int
    priority: int
    inserted: float
    error: str
    payload: PayloadRow
    headers: dict[str, str]


@app.command("ls")
def list_dead(address: AddressArgument, count: CountOption = 100, json: JsonOption = False) -> None:
    """List dead letters with their last error."""
    with opened(address) as queue:
        letters = queue.dead(count)
    if json:
        print_json([_dead_row(one) for one in letters])
        return
    now = time.time()
    rows = [(one.id, str(one.attempts), age(now - one.inserted), shown(one.error), shown(one.payload)) for one in letters]
    console().print(table("", ("ID", ">ATTEMPTS", ">AGE", "ERROR", "PAYLOAD"), rows))


def _dead_row(one: TaskView) -> DeadRow:
    shown_rows = (payload_row(one.payload), headers_row(one.headers))
    return DeadRow(one.id, one.attempts, one.priority, one.inserted, one.error, *shown_rows)


def _chosen(ids: list[str] | None, everything: bool) -> list[str] | None:
    if bool(ids) == everything:
        raise CallError("name dead letters, or --all")
    return None if everything else ids


def _report_dead(done: int, chosen: list[str] | None, what: str, queue: WorkQueue, json: bool) -> None:
    if chosen is not None and done < len(set(chosen)):
        raise TaskNotFound(f"{what} {done}; {len(set(chosen)) - done} of those named are no dead letters of {queue.address}")
    if json:
        print_json(ChangedTasks(done))
    else:
        say(f"roq task dead: {what} {done}")


@app.command("requeue")
def requeue(address: AddressArgument, ids: IdsArgument = None, everything: AllOption = False, json: JsonOption = False) -> None:
    """Make dead letters ready again, as if never tried."""
    chosen = _chosen(ids, everything)
    with opened(address) as queue:
        with working("requeueing dead letters"):
            requeued = queue.requeue_dead(chosen)
        _report_dead(requeued, chosen, "requeued", queue, json)


@app.command("rm")
def remove_dead(
    address: AddressArgument, ids: IdsArgument = None, everything: AllOption = False, json: JsonOption = False
) -> None:
    """Forget dead letters."""
    chosen = _chosen(ids, everything)
    with opened(address) as queue:
        with working("removing dead letters"):
            removed = queue.remove_dead(chosen)
        _report_dead(removed, chosen, "removed", queue, json)
