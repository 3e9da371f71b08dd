"""Reading of a tape only what may have something of some topics, as far as its indexes tell (wire/tape_index.py).

Whatever keeps a block from being read so, be it that it has no index or that something of it can't be read, has it read as
ever, entry by entry: then what is missing is found, and told, where it is.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from itertools import islice

from roq.errors import DataLost, LogTrimmed, LogUnavailable
from roq.log.replicated.metadata import LogMeta, SegmentState
from roq.log.replicated.reader import Entry, SegmentReader
from roq.wire.tape_index import index_behind, index_of

RUNS_AT_ONCE = 8  # asked for, at most
ROUND_BYTES = 1024 * 1024  # of all of them, about, as those before were: one alone has no more
END_SECONDS = 1.0  # between two questions where an open tape ends
LITTLE = 2  # entries before an index are read without it


class TapeSelection:
    """Of one tape. wants: whether a topic is to be read."""

    def __init__(self, tape: SegmentReader, wants: Callable[[bytes], bool]) -> None:
        self._tape, self._wants = tape, wants
        self._position = 0  # of the index that was looked for last
        self._after = 0  # where it was read last
        self._is_read = False  # it says what is to be read
        self._entry: Entry = (0, b"")  # it
        self._runs: deque[tuple[int, int]] = deque()  # first and last entries that are to be read before it
        self._at_once = 1
        self._end = 0  # so far an open tape is known to be confirmed
        self._asked = 0.0  # when that was asked last (monotonic)

    async def read(self, meta: LogMeta, after: int, last: int = 0) -> list[Entry]:
        """The next entries behind `after` that may be wanted; [] if that is not known: whatever is next. What lies between
        entries that follow each other here is not wanted. last: none behind it is, but for the index; 0: all are. Raises
        LogUnavailable."""
        position = index_behind(after)
        if min(position, last or position) - after <= LITTLE:
            return []
        try:
            if self._position != position or after < self._after:
                await self._look(meta, after, position)
            self._after = after
            return await self._selected(meta, after, min(position - 1, last or position)) if self._is_read else []
        except (DataLost, LogTrimmed):
            self._is_read = False
            return []

    async def _look(self, meta: LogMeta, after: int, position: int) -> None:
        """For the index of that position."""
        self._is_read, self._position = False, position
        if not await self._is_stored(meta, position):
            return
        try:
            run = await self._tape.read_from(meta, position - 1, ask_all=True, last=position)
        except LogUnavailable:  # what it speaks of may be on other stores
            return
        if run and (index := index_of(*run[0])) is not None:
            self._is_read, self._entry = True, run[0]
            self._runs = deque(index.runs(self._wants, after))

    async def _is_stored(self, meta: LogMeta, position: int) -> bool:
        is_open = bool(meta.segments) and meta.segments[-1].state is not SegmentState.CLOSED
        if position < (meta.segments[-1].first if is_open else meta.next_first):
            return True
        now = time.monotonic()
        if is_open and position > self._end and now - self._asked > END_SECONDS:
            self._asked = now
            try:
                self._end = await self._tape.confirmed_end(meta)
            except LogUnavailable:
                return False
        return is_open and position <= self._end

    async def _selected(self, meta: LogMeta, after: int, until: int) -> list[Entry]:
        while self._runs and self._runs[0][1] <= after:
            self._runs.popleft()
        some = islice(self._runs, self._at_once)
        runs = [(max(first, after + 1), min(last, until)) for first, last in some if first <= until]
        entries: list[Entry] = []
        results = await asyncio.gather(*(self._read(meta, *one) for one in runs), return_exceptions=True)
        for (_, last), run in zip(runs, results, strict=True):
            if isinstance(run, BaseException):
                if not entries:
                    raise run
                return entries
            entries += run
            if entries[-1][0] < last:
                self._at_once = 1  # entries are large
                return entries
        if size := sum(len(entry) for _, entry in entries):
            self._at_once = max(1, min(RUNS_AT_ONCE, ROUND_BYTES * len(runs) // size))
        is_last = len(self._runs) == len(runs) or self._runs[len(runs)][0] > until
        return [*entries, self._entry] if is_last else entries

    async def _read(self, meta: LogMeta, first: int, last: int) -> list[Entry]:
        run = await self._tape.read_from(meta, first - 1, ask_all=True, last=last)
        if not run:  # it was confirmed: stores hear of that a little later
            raise LogUnavailable(f"entry {first} of log {self._tape.log_id} is not there yet")
        return run
