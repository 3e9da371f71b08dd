"""What becomes of a cluster's tasks when masters, stores and hosts die, join or stand still. Each in its own cluster.

Not covered: the machinery of stores (test_stores.py), whole machines (tests/failure).
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path

import pytest

import roq
from roq import blocking
from roq.coordination import paths
from roq.coordination.link import Node
from roq.coordination.session import Session
from roq.errors import (
    NotLeader,
    RoqError,
)
from roq.log.replicated.metadata import LogMeta
from roq.runtime.blocking_connection import BlockingConnection, StopEvent
from roq.testing.freezing import freeze
from roq.tools.local.cluster import JAVA, LocalCluster
from roq.wire import gcm
from roq.wire import master as wire
from roq.wire.assignment import RunningProcess, from_json
from roq.wire.envelope import error_of, open_envelope
from roq.wire.task import NewTask, Settlement, TaskToPut
from roq.workqueue.remote import RemoteQueue
from tests.harness.task_load import TaskLoad

SESSION_SECONDS = 3.0
BIG = 200_000


@asynccontextmanager
async def local_cluster(path: Path, hosts: int = 3) -> AsyncIterator[LocalCluster]:
    async with LocalCluster(path, hosts=hosts, session_seconds=SESSION_SECONDS, zookeeper=JAVA) as cluster:
        yield cluster
    assert cluster.leftovers == []


async def describe(cluster: LocalCluster, name: str) -> gcm.WorkQueueInfo:
    async with roq.connect(cluster.zookeeper) as connected:
        return await connected.work_queue(name)


async def process_on(cluster: LocalCluster, host: str, process: str) -> RunningProcess:
    """As its host reports it; while it is started anew it has no pid, and is waited for."""
    async with roq.connect(cluster.zookeeper) as connected, asyncio.timeout(20):
        while True:
            reports = [info.report for info in await connected.hosts() if info.host == host]
            every = (one for report in reports if report is not None for one in report.processes)
            if (found := next(one for one in every if one.name == process)).pid:
                return found
            await asyncio.sleep(0.05)


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


async def test_a_big_payload_waits_for_the_stores_when_all_are_away(tmp_path: Path) -> None:
    """Every upload is refused at once until a store is back."""
    payload = os.urandom(BIG)
    async with local_cluster(tmp_path) as cluster:
        queue = await asyncio.to_thread(RemoteQueue, cluster.zookeeper, "w")
        try:
            for _ in range(3):
                stores = [(await process_on(cluster, f"host-{n}", "store")).pid for n in (1, 2, 3)]
                for pid in stores:
                    os.kill(pid, signal.SIGKILL)
                await asyncio.to_thread(queue.put, [NewTask(payload)])
                _, (task,), _ = await asyncio.to_thread(queue.lease, 30, 1, 20.0)
                assert task.payload == payload
                await asyncio.to_thread(queue.settle, [Settlement.ack(task.token)])
        finally:
            queue.close()


async def test_a_master_that_missed_the_end_of_its_queue_does_not_make_its_log_again(tmp_path: Path) -> None:
    async with local_cluster(tmp_path, 1) as cluster:
        queue = await asyncio.to_thread(RemoteQueue, cluster.zookeeper, "w")
        queue.close()
        record = (await describe(cluster, "w")).record
        log = paths.log(record.spec.log)
        session = await Session.connect(cluster.zookeeper)
        try:
            await session.delete(paths.work_queue("w"))
            await session.delete(log)
            before = await process_on(cluster, "host-1", "master/w")
            os.kill(before.pid, signal.SIGKILL)
            async with asyncio.timeout(10):
                while (await process_on(cluster, "host-1", "master/w")).pid == before.pid:
                    await asyncio.sleep(0.05)
            for _ in range(30):
                assert await session.get(log) is None
                await asyncio.sleep(0.05)
        finally:
            await session.close()


@pytest.mark.timeout(150)
@pytest.mark.long
async def test_a_queue_of_one_host_is_kept_by_three_when_they_join(tmp_path: Path) -> None:
    """What it had before too: then any of them may go. One whose quorums were chosen stays as it is."""
    async with local_cluster(tmp_path, 1) as cluster:
        async with roq.connect(cluster.zookeeper) as connected:
            await connected.create_work_queue("chosen", write_quorum=1)
        queue = await asyncio.to_thread(RemoteQueue, cluster.zookeeper, "w")
        try:
            ids = await asyncio.to_thread(queue.put, [NewTask(b"early"), NewTask(b"x" * BIG)])
            record = (await describe(cluster, "w")).record
            assert (record.spec.write_quorum, record.spec.ack_quorum) == (1, 1)
            for _ in range(2):
                await cluster.add_host()
            async with asyncio.timeout(60):
                while (spec := (await describe(cluster, "w")).record.spec).write_quorum < 3:
                    await asyncio.sleep(0.1)
                assert (spec.write_quorum, spec.ack_quorum, spec.log) == (3, 2, record.spec.log)
                session = await Session.connect(cluster.zookeeper)
                try:
                    while not kept_by_three(await session.get(paths.log(spec.log))):
                        ids += await asyncio.to_thread(queue.put, [NewTask(b"late")])
                        await asyncio.sleep(0.1)
                finally:
                    await session.close()
            assert (await describe(cluster, "chosen")).record.spec.write_quorum == 1
            await cluster.lose_host(record.master_host)
            found: list[str] = []
            async with asyncio.timeout(60):
                while len(found) < len(ids):
                    _, leases, _ = await asyncio.to_thread(queue.lease, 60, 1000, 1.0)
                    found += [lease.id for lease in leases]
            assert sorted(found) == sorted(ids)
        finally:
            queue.close()


def kept_by_three(node: Node | None) -> bool:
    """Is every fragment of a log on three hosts?"""
    assert node is not None
    meta = from_json(node.data, LogMeta)
    nodes = [fragment.nodes for segment in meta.segments for fragment in segment.fragments]
    return (meta.write_quorum, meta.ack_quorum) == (3, 2) and all(len(one) == 3 for one in nodes)


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


async def test_a_lease_counts_from_the_master_handing_it_out(tmp_path: Path) -> None:
    """The log stands still between the lease and its answer; what is sent again meanwhile is there once."""
    async with local_cluster(tmp_path, 2) as cluster:
        queue = await asyncio.to_thread(blocking.open_queue(f"roq://{cluster.zookeeper}/w").__enter__)
        other = await asyncio.to_thread(RemoteQueue, cluster.zookeeper, "w")
        try:
            waiting = asyncio.ensure_future(asyncio.to_thread(queue.lease, 5.0, 1, 20.0))
            await asyncio.sleep(2.5)  # longer than one request waits
            stores = [(await process_on(cluster, host, "store")).pid for host in ("host-1", "host-2")]
            freeze(*stores)
            putting = asyncio.ensure_future(asyncio.to_thread(other.put, [NewTask(b"x")]))
            await asyncio.sleep(1.5)
            assert not waiting.done()
            for pid in stores:
                os.kill(pid, signal.SIGCONT)
            (task,) = await waiting
            assert 0 < task.ends_in(time.monotonic()) < 5.0 - 1.0
            await putting
            assert (await asyncio.to_thread(queue.status)).inserted == 1
        finally:
            other.close()
            queue.close()


async def test_a_paused_master_that_wakes_is_refused(tmp_path: Path) -> None:
    async with local_cluster(tmp_path) as cluster:
        load = await loaded(cluster)
        info = await describe(cluster, "w")
        old = info.masters[0]
        hcm = cluster.hosts[old.host]
        master = await process_on(cluster, old.host, "master/w")
        assert hcm.pid is not None
        freeze(hcm.pid, master.pid)
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
            error = await asyncio.to_thread(ask_once, old.endpoint(), wire.Put(1, 1, [TaskToPut(b"to the wrong one")]))
            assert isinstance(error, NotLeader)
        finally:
            for pid in (master.pid, hcm.pid):
                os.kill(pid, signal.SIGCONT)
        await judged(load)


def ask_once(endpoint: str, request: wire.Request) -> RoqError | None:
    """What this process answers, whatever the GCM says of it: its error, None if it answered otherwise."""
    connection = BlockingConnection(endpoint, StopEvent())
    try:
        connection.send(wire.seal_call(77, request))
        parts = connection.receive(time.monotonic() + 10)
        assert parts is not None, "no answer at all"
        envelope = open_envelope(parts[-1])
        return error_of(envelope.body) if envelope.kind == 2 else None
    finally:
        connection.close()


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
        _, leases, _ = await asyncio.to_thread(again.lease, 30, 200, 5)
        assert [lease.id for lease in leases] == [*ids, *big]
        assert leases[-1].payload == b"y" * BIG
        again.close()
