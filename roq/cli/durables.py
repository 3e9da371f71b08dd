"""`roq queue durables` and `roq queue forget-durable`: how far durable subscribers of a recorded queue have got."""

from __future__ import annotations

from typing import Annotated

import msgspec
import typer
from rich.console import RenderableType

from roq.cli.address import ClusterOption, JsonOption, QueueArgument, with_cluster
from roq.cli.output import moment, print_found, say, table
from roq.wire.durables import DurableView
from roq.wire.recording import TapePosition


class DurableRow(msgspec.Struct, frozen=True):
    """A durable subscriber. position: for --start of another one, empty if none was kept. tapes, entries: how many tapes it has
    begun with, and how many entries it is done with on all of them. owner: who opened it last. opened, kept: when, and when a
    position was kept last; Unix seconds, None: never."""

    name: str
    position: str
    tapes: int
    entries: int
    owner: str
    opened: float | None
    kept: float | None


def list_durables(queue: QueueArgument, cluster: ClusterOption = None, json: JsonOption = False) -> None:
    """List the durable subscribers of a recorded queue, open or not, and how far each has got."""
    found = with_cluster(cluster, lambda connected: connected.durables(queue))
    print_found([durable_row(view) for view in found], json, durable_table)


def forget(
    queue: QueueArgument,
    name: Annotated[str, typer.Argument(metavar="NAME", help="Of the durable subscriber.", show_default=False)],
    cluster: ClusterOption = None,
) -> None:
    """Forget how far a durable subscriber has got: opened again it begins anew, and where it is open now it fails."""
    with_cluster(cluster, lambda connected: connected.forget_durable(queue, name))
    say(f"forgot {name} of {queue}")


def durable_row(view: DurableView) -> DurableRow:
    """What its position says."""
    done = TapePosition.parse(view.position).done if view.position else {}
    entries = sum(done.values())
    return DurableRow(view.name, view.position, len(done), entries, view.owner, view.opened or None, view.kept or None)


def durable_table(rows: list[DurableRow]) -> RenderableType:
    """Durable subscribers."""
    cells = [
        (
            row.name,
            str(row.tapes),
            str(row.entries),
            "-" if row.kept is None else moment(row.kept),
            row.owner or "-",
            "-" if row.opened is None else moment(row.opened),
        )
        for row in rows
    ]
    return table("Durable subscribers", ("NAME", ">TAPES", ">ENTRIES", "KEPT", "OPENED BY", "OPENED"), cells)
