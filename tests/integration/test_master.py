"""Work queues of a cluster: verbs as a client of the master sees them, and big payloads.

The verbs in full are in the contract suite; the GCM's part in test_gcm_work_queues.py, faults in test_master_faults.py.
"""

from __future__ import annotations

import asyncio
import os
import time
import uuid
from collections.abc import AsyncIterator

import pytest

import roq
from roq.cli.doctor_cluster import CopiesOf, read_copies
from roq.errors import (
    Closed,
    InvalidConfiguration,
    PayloadTooLarge,
    TemporaryError,
    WorkQueueConflict,
    WorkQueueNotFound,
)
from roq.runtime.blocking_connection import BlockingConnection, StopEvent
from roq.wire import master as wire
from roq.wire.envelope import open_envelope
from roq.wire.task import ACK, NewTask, Settlement, TaskState, TaskToPut
from roq.wire.work_queue import TaskSettings
from roq.workqueue.contract import RoundTrip
from roq.workqueue.master_link import MasterLink
from roq.workqueue.remote import RemoteQueue
from roq.workqueue.sharded import ShardedQueue
from tests.integration.held import blobs_of, held_of, with_stores
from tests.integration.running import RunningCluster
from tests.integration.workqueue_rig import program

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
    queue = await asyncio.to_thread(RemoteQueue, cluster.zookeeper, name, TaskSettings(max_attempts=3))
    yield queue
    queue.close()


# --- verbs ------------------------------------------------------------------------------------------------------------


@pytest.mark.quick
async def test_a_task_is_leased_extended_given_back_and_done(tasks: RemoteQueue) -> None:
    def story() -> None:
        ids = tasks.put([NewTask(b"a"), NewTask(b"b", priority=5), NewTask(b"c", delay_seconds=60)])
        assert len(set(ids)) == 3
        settled, (first, second), _ = tasks.lease(30, 2, 0)
        assert settled == []
        assert [first.payload, second.payload] == [b"b", b"a"]
        assert [first.id, second.id] == [ids[1], ids[0]]
        (kept,) = tasks.settle([Settlement.extend(first.token, 60)])
        assert kept
        answers, (third,), _ = tasks.lease(30, 5, 0, [Settlement.ack(kept), Settlement.release(second.token, error="not now")])
        assert answers == ["", ""]
        assert (third.payload, third.attempt) == (b"a", 2)
        assert tasks.settle([Settlement.ack(second.token), Settlement.reject(third.token, "never")]) == [None, ""]
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
    _, (lease,), _ = await waiting
    assert time.monotonic() - started < 1.0
    assert lease.payload == b"late"
    started = time.monotonic()
    assert await asyncio.to_thread(tasks.lease, 30, 1, 0.3) == RoundTrip([], [])
    assert 0.3 <= time.monotonic() - started < 1.0
    waiting = asyncio.ensure_future(asyncio.to_thread(other.lease, 30, 1, 20))
    await asyncio.sleep(0.2)
    other.close()
    with pytest.raises(Closed):
        await asyncio.wait_for(waiting, 2)


WAITING = """
import sys
from roq import blocking
with blocking.open_queue(sys.argv[1]) as queue:
    print("open", flush=True)
    queue.lease(60, 1, 30)
"""


async def test_a_client_killed_while_it_waits_gets_no_task(cluster: RunningCluster, tasks: RemoteQueue, name: str) -> None:
    def story() -> None:
        with program(WAITING, f"roq://{cluster.zookeeper}/{name}") as waiting:
            assert waiting.stdout is not None
            assert waiting.stdout.readline() == b"open\n"
            time.sleep(0.5)  # until it is known to wait, which nobody can ask the master
            waiting.kill()
            waiting.wait()
            time.sleep(0.2)  # its connection ends
            tasks.put([NewTask(b"for a living one")])
            _, (lease,), _ = tasks.lease(30, 1, 1.0)
            assert lease.attempt == 1

    await asyncio.to_thread(story)


