"""Work queues at the GCM: created once whatever dies on the way, found again after a host is lost, removed for good.

Hosts are played by a test double (gcm_bench.py); masters and stores themselves are in test_master.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import pytest

from roq.coordination import paths
from roq.errors import InvalidConfiguration, NoHosts, WorkQueueConflict, WorkQueueNotFound
from roq.wire import gcm as wire
from roq.wire.assignment import MonitorRole, ProcessKind
from roq.wire.work_queue import TaskSettings, WorkQueueRecord
from tests.integration.gcm_bench import Bench, FakeHost, eventually
from tests.integration.test_gcm_crash_points import ANSWER_SECONDS, HOSTS, Scene, points, read_assignment

ACTIVE, BACKUP = MonitorRole.ACTIVE, MonitorRole.BACKUP


async def create(scene: Scene, name: str) -> wire.WorkQueueInfo:
    request = wire.CreateWorkQueue(name, f"t-{name}", TaskSettings(max_attempts=3))
    return await scene.client.request(request, wire.WorkQueueInfo, ANSWER_SECONDS)


async def ends_whole(scene: Scene, *names: str) -> list[WorkQueueRecord]:
    """Exactly these work queues, each with its master and a standby elsewhere, a store per host, and nothing under way."""
    found: list[WorkQueueRecord] = []

    async def whole() -> bool:
        for kind in paths.TransactionKind:
            if await scene.session.children(paths.transactions(kind)):
                return False
        infos = (await scene.client.request(wire.ListWorkQueues(), wire.WorkQueues, ANSWER_SECONDS)).work_queues
        found[:] = [info.record for info in infos]
        wanted = Counter((host, "store", ACTIVE) for host in scene.hosts)
        for record in found:
            wanted[(record.master_host, f"{ProcessKind.MASTER}/{record.name}", ACTIVE)] += 1
            wanted.update((host, f"{ProcessKind.MASTER}/{record.name}", BACKUP) for host in record.standby_hosts)
        written = [await read_assignment(scene.session, name) for name in HOSTS if name in scene.hosts]
        assigned = Counter((of.host, spec.name, spec.role) for of in written for spec in of.processes)
        apart = all(len({*record.hosts}) == 2 for record in found)
        return tuple(record.name for record in found) == names and wanted == assigned and apart

    await eventually(whole)
    return found


@pytest.fixture
async def scene(chroot: str) -> AsyncIterator[Scene]:
    async with AsyncExitStack() as stack:
        yield Scene(chroot, stack)


@pytest.mark.parametrize("point", points("create_work_queue"))
async def test_creation_survives_a_leader_killed_at(scene: Scene, point: str) -> None:
    await scene.start(point)
    info = await create(scene, "w")
    await scene.leader_died()
    assert info.ready
    assert info.record.transaction == "t-w"
    assert (info.record.spec.write_quorum, info.record.spec.ack_quorum) == (3, 2)
    assert (await create(scene, "w")).record == info.record
    assert await ends_whole(scene, "w") == [info.record]


@pytest.mark.parametrize("point", points("recover_host"))
async def test_host_recovery_survives_a_leader_killed_at(scene: Scene, point: str) -> None:
    await scene.start(point)
    before = (await create(scene, "w")).record
    await scene.hosts.pop(before.master_host).stop()
    await scene.leader_died()
    (after,) = await ends_whole(scene, "w")
    assert (after.term, after.master_host) == (before.term + 1, before.standby_hosts[0])
    assert after.spec == before.spec


class Clients:
    """One GCM, and requests to it."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench

    async def create(self, name: str = "w", transaction: str = "t", **settings: Any) -> WorkQueueRecord:
        request = wire.CreateWorkQueue(name, transaction, None, **settings)
        return (await self.bench.ask(request, wire.WorkQueueInfo)).record


@pytest.fixture
async def clients(chroot: str) -> AsyncIterator[Clients]:
    async with AsyncExitStack() as stack:
        bench = Bench(chroot, stack)
        await bench.gcm()
        yield Clients(bench)


async def hosts(clients: Clients, count: int) -> list[FakeHost]:
    made = [await clients.bench.host(f"h{number}") for number in range(count)]
    await clients.bench.hosts_alive(count)
    return made


