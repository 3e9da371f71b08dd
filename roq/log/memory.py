"""A shared log in this process, for tests and models. Nothing outlives the process."""

from __future__ import annotations

import time
from threading import Lock

from roq.errors import CallError, Closed, LogTrimmed, StorageFailed
from roq.log.arrivals import Arrivals
from roq.log.contract import READ_BYTES, LogEntry

ENTRY_BYTES_MAX = 64 * 1024 * 1024


class MemoryLog:
    """A SharedLog (contract.py). All who shall share it are given this object; the first `close` ends it for all."""

    entry_bytes_max = ENTRY_BYTES_MAX

    def __init__(self, name: str = "memory") -> None:
        self.name = name
        self._lock = Lock()
        self._entries: list[LogEntry] = []
        self._trimmed = 0  # position up to which entries are in the snapshot
        self._snapshot: tuple[int, bytes] | None = None
        self._epoch = time.time() - time.monotonic()
        self._arrivals = Arrivals()
        self._closed = False

    def now(self) -> int:
        """See SharedLog."""
        return int((self._epoch + time.monotonic()) * 1000)

    def latest(self) -> int:
        """See SharedLog."""
        return self.now() + 1

    def append(self, entry: bytes) -> int:
        """See SharedLog."""
        if len(entry) > ENTRY_BYTES_MAX:
            raise CallError(f"an entry of {len(entry)} bytes; this log takes {ENTRY_BYTES_MAX} at once")
        with self._lock:
            self._check_open()
            position = self._trimmed + len(self._entries) + 1
            self._entries.append(LogEntry(position, self.now(), entry))
        self._arrivals.rise(position)
        return position

    def end(self) -> int:
        """See SharedLog."""
        with self._lock:
            self._check_open()
            return self._trimmed + len(self._entries)

    def read(self, after: int, bytes_max: int = READ_BYTES) -> list[LogEntry]:
        """See SharedLog."""
        with self._lock:
            self._check_open()
            if after < self._trimmed:
                raise LogTrimmed(f"{self.name}: entries behind position {after} are in the snapshot")
            if after > self._trimmed + len(self._entries):
                raise StorageFailed(f"{self.name} ends before position {after}")
            found: list[LogEntry] = []
            size = 0
            for entry in self._entries[after - self._trimmed :]:
                size += len(entry.data)
                if found and size > bytes_max:
                    break
                found.append(entry)
            return found

    def wait(self, after: int, seconds: float) -> bool:
        """See SharedLog."""
        return self._arrivals.wait(after, seconds)

    def snapshot(self, position: int, data: bytes) -> None:
        """See SharedLog."""
        with self._lock:
            self._check_open()
            if self._snapshot is None or self._snapshot[0] < position:
                self._snapshot = position, data
                del self._entries[: position - self._trimmed]
                self._trimmed = position

    def newest_snapshot(self) -> tuple[int, int]:
        """See SharedLog."""
        with self._lock:
            return (0, 0) if self._snapshot is None else (self._snapshot[0], len(self._snapshot[1]))

    def load_snapshot(self) -> tuple[int, bytes] | None:
        """See SharedLog."""
        with self._lock:
            self._check_open()
            return self._snapshot

    def close(self) -> None:
        """See SharedLog."""
        with self._lock:
            self._closed = True
        self._arrivals.close()

    def _check_open(self) -> None:
        if self._closed:
            raise Closed(f"the log {self.name} was closed")