async def test_a_lease_that_ends_gives_the_task_to_another(tasks: RemoteQueue) -> None:
    def story() -> None:
        tasks.put([NewTask(b"a")])
        _, (first,), _ = tasks.lease(0.3, 1, 0)
        _, (second,), _ = tasks.lease(30, 1, 5)
        assert (second.payload, second.attempt) == (b"a", 2)
        assert tasks.settle([Settlement.ack(first.token), Settlement.ack(second.token)]) == [None, ""]

    await asyncio.to_thread(story)


@pytest.mark.quick
async def test_what_is_sent_again_takes_effect_once(cluster: RunningCluster, tasks: RemoteQueue, name: str) -> None:
    link = MasterLink(cluster.zookeeper, name)

    def story() -> None:
        link.open(None)
        put = wire.Put(7, 1, [TaskToPut(b"once"), TaskToPut(b"twice")])
        for _ in range(3):
            assert link.ask(lambda again: put, wire.TasksAdded).known == []
        first = link.ask(lambda again: wire.Lease(9, 1, 0, 30_000, 1, 0, []), wire.Leases)
        repeated = link.ask(lambda again: wire.Lease(9, 1, 1, 30_000, 1, 0, []), wire.Leases)
        assert first.tasks == repeated.tasks
        ack = [Settlement(ACK, first.tasks[0].token)]
        assert link.ask(lambda again: wire.SettleAll(9, 0, ack), wire.Leases).settled == [""]
        assert link.ask(lambda again: wire.SettleAll(9, 1, ack), wire.Leases).settled == [""]  # the answer was lost
        assert link.ask(lambda again: wire.SettleAll(9, 0, ack), wire.Leases).settled == [None]
        assert tasks.status().inserted == 2

    try:
        await asyncio.to_thread(story)
    finally:
        link.close()


