"""Transactions in containers: two programs move a group's messages to two recorded queues and publish to both alone, and die at
every step, while hosts lose power, stand still, are cut off or have full disks. Each shows in both queues or in none.

Not covered: single processes (tests/integration/test_transactions_killed.py), every interleaving (tests/model/transactions.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

import roq
from roq.errors import ProcessFailed
from roq.testing import DockerCluster
from roq.testing.cluster import CLIENT
from roq.wire.master import TRANSACTIONS
from roq.workqueue.address import queue_address
from tests.failure.conftest import SESSION_SECONDS
from tests.failure.test_recorded import WAIT_SECONDS, RecordedLoad, recorded
from tests.failure.test_work_queue_disks import full_until, programs
from tests.harness.moving import MovingPrograms, judge

NO_QUICK_TEST = "programs have to die at six steps, which takes half a minute in containers"
CLUSTER = {"gcms": 1, "hcms": 3}
GROUP = "movers"
MASTERS_KILLED = 3  # of the group, and of what acks nothing
COMMITS = 5  # of each kind, before a fault has passed
SLOW = {"burst": 10, "pause_seconds": 0.1}  # what two programs move that die every second
BIG = SLOW | {"payload_bytes": 200_000, "flush_seconds": 4.0}  # fills what a store has at hand
STANDS_SECONDS = 5.0  # without a commit, while programs go on trying


class StoredReader:
    """What is stored of a queue, as it comes, from the beginning."""

    def __init__(self, client: roq.Cluster, queue: str) -> None:
        self._client, self.queue = client, queue
        self.found: list[str] = []
        self.lost: list[object] = []
        self._came = asyncio.Event()
        self._task = asyncio.get_running_loop().create_task(self._read())

    async def _read(self) -> None:
        told = self.lost.append
        async with self._client.subscriber(self.queue, start="earliest", follow="stored", on_lost=told) as messages:
            async for message in messages:
                self.found.append(message.payload.decode())
                self._came.set()

    async def has(self, count: int) -> None:
        """Until it has read so many."""
        async with asyncio.timeout(WAIT_SECONDS):
            while len(self.found) < count:
                if self._task.done():
                    self._task.result()
                self._came.clear()
                await self._came.wait()

    async def close(self) -> None:
        """End it."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)


class MovedQueues:
    """Those two to which programs move what is in the group of the queue under load."""

    def __init__(self, machines: DockerCluster, client: roq.Cluster, load: RecordedLoad, names: Sequence[str]) -> None:
        self._machines, self._client, self._load = machines, client, load
        self.group = f"{load.queue}@{GROUP}"
        self.names = names
        self.readers = [StoredReader(client, name) for name in names]
        self.programs = MovingPrograms(client.zookeeper, queue_address(client.zookeeper, self.group), names)

    async def master_host(self) -> str:
        """Of the group, just now."""
        return (await self._client.work_queue(self.group)).record.master_host

    async def kill_master(self, name: str) -> None:
        """Of a work queue; then transactions of both kinds are committed."""
        host = (await self._client.work_queue(name)).record.master_host
        with contextlib.suppress(ProcessFailed):  # it is just being replaced
            await self._machines.kill_process(host, f"master/{name}")
        await self.programs.until(WAIT_SECONDS, commits=COMMITS)

    def refused(self) -> int:
        """How often it was refused to store what is published."""
        return sum(self._load.refused.values())

    def stands(self) -> bool:
        """Nothing has been committed for a while."""
        return time.monotonic() - max(self.programs.ledger.committed.values()) > STANDS_SECONDS

    async def flowing(self) -> None:
        """Transactions of both kinds are committed that were not now."""
        await self._load.flowing()
        await self.programs.until(WAIT_SECONDS, commits=COMMITS)

    async def drained(self) -> None:
        """The group is empty, programs have ended, and what they committed is on the tapes."""
        stored = sum(self._load.stored.values())
        async with roq.open_queue(queue_address(self._client.zookeeper, self.group)) as group:

            async def done() -> bool:
                status = await group.status()
                return (status.completed, status.ready, status.leased, status.delayed) == (stored, 0, 0, 0)

            await self._machines.wait_for(done, f"{stored} messages are moved", WAIT_SECONDS)
            await self.programs.finish(WAIT_SECONDS)
            assert await done(), f"each is done once: {await group.status()}"
            async with roq.open_queue(queue_address(self._client.zookeeper, TRANSACTIONS)) as alone:

                async def forwarded() -> bool:
                    return not any([(await one.status()).outgoing for one in (group, alone)])

                await self._machines.wait_for(forwarded, "all is on the tapes", WAIT_SECONDS)

    async def judge(self) -> None:
        """Who reads now, and who has read all the time, has what is right."""
        fresh = {name: await self._read(name) for name in self.names}
        done = {f"{publisher}.{number}" for publisher, count in self._load.stored.items() for number in range(count)}
        assert judge(self.programs.ledger, fresh, done) == []
        for reader in self.readers:
            await reader.has(len(fresh[reader.queue]))
        assert judge(self.programs.ledger, {reader.queue: reader.found for reader in self.readers}, done) == []
        assert [reader.lost for reader in self.readers] == [[], []]
        sys.stdout.write(f"\n{self.programs}\n")

    async def _read(self, queue: str) -> list[str]:
        lost = list[object]()
        async with self._client.subscriber(queue, start="earliest", follow=False, on_lost=lost.append) as past:
            found = [message.payload.decode() async for message in past]
        assert lost == []
        return found

    async def close(self) -> None:
        """End what runs."""
        await self.programs.close()
        await asyncio.gather(*(reader.close() for reader in self.readers))


