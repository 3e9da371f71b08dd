"""One tape of a recorded queue as a subscriber reads it, and what may be said of what it has not read.

A publisher that left an Exchange without an end is not followed while the tape it left may have something older (`has_older`).
It may until it was read so far: an entry of a later time was read, or the end was seen by a look that began late enough.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Protocol

from roq.errors import DataLost, InvalidPosition, LogTrimmed, LogUnavailable
from roq.log.replicated.metadata import LogMeta, SegmentState
from roq.log.replicated.reader import Entry, SegmentReader
from roq.log.replicated.stores import Stores
from roq.pubsub.order import Origin
from roq.pubsub.tape_selection import TapeSelection
from roq.wire import gcm
from roq.wire.assignment import from_json
from roq.wire.monitor import ExchangeAddress
from roq.wire.recording import entry_time, messages_before, messages_in

SKEW_MS = 5_000  # between the clocks of two hosts, at most
STEP_MS = 1_000  # by which a host's clock is set back, at most, for `seek` to find the first entry of a time
UNCONFIRMED_MS = 5_000  # what is not stored after that, and not seen, waits for its stores: who wants it stored sends it again
PROVE_SECONDS = 0.5
LATELY_SECONDS = 20.0  # who saw its end before that does not know whether more has come: who rests looks every REST_SECONDS
REST_SECONDS = 15.0  # between two looks for more while nobody waits for it
ABANDONED_SECONDS = 30.0  # for whoever looks after the tape of an Exchange that is gone to close it, for one that goes on live
UNREADABLE_SECONDS = 600.0  # for a host to come back that has what nobody else has, for one that reads what is stored
TAPE_ENTRIES_MAX = 1 << 32  # of an open segment: far more than it may have


class ReadUpTo(Protocol):
    """A tape that is read. Times: milliseconds since 1970."""

    @property
    def written(self) -> int:
        """When the last entry was that was read, by its Exchange's clock."""

    @property
    def seen(self) -> int:
        """What was written earlier by the reader's clock is read, too."""

    @property
    def ended(self) -> bool:
        """Nothing follows it."""


def has_older(reading: Mapping[str, ReadUpTo], exchange: str, origin: Origin) -> bool:
    """Whether this Exchange's tape ("": any) may have something older than what comes from `origin`, another one, and when; or,
    if that has no name, something that follows within SKEW_MS what it had then itself."""
    least = origin[1] + SKEW_MS
    least_seen = least if origin[0] else least + SKEW_MS  # its clock is not the reader's
    return any(
        name != origin[0] and not tape.ended and tape.written <= least and tape.seen <= least_seen
        for name, tape in reading.items()
        if exchange in ("", name)
    )


