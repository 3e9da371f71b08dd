"""A folder's log behind the words of a shared log (roq/log/contract.py). `log:` addresses don't go through here."""

from __future__ import annotations

from pathlib import Path

from roq.errors import CallError, StorageFailed
from roq.log.contract import READ_BYTES, LogEntry
from roq.log.local.layout import ENTRY_BYTES_MAX
from roq.log.local.log import LocalLog

TIME_BYTES = 8  # before each entry: ms since 1970, unsigned, big-endian
HEAD_BYTES = 64  # generous: what the log puts around an entry


class FolderLog:
    """A SharedLog in a folder."""

    entry_bytes_max = ENTRY_BYTES_MAX - HEAD_BYTES

    def __init__(self, folder: Path) -> None:
        self._log = LocalLog(folder)
        self.name = str(self._log.folder)

    def now(self) -> int:
        """See SharedLog."""
        return self._log.now()

    def latest(self) -> int:
        """See SharedLog."""
        return self._log.now() + 1

    def append(self, entry: bytes) -> int:
        """See SharedLog."""
        if len(entry) > self.entry_bytes_max:
            raise CallError(f"an entry of {len(entry)} bytes; {self.name} takes {self.entry_bytes_max} at once")
        position = self._log.append([self._log.now().to_bytes(TIME_BYTES, "big") + entry])
        self._log.sync(position)
        return position

    def end(self) -> int:
        """See SharedLog."""
        return self._log.end

    def read(self, after: int, bytes_max: int = READ_BYTES) -> list[LogEntry]:
        """See SharedLog."""
        if after > self._log.end:
            raise StorageFailed(f"{self.name} ends before position {after}")
        entries = self._log.read(after, bytes_max)
        return [LogEntry(at, int.from_bytes(data[:TIME_BYTES], "big"), bytes(data[TIME_BYTES:])) for at, data in entries]

    def wait(self, after: int, seconds: float) -> bool:
        """See SharedLog."""
        return self._log.wait(after, seconds)

    def snapshot(self, position: int, data: bytes) -> None:
        """See SharedLog."""
        with self._log.upkeep(wait_seconds=60.0) as mine:
            if mine and self._log.newest_snapshot()[0] < position:
                self._log.snapshot(position, data)

    def newest_snapshot(self) -> tuple[int, int]:
        """See SharedLog."""
        return self._log.newest_snapshot()

    def load_snapshot(self) -> tuple[int, bytes] | None:
        """See SharedLog."""
        return self._log.load_snapshot()

    def close(self) -> None:
        """See SharedLog."""
        self._log.close()