async def test_what_is_put_under_an_id_that_somebody_else_uses_too_does_not_vanish(
    cluster: RunningCluster, tasks: RemoteQueue, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """As after a fork: the same producer, the same numbers, other tasks."""
    link = MasterLink(cluster.zookeeper, name)

    def story() -> None:
        link.open(None)
        tasks.put([NewTask(b"mine")])
        theirs = wire.Put(tasks._producer, 3, [TaskToPut(b"theirs, %d" % number) for number in range(3)])
        assert link.ask(lambda again: theirs, wire.TasksAdded).repeated == []
        assert link.ask(lambda again: theirs, wire.TasksAdded).repeated == [0, 1, 2]
        big = b"x" * BIG
        ids = tasks.put([NewTask(b"2"), NewTask(b"3"), NewTask(b"4")])
        ids += tasks.put([NewTask(big)])  # number 1 of a new producer
        before = tasks._producer
        taken = wire.Put(before, tasks._sequence + 1, [TaskToPut(b"theirs, again")])
        link.ask(lambda again: taken, wire.TasksAdded)
        ids += tasks.put([NewTask(big[1:])])
        assert tasks._producer != before
        found = {view.id: view.payload for view in tasks.peek(TaskState.READY, 100)}
        assert [found[id] for id in ids] == [b"2", b"3", b"4", big, big[1:]]
        assert tasks.status().inserted == 1 + 3 + 3 + 1 + 1 + 1

    try:
        await asyncio.to_thread(story)
    finally:
        link.close()
    assert "somebody else puts under this producer's id" in caplog.text


async def test_a_put_of_which_a_part_was_refused_is_not_put_again(
    cluster: RunningCluster, tasks: RemoteQueue, name: str
) -> None:
    """Calls that travelled together: what had arrived before the refused part is there once, and nobody is told otherwise."""
    async with roq.open_queue(f"roq://{cluster.zookeeper}/{name}") as queue:
        assert isinstance(queue._opened, ShardedQueue)
        backend = queue._opened._first
        backend._blob_bytes = BIG  # as a queue that was made again by a master of another version
        payloads = [b"%060000d" % number for number in range(60)] + [b"x" * (BIG - 1)]
        ends = await asyncio.gather(*map(queue.put, payloads), return_exceptions=True)
    assert {type(end) for end in ends} == {TemporaryError}, "whether one's own task is in the queue is unknown"
    views = await asyncio.to_thread(tasks.peek, TaskState.READY, 100)
    assert 0 < len(views) == len({view.payload for view in views}) < 60


async def test_bad_calls_are_told(cluster: RunningCluster, tasks: RemoteQueue, name: str) -> None:
    def story() -> None:
        with pytest.raises(PayloadTooLarge):
            tasks.put([NewTask(b"x" * (tasks.settings.payload_bytes_max + 1))])
        with pytest.raises(InvalidConfiguration):
            tasks.put([NewTask(b"x", delay_seconds=-1)])
        with pytest.raises(InvalidConfiguration):
            tasks.put([NewTask(b"x", priority=1000)])
        with pytest.raises(roq.RoqError):
            tasks.settle([Settlement.ack("no token")])
        with pytest.raises(WorkQueueConflict):
            RemoteQueue(cluster.zookeeper, name, TaskSettings(max_attempts=9))
        assert tasks.status().inserted == 0

    await asyncio.to_thread(story)


async def test_undecodable_requests_are_refused_and_the_master_goes_on(
    cluster: RunningCluster, tasks: RemoteQueue, name: str
) -> None:
    async with roq.connect(cluster.zookeeper) as connected:
        endpoint = (await connected.work_queue(name)).masters[0].endpoint()

    def story() -> None:
        connection = BlockingConnection(endpoint, StopEvent())
        for message in (b"", b"\xff" * 50, wire.seal_call(1, wire.Hello())[:-1], b"\x94\x01\x00\x05\x91\x63"):
            connection.send(message)
        connection.send(wire.seal_call(8, wire.Put(1, 1, [TaskToPut(b"x", -5)])))
        answers = [connection.receive(time.monotonic() + 5) for _ in range(2)]
        assert [open_envelope(parts[-1]).id for parts in answers if parts] == [5, 8]
        connection.close()
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
    _, leases, _ = await asyncio.to_thread(tasks.lease, 30, 10, 0)
    assert [lease.payload for lease in leases] == payloads
    await asyncio.to_thread(tasks.settle, [Settlement.ack(lease.token) for lease in leases])
    async with asyncio.timeout(10):
        while any((await blobs_of(cluster.local, name)).values()):
            await asyncio.sleep(0.05)


async def test_a_payload_that_is_gone_everywhere_costs_its_task_only_and_is_named(
    cluster: RunningCluster, client: roq.Cluster, tasks: RemoteQueue, name: str
) -> None:
    """The doctor says that it has no copies; the task becomes a dead letter that says so; the others are served."""
    await asyncio.to_thread(tasks.put, [NewTask(b"x" * BIG), NewTask(b"small")])
    held = await blobs_of(cluster.local, name)
    blob = next(iter(held.values()))[0]

    async def copies() -> CopiesOf:
        return next(one for one in await read_copies(client, cluster.zookeeper) if one.subject == f"work queue {name}")

    async with asyncio.timeout(20):
        while (await copies()).shortages:  # the log's quorum may still grow
            await asyncio.sleep(0.1)
    await with_stores(cluster.local, lambda stores: stores.delete_blob(held, blob))
    assert list((await copies()).shortages) == [wire.Shortage(f"1 payloads, {blob} first", 0, 2, tuple(sorted(held)))]
    _, leases, _ = await asyncio.to_thread(tasks.lease, 30, 2, 1.5)
    assert [lease.payload for lease in leases] == [b"small"]
    (dead,) = await asyncio.to_thread(tasks.peek, TaskState.DEAD, 5)
    assert (dead.payload, dead.attempts) == (b"", 1)
    assert blob in dead.error
    assert all(host in dead.error for host in held)
