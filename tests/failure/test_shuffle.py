"""Shuffles of a cluster of containers while stores, hosts, networks, disks and leaders fail.

Each test hurts something while rows are written, sealed or read, heals it, reads everything, prints the verdict as one line of
JSON, and judges it: every row of every partition exactly once, in key order, and every range with as many holders as it should
have. A task whose attempt is lost is written again (tests/harness/shuffle_load.py).
"""

from __future__ import annotations

import asyncio
import secrets
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pytest

import roq
from roq.runtime.rpc import OnDisconnect, RpcClient
from roq.testing import DockerCluster
from roq.testing.cluster import CLIENT
from roq.wire import shuffle as wire
from roq.wire.shuffle import Description
from tests.failure.conftest import SESSION_SECONDS
from tests.harness.arming import arm
from tests.harness.gate import Gate
from tests.harness.shuffle_load import BATCH_ROWS, ShuffleLoad

CLUSTER = {"gcms": 2, "hcms": 4}
STORE = "store"
PACE_SECONDS = 0.03  # between two batches of each writer: a run lasts some seconds
REPLICAS = 2


class HeldLoad(ShuffleLoad):
    """Its writers stop before their last batch while the gate is closed."""

    def __init__(self, address: str, name: str) -> None:
        super().__init__(address, name)
        self.gate = Gate()

    def batches(self, partition: int) -> Iterator[pa.RecordBatch]:
        """See ShuffleLoad."""
        for number, batch in enumerate(super().batches(partition), 1):
            if number * BATCH_ROWS >= self.rows:
                self.gate.stop()
            yield batch


class Scene:
    """A shuffle of a cluster of containers, and a load of rows for it. held: writers stop until `sealed`."""

    def __init__(self, machines: DockerCluster, client: roq.Cluster, *, held: bool = False) -> None:
        self.machines, self.client = machines, client
        self.load = HeldLoad(f"roq://{machines.zookeeper}", f"s-{secrets.token_hex(4)}")
        if not held:
            self.load.gate.open()

    async def begin(self) -> None:
        """Writers write, and there is a table."""
        await asyncio.to_thread(self.load.create, REPLICAS, 8)
        self.load.start(PACE_SECONDS)

    async def written(self, rows: int) -> None:
        """Until so many rows were given to writers."""

        async def enough() -> bool:
            return self.load.written >= rows

        await self.machines.wait_for(enough, "rows are written")

    async def counters(self, host: str) -> Counter[str]:
        """Of a host's follower."""
        store = next(one for one in await self.machines.reported(host) if one.name == STORE)
        client = RpcClient(
            f"tcp://{self.machines.address(host)}:{store.ports['shuffle']}", wire.Reply, on_disconnect=OnDisconnect.FAIL
        )
        try:
            return Counter((await client.request(wire.DescribeFollower(), wire.FollowerView)).counters)
        finally:
            client.close()

    async def sealed(self) -> Description:
        """All is written, and sealed."""
        self.load.gate.open()
        await asyncio.to_thread(self.load.finished)
        return await asyncio.to_thread(self.load.commit)

    async def judge(self, fault: str, **figures: object) -> None:
        """Read, tell, judge; and wait until every range has its holders again."""
        self.load.pause_seconds = 0.0
        verdict = await asyncio.to_thread(self.load.read)
        sys.stdout.write(f"\nverdict {verdict.line(fault, **figures)}\n")
        verdict.check()
        await self.machines.heal()
        await self.machines.wait_hosts(len(self.machines.hosts))

        async def replicated() -> bool:
            found = await asyncio.to_thread(self.load.shuffles.describe, self.load.name)
            return not found.former and all(len(one.holders) == REPLICAS for one in found.ranges)

        await self.machines.wait_for(replicated, "every range has its holders")

    async def close(self) -> None:
        self.load.gate.open()
        await asyncio.to_thread(self.load.remove)
        await asyncio.to_thread(self.load.close)


@pytest.fixture
async def scene(machines: DockerCluster, client: roq.Cluster, request: pytest.FixtureRequest) -> AsyncIterator[Scene]:
    made = Scene(machines, client, held=getattr(request, "param", False))
    await made.begin()
    yield made
    await machines.heal()
    await made.close()


# --- followers ----------------------------------------------------------------------------------------------------------


async def kill_store(machines: DockerCluster, host: str) -> None:
    """kill -9; returns when it runs again."""
    await machines.wait_process(host, STORE)
    pid = await machines.kill_process(host, STORE)
    await machines.wait_process(host, STORE, not_pid=pid)


