"""Full and failing disks, and crashes of the machine, under the local log and the work queue on it.

A crash is a disk layer that keeps what was synced and any part of the rest. kill -9 of processes: integration.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import random
import stat
import threading
from pathlib import Path

import pytest

from roq.errors import StorageFailed, StorageFull
from roq.log.local import LocalLog
from roq.log.local.shared import Word
from roq.runtime.files import Disk, StrPath
from roq.wire.task import NewTask, Settlement
from roq.workqueue.log_queue import LogQueue

SMALL = 4096  # bytes of a segment
SECTOR = 512


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "log"


def contents(log: LocalLog, after: int = 0) -> list[bytes]:
    found: list[bytes] = []
    while entries := log.read(after, 1000):
        found += [entry for _, entry in entries]
        after = entries[-1][0]
    return found


# --- full and failing disks -------------------------------------------------------------------------------------------


class SickDisk(Disk):
    """Fails with `error` when it is set. room: bytes that can still be allocated."""

    def __init__(self) -> None:
        self.error = 0
        self.room = 1 << 40

    def sync(self, descriptor: int) -> None:
        if self.error:
            raise OSError(self.error, os.strerror(self.error))
        super().sync(descriptor)

    def allocate(self, descriptor: int, size: int) -> None:
        if size > self.room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.room -= size
        super().allocate(descriptor, size)


def test_a_full_disk_refuses_puts_first_and_loses_nothing(folder: Path) -> None:
    disk = SickDisk()
    disk.room = 3 * SMALL
    log = LocalLog(folder, segment_bytes=SMALL, disk=disk)
    written: list[bytes] = []
    for number in itertools.count():
        try:
            log.append([b"%d" % number], keep_bytes=SMALL // 2)
        except StorageFull:
            break
        written.append(b"%d" % number)
    assert 330 > len(written) > 300
    for number in range(20):  # settlements still find room
        log.append([b"ack %d" % number])
        written.append(b"ack %d" % number)
    with pytest.raises(StorageFull):
        log.append([bytes(SMALL)])
    log.sync(log.end)
    assert contents(log) == written
    disk.room = 1 << 40
    log.append([b"again"], keep_bytes=SMALL // 2)
    log.append([bytes(SMALL)])
    assert contents(log) == [*written, b"again", bytes(SMALL)]
    log.close()


def test_after_a_failed_sync_nobody_writes_until_the_log_was_opened_anew(folder: Path) -> None:
    disk = SickDisk()
    log, other = LocalLog(folder, disk=disk), LocalLog(folder)
    log.sync(log.append([b"safe"]))
    position = log.append([b"not safe"])
    disk.error = errno.EIO
    with pytest.raises(StorageFailed, match="sync failed"):
        log.sync(position)
    disk.error = 0  # the kernel would say yes now: it has dropped the page
    for one in (log, other, LocalLog(folder)):
        with pytest.raises(StorageFailed):
            one.sync(position)
        with pytest.raises(StorageFailed):
            one.append([b"more"])
        assert contents(one)[0] == b"safe"
        one.close()
    again = LocalLog(folder)
    assert contents(again)[0] == b"safe"
    again.sync(again.append([b"goes on"]))
    again.close()


# --- crashes of the machine -------------------------------------------------------------------------------------------


class PowerCut(BaseException):
    """The machine stops here."""


class ForgetfulDisk(Disk):
    """Remembers what is on the medium: whole files as of their last sync, names as of the last sync of the folder.

    fuse: the power is cut at this operation from now, 0: never.
    """

    fuse = 0

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files: dict[int, bytes] = {}  # by inode
        self.loose: dict[int, list[tuple[int, bytes]]] = {}
        self.named: dict[str, int] = {}
        self.one_at_a_time = threading.Lock()  # a log allocates in a thread
        if folder.exists():
            self.named = self._listed()
            self.files = {inode: (folder / name).read_bytes() for name, inode in self.named.items()}

    def _listed(self) -> dict[str, int]:
        found = {}
        for name in os.listdir(self.folder):
            status = os.stat(self.folder / name) if not name.endswith(".tmp") else None  # those come and go
            if status is not None and stat.S_ISREG(status.st_mode) and name != "header":
                found[name] = status.st_ino
        return found

    def _burn(self) -> None:
        if self.fuse and threading.current_thread() is threading.main_thread():
            self.fuse -= 1
            if not self.fuse:
                raise PowerCut

    def rename(self, old: StrPath, new: StrPath) -> None:
        self._burn()
        super().rename(old, new)

    def write(self, descriptor: int, data: bytes | memoryview, offset: int) -> int:
        self._burn()
        self.loose.setdefault(os.fstat(descriptor).st_ino, []).append((offset, bytes(data)))
        return super().write(descriptor, data, offset)

    def sync(self, descriptor: int) -> None:
        self._burn()
        status = os.fstat(descriptor)
        self.files[status.st_ino] = os.pread(descriptor, status.st_size, 0)
        self.loose.pop(status.st_ino, None)

    def sync_folder(self, folder: StrPath) -> None:
        self._burn()
        with self.one_at_a_time:
            self.named = self._listed()

    def crash(self, into: Path, dice: random.Random) -> None:
        """What the machine finds when it is up again: synced bytes, and any sectors of the others."""
        into.mkdir()
        for name, inode in self.named.items():
            data = bytearray(self.files.get(inode, b""))
            for offset, written in self.loose.get(inode, []):
                for start in range(0, len(written), SECTOR):
                    piece = written[start : start + SECTOR]
                    if dice.random() < 0.6 and offset + start + len(piece) <= len(data):
                        data[offset + start : offset + start + len(piece)] = piece  # a file keeps its length
            (into / name).write_bytes(data)
        if dice.random() < 0.7:
            header = bytearray((self.folder / "header").read_bytes())
            header[8 * Word.BOOT] ^= 1
            (into / "header").write_bytes(header)


@pytest.mark.parametrize("seed", range(12))
def test_a_crash_of_the_machine_loses_nothing_that_was_synced(tmp_path: Path, seed: int) -> None:
    dice = random.Random(seed)
    folder, expected = tmp_path / "0", list[bytes]()
    number = 0
    for life in range(6):
        disk = ForgetfulDisk(folder)
        logs = [LocalLog(folder, segment_bytes=SMALL, disk=disk) for _ in range(2)]
        found = contents(logs[0], logs[0].first)
        covered = logs[0].load_snapshot()
        kept = int(covered[1]) if covered else 0
        assert found == expected[len(expected) - len(found) :] if life else not found
        synced = len(expected)
        disk.fuse = dice.choice((0, dice.randrange(1, 250)))
        with contextlib.suppress(PowerCut):
            for _ in range(dice.randrange(150)):
                log = dice.choice(logs)
                entries = [b"%d " % (number + more) * dice.randrange(1, 60) for more in range(dice.randrange(1, 4))]
                number += len(entries)
                expected += entries
                position = log.append(entries)
                if dice.random() < 0.3:
                    log.sync(position)
                    synced = len(expected)
                if dice.random() < 0.03:
                    log.snapshot(position, b"%d" % len(expected))
                    synced = len(expected)
        crashed = tmp_path / str(life + 1)
        disk.crash(crashed, dice)
        for log in logs:
            log.close()
        folder = crashed
        log = LocalLog(folder)
        covered = log.load_snapshot()
        kept = int(covered[1]) if covered else 0
        left = kept + len(contents(log, covered[0] if covered else 0))
        assert left >= synced, "something that was synced is gone"
        assert expected[kept:left] == contents(log, covered[0] if covered else 0), "something that was never written is there"
        expected = expected[:left]
        log.close()


def test_a_power_cut_at_any_single_operation_leaves_a_readable_log(tmp_path: Path) -> None:
    expected = [b"%d " % number * 30 for number in range(150)]
    for cut in range(1, 190, 2):
        disk = ForgetfulDisk(tmp_path / f"{cut}")
        log = LocalLog(disk.folder, segment_bytes=SMALL, disk=disk)
        disk.fuse, synced = cut, 0
        with contextlib.suppress(PowerCut):
            for number, entry in enumerate(expected):
                position = log.append([entry])
                if number % 40 == 39:
                    log.sync(position)
                    synced = number + 1
        crashed = tmp_path / f"{cut} crashed"
        disk.crash(crashed, random.Random(cut))
        log.close()
        after = LocalLog(crashed)
        found = contents(after)
        assert found == expected[: len(found)]
        assert len(found) >= synced
        after.close()


def test_the_crash_finds_a_log_that_acknowledges_before_it_syncs(tmp_path: Path) -> None:
    lost = 0
    for seed in range(5):
        disk = ForgetfulDisk(tmp_path / f"{seed}")
        log = LocalLog(tmp_path / f"{seed}", segment_bytes=SMALL, disk=disk)
        for number in range(20):
            log.append([b"%d" % number * 30])
        log._words[Word.DURABLE] = 0
        disk.crash(tmp_path / f"{seed} crashed", random.Random(seed))
        log.close()
        after = LocalLog(tmp_path / f"{seed} crashed")
        lost += 20 - len(contents(after))
        after.close()
    assert lost > 0


@pytest.mark.parametrize("seed", range(8))
def test_no_acknowledged_task_is_lost_and_none_comes_back_when_the_machine_crashes(tmp_path: Path, seed: int) -> None:
    dice = random.Random(seed)
    folder = tmp_path / "0"
    put: set[str] = set()
    done: set[str] = set()
    for life in range(4):
        disk = ForgetfulDisk(folder)
        queues = [LogQueue(folder, log=LocalLog(folder, segment_bytes=SMALL, disk=disk)) for _ in range(2)]
        disk.fuse = dice.choice((0, dice.randrange(1, 250)))
        trying = ""
        with contextlib.suppress(PowerCut):
            for _ in range(60):
                queue, trying = dice.choice(queues), ""
                if dice.random() < 0.6:
                    put |= set(queue.put([NewTask(b"x" * dice.randrange(200)) for _ in range(dice.randrange(1, 4))]))
                _, tasks, _ = queue.lease(60, dice.randrange(1, 3), 0)
                for task in tasks:
                    assert task.id not in done, "an acked task came back"
                    if dice.random() < 0.7:
                        trying = task.id
                        assert queue.settle([Settlement.ack(task.token)]) == [""]
                        done.add(task.id)
        disk.crash(tmp_path / str(life + 1), dice)
        for queue in queues:
            queue.close()
        folder = tmp_path / str(life + 1)
        survivor = LogQueue(folder)
        survivor.release_all()
        left: set[str] = set()
        while tasks := survivor.lease(60, 1000, 0)[1]:
            left |= {task.id for task in tasks}
        if trying and trying not in left:
            done.add(trying)  # whether the last ack took effect was not known
        assert left >= put - done, "an acknowledged put is gone"
        assert not left & done, "an acked task came back"
        survivor.release_all()
        survivor.close()
