"""What a run wrote down: what each publisher did, and what each subscriber got in the order it came. Pure; reads no clock.

Messages are numbered from 1 per publisher in the payload, beside the SDK's own numbers, which are only compared.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from struct import Struct
from typing import NamedTuple

STAMP = Struct("<IQ")  # publisher index, number of the message


class Sent(NamedTuple):
    """One publisher. acked: numbers up to this one were covered by a flush() that succeeded."""

    published: int
    acked: int


class Told(NamedTuple):
    """One gap told by on_lost: `count` messages within first..last."""

    publisher: int
    first: int
    last: int
    count: int


class Heard:
    """One subscriber. runs: per publisher, arrivals in order as (first, last) of consecutive numbers. foreign: messages nobody
    sent or that were damaged. per_second: arrivals by whole second since the start. silence_seconds: longest time without any."""

    def __init__(self, publishers: int) -> None:
        self.runs: list[list[tuple[int, int]]] = [[] for _ in range(publishers)]
        self.told: list[Told] = []
        self.foreign = 0
        self.per_second: Counter[int] = Counter()
        self.silence_seconds = 0.0
        self._last = 0.0

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

    def progress(self) -> int:
        """Grows with everything that comes or is told."""
        return self.per_second.total() + self.foreign + sum(told.count for told in self.told)
