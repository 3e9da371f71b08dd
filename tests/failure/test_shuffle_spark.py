"""A real Spark (local[2], its driver on this machine) against a cluster of containers while hosts and leaders fail.

format("roq-shuffle"): written and read back in key order, beside Spark's own sort of the same rows; tasks stop in the middle
of writing and of reading until the fault is there. format("roq"): a stream from one work queue to another, counted by ids.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

import roq
import roq.blocking
import roq.shuffle
from roq.errors import ShuffleNotFound
from roq.testing import DockerCluster
from roq.wire.shuffle import Description, ShuffleState
from tests.harness.spark_driver import PARTITIONS, ROWS
from tests.harness.spark_scene import Producer, SparkDriver
from tests.harness.task_scene import ask_status

CLUSTER = {"gcms": 2, "hcms": 4}
RANGES, REPLICAS = 6, 2
ROWS_PER_BATCH = 1000
FLOW_SECONDS = 60.0  # until all that was put before now is through
BEGIN_SECONDS = 120.0  # of Spark's first job, on a machine that has other things to do
LOST_SECONDS = 15.0  # until the leader has given up a host

pytestmark = pytest.mark.timeout(240, func_only=True)  # the cluster and Spark have bounds of their own


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[SparkDriver]:
    """One Spark for all tests here; it starts while the cluster does."""
    made = SparkDriver(tmp_path_factory.mktemp("spark"), ROWS_PER_BATCH)
    try:
        request.getfixturevalue("whole_cluster")
        asyncio.run(made.started())
        yield made
    finally:
        made.close()


@asynccontextmanager
async def hurt(machines: DockerCluster, name: str, how: str) -> AsyncIterator[None]:
    """A machine is killed or paused, and started or woken at the end."""
    begin, end = (machines.pause, machines.unpause) if how == "paused" else (machines.kill, machines.start)
    await begin(name)
    try:
        yield
    finally:
        await end(name)


def tell(fault: str, **figures: object) -> None:
    """One line of JSON."""
    sys.stdout.write(f"\nverdict {json.dumps({'fault': fault, **figures})}\n")


# --- format("roq-shuffle") ------------------------------------------------------------------------------------------------


class Shuffle:
    """One that Spark writes and reads. folder: its gates."""

    def __init__(self, machines: DockerCluster, driver: SparkDriver, folder: Path) -> None:
        self.machines, self.driver, self.folder = machines, driver, folder
        self.address, self.name = f"roq://{machines.zookeeper}", f"s-{secrets.token_hex(4)}"
        self.shuffles = roq.shuffle.open(self.address)

    async def seen(self) -> Description:
        """As it is now."""
        return await asyncio.to_thread(self.shuffles.describe, self.name)

    @asynccontextmanager
    async def asked(self, what: str, gate: str, tasks: Iterable[int]) -> AsyncIterator[asyncio.Task[dict[str, Any]]]:
        """Spark is at it, and these tasks are in the middle; they go on at the end at the latest."""
        order = {"address": self.address, "name": self.name, "folder": str(self.folder), "ranges": RANGES}
        task = asyncio.create_task(self.driver.ask(what, **order))

        async def stopped() -> bool:
            assert not task.done(), f"Spark was through too early: {task.exception() or task.result()}"
            return all((self.folder / f"{gate}.{number}").exists() for number in tasks)

        try:
            await self.machines.wait_for(stopped, "tasks are in the middle", BEGIN_SECONDS)
            yield task
        finally:
            (self.folder / gate).touch()
            await asyncio.gather(task, return_exceptions=True)

    async def whole(self) -> None:
        """Until every range has its holders."""

        async def replicated() -> bool:
            now = await self.seen()
            return not now.former and all(len(one.holders) == REPLICAS for one in now.ranges)

        await self.machines.wait_hosts(len(self.machines.hosts))
        await self.machines.wait_for(replicated, "every range has its holders")

    async def close(self) -> None:
        """Remove it."""
        with suppress(ShuffleNotFound):
            await asyncio.to_thread(self.shuffles.remove, self.name)
        self.shuffles.close()


@pytest.fixture
async def shuffle(machines: DockerCluster, driver: SparkDriver, tmp_path: Path) -> AsyncIterator[Shuffle]:
    made = Shuffle(machines, driver, tmp_path)
    yield made
    await made.close()


@pytest.mark.long
async def test_a_sorted_data_set(shuffle: Shuffle) -> None:
    """A holder of the first range stands still while it is written, one of the second while it is read.

    Hosts and leaders that are killed: tests/spark/test_shuffle_cluster.py, and without Spark test_shuffle.py.
    """
    machines = shuffle.machines

    async def holder(number: int) -> str:
        return (await shuffle.seen()).ranges[number].holders[0]

    async with shuffle.asked("save", "written", range(PARTITIONS // 2, PARTITIONS)) as saving:
        assert (await shuffle.seen()).state is ShuffleState.FILLING
        began = time.monotonic()
        async with hurt(machines, await holder(0), "paused"):
            (shuffle.folder / "written").touch()
            await saving
            sealed, took = await shuffle.seen(), round(time.monotonic() - began, 1)
    assert (sealed.state, sealed.rows) == (ShuffleState.SEALED, ROWS)
    await machines.wait_hosts(len(machines.hosts))
    async with shuffle.asked("read", "read", range(2)) as reading, hurt(machines, await holder(1), "paused"):
        (shuffle.folder / "read").touch()
        found = await reading
    tell("holder paused while Spark wrote and read", **found, sealed_after_seconds=took)
    assert (found["rows"], found["more"], found["less"], found["disordered"]) == (ROWS, 0, 0, 0)
    assert found["ranges"] == [one.rows for one in sealed.ranges if one.rows], "a partition of Spark is a range"
    await shuffle.whole()


# --- format("roq") --------------------------------------------------------------------------------------------------------


class Stream:
    """Tasks are put into one work queue, and a stream of Spark takes them to another one."""

    def __init__(self, machines: DockerCluster, driver: SparkDriver, source: str, target: str) -> None:
        self.machines, self.driver, self.source, self.target = machines, driver, source, target
        self.producer = Producer(machines.zookeeper, source)

    async def flowing(self) -> float:
        """Until all that was put before now is in the target; how long that took."""
        wanted, began = len(self.producer.answered), time.monotonic()

        async def through() -> bool:
            await self.driver.ask("how")
            return (await asyncio.to_thread(ask_status, self.machines.zookeeper, self.target)).inserted >= wanted

        await self.machines.wait_for(through, "tasks are through", FLOW_SECONDS)
        return round(time.monotonic() - began, 2)

    async def acked(self) -> bool:
        """Nothing is left in the source."""
        status = await asyncio.to_thread(ask_status, self.machines.zookeeper, self.source)
        return (status.ready, status.leased, status.delayed, status.dead) == (0, 0, 0, 0)


async def lost(machines: DockerCluster, count: int) -> None:
    """The leader has given up so many hosts."""
    await machines.wait_hosts(len(machines.hosts) - count, timeout_seconds=LOST_SECONDS)


async def trouble(stream: Stream, client: roq.Cluster) -> list[float]:
    """The source's master, the target's, and the leader; how long tasks took to get through after each."""
    machines, took = stream.machines, [await stream.flowing()]
    master = (await client.work_queue(stream.source)).record.master_host
    async with hurt(machines, master, "killed"):
        await lost(machines, 1)
        took.append(await stream.flowing())
    await machines.wait_hosts(len(machines.hosts))
    master = (await client.work_queue(stream.target)).record.master_host
    async with hurt(machines, master, "paused"):
        await lost(machines, 1)
        took.append(await stream.flowing())
    await machines.wait_hosts(len(machines.hosts))
    async with hurt(machines, await machines.leader(), "killed"):
        took.append(await stream.flowing())
    return took


def drained(address: str) -> Counter[tuple[int, int]]:
    """(id, attempt) of all tasks there."""
    seen = Counter[tuple[int, int]]()
    with roq.blocking.open_queue(address) as queue:
        while tasks := queue.lease(count=1000):
            for task in tasks:
                id, attempt = task.payload.split()
                seen[int(id), int(attempt)] += 1
            assert not queue.ack_many(tasks)
    return seen


async def test_a_stream_between_work_queues(
    machines: DockerCluster, client: roq.Cluster, driver: SparkDriver, tmp_path: Path
) -> None:
    names = [f"{side}-{secrets.token_hex(3)}" for side in ("in", "out")]
    for name in names:
        await client.create_work_queue(name, write_quorum=3, ack_quorum=2, standbys=1)
    source, target = (f"roq://{machines.zookeeper}/{name}" for name in names)
    stream = Stream(machines, driver, *names)
    try:
        await driver.ask("stream", source=source, target=target, folder=str(tmp_path))
        took = await trouble(stream, client)
    finally:
        stream.producer.stop()
    await stream.flowing()
    await machines.wait_for(stream.acked, "all tasks of the source are acked", FLOW_SECONDS)
    told = await driver.ask("how")
    await driver.ask("stop")
    seen, put = await asyncio.to_thread(drained, target), stream.producer
    ids = Counter(id for id, _ in seen.elements())
    again = sum(attempt > 1 for _, attempt in seen.elements())
    status = await asyncio.to_thread(ask_status, machines.zookeeper, names[0])
    doubtful = len(put.doubtful)
    tell("a stream in trouble", put=len(put.answered), doubtful=doubtful, again=again, through_seconds=took, **told)
    assert max(ids.values()) == 1, f"more than once: {[id for id, count in ids.items() if count > 1][:10]}"
    assert put.answered <= ids.keys() <= put.answered | put.doubtful
    assert status.completed == len(ids)
    for name in names:
        await client.remove_work_queue(name)
