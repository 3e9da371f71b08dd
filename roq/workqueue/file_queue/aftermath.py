"""What an ack leaves to do when the task is gone for everybody: free its blocks and, if asked for late syncs, sync and count.
And what any count leaves to do: sync the counters.

Freeing the blocks of two removed files takes longer than the lease and the ack together, and the kernel does it when the last
descriptor is closed: so removed files are held open and closed here, in a thread. Not on network file systems, which rename a
file removed while open to a name that python-task-queue stumbles over.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
import weakref
from collections.abc import Iterable
from contextlib import suppress

from roq.runtime.files import DISK
from roq.workqueue.file_queue.counters import COMPLETED, CounterFiles

logger = logging.getLogger(__name__)
HELD_MAX = 256  # removed files kept open; beyond, the ack frees them itself
COUNTERS_SYNC_SECONDS = 1.0  # after a change, at the latest; what a loss of power may take back of the counters
GATHER_SECONDS = 0.005  # acks are counted, and their blocks freed, together
_LOCAL = frozenset({"btrfs", "ext2", "ext3", "ext4", "f2fs", "overlay", "tmpfs", "xfs", "zfs"})


def is_local(path: str) -> bool:
    """Whether removed files may be held open here."""
    device = os.stat(path).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    try:
        with open("/proc/self/mountinfo") as file:
            mounts = [line.split() for line in file]
    except OSError:
        return False
    return any(words[2] == number and words[words.index("-") + 1] in _LOCAL for words in mounts)


class Aftermath:
    """Of one open queue. seconds: how long to gather."""

    def __init__(self, counters: CounterFiles, seconds: float) -> None:
        self._counters = counters
        self._counters_due = float("inf")  # monotonic, when they are synced
        self._seconds = max(GATHER_SECONDS, seconds)
        self._lock = threading.Lock()
        self._freeing = threading.Lock()  # while files that were held are closed
        self._held: list[int] = []
        self._dirty: set[str] = set()
        self._acked = 0
        self._work, self._closed = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None
        self._process = os.getpid()
        _open.add(self)

    @property
    def is_ours(self) -> bool:
        """Not of a parent this process was forked from, whose threads hold its locks, and who does what is left itself."""
        return self._process == os.getpid()

    def hold(self, path: str) -> None:
        """Keep a file open that is about to be removed."""
        if len(self._held) >= HELD_MAX:
            return
        with suppress(FileNotFoundError):
            fd = os.open(path, os.O_RDONLY)
            with self._lock:
                self._held.append(fd)

    def add(self, acked: int = 0, dirty: Iterable[str] = ()) -> None:
        """So many tasks are not counted, these folders not synced yet; or just: files are held."""
        with self._lock:
            self._acked += acked
            self._dirty.update(dirty)
        self._wake()

    def sync_counters_soon(self) -> None:
        """A counter changed."""
        self._counters_due = time.monotonic() + COUNTERS_SYNC_SECONDS
        self._wake()

    def _wake(self) -> None:
        with self._lock:
            if self._thread is None and not self._closed.is_set():
                self._thread = threading.Thread(target=self._run, name="roq-file-queue", daemon=True)
                self._thread.start()
        if not self._work.is_set():
            self._work.set()

    def flush(self) -> None:
        """Do now what is left. When it returns, nothing is held that was before."""
        with self._freeing:
            with self._lock:
                held, self._held = self._held, []
                dirty, self._dirty = self._dirty, set()
                acked, self._acked = self._acked, 0
            for fd in held:
                os.close(fd)
        try:
            for folder in dirty:
                DISK.sync_folder(folder)
        except OSError as error:
            logger.error("acks could not be synced: a power loss may bring their tasks back: %s", error)
        if acked and self._counters.add(COMPLETED, acked):
            self.sync_counters_soon()

    def close(self) -> None:
        """Do what is left and end the thread."""
        self._closed.set()
        self._work.set()
        if self._thread is not None:
            self._thread.join()
        self._finish()

    def forsaken(self) -> None:
        """The queue is gone without `close`. This may run in the middle of another queue's verb, which holds locks that are to
        be taken here: so the thread does what is left, and nobody waits for it."""
        self._closed.set()
        self._work.set()

    def _finish(self) -> None:
        self.flush()
        self._counters.settle()
        self._counters.sync()

    def _run(self) -> None:
        while not self._closed.is_set():
            left = self._counters_due - time.monotonic()
            self._work.wait(None if left == float("inf") else max(0.0, left))
            self._closed.wait(self._seconds)
            self._work.clear()
            self.flush()
            if time.monotonic() >= self._counters_due:
                self._counters_due = float("inf")  # before: what is counted meanwhile asks again
                self._counters.sync()
        self._finish()


_open: weakref.WeakSet[Aftermath] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """The program ends without `close`."""
    for aftermath in list(_open):
        if aftermath.is_ours:
            aftermath.close()
