"""`roq task dead …`: tasks that failed too often, or were rejected, and why."""

from __future__ import annotations

import time
from typing import Annotated

import msgspec
import typer

from roq.blocking import WorkQueue
from roq.cli.address import JsonOption
from roq.cli.output import console, print_json, say, table
from roq.cli.task_address import AddressArgument, CountOption, PayloadRow, age, opened, payload_row, shown
from roq.errors import CallError, TaskNotFound

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


@app.command("ls")
def list_dead(address: AddressArgument, count: CountOption = 100, json: JsonOption = False) -> None:
    """List dead letters with their last error."""
    with opened(address) as queue:
        letters = queue.dead(count)
    if json:
        print_json(
            [DeadRow(one.id, one.attempts, one.priority, one.inserted, one.error, payload_row(one.payload)) for one in letters]
        )
        return
    now = time.time()
    rows = [(one.id, str(one.attempts), age(now - one.inserted), shown(one.error), shown(one.payload)) for one in letters]
    console().print(table("", ("ID", ">ATTEMPTS", ">AGE", "ERROR", "PAYLOAD"), rows))


def _chosen(ids: list[str] | None, everything: bool) -> list[str] | None:
    if bool(ids) == everything:
        raise CallError("name dead letters, or --all")
    return None if everything else ids


def _tell(done: int, chosen: list[str] | None, what: str, queue: WorkQueue) -> None:
    if chosen is not None and done < len(set(chosen)):
        raise TaskNotFound(f"{what} {done}; {len(set(chosen)) - done} of those named are no dead letters of {queue.address}")
    say(f"roq task dead: {what} {done}")


@app.command("requeue")
def requeue(address: AddressArgument, ids: IdsArgument = None, everything: AllOption = False) -> None:
    """Make dead letters ready again, as if never tried."""
    chosen = _chosen(ids, everything)
    with opened(address) as queue:
        _tell(queue.requeue_dead(chosen), chosen, "requeued", queue)


@app.command("rm")
def remove(address: AddressArgument, ids: IdsArgument = None, everything: AllOption = False) -> None:
    """Forget dead letters."""
    chosen = _chosen(ids, everything)
    with opened(address) as queue:
        _tell(queue.remove_dead(chosen), chosen, "removed", queue)
