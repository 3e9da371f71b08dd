"""Descriptors of many files: only so many are open at a time; who reads a file that was closed meanwhile opens it again.

Thread-safe. A file in use, or that was written and not synced yet, stays open: the kernel tells a failed write to the
descriptors that are open then, and to each only once. Not covered: what is in the files (datafile.py).
"""

from __future__ import annotations

import contextlib
import os
import resource
import threading
from collections import OrderedDict, deque
from pathlib import Path

OPEN_FILES_MAX = 256
OPEN_SHARE = 4  # of the process's limit, one part in so many: connections and work queues need descriptors too


class OpenFile:
    """One file's descriptor, -1 when closed. uses: by threads just now. kept: not to be closed by others."""

    __slots__ = ("descriptor", "kept", "path", "uses")

    def __init__(self, path: Path) -> None:
        self.path = path
        self.descriptor, self.uses, self.kept = -1, 0, False


class Descriptors:
    """limit: files open at a time, as long as no more are in use or kept."""

    def __init__(self, limit: int = 0) -> None:
        """0: as fits the process's limit."""
        self._limit = limit or max(1, min(OPEN_FILES_MAX, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // OPEN_SHARE))
        self._lock = threading.Lock()
        self._idle: OrderedDict[OpenFile, None] = OrderedDict()  # the one not used for longest comes first
        self._dropped: deque[OpenFile] = deque()
        self.open = 0

    def take(self, file: OpenFile, flags: int = 0) -> int:
        """Its descriptor, which stays open until `give_back`. Raises OSError."""
        with self._lock:
            self._close_dropped()
            if file.descriptor < 0:
                self._make_room()
                file.descriptor = os.open(file.path, os.O_RDWR | os.O_CLOEXEC | flags, 0o600)
                self.open += 1
            self._idle.pop(file, None)
            file.uses += 1
            return file.descriptor

    def give_back(self, file: OpenFile) -> None:
        """What `take` gave."""
        with self._lock:
            file.uses -= 1
            if not file.uses and not file.kept:
                self._idle[file] = None
            self._close_dropped()

    def keep(self, file: OpenFile) -> None:
        """Don't close it until `release`. It is in use by the caller."""
        with self._lock:
            file.kept = True

    def release(self, file: OpenFile) -> None:
        """It may be closed again. It is in use by the caller."""
        with self._lock:
            file.kept = False

    def drop(self, file: OpenFile) -> None:
        """Nobody needs it any more. Never waits: the collector of garbage may call it, in the middle of anything."""
        self._dropped.append(file)
        if self._lock.acquire(blocking=False):
            try:
                self._close_dropped()
            finally:
                self._lock.release()

    def _make_room(self) -> None:
        while self.open >= self._limit and self._idle:
            self._close(self._idle.popitem(last=False)[0])

    def _close_dropped(self) -> None:
        while self._dropped:
            file = self._dropped.popleft()
            self._idle.pop(file, None)
            if file.descriptor >= 0:
                self._close(file)

    def _close(self, file: OpenFile) -> None:
        os.close(file.descriptor)
        file.descriptor = -1
        self.open -= 1


def raise_limit() -> None:
    """As many descriptors as the system lets this process have: the default of most systems is far below."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(OSError, ValueError):  # it goes on with fewer
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
