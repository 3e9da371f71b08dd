"""What a log on a server must do so that a work queue can stand on it; any log that can do this will serve.

A log is one ordered list of entries (bytes) that any number of processes on any number of hosts append to and read. Positions
are whole numbers that grow from entry to entry; 0 is before the first. Blocking code; any thread.

Promises of every log:
    an append is all or nothing, and what it wrote is on the log's stable storage when it returns;
    positions are ordered as appends become visible: who has read up to a position never finds anything at or below it later;
    whoever reads a position reads the same entry;
    an entry carries a time that the log itself gave it; from entry to entry it may fall back, by what its server's clock does;
    an entry goes only by a snapshot of it and of all before it.

There is no fence: an append that a process had under way may come into the log after others, also when its process is dead or
was told that it failed. What is appended must be such that this, and writing it twice, does no harm (records.py).
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

READ_BYTES = 4 * 1024 * 1024


class LogEntry(NamedTuple):
    """time: ms since 1970 of the log's clock, when it was appended."""

    position: int
    time: int
    data: bytes


class SharedLog(Protocol):
    """One open log.

    Every call may raise Closed, or LogUnavailable: the server can't be reached or doesn't serve; nothing was written.
    """

    @property
    def name(self) -> str:
        """Where it is, for messages; no password is in it."""

    @property
    def entry_bytes_max(self) -> int:
        """Of one entry; more raises CallError."""

    def now(self) -> int:
        """ms since 1970 of the log's clock, or a little less. Asks nobody."""

    def latest(self) -> int:
        """The same, or a little more; much more where that is not known yet. Asks nobody."""

    def append(self, entry: bytes) -> int:
        """Write an entry; its position. Raises AppendUnknown, StorageFull (nothing was written)."""

    def end(self) -> int:
        """Position of the last entry; of everything whose append had returned when this was called."""

    def read(self, after: int, bytes_max: int = READ_BYTES) -> list[LogEntry]:
        """Entries behind `after`, about `bytes_max` at most and at least one if there was one when this was called.

        Raises LogTrimmed: load the snapshot and go on behind it. StorageFailed: the log ends before `after`, has a hole, or
        has another entry there than this opening has read: then every later call raises it.
        """

    def wait(self, after: int, seconds: float) -> bool:
        """Sleep until there is an entry behind `after`; whether there is. May return False early: look at the clock."""

    def snapshot(self, position: int, data: bytes) -> None:
        """Keep `data` as what the entries up to `position` add up to, and forget them. Nothing, if a newer one is kept."""

    def newest_snapshot(self) -> tuple[int, int]:
        """Position of the newest snapshot, and about how many bytes it has; zeros if there is none."""

    def load_snapshot(self) -> tuple[int, bytes] | None:
        """The newest snapshot as (position, data), None if there is none."""

    def close(self) -> None:
        """Let go. Calls under way in other threads end with Closed."""
