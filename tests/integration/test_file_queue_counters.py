"""The file queue's counters: processes killed at every change they make, disks that refuse to count, and a loss of power."""

from __future__ import annotations

import errno
import gc
import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest

from roq.errors import StorageFailed
from roq.wire.task import NewTask, Settlement
from roq.wire.work_queue import TaskSettings
from roq.workqueue.file_queue import aftermath
from roq.workqueue.file_queue.folder import LITTER_SECONDS
from roq.workqueue.file_queue.publication import FilePublication
from roq.workqueue.file_queue.queue import FileQueue
from tests.harness.crash_points import crash_points, trace, unsynced

RUNNABLE = json.dumps({"txt": "x" * 300, "class": "PrintTask"}).encode()
BOTH = [NewTask(RUNNABLE), NewTask(b"data"), NewTask(RUNNABLE)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "queue"


def new(folder: Path) -> FileQueue:
    shutil.rmtree(folder, ignore_errors=True)
    return FileQueue(folder)


def counts(queue: FileQueue) -> tuple[int, int, int]:
    """Inserted, completed, and how many tasks there are."""
    found = queue.status()
    return found.inserted, found.completed, found.ready + found.delayed + found.leased + found.dead


@pytest.mark.parametrize("before", [0, 9])
def test_a_put_killed_anywhere_is_counted(folder: Path, before: int) -> None:
    def prepare() -> Callable[[], object]:
        queue = new(folder)
        queue.put([NewTask(b"before") for _ in range(before)])
        return lambda: queue.put(BOTH)

    seen = set()
    for point, _ in crash_points(prepare):
        for _ in range(2):
            inserted, completed, there = counts(FileQueue(folder))
            assert (inserted, completed) == (there, 0), point
        seen.add(there - before)
    assert seen == {0, 1, 2, 3}


@pytest.mark.parametrize("acked", [1, 3])
def test_an_ack_killed_anywhere_is_counted(folder: Path, acked: int) -> None:
    def prepare() -> Callable[[], object]:
        queue = new(folder)
        queue.put(BOTH)
        _, leases, _ = queue.lease(60, 3, 0)
        return lambda: queue.settle([Settlement.ack(lease.token) for lease in leases[:acked]])

    seen = set()
    for point, _ in crash_points(prepare):
        for _ in range(2):
            inserted, completed, there = counts(FileQueue(folder))
            assert (inserted, completed) == (3, 3 - there), point
        seen.add(completed)
    assert seen == set(range(acked + 1))


def test_a_publication_killed_anywhere_is_counted_also_when_it_is_repeated(folder: Path) -> None:
    """As a Spark stream's driver puts; the next one puts the same again."""
    job = "save of a day"  # a name with blanks, as people give them

    def publish() -> None:
        publication = FilePublication(str(folder), f".spark/publishing/{job}", job, 1_790_000_000_000)
        publication.put(1, BOTH)
        publication.close()

    def prepare() -> Callable[[], object]:
        new(folder)
        return publish

    seen = set()
    for point, _ in crash_points(prepare):
        inserted, completed, there = counts(FileQueue(folder))
        assert (inserted, completed) == (there, 0), point
        seen.add(there)
        publish()
        assert counts(FileQueue(folder)) == (3, 0, 3), point
    assert seen == {0, 1, 2, 3}


def test_who_counts_for_a_killed_process_may_be_killed_too(folder: Path) -> None:
    """Killed in an ack right before it is counted; then so is whoever looks."""

    def half_done() -> None:
        queue = new(folder)
        queue.put([NewTask(b"x"), NewTask(b"y")])
        _, leases, _ = queue.lease(60, 1, 0)
        process = os.fork()
        if process == 0:
            with mock.patch("roq.workqueue.file_queue.counters.CounterFiles.add", side_effect=lambda *_: os._exit(0)):
                queue.settle([Settlement.ack(leases[0].token)])
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 0

    def prepare() -> Callable[[], object]:
        half_done()
        return lambda: FileQueue(folder)

    for point, _ in crash_points(prepare):
        assert counts(FileQueue(folder)) == (2, 1, 1), point


def test_a_lease_that_was_lost_before_the_kill_is_not_counted(folder: Path) -> None:
    def prepare() -> Callable[[], object]:
        queue = new(folder)
        queue.put([NewTask(b"x")])
        _, (lease,), _ = queue.lease(60, 1, 0)
        queue.settle([Settlement.release(lease.token)])
        return lambda: queue.settle([Settlement.ack(lease.token)])

    for point, _ in crash_points(prepare):
        assert counts(FileQueue(folder)) == (1, 0, 1), point


def test_calls_under_way_in_living_processes_are_left_to_them(folder: Path) -> None:
    queue = FileQueue(folder)
    original = queue._counters.add
    seen: list[tuple[int, int, int]] = []

    def meanwhile(*arguments: object) -> bool:
        process = os.fork()
        if process == 0:
            other = FileQueue(folder)
            os._exit(10 + other.status().inserted)
        seen.append((os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) - 10, *counts(FileQueue(folder))[::2]))
        return original(*arguments)  # type: ignore[arg-type]

    with mock.patch.object(queue._counters, "add", meanwhile):
        queue.put([NewTask(b"x")])
    assert seen == [(0, 0, 1)]
    assert counts(queue) == (1, 0, 1)


@pytest.mark.quick
def test_a_forked_child_counts_for_its_killed_parent(folder: Path) -> None:
    told, tell = os.pipe()
    maker = os.fork()
    if maker == 0:
        queue, (alive, live) = FileQueue(folder), os.pipe()

        def dies(*_: object) -> None:
            if os.fork() == 0:
                os.close(live)
                os.read(alive, 1)  # until the parent is gone
                os.write(tell, b"%d %d %d" % counts(FileQueue(folder)))
            os._exit(0)

        with mock.patch.object(queue._counters, "add", dies):
            queue.put([NewTask(b"x")])
        os._exit(1)
    os.close(tell)
    assert os.waitstatus_to_exitcode(os.waitpid(maker, 0)[1]) == 0
    with os.fdopen(told) as answer:
        assert answer.read() == "1 0 1"


