"""log: work queues: what only this backend has. Deaths of instances, waiting across processes, snapshots, damage, a full disk.

The verbs: test_workqueue_contract.py. The log underneath, and crashes of the machine: test_local_log.py here and in unit.
"""

from __future__ import annotations

import errno
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from roq.errors import Closed, StorageFailed, StorageFull, UnknownFormat, WorkQueueConflict
from roq.log.local import LocalLog
from roq.runtime.files import Disk
from roq.wire.task import LeasedTask, NewTask, Settlement, TaskState
from roq.wire.work_queue import TaskSettings
from roq.workqueue.log_queue import LogQueue
from tests.integration.log_queue_rig import HOLDER, PRODUCER, WAITER, WORKER, in_line, kill, lease_one, line, start

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "tasks"


@pytest.fixture
def queue(folder: Path) -> Iterator[LogQueue]:
    one = LogQueue(folder)
    yield one
    one.close()


# --- deaths -----------------------------------------------------------------------------------------------------------


def test_no_task_is_lost_or_comes_back_when_processes_are_killed_at_any_moment(folder: Path) -> None:
    dice = random.Random(3)
    LogQueue(folder, log=LocalLog(folder, segment_bytes=64 * 1024)).close()
    said: list[str] = []
    [oldest] = folder.rglob("*.segment")
    running = [start(script, folder) for script in (PRODUCER, PRODUCER, WORKER, WORKER, WORKER)]
    began = time.monotonic()
    while (lasted := time.monotonic() - began) < 14 or (oldest.exists() and lasted < 40):
        time.sleep(dice.uniform(0.1, 0.7))
        victim = dice.randrange(len(running))
        said += kill(running[victim])
        running[victim] = start(PRODUCER if victim < 2 else WORKER, folder)
    for process in running:
        said += kill(process)
    put = {one.split()[1] for one in said if one.startswith("put")}
    acked = [one.split()[1] for one in said if one.startswith("acked")]
    assert len(acked) == len(set(acked)), "a task was acked twice"
    assert len(acked) > 50
    queue = LogQueue(folder)
    assert queue.status().leased < 20
    left: set[str] = set()
    while tasks := queue.lease(60, 1000, 1.0)[1]:
        left |= {task.id for task in tasks}
    tried = {one.split()[1] for one in said if one.startswith("tries")}  # an ack may take effect without having been said
    assert not put - left - tried, "an acknowledged put is gone"
    assert len(put - left - set(acked)) < 200
    assert not left & set(acked), "an acked task came back"
    assert not oldest.exists(), "snapshots were taken and the log was trimmed meanwhile"
    queue._replica.state.check()
    fresh = LogQueue(folder)
    fresh.status()
    assert fresh._replica.state.digest() == queue._replica.state.digest()
    fresh.close()
    queue.close()


def test_a_dead_workers_task_is_free_at_once_a_closed_ones_when_its_lease_ends(queue: LogQueue, folder: Path) -> None:
    queue.put([NewTask(b"first")])
    holder = start(HOLDER, folder, "stay")
    token = line(holder)
    assert queue.lease(60, 1, 0.7)[1] == [], "it is alive"
    kill(holder)
    began = time.monotonic()
    task = lease_one(queue, wait_seconds=5)
    assert time.monotonic() - began < 3, "not after the 60 s of its lease"
    assert task.attempt == 2
    assert queue.settle([Settlement.ack(token), Settlement.ack(task.token)]) == [None, ""]
    queue.put([NewTask(b"second")])
    closer = start(HOLDER, folder, "close")
    token = line(closer)
    assert line(closer) == "closed"
    kill(closer)
    assert queue.lease(60, 1, 1.2)[1] == [], "closed in good order: its lease goes on"
    assert queue.settle([Settlement.ack(token)]) == [""], "and any process may settle it"


def test_waiting_crosses_processes_and_killed_waiters_swallow_no_task(queue: LogQueue, folder: Path) -> None:
    doomed = [start(WAITER, folder) for _ in range(2)]
    for waiter in doomed:
        assert line(waiter) == "waits"
    in_line(queue, 2)
    survivor = start(WAITER, folder)
    assert line(survivor) == "waits"
    in_line(queue, 3)
    for waiter in doomed:
        kill(waiter)
    began = time.monotonic()
    [id] = queue.put([NewTask(b"x")])
    assert line(survivor) == id
    assert time.monotonic() - began < 4
    kill(survivor)


