"""Work queues of a cluster of containers under load while masters, stores, hosts, networks and disks fail.

Each test hurts one thing, heals it, lets the workers finish, prints the load's verdict as one line of JSON, and judges it:
nothing acknowledged is lost, nothing was made up, nothing acked comes back. Queues in a folder: test_work_queue_folders.py.
"""

from __future__ import annotations

import asyncio
import secrets
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import zmq

import roq
from roq.errors import LogUnavailable, NotLeader, NotReady, ZooKeeperUnavailable
from roq.testing import DockerCluster
from roq.testing.cluster import CLIENT, HCM
from roq.wire import gcm
from roq.wire import master as wire
from roq.wire.envelope import EnvelopeKind, error_of, open_envelope
from roq.wire.task import NewTask, TaskToPut
from roq.workqueue.remote import RemoteQueue
from tests.failure.conftest import PAUSE_SECONDS, ROOT, SESSION_SECONDS
from tests.harness import libzmq
from tests.harness.task_scene import Scene, under_load

CLUSTER = {"gcms": 2, "hcms": 4}
SLACK_SECONDS = 6.0  # beyond the session: ZooKeeper's ticks, a request to a silent store (2 s), all of the cluster on two cores
TAKE_OVER_SECONDS = SESSION_SECONDS + SLACK_SECONDS
STORE = "store"
HOLDING = """
import sys, time
from roq import blocking
with blocking.open_queue(sys.argv[1]) as queue:
    for task in queue.leases(6.0, wait_seconds=10):
        print(task.payload.decode(), task.attempt, flush=True)
        time.sleep(1000)
"""
# Harms the journal file a log's entries are in. The last records stay as they are in one case, and are cut off in the other.
HARM = """python3 -c '
import pathlib, sys
log, harm = sys.argv[1:]
for path in sorted(pathlib.Path("/var/lib/roq").rglob("journal-*")):
    data = bytearray(path.read_bytes())
    first, last = data.find(log.encode()), data.rfind(log.encode())
    if first < 0:
        continue
    middle = (first + last) // 2
    with path.open("r+b") as file:
        if harm == "truncate":
            file.truncate(middle)
        else:
            for place in (middle, last):
                file.seek(place)
                file.write(bytes([data[place] ^ 8]))
    print(path.name, middle)
' {log} {harm}"""


@pytest.fixture
async def scene(machines: DockerCluster, client: roq.Cluster) -> AsyncIterator[Scene]:
    async with under_load(machines, client) as made:
        yield made


@asynccontextmanager
async def dead(machines: DockerCluster, *names: str) -> AsyncIterator[None]:
    """Machines killed, and started again whatever happens."""
    await asyncio.gather(*(machines.kill(name) for name in names))
    try:
        yield
    finally:
        await asyncio.gather(*(machines.start(name) for name in names))


# --- kills ------------------------------------------------------------------------------------------------------------


@pytest.mark.quick
async def test_the_active_master_is_killed(scene: Scene) -> None:
    before = await scene.info()
    took = []
    for _ in range(2):
        scene.calm()
        await scene.machines.kill_process(before.record.master_host, f"master/{scene.name}")
        took.append(round(await scene.flowing(TAKE_OVER_SECONDS), 2))
    assert (await scene.info()).record == before.record, "it came back in place"
    await scene.judge("master killed twice", take_over_seconds=took)


async def test_a_store_is_killed(scene: Scene) -> None:
    took = []
    for host in scene.machines.hosts:
        scene.calm()
        await scene.machines.kill_process(host, STORE)
        took.append(round(await scene.flowing(), 2))
        await scene.machines.wait_process(host, STORE)
    await scene.judge("each store killed once", put_seconds=took)


async def test_the_host_of_the_master_is_killed(scene: Scene) -> None:
    before = await scene.info()
    scene.calm()
    async with dead(scene.machines, before.record.master_host):
        after = await scene.taken_over(before, TAKE_OVER_SECONDS)
        took = scene.load.longest
    assert after.record.master_host in before.record.standby_hosts
    await scene.judge("host of the master killed", take_over_seconds=round(took, 2))
    assert took < TAKE_OVER_SECONDS


