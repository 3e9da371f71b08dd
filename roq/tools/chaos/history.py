"""What a run wrote down: the faults, what each publisher did, what each subscriber got in the order it came. Reads no clock.

Messages are numbered from 1 per publisher in the payload, beside the SDK's own numbers, which are only compared.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from struct import Struct
from typing import NamedTuple

import msgspec

STAMP = Struct("<IQ")  # publisher index, number of the message


class Sent(NamedTuple):
    """One publisher. acked: numbers up to this one were covered by a flush() that succeeded."""

    published: int
    acked: int


class GapReported(NamedTuple):
    """One gap reported by on_lost: `messages` many within first..last. t: seconds after the start of the load."""

    publisher: int
    first: int
    last: int
    messages: int
    t: float = 0.0


class FaultDone(msgspec.Struct):
    """One fault as it was. t: seconds after the start of the load; seconds: until it was ended, 0 for a killed process.
    target: the machine, and the process after a colon. error: why it could not be done, or not be ended."""

    t: float
    kind: str
    target: str
    seconds: float = 0.0
    role: str = ""
    error: str = ""


class SubscriberHistory:
    """One subscriber. runs: per publisher, arrivals in order as (first, last) of consecutive numbers. foreign: messages that
    nobody sent or that were damaged. per_second: arrivals by whole second since the start. silence_seconds: longest time
    without any."""

    def __init__(self, publishers: int) -> None:
        self.runs: list[list[tuple[int, int]]] = [[] for _ in range(publishers)]
        self.reported: list[GapReported] = []
        self.foreign = 0
        self.per_second = array("L")  # compact: a soak keeps many
        self.silence_seconds = 0.0
        self._last = 0.0
        self._asked: list[tuple[int, int]] = [(0, 0)] * publishers  # run and number up to which `news` has told

    def take(self, messages: Iterable[tuple[int, bytes]], size: int, seconds: float) -> None:
        """(SDK's sequence number, payload) of messages that came `seconds` after the start; `size`: bytes each must have."""
        before = self.foreign
        arrived = 0
        unpack = STAMP.unpack_from
        for sequence, payload in messages:
            arrived += 1
            if len(payload) != size:
                self.foreign += 1
                continue
            publisher, number = unpack(payload)
            if publisher >= len(self.runs) or number != sequence:
                self.foreign += 1
                continue
            self.arrived(publisher, number)
        self.per_second.extend([0] * (int(seconds) + 1 - len(self.per_second)))
        self.per_second[int(seconds)] += arrived - (self.foreign - before)
        self.silence_seconds = max(self.silence_seconds, seconds - self._last)
        self._last = seconds

    def arrived(self, publisher: int, number: int) -> None:
        """One message."""
        runs = self.runs[publisher]
        if runs and runs[-1][1] == number - 1:
            runs[-1] = (runs[-1][0], number)
        else:
            runs.append((number, number))

    def news(self) -> dict[int, list[tuple[int, int]]]:
        """The runs that came since this was asked last, by publisher."""
        found = {}
        for publisher, (runs, (place, last)) in enumerate(zip(self.runs, self._asked, strict=True)):
            if not runs or (place == len(runs) - 1 and last == runs[-1][1]):
                continue
            fresh = runs[place:]
            fresh[0] = (max(fresh[0][0], last + 1) if last else fresh[0][0], fresh[0][1])
            found[publisher] = [one for one in fresh if one[0] <= one[1]]
            self._asked[publisher] = len(runs) - 1, runs[-1][1]
        return found

    def progress(self) -> int:
        """Grows with everything that comes or is reported."""
        return sum(self.per_second) + self.foreign + sum(gap.messages for gap in self.reported)