def test_a_queue_forsaken_in_the_middle_of_another_one_s_verb_holds_nothing_up(folder: Path) -> None:
    queue, forsaken = FileQueue(folder), [FileQueue(folder)]
    forsaken[0].put([NewTask(b"x")])
    thread = threading.Thread(target=lambda: _forsake(queue, forsaken), daemon=True)
    thread.start()
    thread.join(20)
    assert not thread.is_alive()
    assert counts(queue) == (1, 0, 1)


def _forsake(queue: FileQueue, forsaken: list[FileQueue]) -> None:
    with queue._counters._mutex:
        forsaken.clear()
        gc.collect()


def test_nothing_is_left_behind(folder: Path) -> None:
    queue = FileQueue(folder)
    queue.put(BOTH)
    _, leases, _ = queue.lease(60, 3, 0)
    queue.settle([Settlement.ack(lease.token) for lease in leases])
    assert len(list((folder / "counting").iterdir())) == 1, "one file per thread at once, empty between calls"
    queue.close()
    assert list((folder / "counting").iterdir()) == []
    litter = folder / "counting" / "host--1--0000"
    litter.touch()
    FileQueue(folder).close()
    assert litter.exists(), "it may be about to be locked"
    old = time.time() - 2 * LITTER_SECONDS
    os.utime(litter, (old, old))
    FileQueue(folder).close()
    assert not litter.exists()


# --- disks that refuse ----------------------------------------------------------------------------------------------------


@contextmanager
def refused(*paths: Path, call: str = "write") -> Iterator[None]:
    """Writes to these files fail."""
    original = getattr(os, call)

    def failing(fd: int, *arguments: object) -> object:
        if os.readlink(f"/proc/self/fd/{fd}") in map(str, paths):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return original(fd, *arguments)

    with mock.patch.object(os, call, failing):
        yield


def test_what_the_disk_refused_to_count_is_counted_later(folder: Path) -> None:
    queue = FileQueue(folder)
    with refused(folder / "insertions", folder / "completions"):
        queue.put(BOTH)
        _, leases, _ = queue.lease(60, 2, 0)
        assert queue.settle([Settlement.ack(lease.token) for lease in leases]) == ["", ""]
        assert counts(queue) == (0, 0, 1)
    assert counts(queue) == (3, 2, 1)
    with refused(folder / "insertions"):
        queue.put(BOTH)
    queue.close()
    assert counts(FileQueue(folder)) == (6, 2, 4)


def test_acks_of_a_call_that_failed_midway_are_counted(folder: Path) -> None:
    queue = FileQueue(folder, TaskSettings(max_attempts=9))
    queue.put(BOTH)
    _, leases, _ = queue.lease(60, 3, 0)
    with refused(folder / "queue", folder / "data/queue", call="fsync"), pytest.raises(StorageFailed):
        queue.settle([Settlement.ack(lease.token) for lease in leases])
    assert counts(queue) == (3, 3, 0)


# --- a loss of power --------------------------------------------------------------------------------------------------------


def lost_by_power_cut(folder: Path, act: Callable[[], object]) -> list[str]:
    """What of the counters a loss of power after `act` would take back."""
    paths = (f"{folder}/insertions", f"{folder}/completions")
    return [f"{change}" for change in unsynced(trace(act)) if (change.target or change.path) in paths]


def test_counters_are_synced_when_a_queue_is_closed_and_a_little_after_each_change(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(aftermath, "COUNTERS_SYNC_SECONDS", 0.05)

    queues: list[FileQueue] = []  # open to the end
    synced = threading.Event()

    def work_and_wait() -> None:
        queue = FileQueue(folder)
        queues.append(queue)
        sync = queue._counters.sync

        def watched_sync() -> None:
            synced.clear()
            sync()
            synced.set()

        with mock.patch.object(queue._counters, "sync", watched_sync):
            queue.put(BOTH)
            _, leases, _ = queue.lease(60, 2, 0)
            queue.settle([Settlement.ack(lease.token) for lease in leases])
            deadline = time.monotonic() + 20
            while queue._counters._unsynced or not synced.is_set():
                assert time.monotonic() < deadline
                time.sleep(0.01)

    assert lost_by_power_cut(folder, work_and_wait) == []
    monkeypatch.setattr(aftermath, "COUNTERS_SYNC_SECONDS", 3600.0)

    def work_and_close() -> None:
        queue = FileQueue(folder)
        queue.put(BOTH)
        queue.close()

    assert lost_by_power_cut(folder, work_and_close) == []

    def only_work() -> None:
        queues.append(FileQueue(folder))
        queues[-1].put(BOTH)

    assert lost_by_power_cut(folder, only_work) != [], "what the watch is worth"


def test_no_verb_waits_for_a_sync_of_the_counters(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aftermath, "COUNTERS_SYNC_SECONDS", 3600.0)  # `trace` sees the thread that does it, too
    queue = FileQueue(folder)

    def work() -> None:
        queue.put([NewTask(b"x")])
        _, (lease,), _ = queue.lease(60, 1, 0)
        queue.settle([Settlement.ack(lease.token)])

    work()
    syncs = [change.path.removeprefix(f"{folder}/") for change in trace(work) if change.call in ("fsync", "fdatasync")]
    assert len(syncs) == 4, syncs
    assert syncs[1:] == ["data/movement", "data/queue", "data/queue"]