class Tape(SegmentReader):
    """One tape. done: number of the last entry handed out; written: when it was (ms since 1970); time: when the one was that is
    handed out just now; seen: see ReadUpTo. ahead: entries read before their time. exchange: as an attachment has one, of no
    life. proved: it needs no proof."""

    proved = taped = True

    def __init__(self, view: gcm.TapeView, stores: Stores, of_queue: tuple[str, str] = ("", "")) -> None:
        super().__init__(view.log, stores)
        self.exchange = ExchangeAddress(view.exchange, "", 0, 0)
        self.done = self.written = self.time = self.seen = 0
        self.ahead: deque[Entry] = deque()
        self.looked = 0.0  # when it was seen that nothing follows (monotonic)
        self._proved = 0.0  # when it was asked last whether it is certain (monotonic)
        self._empty_behind = -1  # of the entry there was none when it was asked last, nor is one on its way
        self.late_at = 0.0  # when something was handed out that was not new any more (monotonic)
        self._failing = 0.0  # since when it can't be read (monotonic), 0: it can
        self._meta, self.live = view.meta, view.live
        self.metadata = from_json(view.meta, LogMeta)
        self.of_queue = of_queue
        self._selection: TapeSelection | None = None

    def select(self, wants: Callable[[bytes], bool]) -> None:
        """Read only what may have something of these topics; what lies between is passed over."""
        self._selection = TapeSelection(self, wants)

    def update(self, view: gcm.TapeView) -> None:
        """What is known of it now. Whoever waits for more of it asks again if that is something else than before."""
        self.live = view.live
        if view.meta != self._meta:
            self._meta, self.metadata = view.meta, from_json(view.meta, LogMeta)
            self._changed.set()

    async def refresh(self) -> LogMeta:
        """See SegmentReader: whoever reads looks again soon."""
        return self.metadata

    @property
    def origin(self) -> tuple[str, int]:
        """Of a frame that is handed out just now: its Exchange, and when it was written."""
        return self.exchange.id, self.time

    @property
    def is_open(self) -> bool:
        """Whether somebody writes it, or somebody who did was not replaced yet."""
        return bool(self.metadata.segments) and self.metadata.segments[-1].state is not SegmentState.CLOSED

    @property
    def ended(self) -> bool:
        """Nothing will follow what was handed out."""
        return not self.ahead and not self.is_open and self.done >= self.metadata.next_first - 1

    @property
    def is_empty(self) -> bool:
        """Nothing followed what was handed out, nor was anything on its way to enough stores, when that was asked last."""
        return not self.ahead and self._empty_behind == self.done

    def unread_at(self, now: float) -> float:
        """When something of it last lay unread; `now` while it does, or can't be read just now (monotonic)."""
        if self._failing:
            return min(now, self._failing + UNREADABLE_SECONDS)
        return now if self.ahead or not (self.looked or self.ended) else self.late_at

    def behind_since(self, now: float) -> int | None:
        """When the next entry was written; if none is known, the last one that was read (0: none was); None if it was seen
        lately that nothing follows (ms since 1970). The end of an Exchange that is gone is seen when its tape is closed. now:
        monotonic."""
        if self.ahead:
            return self.head
        seen = self.looked and now - self.looked < LATELY_SECONDS and self.live
        return None if seen or self.ended else self.written

    @property
    def head(self) -> int:
        """When the next entry was written, as far as one is known."""
        return entry_time(self.ahead[0][1])

    def begin_behind(self, done: int) -> None:
        """Raises InvalidPosition: it is behind the end of a tape that nobody writes, or no number of an entry."""
        last = self.metadata.segments[-1].first + TAPE_ENTRIES_MAX if self.is_open else self.metadata.next_first - 1
        if not 0 <= done <= last:
            raise InvalidPosition(f"entry {done} of Exchange {self.exchange.id}: its tape has none of that number")
        self.done = done

    async def fetch(self, wait_seconds: float = 0.0, prove: bool = False) -> int:
        """Read on, at the end after a wait for more; how many entries were trimmed that should have come next. prove: make sure
        of the end, for `seen`. Raises LogUnavailable, DataLost."""
        meta, began = self.metadata, time.time_ns() // 1_000_000
        self._changed.clear()
        try:
            self.ahead.extend(await self.read_on(meta, self.done, wait_seconds))
        except LogTrimmed:
            missed = self.metadata.trimmed - self.done
            self.done = self.metadata.trimmed
            return missed
        except (LogUnavailable, DataLost):
            self.looked, self._failing = 0.0, self._failing or time.monotonic()
            raise
        now, self._failing = time.monotonic(), 0.0
        self.looked = 0.0 if self.ahead else now
        if not self.ahead and prove and now - self._proved > PROVE_SECONDS:
            self._proved = now
            is_written = bool(meta.segments) and meta.segments[-1].state is SegmentState.OPEN
            self._empty_behind = -1
            if is_written and await self.is_nothing_at(meta, self.done + 1):
                self._empty_behind = self.done
                self.seen = max(self.seen, began - UNCONFIRMED_MS)
        return 0

    async def read_on(self, meta: LogMeta, after: int, wait_seconds: float = 0.0, last: int = 0) -> list[Entry]:
        """As read_from; of what was selected, if anything was: what is given may go on behind `last`. Raises as that."""
        found = [] if self._selection is None else await self._selection.read(meta, after, last)
        return found or await self.read_from(meta, after, wait_seconds, ask_all=True, last=last)

    def is_read(self, done: int) -> bool:
        """Whether it was read up to entry `done`, and seen lately that nothing follows."""
        return done >= self.done and not self.ahead and (self.ended or time.monotonic() - self.looked < LATELY_SECONDS)

    async def messages_behind(self, done: int, meta: LogMeta) -> int:
        """Stored behind entry `done`, as far as the nodes that answer know, without what is trimmed; -1: not known. meta: as
        they are now. Nobody is asked if it is_read. Raises LogUnavailable, DataLost, FrameError, LogTrimmed (ask again)."""
        if self.is_read(done):
            return 0
        done, last = max(done, meta.trimmed), await self.confirmed_end(meta)
        if last <= done:
            return 0
        is_next = self.ahead and self.ahead[0][0] == done + 1
        first = [self.ahead[0]] if is_next else await self.read_from(meta, done)
        end = await self.read_from(meta, last - 1)
        before, until = (messages_before(run[0][1]) if run else None for run in (first, end))
        return -1 if before is None or until is None else max(until + messages_in(end[0][1]) - before, 0)

    async def seek_end(self) -> None:
        """Go on with what comes from now on. Raises LogUnavailable."""
        self.done = await self.confirmed_end(self.metadata)

    async def seek(self, time_ms: int) -> None:
        """Go on with the first entry that was written at that time or later, also if earlier ones follow it: a clock was set
        back meanwhile, by STEP_MS at most. Raises LogUnavailable, DataLost."""
        low, meta = await self._seek_early(time_ms - STEP_MS), self.metadata
        while run := await self.read_from(meta, low):
            late = next((position for position, entry in run if entry_time(entry) >= time_ms), None)
            if late is not None:
                low = late - 1
                break
            low = run[-1][0]
        self.done = low

    async def _seek_early(self, time_ms: int) -> int:
        """The last entry before that time, or one of several if times go back somewhere; where it is, if there is none."""
        low, meta = self.done, self.metadata
        for segment in meta.segments:
            if segment.closed_at and segment.closed_at < time_ms - SKEW_MS:  # by another host's clock
                low = max(low, segment.last)
        high, step = 0, 1  # high: the first one known to be late enough, or not there
        while not high or high - low > 1:
            middle = low + step if not high else (low + high) // 2
            run = await self.read_from(meta, middle - 1)
            early = [position for position, entry in run if entry_time(entry) < time_ms]
            if early and early[-1] >= middle:
                low = early[-1]
                if len(early) < len(run):
                    break
                step *= 2
            else:
                high = middle
        return low
