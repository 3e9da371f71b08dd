"""Which numbers a producer or an instance has used, so that a record written twice takes effect once. Pure.

A sender counts its records from 1 and may write them out of order. What is kept: the highest number and the ranges below it
that are still missing, at most GAPS_MAX of them; of numbers below a range given up nothing is known, and a record with one
is refused instead of taken or called a repeat. A sender from whom nothing came for SENDER_IDLE_MS of the log's time may be
forgotten: the same record written again after that is taken as a new one. A sender with a `lasting` id, of a job that may
rest for weeks between two tries, is kept for LASTING_IDLE_MS.
"""

from __future__ import annotations

from bisect import bisect_right
from enum import StrEnum

import msgspec

GAPS_MAX = 128  # puts that failed, or are still on their way in other threads
SENDER_IDLE_MS = 3_600_000  # far above any time-out after which a client still repeats a request
LASTING_IDLE_MS = 90 * 86_400_000
LASTING = 0x5A17  # the upper 16 bits of such ids; of a random one they are so once in 65,536 times, which does no harm
SENDERS_MAX = 100_000  # above it the longest idle are forgotten early


def lasting(id: int) -> int:
    """The id of a sender that is kept for long, from 64 bits of which the upper 16 are not used."""
    return LASTING << 48 | (id & (1 << 48) - 1)


def _idle_ms(id: int) -> int:
    return LASTING_IDLE_MS if id >> 48 == LASTING else SENDER_IDLE_MS


class Use(StrEnum):
    """What is known of a number."""

    NEW = "new"
    KNOWN = "known"
    FORGOTTEN = "forgotten"


class Sender(msgspec.Struct, array_like=True):
    """One sender's numbers. missing: ranges (first, last), ascending. floor: nothing is known of numbers up to it. touched: ms
    of its last record. ended: nothing more is taken from it."""

    highest: int = 0
    touched: int = 0
    floor: int = 0
    missing: list[tuple[int, int]] = []
    ended: bool = False

    def use(self, number: int) -> Use:
        """Take note of this number."""
        if number > self.highest:
            if number > self.highest + 1:
                self.missing.append((self.highest + 1, number - 1))
                if len(self.missing) > GAPS_MAX:
                    self.floor = self.missing.pop(0)[1]
            self.highest = number
            return Use.NEW
        at = bisect_right(self.missing, (number, self.highest)) - 1
        if at >= 0 and self.missing[at][0] <= number <= self.missing[at][1]:
            first, last = self.missing[at]
            self.missing[at : at + 1] = [part for part in ((first, number - 1), (number + 1, last)) if part[0] <= part[1]]
            if len(self.missing) > GAPS_MAX:
                self.floor = self.missing.pop(0)[1]
            return Use.NEW
        return Use.FORGOTTEN if number <= self.floor else Use.KNOWN

    def knows(self, number: int) -> bool:
        """Whether this number was used, as far as it is remembered."""
        return self.floor < number <= self.highest and not any(first <= number <= last for first, last in self.missing)


class Senders(msgspec.Struct, array_like=True):
    """Senders by id. sweep: the log's time at which the idle are looked for again."""

    known: dict[int, Sender] = {}
    sweep: int = 0

    def use(self, sender: int, number: int, clock: int) -> Use:
        """Take note of a record."""
        one = self.known.get(sender)
        if one is not None and number == one.highest + 1 and not one.ended:  # what nearly all are
            one.highest, one.touched = number, clock
            return Use.NEW
        one = self.of(sender, clock)
        return Use.FORGOTTEN if one.ended else one.use(number)

    def of(self, sender: int, clock: int) -> Sender:
        """This sender, touched."""
        one = self.known.get(sender)
        if one is None:
            self._forget(clock)
            one = self.known[sender] = Sender()
        one.touched = clock
        return one

    def _forget(self, clock: int) -> None:
        """The only place where there get to be more is also the one where there get to be fewer."""
        if clock >= self.sweep:
            self.sweep = clock + SENDER_IDLE_MS // 4
            for id in [id for id, one in self.known.items() if one.touched + _idle_ms(id) < clock]:
                del self.known[id]
        if len(self.known) >= SENDERS_MAX:
            oldest = sorted(self.known, key=lambda id: (self.known[id].touched, id))
            for id in oldest[: SENDERS_MAX // 8]:
                del self.known[id]

    def ordered(self) -> Senders:
        """The same, in the one order a dump has."""
        return Senders(dict(sorted(self.known.items())), self.sweep)
