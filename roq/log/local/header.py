"""The small mapped file through which the processes of one folder see how far the log is, and wake each other.

It is a cache: lost, stale or foreign, it is rebuilt from the segments by the next process that opens the folder alone.
Every field is one aligned 8-byte word, so that a reader without a lock sees an old or a new value, never a mixture. Who may
write which word: `log.py`. Who waits sleeps on the bell word (futex.py).
"""

from __future__ import annotations

import time
from enum import IntEnum
from pathlib import Path

from roq.log.local import futex
from roq.log.local.mapped import Mapped

SIZE = 4096
LISTEN_SECONDS = 1.0  # a waiter looks again at least this often, whatever happened to its wake-up


class Word(IntEnum):
    """The 8-byte fields."""

    MAGIC = 0
    BOOT = 1  # these five say whose cache this is
    DEVICE = 2
    INODE = 3
    COOKIE = 4
    WRITTEN = 8  # position behind the last whole entry
    INTENT = 9  # position up to which the holder of the append lock is writing; = WRITTEN when nobody is
    ACTIVE = 10  # base of the segment that is written
    FIRST = 11  # base of the first segment that is still there
    FAILED = 12  # errno of a failed sync or write: the log is read-only until it was opened anew; 0: fine
    ROLL = 13  # base of the segment that is being started; 0: none
    DURABLE = 16  # position up to which everything is on stable storage
    ROUND = 17  # number of the group sync that a writer may still join
    CLOCK_OFFSET = 18  # ms to add to CLOCK_BOOTTIME (clock.py)
    CLOCK_BOOT = 19  # number of the boot for which the offset was chosen: version 0.1 knows neither, and leaves both
    TIGHT = 20  # 1: a put was refused because the disk is full, or an acknowledgement took what is kept; 0: not since
    BELL = 24  # counts appends; the futex word
    LISTEN = 25  # CLOCK_MONOTONIC milliseconds until which somebody may be waiting for the bell


class MappedHeader(Mapped):
    """The mapped words. A thread may still sleep on the bell of a log that was closed."""

    def __init__(self, path: Path, mode: int) -> None:
        super().__init__(path, mode, SIZE)
        self._bell = self.address(Word.BELL)

    def rebuild(self, cookie: int, *, first: int, active: int, end: int) -> None:
        """Start the words anew: everything up to `end` is written and durable."""
        words = self.words
        words[Word.MAGIC] = 0
        words[Word.FIRST], words[Word.ACTIVE] = first, active
        words[Word.WRITTEN] = words[Word.INTENT] = words[Word.DURABLE] = end
        words[Word.FAILED] = words[Word.LISTEN] = words[Word.ROLL] = words[Word.TIGHT] = 0
        self.adopt(cookie)

    def ring(self) -> None:
        """Wake everybody who waits. Only while holding the append lock."""
        words = self.words
        words[Word.BELL] = (words[Word.BELL] + 1) & 0xFFFFFFFF

    def wake(self) -> None:
        """After `ring`, and after letting go of the lock: let those who sleep run."""
        if futex.AVAILABLE and self.words[Word.LISTEN] > time.monotonic() * 1000:
            futex.wake(self._bell, futex.EVERYBODY)

    def listen(self, seconds: float) -> int:
        """Say that somebody will wait; returns the bell's count to give to `wait`."""
        words = self.words
        until = int((time.monotonic() + min(seconds, LISTEN_SECONDS) + 0.5) * 1000)
        words[Word.LISTEN] = max(until, words[Word.LISTEN])
        return words[Word.BELL]

    def wait(self, bell: int, seconds: float) -> None:
        """Sleep until the bell was rung after `listen` gave `bell`, or `seconds` (at most LISTEN_SECONDS) are over."""
        futex.wait(self._bell, bell, min(seconds, LISTEN_SECONDS))
