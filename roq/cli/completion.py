"""Names that a shell completes: queues, work queues, groups, hosts of the cluster that the line means, and contexts.

The cluster is asked for one second at most. Whatever fails, nothing is offered and nothing is said: that terminal has a
line under way.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path

import typer

from roq.cli.which import DEFAULT_ADDRESS, Choice, choose, contexts_file, read_contexts, take_card
from roq.client.cluster import Cluster, connect
from roq.ids import GROUP_MARK
from roq.runtime.security import use_card

ASK_SECONDS = 1.0  # people wait for it between two keys


def context_names(incomplete: str) -> list[str]:
    """Contexts that begin so."""
    return _quietly(lambda: sorted(read_contexts(contexts_file()).contexts), incomplete)


def queue_names(ctx: typer.Context, incomplete: str) -> list[str]:
    """Queues that begin so."""

    async def ask(cluster: Cluster) -> list[str]:
        return [info.record.name for info in await cluster.queues()]

    return _asked(ctx, ask, incomplete)


def work_queue_names(ctx: typer.Context, incomplete: str) -> list[str]:
    """Work queues that begin so, groups among them."""

    async def ask(cluster: Cluster) -> list[str]:
        return [info.record.name for info in await cluster.work_queues()]

    return _asked(ctx, ask, incomplete)


def group_names(ctx: typer.Context, incomplete: str) -> list[str]:
    """Groups that begin so, of the queue that stands before on the line."""
    queue = str(ctx.params.get("queue") or "")

    async def ask(cluster: Cluster) -> list[str]:
        return [info.record.name.removeprefix(queue + GROUP_MARK) for info in await cluster.groups(queue)]

    return _asked(ctx, ask, incomplete)


def host_names(ctx: typer.Context, incomplete: str) -> list[str]:
    """Hosts that begin so."""

    async def ask(cluster: Cluster) -> list[str]:
        return [info.host for info in await cluster.hosts()]

    return _asked(ctx, ask, incomplete)


def _asked(ctx: typer.Context, ask: Callable[[Cluster], Awaitable[list[str]]], incomplete: str) -> list[str]:
    async def names() -> list[str]:
        async with asyncio.timeout(ASK_SECONDS):
            choice = choose(ctx.params.get("cluster")) or Choice(DEFAULT_ADDRESS, "")
            if card := ctx.find_root().params.get("card"):
                use_card(Path(card))
            take_card(choice)
            async with connect(choice.address, connect_seconds=ASK_SECONDS, zookeeper_seconds=ASK_SECONDS) as cluster:
                return await ask(cluster)

    return _quietly(lambda: asyncio.run(names()), incomplete)


def _quietly(names: Callable[[], Iterable[str]], incomplete: str) -> list[str]:
    try:
        return [name for name in names() if name.startswith(incomplete)]
    except Exception:  # noqa: BLE001  whatever it is: the terminal has a line under way, which is no place to tell it
        return []