@pytest.mark.quick
def test_a_waiting_lease_wakes_at_once(queue: LogQueue, folder: Path) -> None:
    waiter = start(WAITER, folder, "only the bell")
    assert line(waiter) == "waits"
    in_line(queue, 1)
    began = time.monotonic()
    [id] = queue.put([NewTask(b"x")])
    assert line(waiter) == id
    assert time.monotonic() - began < 5, "it would look again after minutes"
    kill(waiter)


STEPPED = """
import sys, time
from pathlib import Path
from roq.log.local import LocalLog
from roq.workqueue.log_queue import LogQueue
wall = lambda: time.time_ns() + int(sys.argv[2]) * 10**9
queue = LogQueue(Path(sys.argv[1]), log=LocalLog(Path(sys.argv[1]), wall=wall))
print(*[task.payload.decode() for task in queue.lease(60, 5, 0)[1]], "at once", flush=True)
print(*[task.payload.decode() for task in queue.lease(60, 1, float(sys.argv[3]))[1]], "in time", flush=True)
queue.close()
"""


def test_processes_started_after_steps_of_the_wall_clock_agree_when_a_lease_ends(folder: Path, queue: LogQueue) -> None:
    queue.put([NewTask(b"long"), NewTask(b"delayed", delay_seconds=600)])
    lease_one(queue, seconds=300)
    for step in (3600, -3600):
        process = start(STEPPED, folder, step, 0)
        assert [line(process), line(process)] == ["at once", "in time"]
        kill(process)
    queue.put([NewTask(b"short")])
    lease_one(queue, seconds=0.3)
    process = start(STEPPED, folder, -3600, 20)
    said = [line(process), line(process)]
    assert said in (["at once", "short in time"], ["short at once", "in time"]), "on a slow machine it comes late"
    kill(process)


# --- time and waiting in one process ----------------------------------------------------------------------------------


def test_an_expired_lease_is_ended_once_by_many_who_wait(folder: Path, queue: LogQueue) -> None:
    queue.put([NewTask(b"x")])
    others = [LogQueue(folder) for _ in range(4)]
    got: list[LeasedTask[bytes]] = []
    threads = [threading.Thread(target=lambda one=one: got.extend(one.lease(60, 1, 3)[1])) for one in others]
    began = time.monotonic()
    first = lease_one(queue, seconds=0.4)
    for thread in threads:
        thread.start()
    while not got:
        time.sleep(0.01)
    assert 0.4 <= time.monotonic() - began < 2.5, "when it was over, not when waiting was"
    for thread in threads:
        thread.join()
    assert [task.attempt for task in got] == [2]
    assert queue.settle([Settlement.extend(first.token, 5), Settlement.ack(got[0].token)]) == [None, ""]
    for one in others:
        one.close()


def test_closing_ends_a_wait_and_leaves_nothing_in_line(folder: Path, queue: LogQueue) -> None:
    other = LogQueue(folder)
    ended: list[type[BaseException]] = []

    def wait() -> None:
        try:
            other.lease(60, 1, 20)
        except Closed as error:
            ended.append(type(error))

    threads = [threading.Thread(target=wait) for _ in range(3)]
    for thread in threads:
        thread.start()
    while len(other._replica.state.waiters) < 3:
        time.sleep(0.01)
    other.close()
    for thread in threads:
        thread.join(2)
    assert ended == [Closed] * 3
    queue.put([NewTask(b"x")])
    assert lease_one(queue, wait_seconds=0).attempt == 1
    for call in (lambda: other.put([NewTask(b"")]), other.status, lambda: other.lease(1, 1, 0)):
        with pytest.raises(Closed):
            call()


def test_an_interrupted_wait_leaves_nothing_in_line(queue: LogQueue) -> None:
    def interrupt(*_: object) -> None:
        raise InterruptedError

    before = signal.signal(signal.SIGUSR1, interrupt)
    timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGUSR1))
    timer.start()
    try:
        with pytest.raises(InterruptedError):
            queue.lease(60, 1, 10)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert not queue._replica.state.waiters
    queue.put([NewTask(b"x")])
    assert lease_one(queue, wait_seconds=0).attempt == 1


def test_looking_at_an_empty_queue_writes_nothing(queue: LogQueue) -> None:
    queue.lease(60, 1, 0)
    before = queue._log.end
    for _ in range(50):
        assert queue.lease(60, 1, 0)[:2] == ([], [])
        queue.status()
        queue.peek(TaskState.READY, 10)
    assert queue._log.end == before


# --- snapshots --------------------------------------------------------------------------------------------------------


