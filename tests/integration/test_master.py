"""Work queues of a cluster: verbs, big payloads, and what becomes of tasks when masters, stores and hosts die or stand still.

The verbs in full are in the contract suite; the GCM's part in test_gcm_work_queues.py.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path

import pytest

import roq
from roq.errors import Closed, InvalidConfiguration, NotLeader, PayloadTooLarge, RoqError, WorkQueueConflict, WorkQueueNotFound
from roq.local.cluster import LocalCluster
from roq.runtime.line import Bell, Line
from roq.wire import gcm
from roq.wire import master as wire
from roq.wire.assignment import RunningProcess
from roq.wire.envelope import error_of, open_envelope
from roq.workqueue.contract import Ack, Extend, NewTask, Reject, Release, Settings, TaskState
from roq.workqueue.master_link import MasterLink
from roq.workqueue.remote import RemoteQueue
from tests.harness.task_load import TaskLoad
from tests.integration.held import blobs_of, held_of, with_stores
from tests.integration.running import RunningCluster

SESSION_SECONDS = 3.0
BIG = 200_000


@pytest.fixture
async def name(client: roq.Cluster) -> AsyncIterator[str]:
    chosen = f"w-{uuid.uuid4().hex[:8]}"
    yield chosen
    try:
        await client.remove_work_queue(chosen)
    except WorkQueueNotFound:
        return


@pytest.fixture
async def tasks(cluster: RunningCluster, name: str) -> AsyncIterator[RemoteQueue]:
    queue = await asyncio.to_thread(RemoteQueue, cluster.zookeeper, name, Settings(max_attempts=3))
    yield queue
    queue.close()


# --- verbs ------------------------------------------------------------------------------------------------------------


async def test_a_task_is_leased_extended_given_back_and_done(tasks: RemoteQueue) -> None:
    def story() -> None:
        ids = tasks.put([NewTask(b"a"), NewTask(b"b", priority=5), NewTask(b"c", delay_seconds=60)])
        assert len(set(ids)) == 3
        settled, (first, second) = tasks.lease(30, 2, 0)
        assert settled == []
        assert [first.payload, second.payload] == [b"b", b"a"]
        assert [first.id, second.id] == [ids[1], ids[0]]
        (kept,) = tasks.settle([Extend(first.token, 60)])
        assert kept
        answers, (third,) = tasks.lease(30, 5, 0, [Ack(kept), Release(second.token, error="not now")])
        assert answers == ["", ""]
        assert (third.payload, third.attempt) == (b"a", 2)
        assert tasks.settle([Ack(second.token), Reject(third.token, "never")]) == [None, ""]
        assert [(view.payload, view.error) for view in tasks.peek(TaskState.DEAD, 5)] == [(b"a", "never")]
        assert tasks.requeue_dead(None) == 1
        status = tasks.status()
        assert (status.ready, status.delayed, status.leased, status.dead) == (1, 1, 0, 0)
        assert (status.completed, status.inserted) == (1, 3)
        assert tasks.release_all() == 1
        assert tasks.purge() == 2

    await asyncio.to_thread(story)


async def test_a_lease_waits_and_ends_when_the_queue_is_closed(cluster: RunningCluster, tasks: RemoteQueue, name: str) -> None:
    other = await asyncio.to_thread(RemoteQueue, cluster.zookeeper, name)
    waiting = asyncio.ensure_future(asyncio.to_thread(tasks.lease, 30, 1, 20))
    await asyncio.sleep(2.5)  # longer than one request waits
    started = time.monotonic()
    await asyncio.to_thread(other.put, [NewTask(b"late")])
    _, (lease,) = await waiting
    assert time.monotonic() - started < 1.0
    assert lease.payload == b"late"
    started = time.monotonic()
    assert await asyncio.to_thread(tasks.lease, 30, 1, 0.3) == ([], [])
    assert 0.3 <= time.monotonic() - started < 1.0
    waiting = asyncio.ensure_future(asyncio.to_thread(other.lease, 30, 1, 20))
    await asyncio.sleep(0.2)
    other.close()
    with pytest.raises(Closed):
        await asyncio.wait_for(waiting, 2)


async def test_a_lease_that_ends_gives_the_task_to_another(tasks: RemoteQueue) -> None:
    def story() -> None:
        tasks.put([NewTask(b"a")])
        _, (first,) = tasks.lease(0.3, 1, 0)
        _, (second,) = tasks.lease(30, 1, 5)
        assert (second.payload, second.attempt) == (b"a", 2)
        assert tasks.settle([Ack(first.token), Ack(second.token)]) == [None, ""]

    await asyncio.to_thread(story)


async def test_what_is_sent_again_takes_effect_once(cluster: RunningCluster, tasks: RemoteQueue, name: str) -> None:
    link = MasterLink(cluster.zookeeper, name)

    def story() -> None:
        link.open(None)
        put = wire.Put(7, 1, [wire.Task(b"once"), wire.Task(b"twice")])
        for _ in range(3):
            assert link.ask(lambda again: put, wire.Added).known == []
        first = link.ask(lambda again: wire.Lease(9, 1, 0, 30_000, 1, 0, []), wire.Leases)
        repeated = link.ask(lambda again: wire.Lease(9, 1, 1, 30_000, 1, 0, []), wire.Leases)
        assert first.tasks == repeated.tasks
        ack = [wire.Settle(wire.ACK, first.tasks[0].token)]
        assert link.ask(lambda again: wire.SettleAll(9, 0, ack), wire.Leases).settled == [""]
        assert link.ask(lambda again: wire.SettleAll(9, 1, ack), wire.Leases).settled == [""]  # the answer was lost
        assert link.ask(lambda again: wire.SettleAll(9, 0, ack), wire.Leases).settled == [None]
        assert tasks.status().inserted == 2

    try:
        await asyncio.to_thread(story)
    finally:
        link.close()


async def test_bad_calls_are_told(cluster: RunningCluster, tasks: RemoteQueue, name: str) -> None:
    def story() -> None:
        with pytest.raises(PayloadTooLarge):
            tasks.put([NewTask(b"x" * (tasks.settings.payload_bytes_max + 1))])
        with pytest.raises(InvalidConfiguration):
            tasks.put([NewTask(b"x", delay_seconds=-1)])
        with pytest.raises(InvalidConfiguration):
            tasks.put([NewTask(b"x", priority=1000)])
        with pytest.raises(roq.RoqError):
            tasks.settle([Ack("no token")])
        with pytest.raises(WorkQueueConflict):
            RemoteQueue(cluster.zookeeper, name, Settings(max_attempts=9))
        assert tasks.status().inserted == 0

    await asyncio.to_thread(story)


async def test_undecodable_requests_are_refused_and_the_master_goes_on(
    cluster: RunningCluster, tasks: RemoteQueue, name: str
) -> None:
    async with roq.connect(cluster.zookeeper) as connected:
        endpoint = (await connected.work_queue(name)).masters[0].endpoint()

    def story() -> None:
        line = Line(endpoint, Bell())
        for message in (b"", b"\xff" * 50, wire.seal_call(1, wire.Hello())[:-1], b"\x94\x01\x00\x05\x91\x63"):
            line.send(message)
        line.send(wire.seal_call(8, wire.Put(1, 1, [wire.Task(b"x", -5)])))
        answers = [line.receive(time.monotonic() + 5) for _ in range(2)]
        assert [open_envelope(parts[-1]).id for parts in answers if parts] == [5, 8]
        line.close()
        tasks.put([NewTask(b"fine")])

    await asyncio.to_thread(story)


# --- big payloads -----------------------------------------------------------------------------------------------------


async def test_nothing_is_left_of_a_removed_queue(cluster: RunningCluster, tasks: RemoteQueue, name: str) -> None:
    await asyncio.to_thread(tasks.put, [NewTask(b"small"), NewTask(b"x" * BIG)])
    async with roq.connect(cluster.zookeeper) as connected:
        log = (await connected.work_queue(name)).record.spec.log
        for kind in "~/":
            assert all((await held_of(cluster.local, log, kind)).values())
        await connected.remove_work_queue(name)
        async with asyncio.timeout(10):
            for kind in "~/":
                while any((await held_of(cluster.local, log, kind)).values()):
                    await asyncio.sleep(0.05)
        with pytest.raises(WorkQueueNotFound):
            await connected.work_queue(name)
    with pytest.raises(WorkQueueNotFound):
        await asyncio.to_thread(tasks.put, [NewTask(b"x")])


async def test_a_big_payload_is_kept_by_its_stores_until_it_is_acked(
    cluster: RunningCluster, tasks: RemoteQueue, name: str
) -> None:
    payloads = [os.urandom(BIG), b"small", os.urandom(BIG), os.urandom(1024 * 1024)]
    await asyncio.to_thread(tasks.put, [NewTask(payload) for payload in payloads])
    held = await blobs_of(cluster.local, name)
    assert {len(blobs) for blobs in held.values()} == {3}, "two hosts, a write quorum of two"
    _, leases = await asyncio.to_thread(tasks.lease, 30, 10, 0)
    assert [lease.payload for lease in leases] == payloads
    await asyncio.to_thread(tasks.settle, [Ack(lease.token) for lease in leases])
    async with asyncio.timeout(10):
        while any((await blobs_of(cluster.local, name)).values()):
            await asyncio.sleep(0.05)


async def test_a_task_whose_payload_no_store_gives_does_not_die_of_it(
    cluster: RunningCluster, tasks: RemoteQueue, name: str
) -> None:
    await asyncio.to_thread(tasks.put, [NewTask(b"x" * BIG)])
    held = await blobs_of(cluster.local, name)
    await with_stores(cluster.local, lambda stores: stores.delete_blob(held, next(iter(held.values()))[0]))
    for _ in range(4):  # its max_attempts are 3
        assert await asyncio.to_thread(tasks.lease, 30, 1, 1.5) == ([], [])
    status = await asyncio.to_thread(tasks.status)
    assert (status.leased, status.dead, status.ready + status.delayed) == (0, 0, 1)


# --- faults -----------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def local_cluster(path: Path, hosts: int = 3) -> AsyncIterator[LocalCluster]:
    async with LocalCluster(path, hosts=hosts, session_seconds=SESSION_SECONDS) as cluster:
        yield cluster
    assert cluster.leftovers == []


async def describe(cluster: LocalCluster, name: str) -> gcm.WorkQueueInfo:
    async with roq.connect(cluster.zookeeper) as connected:
        return await connected.work_queue(name)


async def process_on(cluster: LocalCluster, host: str, process: str) -> RunningProcess:
    async with roq.connect(cluster.zookeeper) as connected:
        reports = [info.report for info in await connected.hosts() if info.host == host]
    return next(one for report in reports if report is not None for one in report.processes if one.name == process)


async def loaded(cluster: LocalCluster) -> TaskLoad:
    async with roq.connect(cluster.zookeeper) as connected:
        await connected.create_work_queue("w")
    load = TaskLoad(cluster.zookeeper, "w", pause_seconds=0.002)
    load.start()
    try:
        async with asyncio.timeout(20):
            while len(load.done) < 50:
                await asyncio.sleep(0.05)
    except TimeoutError:
        load.stop()
        raise
    return load


async def judged(load: TaskLoad) -> None:
    verdict = await asyncio.to_thread(load.finish)
    verdict.check()
    assert verdict.unknown == 0, "every put was answered in the end"


async def test_a_killed_master_comes_back_in_place(tmp_path: Path) -> None:
    async with local_cluster(tmp_path) as cluster:
        load = await loaded(cluster)
        for _ in range(3):
            info = await describe(cluster, "w")
            process = await process_on(cluster, info.record.master_host, "master/w")
            os.kill(process.pid, signal.SIGKILL)
            await asyncio.sleep(2.0)
        await judged(load)
        assert (await describe(cluster, "w")).record == info.record


async def test_a_lost_host_costs_no_more_than_the_session(tmp_path: Path) -> None:
    async with local_cluster(tmp_path, 4) as cluster:
        load = await loaded(cluster)
        before = (await describe(cluster, "w")).record
        assert len(before.standby_hosts) == 1
        load.longest = 0.0
        await cluster.lose_host(before.master_host)
        await asyncio.sleep(SESSION_SECONDS + 3.0)
        after = (await describe(cluster, "w")).record
        assert (after.term, after.master_host) == (before.term + 1, before.standby_hosts[0])
        assert len(after.standby_hosts) == 1, "the standby is restored"
        longest = load.longest
        await judged(load)
        assert longest < SESSION_SECONDS + 3.0  # a busy machine; the figure is told


async def test_a_killed_store_costs_nothing(tmp_path: Path) -> None:
    async with local_cluster(tmp_path) as cluster:
        load = await loaded(cluster)
        big = await asyncio.to_thread(RemoteQueue, cluster.zookeeper, "w")
        numbers = count()
        for host in ("host-1", "host-2", "host-3"):
            process = await process_on(cluster, host, "store")
            os.kill(process.pid, signal.SIGKILL)
            payload = f"big {next(numbers)}".encode().ljust(BIG, b"x")
            load.tried.add(payload)
            await asyncio.to_thread(big.put, [NewTask(payload)])
            load.acked.add(payload)
            await asyncio.sleep(1.5)
        big.close()
        await judged(load)


async def test_a_paused_master_that_wakes_is_refused(tmp_path: Path) -> None:
    async with local_cluster(tmp_path) as cluster:
        load = await loaded(cluster)
        info = await describe(cluster, "w")
        old = info.masters[0]
        hcm = cluster.hosts[old.host]
        master = await process_on(cluster, old.host, "master/w")
        assert hcm.pid is not None
        for pid in (hcm.pid, master.pid):
            os.kill(pid, signal.SIGSTOP)
        try:
            async with asyncio.timeout(SESSION_SECONDS + 10):
                while (await describe(cluster, "w")).record.term == info.record.term:
                    await asyncio.sleep(0.1)
            async with asyncio.timeout(10):  # until the new master serves, the old one might still be right
                served = len(load.acked)
                while len(load.acked) == served:
                    await asyncio.sleep(0.05)
            os.kill(master.pid, signal.SIGCONT)
            error = await asyncio.to_thread(ask_once, old.endpoint(), wire.GetStatus())
            assert isinstance(error, NotLeader)
            error = await asyncio.to_thread(ask_once, old.endpoint(), wire.Put(1, 1, [wire.Task(b"to the wrong one")]))
            assert isinstance(error, NotLeader)
        finally:
            for pid in (master.pid, hcm.pid):
                os.kill(pid, signal.SIGCONT)
        await judged(load)


def ask_once(endpoint: str, request: wire.Request) -> RoqError | None:
    """What this process answers, whatever the GCM says of it: its error, None if it answered otherwise."""
    line = Line(endpoint, Bell())
    try:
        line.send(wire.seal_call(77, request))
        parts = line.receive(time.monotonic() + 10)
        assert parts is not None, "no answer at all"
        envelope = open_envelope(parts[-1])
        return error_of(envelope.body) if envelope.kind == 2 else None
    finally:
        line.close()


async def test_a_restarted_cluster_has_every_task(tmp_path: Path) -> None:
    """Every process of every host is killed at once; what was acknowledged is on the disks."""
    async with local_cluster(tmp_path, 2) as cluster:
        queue = await asyncio.to_thread(RemoteQueue, cluster.zookeeper, "w")
        ids = await asyncio.to_thread(queue.put, [NewTask(b"%d" % number) for number in range(100)])
        big = await asyncio.to_thread(queue.put, [NewTask(b"y" * BIG)])
        queue.close()
        for host in ("host-1", "host-2"):
            await cluster.lose_host(host)
        for host in ("host-1", "host-2"):
            await cluster.start_hcm(host)
        again = await asyncio.to_thread(RemoteQueue, cluster.zookeeper, "w")
        _, leases = await asyncio.to_thread(again.lease, 30, 200, 5)
        assert [lease.id for lease in leases] == [*ids, *big]
        assert leases[-1].payload == b"y" * BIG
        again.close()
