"""The time of a log: one clock for all processes that share the folder, which no step of the wall clock reaches.

Milliseconds of CLOCK_BOOTTIME, which all processes of a machine share and which counts while it sleeps, plus an offset in the
shared header. Who opens the folder first in a boot chooses the offset by its wall clock; from then on it only grows, when the
log turns out to hold a later time: of the boot before, when the wall clock has gone back since, or of a program of version 0.1,
which writes its own wall clock. Invariant: within a boot, no process is ahead of another, and none goes back.

After a reboot only the wall clock knows how long the machine was off. Is it wrong then, leases and delays from before end
early, or later by what it is behind; durations begun since are right.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

from roq.log.local.header import MappedHeader, Word
from roq.log.local.mapped import boot_number

NANOS = 1_000_000
_BOOTTIME = partial(time.clock_gettime_ns, time.CLOCK_BOOTTIME)


class Clock:
    """wall, boottime: nanoseconds. boot: of the machine. Make one, and call `reach`, under the append lock only."""

    def __init__(
        self,
        header: MappedHeader,
        wall: Callable[[], int] = time.time_ns,
        boottime: Callable[[], int] = _BOOTTIME,
        boot: int | None = None,
    ) -> None:
        self._words, self._boottime = header.words, boottime
        boot = boot or boot_number()
        if self._words[Word.CLOCK_BOOT] != boot:  # first the offset: without its boot it counts for nothing
            self._words[Word.CLOCK_OFFSET] = max((wall() - boottime()) // NANOS, 0)
            self._words[Word.CLOCK_BOOT] = boot

    def now(self) -> int:
        """ms since 1970, about."""
        return self._boottime() // NANOS + self._words[Word.CLOCK_OFFSET]

    def reach(self, milliseconds: int) -> None:
        """The log holds this time: no process is before it from now on."""
        offset = milliseconds - self._boottime() // NANOS
        self._words[Word.CLOCK_OFFSET] = max(self._words[Word.CLOCK_OFFSET], offset)
