"""Planned moves under load: scale-out, rebalance and scale-in, one after the other, while processes publish flat out."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Callable
from statistics import median

import msgspec

from roq.client.cluster import Cluster, connect
from roq.errors import NotReady, RoqError
from roq.runtime.backoff import delays
from roq.tools.bench.harness import PubSubResult
from roq.tools.bench.load import Load
from roq.tools.bench.pubsub import own_cluster, run_on
from roq.wire.assignment import Overflow
from roq.wire.monitor import QueueView

SEED = 20
PUBLISHERS, SUBSCRIBERS, SIZE = 4, 3, 100


class Moves(msgspec.Struct, frozen=True):
    """The findings. operations: scale-outs, rebalances and scale-ins done; moved: publishers moved by them."""

    operations: int
    moved: int
    move_seconds_median: float
    move_seconds_max: float
    result: PubSubResult


async def _active(cluster: Cluster, queue: str) -> tuple[list[str], list[int]]:
    view: QueueView = await cluster.inspect(queue)
    exchanges = [one.exchange.id for one in view.exchanges if one.state == "active"]
    return exchanges, [one.id for one in view.members if one.role == "publisher"]


async def _operate(address: str, operations: int, seconds: float, tell: Callable[[str], None]) -> tuple[int, list[float]]:
    """The operations, spread over the time; publishers moved, and how long each operation took."""
    chance = random.Random(SEED)
    moved, took = 0, []
    async with connect(address) as cluster:
        for wait in delays(0.1, 0.1):  # the load generator makes the queue and its members
            with contextlib.suppress(NotReady):
                if await cluster.queues() and len((await _active(cluster, await _queue(cluster)))[1]) == PUBLISHERS:
                    break
            await asyncio.sleep(wait)
        queue = await _queue(cluster)
        started = time.monotonic()
        for number in range(operations):
            await asyncio.sleep(max(0.0, started + number * seconds / operations - time.monotonic()))
            exchanges, publishers = await _active(cluster, queue)
            begun = time.monotonic()
            if number % 3 == 0:
                created = (await cluster.create_exchange(queue)).exchange
                await cluster.exchange_active(queue, created)
                chosen = [(publisher, created) for publisher in chance.sample(publishers, 2)]
                moved += (await cluster.move(queue, chosen)).moved
            elif number % 3 == 1:
                chosen = [(publisher, chance.choice(exchanges)) for publisher in publishers]
                moved += (await cluster.move(queue, chosen)).moved
            else:
                await cluster.remove_exchange(queue, chance.choice(exchanges))
            took.append(time.monotonic() - begun)
            tell(f"operation {number + 1} of {operations}: {took[-1] * 1000:.0f} ms")
    return moved, took


async def _queue(cluster: Cluster) -> str:
    return (await cluster.queues())[0].record.name


async def moves(operations: int, seconds: float, tell: Callable[[str], None]) -> Moves:
    """Run the load on a cluster of its own and operate on it meanwhile. Raises what an operation met with."""
    load = Load(publishers=PUBLISHERS, subscribers=SUBSCRIBERS, size=SIZE, duration=seconds + 5.0)
    async with own_cluster() as local:
        loading = asyncio.create_task(run_on(local.zookeeper, load, Overflow.BLOCK))
        operating = asyncio.create_task(_operate(local.zookeeper, operations, seconds, tell))
        await asyncio.wait({loading, operating}, return_when=asyncio.FIRST_EXCEPTION)
        if loading.done() and not operating.done():
            operating.cancel()
            raise RoqError("the load ended before the operations did")
        moved, took = await operating
        return Moves(len(took), moved, median(took), max(took), await loading)


def moves_rows(found: Moves) -> list[tuple[str, ...]]:
    """Rows of the report."""
    result = found.result
    wrong = result.lost + result.duplicated + result.reordered
    return [
        ("operations under load", f"{found.operations}, {found.moved} publishers moved", "20 in a minute", "-"),
        (
            "an operation, median and slowest",
            f"{found.move_seconds_median * 1e3:.0f} ms, {found.move_seconds_max * 1e3:.0f} ms",
            "-",
            "-",
        ),
        ("published", f"{result.published:,}", "-", "-"),
        ("delivered", f"{result.delivered:,}", "-", "-"),
        (
            "lost, duplicated, reordered",
            f"{result.lost}, {result.duplicated}, {result.reordered}",
            "0, 0, 0",
            "MISSED" if wrong else "met",
        ),
    ]