def test_who_fell_behind_the_trim_goes_on_from_the_snapshot(folder: Path) -> None:
    slow = LogQueue(folder, log=LocalLog(folder, segment_bytes=16 * 1024), replay_bytes=50_000)
    busy = LogQueue(folder, replay_bytes=50_000)
    slow.put([NewTask(b"held")])
    held = lease_one(slow, wait_seconds=5)
    while slow._log.first <= slow._replica.position:
        busy.put([NewTask(b"x" * 100) for _ in range(50)])
        acks = [Settlement.ack(task.token) for task in busy.lease(60, 50, 0)[1]]
        busy.lease(60, 1, 0, acks)
        busy.release_all()
        if busy._replica.chore:
            busy._replica.chore.join()
    assert slow.settle([Settlement.ack(held.token)]) == [None], "released with all others"
    slow.status()
    busy.status()
    assert slow._replica.state.digest() == busy._replica.state.digest()
    late = LogQueue(folder)
    late.status()
    assert late._replica.state.digest() == busy._replica.state.digest()
    for one in (slow, busy, late):
        one.close()


# --- bad input and bad disks ------------------------------------------------------------------------------------------


@pytest.mark.quick
def test_settings_are_kept_and_a_contradiction_is_refused(folder: Path) -> None:
    LogQueue(folder, TaskSettings(max_attempts=3)).close()
    assert LogQueue(folder).settings == TaskSettings(max_attempts=3)
    LogQueue(folder, TaskSettings(max_attempts=3)).close()
    with pytest.raises(WorkQueueConflict):
        LogQueue(folder, TaskSettings(max_attempts=4))
    (folder / "settings.json").write_text("{")
    with pytest.raises(StorageFailed, match="remove it"):
        LogQueue(folder)
    (folder / "settings.json").unlink()
    assert LogQueue(folder).settings.max_attempts == 3


def test_records_of_another_version_stop_the_reader(folder: Path, queue: LogQueue) -> None:
    queue.put([NewTask(b"x")])
    log = LocalLog(folder)
    log.append([b"\x02\x90"])
    for _ in range(2):
        with pytest.raises(UnknownFormat, match="format 2"):
            queue.lease(60, 1, 0)
    late = LogQueue(folder)
    with pytest.raises(UnknownFormat):
        late.status()
    late.close()
    log.close()


def test_a_full_disk_refuses_puts_but_takes_acks_and_recovers(folder: Path) -> None:
    class FullDisk(Disk):
        room = 1 << 40

        def allocate(self, descriptor: int, size: int) -> None:
            if size > self.room:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            super().allocate(descriptor, size)

    disk = FullDisk()
    queue = LogQueue(folder, log=LocalLog(folder, segment_bytes=8 * 1024 * 1024, disk=disk), replay_bytes=1024 * 1024)
    queue.put([NewTask(b"first")])
    disk.room = 0
    count = 1
    while count < 40:
        try:
            queue.put([NewTask(bytes(500_000))])
        except StorageFull:
            break
        count += 1
    assert 16 < count < 30
    assert queue.status().inserted == count
    for _ in range(count):
        assert queue.settle([Settlement.ack(lease_one(queue, wait_seconds=5).token)]) == [""]
    assert queue.status().completed == count
    disk.room = 1 << 40
    queue.put([NewTask(bytes(500_000)) for _ in range(20)])
    assert queue.status().ready == 20
    queue.close()


def test_a_failed_sync_acknowledges_nothing(folder: Path, queue: LogQueue) -> None:
    class FailingDisk(Disk):
        def sync(self, descriptor: int) -> None:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    queue.put([NewTask(b"x")])
    other = LogQueue(folder, log=LocalLog(folder, disk=FailingDisk()))
    with pytest.raises(StorageFailed):
        other.put([NewTask(b"y")])
    for call in (lambda: queue.put([NewTask(b"z")]), lambda: queue.lease(60, 1, 0)):
        with pytest.raises(StorageFailed):
            call()
    assert queue.peek(TaskState.READY, 5)[0].payload == b"x"
    queue.close()
    other.close()
    again = LogQueue(folder)
    assert lease_one(again, wait_seconds=5).payload == b"x"
    again.close()


def test_tokens_of_others_and_of_older_deliveries_do_nothing(queue: LogQueue, folder: Path) -> None:
    queue.put([NewTask(b"x")])
    old = lease_one(queue, wait_seconds=5)
    assert queue.settle([Settlement.release(old.token, error="try again")]) == [""]
    new = lease_one(queue, wait_seconds=5)
    assert queue.settle([Settlement.ack(old.token), Settlement.extend(old.token, 9)]) == [None, None]
    other = LogQueue(folder)
    assert other.settle([Settlement.extend(new.token, 60)]) == [new.token]
    assert other.settle([Settlement.ack(new.token)]) == [""]
    assert queue.settle([Settlement.ack(new.token)]) == [None]
    other.close()
