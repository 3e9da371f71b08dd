"""Groups that are behind, on a real cluster: what expires before a group has it is counted, whoever its master is; one that
stands still slows nobody down; one that nobody asks reads next to nothing, until somebody does.

Not covered: how much a group takes in before it waits (tests/unit/test_groups_fold.py).
"""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import msgspec
import pytest

import roq
from roq.client.overview import read_groups
from roq.coordination import paths
from roq.coordination.session import Session
from roq.log.replicated.metadata import LogMeta
from roq.pubsub.tape import REST_SECONDS
from roq.wire.assignment import ProcessKind, from_json, to_json
from roq.workqueue.address import queue_address
from roq.workqueue.master.intake import BYTES_MAX
from tests.integration.running import RunningCluster
from tests.integration.test_groups import BOUND_SECONDS, numbers, recorded, store, take, until
from tests.unit.spark.queue_feeding import drain, feed

pytestmark = pytest.mark.timeout(120)
__all__ = ["recorded"]  # a fixture
LATE, LIVE = "late", "live"
STEP = 1_000  # messages that are published, and done with, one time after the other
FEW = 10
LARGE_BYTES, LARGE_COUNT = 500_000, 160  # more than a group takes in


async def kill_master(client: roq.Cluster, group: str) -> None:
    """The active one."""
    host = (await client.work_queue(group)).record.master_host
    pids = list[int]()

    async def reported() -> bool:
        pids[:] = [
            process.pid
            for info in (await client.view()).hosts
            if info.report is not None and info.host == host
            for process in info.report.processes
            if (process.kind, process.queue) == (ProcessKind.MASTER, group)
        ]
        return len(pids) == 1

    await until(reported)
    os.kill(pids[0], signal.SIGKILL)


async def expire(cluster: RunningCluster, client: roq.Cluster, queue: str) -> roq.TapePosition:
    """All that is on its tape, as retention leaves it when that is too old. The tape's beginning."""
    await client.stop_queue(queue)
    tapes = await client.tapes(queue)
    (view,) = tapes.views
    meta = from_json(view.meta, LogMeta)
    session = await Session.connect(cluster.zookeeper)
    try:
        gone = msgspec.structs.replace(meta, trimmed=meta.next_first - 1, segments=())
        await session.set(paths.log(view.log), to_json(gone), -1)
    finally:
        await session.close()
    await client.start_queue(queue)
    return roq.TapePosition(tapes.tapes, {view.exchange: 0})


@pytest.mark.quick
async def test_what_expired_before_a_group_had_it_is_counted(
    cluster: RunningCluster, client: roq.Cluster, recorded: str
) -> None:
    await store(client, recorded, 50)
    beginning = await expire(cluster, client, recorded)
    await store(client, recorded, 10, first=50)
    name = f"{recorded}@{LATE}"
    await client.create_group(recorded, LATE, start=beginning)
    async with client.subscriber(recorded, group=LATE, lease_seconds=2.0) as member:
        assert numbers(await take(member, 10)) == list(range(50, 60))

        async def told() -> bool:
            return (await member.queue.status()).missed == 1

        await until(told)
        await kill_master(client, name)
        await store(client, recorded, 10, first=60)
        assert numbers(await take(member, 10)) == list(range(60, 70))
        assert await told(), "the next master knows of it, and counts it once"
    (row,) = await read_groups(client, recorded)
    assert (row.missed, row.delayed, row.waiting, row.oldest_seconds) == (1, 0, 0, None)


async def test_what_nobody_asks_for_stays_on_the_tapes(client: roq.Cluster, recorded: str, tmp_path: Path) -> None:
    """It is counted, and comes when somebody asks; also Spark, which takes what there is and ends."""
    address = queue_address(client.zookeeper, f"{recorded}@{LATE}")
    await client.create_group(recorded, LATE, order="none")
    stored = 0
    async with roq.open_queue(address) as queue:

        async def more_is_left() -> bool:
            nonlocal stored
            await store(client, recorded, FEW, first=stored)
            stored += FEW
            return (await queue.status()).lag > FEW

        await until(more_is_left, 3 * REST_SECONDS)
        found = list[roq.Status]()

        async def counted() -> bool:
            found[:] = [await queue.status()]
            return found[0].lag + found[0].ready == stored

        await until(counted, 3 * REST_SECONDS)
        assert found[0].ready > 0, "for whoever comes first"
    spark = await asyncio.to_thread(feed, address, manifests=str(tmp_path / "manifests"))
    try:
        assert sorted(await asyncio.to_thread(drain, spark, spark.first())) == list(range(stored))
    finally:
        await asyncio.to_thread(spark.close)
    await store(client, recorded, FEW, first=stored)
    async with client.subscriber(recorded, group=LATE, count=100) as member:
        assert sorted(numbers(await take(member, FEW))) == list(range(stored, stored + FEW))


async def test_a_group_that_stands_still_slows_down_nobody(client: roq.Cluster, recorded: str) -> None:
    """One member holds what it leased, of the only topic there is, and its group is full; publishers and others go on."""
    clock = asyncio.get_running_loop().time

    async def rate(number: int) -> float:
        """At which so many messages are stored and done with by the other group."""
        begun = clock()
        async with client.subscriber(recorded, "t.*", group=LIVE, order="none", count=100) as member:
            taking = asyncio.create_task(take(member, STEP))
            await store(client, recorded, STEP, topics=10, first=number * STEP)
            assert sorted(numbers(await taking)) == list(range(number * STEP, (number + 1) * STEP))
        return STEP / (clock() - begun)

    await rate(0)  # the group is made
    alone = await rate(1)
    async with client.subscriber(recorded, "large", group=LATE, lease_seconds=BOUND_SECONDS) as still:
        async with client.publisher(recorded, confirm="stored") as publisher:
            for _ in range(LARGE_COUNT):
                await publisher.publish("large", bytes(LARGE_BYTES))
        held = await anext(still)

        async def full() -> bool:
            return (await still.queue.status()).ready >= BYTES_MAX // LARGE_BYTES

        await until(full)
        beside = await rate(2)

        async def behind() -> bool:
            return (await still.queue.status()).lag >= STEP  # looked at every few seconds

        await until(behind)
        status = await still.queue.status()
        assert (status.leased, status.completed, held.lost) == (1, 0, False)
        assert beside > alone / 10, (alone, beside)
        await held.ack()