@asynccontextmanager
async def moving(machines: DockerCluster, client: roq.Cluster, **load_options: Any) -> AsyncIterator[MovedQueues]:
    """Programs at work, which go on dying; in the end every message is moved, and every transaction is whole."""
    async with recorded(client, **(load_options or SLOW)) as load:
        names = [f"{load.queue}-{what}" for what in ("moved", "copied")]
        for name in names:
            await client.create_queue(name, overflow="block", record=roq.Record(days=1, copies=3, ack=2))
        await client.create_group(load.queue, GROUP, order="none")
        moved = MovedQueues(machines, client, load, names)
        try:
            moved.programs.start()
            await moved.flowing()
            yield moved
            moved.programs.calm()
            await load.finish()
            await moved.drained()
            await moved.judge()
        finally:
            await moved.close()


async def test_programs_die_at_every_step_and_the_groups_host_loses_power(machines: DockerCluster, client: roq.Cluster) -> None:
    async with moving(machines, client) as moved:
        for name in [moved.group, TRANSACTIONS] * MASTERS_KILLED:
            await moved.kill_master(name)
        await moved.programs.until(WAIT_SECONDS, deaths=1)
        host = await moved.master_host()
        await machines.partition_one_way(host, CLIENT)  # what it commits now it can't say, and the next one is asked
        await machines.kill(host)
        await machines.heal()
        try:
            await moved.flowing()
        finally:
            await machines.start(host)
        await moved.flowing()


async def test_hosts_stand_still_and_are_cut_off_while_programs_die(machines: DockerCluster, client: roq.Cluster) -> None:
    async with moving(machines, client) as moved:
        host = await moved.master_host()
        await machines.partition_one_way(host, CLIENT)  # as above
        await machines.pause(host)
        try:
            await moved.flowing()
        finally:
            await machines.unpause(host)
            await machines.heal()
        host = await moved.master_host()
        await machines.partition_halves([host])
        await moved.flowing()
        await machines.heal()
        await moved.flowing()


@pytest.mark.timeout(240)
async def test_disks_are_full_and_have_room_again_while_programs_die(image: str, tmp_path: Path) -> None:
    machines = DockerCluster(
        image=image, gcms=1, hcms=3, session_seconds=SESSION_SECONDS, state_megabytes=600, logs=tmp_path / "logs"
    )
    async with machines, machines.connect() as client, moving(machines, client, **BIG) as moved:
        daemons = {host: await programs(machines, host) for host in machines.hosts}
        before = moved.refused()
        await full_until(machines, machines.hosts, lambda: moved.stands() and moved.refused() > before, "nothing is committed")
        for host in machines.hosts:
            assert await programs(machines, host) >= daemons[host], "a full disk kills nobody"
            await machines.disk_free(host)
        await moved.flowing()