async def test_the_host_of_the_master_and_the_leading_gcm_are_killed_at_once(scene: Scene) -> None:
    before, leader = await scene.info(), await scene.machines.leader()
    scene.calm()
    async with dead(scene.machines, before.record.master_host, leader):
        await scene.taken_over(before, 2 * TAKE_OVER_SECONDS)  # one session after the other at worst
        took = scene.load.longest
    await scene.judge("host of the master and leading GCM killed", take_over_seconds=round(took, 2))
    assert took < 2 * TAKE_OVER_SECONDS


async def test_all_stores_are_killed_at_once(scene: Scene) -> None:
    scene.calm()
    await asyncio.gather(*(scene.machines.kill_process(host, STORE) for host in scene.machines.hosts))
    took = await scene.flowing()
    await scene.judge("all stores killed at once", put_seconds=round(took, 2))


async def test_all_hosts_are_killed_at_once(scene: Scene) -> None:
    scene.calm()
    async with dead(scene.machines, *scene.machines.hosts):
        pass  # a power cut
    took = await scene.flowing(60.0)
    await scene.judge("all hosts killed at once", put_seconds=round(took, 2))


async def test_a_worker_is_killed_in_the_middle_of_a_task(machines: DockerCluster, client: roq.Cluster) -> None:
    name = f"w-{secrets.token_hex(3)}"
    await client.create_work_queue(name, write_quorum=3, ack_quorum=2, standbys=1)
    queue = await asyncio.to_thread(RemoteQueue, machines.zookeeper, name)
    command = [sys.executable, "-c", HOLDING, f"roq://{machines.zookeeper}/{name}"]
    worker = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE, cwd=ROOT)
    assert worker.stdout is not None
    try:
        await asyncio.to_thread(queue.put, [NewTask(b"t")])
        assert await asyncio.wait_for(worker.stdout.readline(), 20) == b"t 1\n"
        assert (await asyncio.to_thread(queue.lease, 60, 1, 8.0))[1] == [], "renewed while it lives"
    finally:
        worker.kill()
        await worker.wait()
    killed = time.monotonic()
    (task,) = (await asyncio.to_thread(queue.lease, 60, 1, 20.0))[1]
    sys.stdout.write(f"\nworker killed: its task came back after {time.monotonic() - killed:.2f} s, lease 6 s\n")
    assert (task.payload, task.attempt) == (b"t", 2)
    await asyncio.to_thread(queue.close)
    await client.remove_work_queue(name)


# --- pauses and partitions --------------------------------------------------------------------------------------------


class OldMaster:
    """Requests straight to one master, whatever the GCM says of it. They are sent at once, or as soon as it takes any."""

    def __init__(self, info: gcm.WorkQueueInfo) -> None:
        self._endpoint = info.masters[0].endpoint()
        self._requests: tuple[wire.Request, ...] = (
            wire.GetStatus(),
            wire.Put(1, 1, [TaskToPut(b"to the wrong one")]),
            wire.Lease(2, 1, 0, 30_000, 5, 0, []),
        )

    def send(self) -> None:
        self._socket = libzmq.socket(zmq.DEALER)
        self._socket.connect(self._endpoint)
        for id, request in enumerate(self._requests, 1):
            self._socket.send(wire.seal_call(id, request))

    def answers(self, seconds: float = 4.0) -> dict[str, str]:
        """By request: an error's class, "silence", or "answered"."""
        found = dict.fromkeys((type(request).__name__ for request in self._requests), "silence")
        deadline = time.monotonic() + seconds
        while "silence" in found.values() and self._socket.poll(max(0, round((deadline - time.monotonic()) * 1000))):
            envelope = open_envelope(self._socket.recv_multipart()[-1])
            error = error_of(envelope.body) if envelope.kind == EnvelopeKind.ERROR else None
            found[type(self._requests[envelope.id - 1]).__name__] = type(error).__name__ if error else "answered"
        self._socket.close()
        return found


# Which of them depends on when it asks: before it has heard of its loss, while it tries to begin again, after the log has
# fenced it, or after it gave up. That nothing of the put was kept is the verdict's `unexpected`.
REFUSALS = {"silence", *(each.__name__ for each in (NotLeader, NotReady, LogUnavailable, ZooKeeperUnavailable))}


