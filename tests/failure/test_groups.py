"""Groups in containers: hosts without power under load, and members that leave and join every second; what was stored is done
by some member, in the order of its topic.

Not covered: single processes (tests/integration/test_groups.py), everything at once (tests/simulation).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

import roq
from roq.errors import LeaseLost
from roq.testing import DockerCluster
from roq.workqueue.codec import parse_task_id
from tests.failure.test_recorded import WAIT_SECONDS, RecordedLoad, recorded

CLUSTER = {"gcms": 1, "hcms": 3}
MEMBERS, LEASE_SECONDS, STAY_SECONDS = 3, 5.0, 1.0
PACED = {"burst": 10, "pause_seconds": 0.1}  # members ack one at a time: of more, most would wait until the load has ended
COMINGS_MIN = 2 * MEMBERS  # before the load ends: some have left under it. What one leaves with stops its topics for a lease


class Members:
    """Of one group, in order by topic. joined: how often one came. staying: nobody leaves any more."""

    def __init__(self, address: str) -> None:
        self._address = address
        self.done: dict[int, set[int]] = {}  # publisher -> numbers that were acked
        self.reached: dict[tuple[int, str], int] = {}  # publisher, topic -> the last number that came for the first time
        self.wrong: list[str] = []
        self.joined = 0
        self.staying = False
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Beside the test."""
        self._tasks = [asyncio.get_running_loop().create_task(self._work()) for _ in range(MEMBERS)]

    async def _work(self) -> None:
        """One member after the other: it leaves with what it has leased, and the next one comes."""
        clock = asyncio.get_running_loop().time
        while True:
            async with roq.open_queue(self._address, patience_seconds=WAIT_SECONDS) as group:
                self.joined += 1
                leaves = clock() + STAY_SECONDS
                async with contextlib.aclosing(group.leases(seconds=LEASE_SECONDS, count=20)) as messages:
                    async for message in messages:
                        await self._handle(message)
                        if clock() >= leaves and not self.staying:
                            break

    async def _handle(self, message: roq.Task) -> None:
        publisher = parse_task_id(message.id)[0]
        number = int(message.payload)
        if number in self.done.setdefault(publisher, set()):
            self.wrong.append(f"{message.id} came again after its ack")
        key = publisher, message.topic
        if message.attempt == 1 and number <= self.reached.get(key, -1):
            self.wrong.append(f"{message.id} came behind {self.reached[key]} of its topic")
        self.reached[key] = max(number, self.reached.get(key, -1))
        try:
            await message.ack()
            self.done[publisher].add(number)
        except LeaseLost:  # another member gets it, or the ack was done and its answer lost
            self.done[publisher].discard(number)

    async def finish(self, load: RecordedLoad) -> None:
        """Wait until the group is empty, and hold what was done against what was stored. Members stay now, for each that leaves
        stops its topics for a lease: what is left would take as long as there is of it, five times over."""
        self.staying = True
        clock, due = asyncio.get_running_loop().time, sum(load.stored.values())
        until = clock() + WAIT_SECONDS
        async with roq.open_queue(self._address) as group:
            while True:
                for task in self._tasks:
                    if task.done():
                        task.result()
                status = await group.status()
                if status.completed >= due and not (status.ready or status.delayed or status.leased):
                    break
                assert clock() < until, f"of {due} messages not all are done: {status}; {self.joined} members came"
                await asyncio.sleep(0.1)
        assert self.wrong == []
        assert (status.completed, status.inserted, status.dead) == (sum(load.stored.values()), status.completed, 0)

    async def close(self) -> None:
        """End what runs."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


@asynccontextmanager
async def group_at_work(client: roq.Cluster) -> AsyncIterator[tuple[RecordedLoad, str]]:
    """A recorded queue under load and a group that works it off; in the end the group has done each message once."""
    async with recorded(client, **PACED) as load:
        info = await client.create_group(load.queue, "billing")
        members = Members(f"roq://{client.zookeeper}/{load.queue}@billing")
        members.start()
        try:
            yield load, info.record.master_host
            async with asyncio.timeout(WAIT_SECONDS):
                while members.joined < COMINGS_MIN:
                    await load.flowing()
            await load.finish()
            await members.finish(load)
        finally:
            await members.close()


@pytest.mark.quick
async def test_the_host_of_a_groups_master_loses_power(machines: DockerCluster, client: roq.Cluster) -> None:
    async with group_at_work(client) as (load, host):
        await machines.kill(host)
        try:
            await load.flowing()
        finally:
            await machines.start(host)
        await load.flowing()


async def test_stores_are_killed_and_a_host_is_cut_off(machines: DockerCluster, client: roq.Cluster) -> None:
    async with group_at_work(client) as (load, host):
        for other in machines.hosts:
            await machines.kill_process(other, "store")
            await load.flowing()
            await machines.wait_process(other, "store")
        await machines.partition_halves([host])
        await load.flowing()
        await machines.heal()
        await load.flowing()
