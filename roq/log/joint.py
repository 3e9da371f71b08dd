"""Notices that a log's server came back as an older state of itself: an unsynced disk, a standby that lagged, a backup.

Other programs may have appended so much since that the log is as long as before, and positions name other entries. So who goes
on reading compares the last entry he read with the one that is there now. Where it was trimmed meanwhile, nothing can be told.
"""

from __future__ import annotations

import hashlib

from roq.errors import StorageFailed
from roq.log.contract import LogEntry

MARK_TIME_BYTES = 8  # before the data: signed, big-endian, as PostgreSQL's int8send has it


def mark_of(entry: LogEntry) -> bytes:
    """Tells an entry from others at its position."""
    return hashlib.sha256(entry.time.to_bytes(MARK_TIME_BYTES, "big", signed=True) + entry.data).digest()


class Joint:
    """Where what was read of a log ends. Once it was found wrong every `check` raises StorageFailed: what the program believes
    to have leased may be other tasks by now. name: of the log."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._last: tuple[int, bytes] = (0, b"")  # position and mark of the entry that was read last
        self._broken = False

    def check(self) -> None:
        """Raises StorageFailed if the log is another one by now."""
        if self._broken:
            raise StorageFailed(
                f"{self._name} has changed behind what was read of it: its server came back as an older state of itself. "
                "Close the work queue everywhere and open it anew"
            )

    def read(self, entry: LogEntry) -> None:
        """This one was read last."""
        self._last = entry.position, mark_of(entry)

    @property
    def position(self) -> int:
        """Of the entry that was read last, 0: none was."""
        return self._last[0]

    def mark(self, position: int) -> bytes | None:
        """Of the entry here, if it was read last."""
        at, mark = self._last
        return mark if at == position and mark else None

    def compare(self, known: bytes | None, found: bytes | None) -> None:
        """Marks of one position, then and now; None: not known, trimmed. Raises StorageFailed if they differ."""
        if known is not None and found is not None and known != found:
            self._broken = True
        self.check()

    def appended(self, before: int, position: int) -> None:
        """An append was given this position; `before` was read when it began. Raises StorageFailed: it should come behind."""
        self._broken = self._broken or position <= before
        self.check()