async def test_quorums_follow_the_hosts_there_are(clients: Clients) -> None:
    with pytest.raises(NoHosts):
        await clients.create()
    await hosts(clients, 1)
    alone = await clients.create()
    assert (alone.spec.write_quorum, alone.spec.ack_quorum, alone.standby_hosts) == (1, 1, ())
    with pytest.raises(NoHosts):
        await clients.create("x", "t2", write_quorum=2)
    with pytest.raises(InvalidConfiguration):
        await clients.create("x", "t3", write_quorum=2, ack_quorum=3)


async def test_creating_again_needs_what_there_is(clients: Clients) -> None:
    await hosts(clients, 3)
    first = await clients.create(standbys=2)
    assert len(first.standby_hosts) == 2
    assert await clients.create(transaction="t2") == first
    with pytest.raises(WorkQueueConflict):
        await clients.create(transaction="t3", standbys=1)
    with pytest.raises(WorkQueueConflict):
        await clients.bench.ask(wire.CreateWorkQueue("w", "t4", TaskSettings(max_attempts=9)), wire.WorkQueueInfo)


async def test_creating_again_compares_what_is_asked_for_and_no_more(clients: Clients) -> None:
    await hosts(clients, 1)
    has = TaskSettings(max_attempts=3, dedup_seconds=7.0)

    async def ask(transaction: str, wanted: TaskSettings, *asked: str) -> WorkQueueRecord:
        request = wire.CreateWorkQueue("w", transaction, wanted, asked=asked)
        return (await clients.bench.ask(request, wire.WorkQueueInfo)).record

    first = await ask("t1", has, "max_attempts", "dedup_seconds")
    assert first.spec.settings == has
    assert await ask("t2", TaskSettings(max_attempts=3), "max_attempts") == first
    assert await ask("t3", TaskSettings(dedup_seconds=7.0), "dedup_seconds") == first
    with pytest.raises(WorkQueueConflict, match=r"exists with max_attempts 3, not 4$"):
        await ask("t4", TaskSettings(max_attempts=4), "max_attempts")
    with pytest.raises(WorkQueueConflict, match=r"exists with dedup_seconds 7.0, not 300.0$"):
        await ask("t5", TaskSettings(max_attempts=3), "max_attempts", "dedup_seconds")


@pytest.mark.parametrize("lost", ["the master's host", "a host with neither"])
async def test_a_lost_host_keeps_nobody_from_opening_what_exists(clients: Clients, lost: str) -> None:
    """Two of three stores acknowledge, so whoever opens the queue again needs no third one; a new queue begins with two."""
    machines = {host.name: host for host in await hosts(clients, 3)}
    record = await clients.create()
    assert (record.spec.write_quorum, record.spec.ack_quorum) == (3, 2)
    (idle,) = machines.keys() - {*record.hosts}
    await machines[record.master_host if lost == "the master's host" else idle].stop()
    await clients.bench.hosts_alive(2)
    opened = await clients.create(transaction="t2")
    assert opened.spec == record.spec
    assert (await clients.create("another", "t3")).spec.write_quorum == 2


async def test_a_work_queue_and_a_queue_of_one_name_live_apart(clients: Clients) -> None:
    await hosts(clients, 2)
    record = await clients.create("orders")
    queue = await clients.bench.create("orders")
    await clients.bench.ask(wire.RemoveQueue("orders", "r1"), wire.Done)
    info = await clients.bench.ask(wire.DescribeWorkQueue("orders"), wire.WorkQueueInfo)
    assert info.ready
    assert info.record == record
    assert queue.record.name == "orders"
    await clients.bench.ask(wire.RemoveWorkQueue("orders", "r2"), wire.Done)
    await clients.bench.ask(wire.RemoveWorkQueue("orders", "r2"), wire.Done)
    with pytest.raises(WorkQueueNotFound):
        await clients.bench.ask(wire.DescribeWorkQueue("orders"), wire.WorkQueueInfo)
    again = await clients.create("orders", "t9")
    assert again.spec.log != record.spec.log


async def test_a_host_that_joins_gets_a_store_and_the_missing_standby(clients: Clients) -> None:
    await hosts(clients, 1)
    await clients.create()
    late = await clients.bench.host("late")

    async def whole() -> bool:
        processes = {spec.name: spec.role for spec in late.assignment.processes} if late.assignment is not None else {}
        return processes == {"store": ACTIVE, "master/w": BACKUP}

    await eventually(whole)
    info = await clients.bench.ask(wire.DescribeWorkQueue("w"), wire.WorkQueueInfo)
    assert [master.active for master in info.masters] == [True, False]
