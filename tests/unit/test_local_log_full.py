"""log: on a disk that is full: acknowledgements alone bring room back, also when a process is killed at any operation.

The disk is a layer with a budget of bytes, so no real one has to be filled. A really full one: integration.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import threading
from pathlib import Path

import pytest

from roq.errors import StorageFull
from roq.log.local import LocalLog
from roq.log.local.segments import SEGMENT_BYTES, SEGMENT_BYTES_MIN, SMALLEST_DISK, DiskRoom, fitting
from roq.runtime.files import Disk, StrPath
from roq.wire.task import NewTask, Settlement
from roq.workqueue import log_replica
from roq.workqueue.log_queue import LogQueue

MIB = 1024 * 1024
BUDGET = SMALLEST_DISK + 64 * 1024


class Killed(BaseException):
    """The process ends here."""


class BudgetDisk(Disk):
    """Has room for `budget` bytes in this folder. fuse: the process is killed at this operation from now, 0: never."""

    def __init__(self, folder: Path, budget: int) -> None:
        self.folder, self.budget, self.fuse = folder, budget, 0
        self._one_at_a_time = threading.RLock()  # a log allocates in a thread

    def used(self) -> int:
        sizes = 0
        for name in os.listdir(self.folder):
            try:
                sizes += os.stat(self.folder / name).st_size
            except FileNotFoundError:
                continue
        return sizes

    def free(self, folder: StrPath) -> int:
        return max(self.budget - self.used(), 0)

    def _burn(self) -> None:
        if self.fuse and threading.current_thread() is threading.main_thread():
            self.fuse -= 1
            if not self.fuse:
                raise Killed

    def _grow(self, descriptor: int, size: int) -> None:
        more = size - os.fstat(descriptor).st_size
        if more > 0 and self.used() + more > self.budget:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def write(self, descriptor: int, data: bytes | memoryview, offset: int) -> int:
        self._burn()
        with self._one_at_a_time:
            if offset + len(data) > os.fstat(descriptor).st_size:
                self._grow(descriptor, offset + len(data))
            return super().write(descriptor, data, offset)

    def allocate(self, descriptor: int, size: int) -> None:
        self._burn()
        with self._one_at_a_time:
            self._grow(descriptor, size)
            os.ftruncate(descriptor, max(size, os.fstat(descriptor).st_size))

    def truncate(self, descriptor: int, size: int) -> None:
        self._burn()
        super().truncate(descriptor, size)

    def sync(self, descriptor: int) -> None:
        self._burn()  # and nothing else: no machine goes down here

    def sync_folder(self, folder: StrPath) -> None:
        self._burn()

    def rename(self, old: StrPath, new: StrPath) -> None:
        self._burn()
        super().rename(old, new)

    def remove(self, path: StrPath) -> bool:
        self._burn()
        return super().remove(path)


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_replica, "TIGHT_SECONDS", 0.0)
    monkeypatch.setattr(log_replica, "RELIEF_SHARE", 0)


def open_on(disk: BudgetDisk) -> LogQueue:
    return LogQueue(disk.folder, log=LocalLog(disk.folder, disk=disk))


def fill(queue: LogQueue, size: int) -> set[str]:
    """Puts until there is no room; ids."""
    put = set[str]()
    try:
        while True:
            put |= set(queue.put([NewTask(bytes(size)) for _ in range(max(1, 5000 // (size + 1)))]))
    except StorageFull:
        return put


def drain(queue: LogQueue, count: int, done: set[str]) -> None:
    """Lease and ack all there is, `count` at a time; no call may fail."""
    acks: list[Settlement] = []
    while True:
        _, tasks, _ = queue.lease(60, count, 0, acks)
        assert not done & {task.id for task in tasks}, "an acked task came back"
        acks = [Settlement.ack(task.token) for task in tasks]
        done |= {task.id for task in tasks}
        if not tasks:
            return


@pytest.mark.parametrize(("size", "count"), [(20, 100), (300, 1), (3000, 1), (3000, 100), (150_000, 1)])
def test_room_comes_back_by_acks_alone_however_often_the_disk_fills(tmp_path: Path, size: int, count: int) -> None:
    disk = BudgetDisk(tmp_path, (6 if size > 1000 else 3) * MIB + 65536)
    queue = open_on(disk)
    for _ in range(3):
        put, done = fill(queue, size), set[str]()
        # A part of what the disk could hold, half a segment at the least: how much of the rest a snapshot and its reserve take
        # depends on when the log's own thread writes it.
        assert len(put) * (size + 50) > fitting(disk.budget) / 2
        assert queue.status().ready == len(put)
        drain(queue, count, done)
        assert done == put
        queue.put([NewTask(bytes(size))])
        drain(queue, count, set())
    queue.close()


def test_without_what_is_kept_it_may_stay_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DiskRoom, "is_kept", lambda self, end: True)
    monkeypatch.setattr(DiskRoom, "keep", lambda self, end: None)
    queue = open_on(BudgetDisk(tmp_path, BUDGET))
    fill(queue, 20)
    with pytest.raises(StorageFull):
        drain(queue, 1, set())
    queue.close()


def test_a_process_killed_at_any_operation_leaves_room_to_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_replica.Replica, "_look_at_length", lambda self: None)  # no threads
    full = BudgetDisk(tmp_path / "full", BUDGET)
    full.folder.mkdir()
    queue = open_on(full)
    put = fill(queue, 3000)
    queue._log.close()
    cut, ended = 0, False
    while not ended:
        cut += 3 if cut < 60 else 17
        disk, done = BudgetDisk(tmp_path / f"{cut}", BUDGET), set[str]()
        shutil.copytree(full.folder, disk.folder)
        queue = open_on(disk)
        disk.fuse, trying = cut, set[str]()
        try:
            drain(queue, 10, done)
            trying = set(queue.put([NewTask(bytes(3000))]))
            ended = disk.fuse > 0
        except Killed:
            queue._log._locks.close()
        disk.fuse = 0
        if not ended:
            queue = open_on(disk)
            queue.release_all()
            drain(queue, 10, left := set[str]())
            assert put <= left | done
            trying = set(queue.put([NewTask(bytes(3000))]))
        assert trying
        queue.close()
        shutil.rmtree(disk.folder, ignore_errors=True)  # the thread of one that only counts as killed may still be at its spare
    assert cut > 60


def test_others_may_take_the_room_that_is_not_kept_and_give_it_back(tmp_path: Path) -> None:
    disk = BudgetDisk(tmp_path, 16 * MIB)
    queue = open_on(disk)
    put = set(queue.put([NewTask(bytes(3000)) for _ in range(300)]))
    disk.budget, done = disk.used(), set[str]()
    put |= fill(queue, 3000)
    drain(queue, 10, done)
    assert done == put
    disk.budget = 16 * MIB
    queue.put([NewTask(bytes(3000)) for _ in range(300)])
    queue.close()


@pytest.mark.parametrize("size", [20, 3 * MIB // 4])
def test_a_full_disk_is_told_with_what_is_needed_and_what_is_free(tmp_path: Path, size: int) -> None:
    disk = BudgetDisk(tmp_path, BUDGET)
    queue = open_on(disk)
    fill(queue, 20)
    with pytest.raises(StorageFull) as full:
        queue.put([NewTask(bytes(size))] * 2)
    told = re.search(rf"{re.escape(str(tmp_path))}: no room for .*: (\d+) bytes are needed, (\d+) are free;", str(full.value))
    assert told, str(full.value)
    needed, free = int(told[1]), int(told[2])
    assert needed > free
    assert abs(free - disk.free(tmp_path)) < SEGMENT_BYTES_MIN
    queue.close()


def test_segments_fit_their_disk_and_one_that_is_too_small_is_told_what_is_needed(tmp_path: Path) -> None:
    assert [fitting(free) for free in (1, 40 * MIB, 1 << 40)] == [SEGMENT_BYTES_MIN, 2560 * 1024, SEGMENT_BYTES]
    with pytest.raises(StorageFull, match=f"bytes are free.* needs {SMALLEST_DISK}"):
        LocalLog(tmp_path / "small", disk=BudgetDisk(tmp_path, 1000))
