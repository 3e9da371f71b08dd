"""`roq task dead …`: dead letters of a work queue or a group."""

from __future__ import annotations

import time
from typing import Annotated

import msgspec
import typer

from roq.blocking import WorkQueue
from roq.cli.address import JsonOption
from roq.cli.headers import headers_row
from roq.cli.output import age, console, print_done, print_json, table, working
from roq.cli.task_address import AddressArgument, CountOption, PayloadRow, changed_tasks, opened, payload_row, shown
from roq.errors import CallError, TaskNotFound
from roq.wire.task import TaskView

app = typer.Typer(help="Dead letters: list, requeue, remove.", no_args_is_help=True)
IdsArgument = Annotated[list[str] | None, typer.Argument(metavar="[ID…]", help="Which ones.", show_default=False)]
AllOption = Annotated[bool, typer.Option("--all", help="All of them.")]


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


def _report_dead(address: str, done: int, chosen: list[str] | None, what: str, queue: WorkQueue, json: bool) -> None:
    missing = 0 if chosen is None else len(set(chosen)) - done
    if json or not missing:
        print_done(changed_tasks(address, what, done), json, f"roq task dead: {what} {done}")
    if missing:
        raise TaskNotFound(f"{what} {done}; {missing} of those named are no dead letters of {queue.address}")


@app.command("requeue")
def requeue(address: AddressArgument, ids: IdsArgument = None, everything: AllOption = False, json: JsonOption = False) -> None:
    """Make dead letters ready again, as if never tried."""
    chosen = _chosen(ids, everything)
    with opened(address) as queue:
        with working("requeueing dead letters"):
            requeued = queue.requeue_dead(chosen)
        _report_dead(address, requeued, chosen, "requeued", queue, json)


@app.command("rm")
def remove_dead(
    address: AddressArgument, ids: IdsArgument = None, everything: AllOption = False, json: JsonOption = False
) -> None:
    """Forget dead letters."""
    chosen = _chosen(ids, everything)
    with opened(address) as queue:
        with working("removing dead letters"):
            removed = queue.remove_dead(chosen)
        _report_dead(address, removed, chosen, "removed", queue, json)
