"""Transactions of one message and one ack: how many a second one by one, and with many under way.

    python -m benchmarks.recorded.transactions --count 2000 --at-once 100

It starts a cluster of its own on this machine (3 hosts, 3 copies), has a group lease what was published, and commits a
transaction for each message. Beside them: the same acks alone. Not covered: other systems (run.py).
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import roq
from roq.tools.local.cluster import LocalCluster

GROUP = "movers"
Work = Callable[[roq.Task], Awaitable[None]]


async def _rate(member: roq.GroupSubscriber, count: int, at_once: int, work: Work) -> float:
    """Messages a second, from the first lease to the last commit."""
    began, left = time.perf_counter(), count
    while left:
        tasks = await member.queue.lease(60.0, min(left, 1000), 10.0)
        left -= len(tasks)
        waiting = asyncio.Semaphore(at_once)

        async def one(task: roq.Task, waiting: asyncio.Semaphore = waiting) -> None:
            async with waiting:
                await work(task)

        await asyncio.gather(*(one(task) for task in tasks))
    return count / (time.perf_counter() - began)


async def measure(cluster: roq.Cluster, count: int, at_once: int) -> None:
    """Print the rates."""
    for name in ("source", "result"):
        await cluster.create_queue(name, overflow="block", record=roq.Record(days=1))
    await cluster.create_group("source", GROUP, order="none")

    async def transaction(task: roq.Task) -> None:
        async with cluster.transaction() as transaction:
            await transaction.publish("result", "t", task.payload)
            await transaction.ack(task)

    published = 0
    async with cluster.publisher("source", confirm="stored") as publisher, cluster.subscriber("source", group=GROUP) as member:
        for name, work in (("acks", roq.Task.ack), ("transactions", transaction)):
            for under_way in (1, at_once):
                amount = count if under_way > 1 else max(count // 10, 1)
                await publisher.publish_many("t", [b"%0128d" % number for number in range(amount)], confirm="stored")
                rate = await _rate(member, amount, under_way, work)
                published += amount if work is transaction else 0
                print(f"{name}, {under_way} under way: {rate:,.0f} a second", flush=True)
    began, found = time.perf_counter(), 0
    async with cluster.subscriber("result", start="earliest", follow="stored") as messages:
        while found < published:
            found += len(await messages.next_batch() or ())
    print(f"all {published} are on the tapes {time.perf_counter() - began:.2f} s later, at most")


async def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=2_000, help="messages of a measurement with many under way")
    parser.add_argument("--at-once", type=int, default=100, help="transactions under way")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        local = LocalCluster(Path(folder), gcms=1, hosts=3)
        await local.start()
        try:
            async with roq.connect(local.zookeeper) as cluster:
                await measure(cluster, given.count, given.at_once)
        finally:
            await local.stop()


if __name__ == "__main__":
    asyncio.run(main())
