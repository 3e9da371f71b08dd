"""How far a query has read a recorded queue, how far its next batch goes, and which of its messages are repeats. Pure.

    {"tapes": "0f3a…", "done": {"exchange-1": 812, "exchange-2": 640}, "ended": {"exchange-1": true}}

An offset is a TapePosition in JSON: number of the last entry that is done with, by Exchange; a tape that is not named is
read from its beginning. ended: tapes of Exchanges that are gone, of which all is done: once they have expired, nothing of
them is lost.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from roq.errors import InvalidPosition
from roq.wire.recording import TapePosition

RANGES_MAX = 1_000  # tasks of one batch: entries may be small
TapeOffsets = dict[str, Any]  # what Spark keeps as JSON


class TapesDone(msgspec.Struct, frozen=True):
    """An offset. See the module."""

    tapes: str
    done: dict[str, int]
    ended: dict[str, bool] = {}

    def offsets(self) -> TapeOffsets:
        """For Spark: always the same text for the same place."""
        return {"tapes": self.tapes, "done": dict(sorted(self.done.items())), "ended": dict(sorted(self.ended.items()))}

    @classmethod
    def of(cls, offsets: Mapping[str, Any], tapes: str) -> TapesDone:
        """Of Spark's checkpoint. tapes: those that are there now. Raises InvalidPosition."""
        try:
            found = msgspec.convert(offsets, cls)
        except msgspec.ValidationError as error:
            raise InvalidPosition(f"Spark's checkpoint names no place on tapes, {offsets}: {error}") from None
        TapePosition(found.tapes, found.done).check_queue(tapes, "Spark's checkpoint", "begin with a new one")
        return found


def admitted(done: Mapping[str, int], ends: Mapping[str, int], most: int | None) -> dict[str, int]:
    """How far a batch goes, by Exchange: `most` entries (None: all) shared out evenly; what one tape does not use, the others
    do."""
    waiting = {exchange: max(0, end - done.get(exchange, 0)) for exchange, end in ends.items()}
    reach = {exchange: done.get(exchange, 0) for exchange in ends}
    room, left = most if most is not None else sum(waiting.values()), len(waiting)
    for exchange, count in sorted(waiting.items(), key=lambda item: (item[1], item[0])):
        share = min(count, -(-room // left))
        reach[exchange] += share
        room, left = room - share, left - 1
    return reach


class TapeRange(NamedTuple):
    """Entries behind `after`, up to and with `last`, of an Exchange's tape."""

    exchange: str
    after: int
    last: int


def ranges(start: Mapping[str, int], end: Mapping[str, int], most: int) -> list[TapeRange]:
    """What lies between two places, in pieces of at most `most` entries, or of more: no more than about RANGES_MAX pieces."""
    total = sum(max(0, last - start.get(exchange, 0)) for exchange, last in end.items())
    step = max(most, -(-total // RANGES_MAX))
    return [
        TapeRange(exchange, after, min(after + step, last))
        for exchange, last in sorted(end.items())
        for after in range(start.get(exchange, 0), last, step)
    ]


class SeenNumbers:
    """Which numbers of which publishers were seen. Publishers number without gaps, so it is a few runs of each."""

    def __init__(self) -> None:
        self._runs: dict[int, list[list[int]]] = {}  # [first, last], in order, apart from each other

    def new(self, publisher: int, first: int, count: int) -> Sequence[int]:
        """Those of first, first + 1, … that were not seen before; they are now."""
        last = first + count - 1
        runs = self._runs.setdefault(publisher, [])
        if runs and runs[-1][1] == first - 1:
            runs[-1][1] = last
            return range(first, first + count)
        if not runs or runs[-1][1] < first:
            runs.append([first, last])
            return range(first, first + count)
        place = bisect_right(runs, first, key=lambda run: run[0])
        begin = place - 1 if place and runs[place - 1][1] >= first - 1 else place
        stop = begin
        while stop < len(runs) and runs[stop][0] <= last + 1:
            stop += 1
        touched = runs[begin:stop]
        seen = [number for low, high in touched for number in range(max(low, first), min(high, last) + 1)]
        fresh = sorted(set(range(first, last + 1)).difference(seen))
        runs[begin:stop] = [[min([first, *(run[0] for run in touched)]), max([last, *(run[1] for run in touched)])]]
        return fresh
