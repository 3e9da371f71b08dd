"""`roq queue durables`, `producers` and their `forget-…`: who has a name on a recorded queue, and how far each has got."""

from __future__ import annotations

from typing import Annotated

import msgspec
import typer
from rich.console import RenderableType

from roq.cli.address import ClusterOption, JsonOption, QueueArgument, with_cluster
from roq.cli.output import moment, print_done, print_found, table
from roq.wire.durables import DurableView
from roq.wire.producers import ProducerView
from roq.wire.recording import TapePosition

DurableArgument = Annotated[str, typer.Argument(metavar="NAME", help="Of the durable subscriber.", show_default=False)]
ProducerArgument = Annotated[str, typer.Argument(metavar="NAME", help="Of the producer.", show_default=False)]


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


class ProducerRow(msgspec.Struct, frozen=True):
    """A producer. number: of its last message that is known to be stored; closed: there are none behind it. owner: who opened
    it last. opened, kept: when, and when the number was kept; Unix seconds, None: never."""

    name: str
    number: int
    closed: bool
    owner: str
    opened: float | None
    kept: float | None


def list_durables(queue: QueueArgument, cluster: ClusterOption = None, json: JsonOption = False) -> None:
    """List the durable subscribers of a recorded queue, open or not, and how far each has got."""
    found = with_cluster(cluster, lambda connected: connected.durables(queue))
    print_found([durable_row(view) for view in found], json, durable_table)


def list_producers(queue: QueueArgument, cluster: ClusterOption = None, json: JsonOption = False) -> None:
    """List the producers of a recorded queue, open or not, and what each has stored."""
    found = with_cluster(cluster, lambda connected: connected.producers(queue))
    print_found([producer_row(view) for view in found], json, producer_table)


def forget_durable(
    queue: QueueArgument, name: DurableArgument, cluster: ClusterOption = None, json: JsonOption = False
) -> None:
    """Forget how far a durable subscriber has got: opened again it begins anew, and where it is open now it fails."""
    with_cluster(cluster, lambda connected: connected.forget_durable(queue, name))
    print_done({"queue": queue, "durable": name, "forgotten": True}, json, f"forgot {name} of {queue}")


def forget_producer(
    queue: QueueArgument, name: ProducerArgument, cluster: ClusterOption = None, json: JsonOption = False
) -> None:
    """Forget a producer: opened again it begins with number 1 and new messages, and where it is open now it fails."""
    with_cluster(cluster, lambda connected: connected.forget_producer(queue, name))
    print_done({"queue": queue, "producer": name, "forgotten": True}, json, f"forgot {name} of {queue}")


def durable_row(view: DurableView) -> DurableRow:
    """What its position says."""
    done = TapePosition.parse(view.position).done if view.position else {}
    entries = sum(done.values())
    return DurableRow(view.name, view.position, len(done), entries, view.owner, view.opened or None, view.kept or None)


def producer_row(view: ProducerView) -> ProducerRow:
    """For people, and as JSON."""
    return ProducerRow(view.name, view.number, view.closed, view.owner, view.opened or None, view.kept or None)


def durable_table(rows: list[DurableRow]) -> RenderableType:
    """Durable subscribers."""
    cells = [(row.name, str(row.tapes), str(row.entries), *_kept_and_opened(row)) for row in rows]
    return table("Durable subscribers", ("NAME", ">TAPES", ">ENTRIES", "KEPT", "OPENED BY", "OPENED"), cells)


def producer_table(rows: list[ProducerRow]) -> RenderableType:
    """Producers."""
    ends = ("open, or ended without a close", "closed")
    cells = [(row.name, str(row.number), ends[row.closed], *_kept_and_opened(row)) for row in rows]
    return table("Producers", ("NAME", ">STORED", "STATE", "KEPT", "OPENED BY", "OPENED"), cells)


def _kept_and_opened(row: DurableRow | ProducerRow) -> tuple[str, str, str]:
    kept, opened = ("-" if at is None else moment(at) for at in (row.kept, row.opened))
    return kept, row.owner or "-", opened