async def test_a_pause_shorter_than_the_session_changes_nothing(scene: Scene) -> None:
    before = await scene.info()
    scene.calm()
    await scene.machines.pause(before.record.master_host)
    await asyncio.sleep(PAUSE_SECONDS)  # the pause is the point
    await scene.machines.unpause(before.record.master_host)
    took = await scene.flowing()
    assert (await scene.info()).record == before.record
    await scene.judge("machine of the master paused for less than the session", put_seconds=round(took, 2))


async def test_a_master_that_wakes_after_its_session_is_refused(scene: Scene) -> None:
    before = await scene.info()
    old = OldMaster(before)
    scene.calm()
    await scene.machines.pause(before.record.master_host)
    try:
        await scene.taken_over(before, TAKE_OVER_SECONDS)
        took = scene.load.longest
        await asyncio.to_thread(old.send)  # they wait for it to wake
    finally:
        await scene.machines.unpause(before.record.master_host)
    answers = await asyncio.to_thread(old.answers)
    await scene.judge("machine of the master paused", take_over_seconds=round(took, 2), old_master=answers)
    assert set(answers.values()) <= REFUSALS
    assert took < TAKE_OVER_SECONDS


async def test_the_host_of_the_master_is_cut_off_from_everybody(scene: Scene) -> None:
    before = await scene.info()
    old, host = OldMaster(before), before.record.master_host
    scene.calm()
    await scene.machines.partition(host, {*scene.machines.machines(), CLIENT} - {host})
    await scene.taken_over(before, TAKE_OVER_SECONDS)
    took = scene.load.longest
    await asyncio.to_thread(old.send)
    await scene.machines.heal()
    answers = await asyncio.to_thread(old.answers)
    await scene.judge("host of the master cut off", take_over_seconds=round(took, 2), old_master=answers)
    assert set(answers.values()) <= REFUSALS
    assert took < TAKE_OVER_SECONDS


async def test_the_host_of_the_master_is_cut_off_from_zookeeper_only(scene: Scene) -> None:
    """It reaches the stores and its clients: only the log tells it that another one serves."""
    before = await scene.info()
    old = OldMaster(before)
    scene.calm()
    await scene.machines.partition_from_zookeeper(before.record.master_host)
    await scene.taken_over(before, TAKE_OVER_SECONDS)
    took = scene.load.longest
    await asyncio.to_thread(old.send)
    answers = await asyncio.to_thread(old.answers)
    await scene.judge("host of the master cut off from ZooKeeper", take_over_seconds=round(took, 2), old_master=answers)
    assert set(answers.values()) <= REFUSALS
    assert took < TAKE_OVER_SECONDS


# --- disks ------------------------------------------------------------------------------------------------------------


async def harm_store(scene: Scene, host: str, harm: str) -> str:
    """Kill a host's store, harm its journal before it is started again; what was harmed."""
    before = next(found for found in await scene.machines.reported(host) if found.name == STORE)
    hcm = await scene.machines.pause_process(host, HCM)  # nobody starts it again meanwhile
    try:
        await scene.machines.run(host, f"kill -9 {before.pid}")
        script = HARM.format(log=(await scene.info()).record.spec.log, harm=harm)
        done = await scene.machines.run(host, script)
    finally:
        await scene.machines.unpause_process(host, hcm)
    await scene.machines.wait_process(host, STORE, not_pid=before.pid)
    return done.strip()


@pytest.mark.parametrize("harm", ["flip", "truncate"])
async def test_a_journal_is_damaged(scene: Scene, harm: str) -> None:
    """The next master reads the log from stores one of which has holes."""
    for host in scene.machines.hosts:
        if done := await harm_store(scene, host, harm):
            break
    assert done, "no host has the log"
    await scene.flowing()
    scene.calm()
    await scene.machines.kill_process((await scene.info()).record.master_host, f"master/{scene.name}")
    took = await scene.flowing()
    await scene.judge(f"journal of a store: {harm}", damaged=f"{host} {done}", take_over_seconds=round(took, 2))
