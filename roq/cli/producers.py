"""`roq queue producers` and `roq queue forget-producer`: what producers of a recorded queue have stored."""

from __future__ import annotations

from typing import Annotated

import msgspec
import typer
from rich.console import RenderableType

from roq.cli.address import ClusterOption, JsonOption, QueueArgument, with_cluster
from roq.cli.output import moment, print_found, say, table
from roq.wire.producers import ProducerView


class ProducerRow(msgspec.Struct, frozen=True):
    """A producer. number: of its last message that is known to be stored; closed: there are none behind it. owner: who opened
    it last. opened, kept: when, and when the number was kept; Unix seconds, None: never."""

    name: str
    number: int
    closed: bool
    owner: str
    opened: float | None
    kept: float | None


def list_producers(queue: QueueArgument, cluster: ClusterOption = None, json: JsonOption = False) -> None:
    """List the producers of a recorded queue, open or not, and what each has stored."""
    found = with_cluster(cluster, lambda connected: connected.producers(queue))
    print_found([producer_row(view) for view in found], json, producer_table)


def forget(
    queue: QueueArgument,
    name: Annotated[str, typer.Argument(metavar="NAME", help="Of the producer.", show_default=False)],
    cluster: ClusterOption = None,
) -> None:
    """Forget a producer: opened again it begins with number 1 and new messages, and where it is open now it fails."""
    with_cluster(cluster, lambda connected: connected.forget_producer(queue, name))
    say(f"forgot {name} of {queue}")


def producer_row(view: ProducerView) -> ProducerRow:
    """For people, and as JSON."""
    return ProducerRow(view.name, view.number, view.closed, view.owner, view.opened or None, view.kept or None)


def producer_table(rows: list[ProducerRow]) -> RenderableType:
    """Producers."""
    cells = [
        (
            row.name,
            str(row.number),
            "closed" if row.closed else "open, or ended without a close",
            "-" if row.kept is None else moment(row.kept),
            row.owner or "-",
            "-" if row.opened is None else moment(row.opened),
        )
        for row in rows
    ]
    return table("Producers", ("NAME", ">STORED", "STATE", "KEPT", "OPENED BY", "OPENED"), cells)