@pytest.mark.parametrize("scene", [True], indirect=True, ids=["held"])
async def test_every_store_is_killed_during_writes_and_reads(scene: Scene) -> None:
    """Each attempt goes on until the store that was its buffer was killed."""
    machines = scene.machines
    for number, host in enumerate(machines.hosts):
        await scene.written(20_000 * (number + 1))
        await kill_store(machines, host)
    await scene.sealed()
    scene.load.pause_seconds = 0.2
    reading = asyncio.create_task(asyncio.to_thread(scene.load.read))
    for host in machines.hosts:
        await kill_store(machines, host)
    (await reading).check()
    await scene.judge("each store killed during writes and during reads")
    assert scene.load.errors["AttemptLost"] > 0


async def hurt(
    scene: Scene, begin: Callable[[str], Awaitable[None]], end: Callable[[str], Awaitable[None]], fault: str
) -> None:
    """A host is of no use from the middle of the writes to the middle of the reads, longer than its session."""
    host = scene.machines.hosts[1]
    await scene.written(30_000)
    began = time.monotonic()
    await begin(host)
    try:
        table = await scene.sealed()
        took = time.monotonic() - began
        scene.load.pause_seconds = 0.1
        reading = asyncio.create_task(asyncio.to_thread(scene.load.read))
        await asyncio.sleep(max(0.5, SESSION_SECONDS + 1.0 - took))  # the fault is the point
    finally:
        await end(host)
    (await reading).check()
    assert sum(one.rows for one in table.ranges) == table.rows
    await scene.judge(fault, sealed_after_seconds=round(took, 2))


@pytest.mark.quick
async def test_a_host_is_killed(scene: Scene) -> None:
    await hurt(scene, scene.machines.kill, scene.machines.start, "a host killed during writes, started during reads")


async def test_a_host_is_paused(scene: Scene) -> None:
    await hurt(scene, scene.machines.pause, scene.machines.unpause, "a host paused during writes, woken during reads")


async def test_a_host_is_cut_off_from_the_others(scene: Scene) -> None:
    """Clients reach it, and ZooKeeper doesn't: what it still does by its old table must not count."""
    machines = scene.machines

    async def cut(host: str) -> None:
        await machines.partition(host, {*machines.machines()} - {host, CLIENT})

    async def heal(host: str) -> None:
        await machines.heal()

    await hurt(scene, cut, heal, "a host cut off from all but clients")


async def test_all_hosts_are_killed_after_the_commit(scene: Scene) -> None:
    machines = scene.machines
    await scene.sealed()
    await asyncio.gather(*(machines.kill(host) for host in machines.hosts))
    await asyncio.gather(*(machines.start(host) for host in machines.hosts))
    await scene.judge("all hosts killed after the commit")


async def test_a_disk_is_full_for_a_while(image: str, tmp_path: Path) -> None:
    machines = DockerCluster(
        image=image, gcms=1, hcms=3, session_seconds=SESSION_SECONDS, state_megabytes=1000, logs=tmp_path / "logs"
    )
    async with machines, machines.connect() as client:
        scene = Scene(machines, client)
        await asyncio.to_thread(scene.load.create, REPLICAS, 8)
        try:
            await machines.disk_full(machines.hosts[2])
            scene.load.start(PACE_SECONDS)

            async def refused() -> bool:
                return (await scene.counters(machines.hosts[2]))["refused_StorageFull"] > 0

            await machines.wait_for(refused, "pieces are refused")
            await machines.disk_free(machines.hosts[2])
            await scene.sealed()
            await scene.judge("the disk of a host was full for a while")
        finally:
            await scene.close()


# --- the leader -----------------------------------------------------------------------------------------------------------


async def test_the_leader_dies(machines: DockerCluster, client: roq.Cluster) -> None:
    """Between two of its steps; the other one goes on. All points: tests/integration/test_shuffle_leader.py."""
    _, other = await arm(machines, "shuffle.moving.written")
    scene = Scene(machines, client)
    await scene.begin()
    try:
        scene.load.pause_seconds = 0.0
        await scene.sealed()
        after = await asyncio.to_thread(scene.load.shuffles.rebalance, scene.load.name, 13)
        assert len(after.ranges) == 13
        assert await machines.wait_leader() == other, "the point was never reached"
        await scene.judge("the leader died at moving.written", moved=after.moved, moved_least=after.moved_least)
    finally:
        await scene.close()
