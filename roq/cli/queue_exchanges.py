"""`roq queue move|add-exchange|drain-exchange`: planned changes of a queue's Exchanges, by hand."""

from __future__ import annotations

from typing import Annotated

import typer

from roq.cli.address import ClusterOption, JsonOption, with_cluster
from roq.cli.output import print_json, say, working
from roq.client.cluster import Cluster
from roq.errors import CallError, ExchangeNotFound, PublisherNotFound, RoqError
from roq.wire.monitor import Moved, QueueView

QueueArgument = Annotated[str, typer.Argument(metavar="QUEUE", help="Name of the queue.", show_default=False)]
ExchangeArgument = Annotated[
    str, typer.Argument(metavar="EXCHANGE", help="Id of the Exchange, or how it begins.", show_default=False)
]


def register(app: typer.Typer) -> None:
    """Add these commands to `roq queue`."""
    app.command("move")(move)
    app.command("add-exchange")(add_exchange)
    app.command("drain-exchange")(drain_exchange)


def move(
    queue: QueueArgument,
    exchange: ExchangeArgument,
    publishers: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[PUBLISHER]...", help="Ids, or how they begin; without any: all of the queue.", show_default=False
        ),
    ] = None,
    cluster: ClusterOption = None,
    json: JsonOption = False,
) -> None:
    """Move publishers to an Exchange, without loss, duplicates or reordering; ends when the move is complete."""

    async def work(connected: Cluster) -> Moved:
        view = await connected.inspect(queue)
        target = find_exchange(view, exchange)
        moves = [(publisher, target) for publisher in find_publishers(view, publishers or [], target)]
        with working(f"moving {len(moves)} publishers to {target}"):
            return await connected.move(queue, moves) if moves else Moved(0)

    moved = with_cluster(cluster, work)
    if json:
        print_json({"moved": moved.moved, "refused": moved.refused})
    else:
        say(f"moved {moved.moved}")
    if moved.refused:
        raise RoqError("refused: " + "; ".join(moved.refused))


def add_exchange(
    queue: QueueArgument,
    cluster: ClusterOption = None,
    host: Annotated[
        str | None, typer.Option(help="Host to run it; else the one with most free slots.", show_default=False)
    ] = None,
    json: JsonOption = False,
) -> None:
    """Add one Exchange to a queue; ends when every subscriber is attached to it."""

    async def work(connected: Cluster) -> None:
        with working(f"adding an Exchange to {queue}"):
            created = await connected.create_exchange(queue, host=host)
            await connected.exchange_active(queue, created.exchange)
        if json:
            print_json({"exchange": created.exchange, "host": created.host})
        else:
            say(f"added Exchange {created.exchange} on {created.host}")

    with_cluster(cluster, work)


def drain_exchange(queue: QueueArgument, exchange: ExchangeArgument, cluster: ClusterOption = None) -> None:
    """Move everybody away from an Exchange, then stop it."""

    async def work(connected: Cluster) -> None:
        target = find_exchange(await connected.inspect(queue), exchange)
        with working(f"draining Exchange {target}"):
            await connected.remove_exchange(queue, target)
        say(f"drained and stopped Exchange {target}")

    with_cluster(cluster, work)


def find_exchange(view: QueueView, wanted: str) -> str:
    """The one Exchange whose id begins with `wanted`; raises ExchangeNotFound or CallError."""
    found = [one.exchange.id for one in view.exchanges if one.exchange.id.startswith(wanted)]
    if wanted in found or len(found) == 1:
        return wanted if wanted in found else found[0]
    if not found:
        raise ExchangeNotFound(f"queue {view.queue!r} has no Exchange {wanted!r}")
    raise CallError(f"{wanted!r} could be any of {', '.join(found)}")


def find_publishers(view: QueueView, wanted: list[str], target: str) -> list[int]:
    """The publishers named by hexadecimal id or its beginning; all that are not at `target` yet if none is named."""
    present = {f"{member.id:016x}": member for member in view.members if member.role == "publisher"}
    if not wanted:
        return [member.id for member in present.values() if target not in member.exchanges]
    chosen = []
    for name in wanted:
        found = [member.id for text, member in present.items() if text.startswith(name.lower())]
        if not found:
            raise PublisherNotFound(f"queue {view.queue!r} has no publisher {name!r}")
        if len(found) > 1:
            raise CallError(f"{name!r} could be any of {', '.join(f'{one:016x}' for one in found)}")
        chosen += found
    return chosen
