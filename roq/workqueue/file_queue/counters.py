"""The two counters beside the queue, as python-task-queue keeps them: `insertions` in digits, `completions` one byte per task.

Both are informative: a counter that can't be written never fails a verb; what it lacks is kept and added the next time. That
program reads `insertions` before it takes the lock and appends to `completions` without one, so it may lose counts beside
others; counts made here are not lost among themselves, on any number of hosts.

They are synced a second after a change, by a thread, and when the queue is closed, so no verb waits for it: a loss of power
takes back what was counted after that, never the whole. What a killed process had not counted: counting.py.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from typing import Literal, Protocol

from roq.runtime.files import DISK
from roq.workqueue.file_queue.storage import read_open, try_lock, write_open

logger = logging.getLogger(__name__)
LOCK_SECONDS = 2.0
_RETRY_SECONDS = 0.001


Counter = Literal["insertions", "completions"]  # the names of their files
INSERTED: Counter = "insertions"
COMPLETED: Counter = "completions"


class Announced(Protocol):
    """Where it is written down that a counter is about to be changed."""

    def write(self, verb: str, words: tuple[int, int]) -> None:
        """One line."""


class CounterFiles:
    """Of one folder. mutex: of this process for both files."""

    def __init__(self, folder: str, mutex: threading.Lock) -> None:
        self._folder = folder
        self._mutex = mutex
        self._owed: dict[Counter, int] = {INSERTED: 0, COMPLETED: 0}  # not written yet, the disk refused
        self._unsynced: set[Counter] = set()
        self._created = False  # since the last sync

    @property
    def inserted(self) -> int:
        """Tasks ever put."""
        try:
            with self._mutex, open(self._path(INSERTED), "rb") as file:
                return int(file.read() or 0)
        except (FileNotFoundError, ValueError):
            return 0

    @property
    def completed(self) -> int:
        """Tasks ever acked."""
        try:
            return os.stat(self._path(COMPLETED)).st_size
        except FileNotFoundError:
            return 0

    def add(self, counter: Counter, count: int, announced: Announced | None = None) -> bool:
        """`count` tasks more, and those owed. True: `sync` is to be called, nobody was told so since the last time."""
        with self._mutex:
            self._owed[counter] += count
            owed = self._owed[counter]
            if not owed:
                return False
            clean = not self._unsynced
            if self._change(counter, lambda before: before + owed, announced):
                self._owed[counter] -= owed
            return clean and bool(self._unsynced)

    def add_once(self, counter: Counter, began_at: int, count: int) -> bool:
        """`count` tasks more unless they are in it: the counter stood at `began_at` when they were about to be counted. False:
        it can't be written."""

        def total(before: int) -> int:
            if before > began_at:
                return max(before, began_at + count)
            if before in (began_at, 0) or counter == COMPLETED:  # 0: set to it since
                return before + count
            return began_at + count  # digits cut short

        with self._mutex:
            return self._change(counter, total, None)

    def settle(self) -> None:
        """Write what is owed."""
        for counter in (INSERTED, COMPLETED):
            self.add(counter, 0)

    def sync(self) -> None:
        """Make what was counted durable."""
        with self._mutex:
            unsynced, self._unsynced = self._unsynced, set()
            created, self._created = self._created, False
        try:
            for counter in unsynced:
                fd = os.open(self._path(counter), os.O_RDWR)
                try:
                    os.fdatasync(fd)
                finally:
                    os.close(fd)
            if created:
                DISK.sync_folder(self._folder)
        except OSError as error:
            logger.warning("the counters of %s can't be synced, a loss of power would take them back: %s", self._folder, error)

    def _path(self, counter: Counter) -> str:
        return f"{self._folder}/{counter}"

    def _change(self, counter: Counter, total: Callable[[int], int], announced: Announced | None) -> bool:
        """Set it to `total` of what it is. False: the disk refuses."""
        path = self._path(counter)
        deadline = time.monotonic() + LOCK_SECONDS
        try:
            fd = os.open(path, os.O_CREAT | (os.O_RDWR if counter == INSERTED else os.O_WRONLY | os.O_APPEND), 0o666)
            try:
                while not try_lock(fd):
                    if time.monotonic() > deadline:
                        logger.warning("%s stays locked: what is to be counted is counted later", path)
                        return False
                    time.sleep(_RETRY_SECONDS)
                before = _value(counter, fd, path)
                after = total(before)
                if announced is not None:
                    announced.write("counted", (before, after - before))
                _write(counter, fd, before, after)
                self._created |= before == 0
                self._unsynced.add(counter)
                return True
            finally:
                os.close(fd)
        except OSError as error:
            logger.warning("%s can't be written: what is to be counted is counted later: %s", path, error)
            return False


def _value(counter: Counter, fd: int, path: str) -> int:
    if counter == COMPLETED:
        return os.fstat(fd).st_size
    digits = read_open(fd, path)
    return int(digits if digits.isdigit() else 0)


def _write(counter: Counter, fd: int, before: int, after: int) -> None:
    """Appended, not set, where python-task-queue appends without a lock."""
    if counter == COMPLETED:
        write_open(fd, bytes(after - before))
        return
    digits = b"%d" % after
    os.lseek(fd, 0, os.SEEK_SET)
    write_open(fd, digits)
    os.ftruncate(fd, len(digits))
