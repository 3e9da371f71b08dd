"""A subscriber's past: what is on the tapes of a recorded queue, in the order in which it was written; then the present.

Theory of operation. For a subscriber a tape is a slow Exchange: frames of it go through the same order machine as live ones. So
each Exchange's messages come from its tape up to an entry, and behind that from the attachment; the Exchange says which entry
that is (TAPED), and what the attachment brings before it is reached waits there.

    past       every tape is read, the entry that was written first comes first; nobody knows of us
    arriving   the end of all tapes was reached once: the subscriber joins, attaches, and waits for what TAPED says of each
    present    everything that came before is handed out: attachments alone

Clocks of hosts differ, so an entry may come too early by that much. So the order machine asks before it follows a publisher to
another Exchange: not while the tape of the one that it left may have something older (`unread`), which it may until it was read
up to SKEW_MS later. And a watermark is passed over while another tape may have what it speaks of.

A tape whose Exchange is gone ends when whoever looks after it has closed it; that is waited for, ABANDONED_SECONDS at most.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Coroutine, Mapping
from datetime import datetime, timedelta
from typing import Any, NamedTuple, Protocol

from roq.coordination.locate import GcmClient
from roq.errors import (
    CallError,
    DataLost,
    DeadlineExceeded,
    InvalidConfiguration,
    InvalidPosition,
    LogTrimmed,
    LogUnavailable,
    MessagesLost,
    NotRecorded,
    ProcessFailed,
    RoqError,
    TemporaryError,
)
from roq.log.replicated.metadata import LogMeta, SegmentState
from roq.log.replicated.reader import Entry, SegmentReader
from roq.log.replicated.stores import StaticDirectory, Stores
from roq.pubsub.links import Attachment
from roq.pubsub.order import Origin
from roq.runtime.backoff import delays
from roq.runtime.observe import logger
from roq.wire import gcm
from roq.wire.assignment import from_json
from roq.wire.frame import FrameKind, control_prefix, parse
from roq.wire.monitor import ExchangeAddress
from roq.wire.recording import TapePosition, decode_entry, entry_time

SKEW_MS = 5_000  # between the clocks of two hosts, at most
STALE_SECONDS = 5.0  # in any case: segments end, are trimmed and copied
NEAR_MS = 1_000  # what was written so lately is the present, for one that goes on into it
REFRESH_SECONDS = 0.5  # between two looks at which tapes there are
IDLE_SECONDS = 0.02  # between two looks for more of them
END_SECONDS = 0.2  # stores hear a few ms later what is stored on enough of them: nothing more for so long is the end
ABANDONED_SECONDS = 30.0
TAPED_PREFIX = control_prefix(FrameKind.TAPED)
REQUEST_SECONDS = 10.0
TAPE_ENTRIES_MAX = 1 << 32  # of an open segment: far more than it may have

log = logger(__name__)
Start = str | datetime | timedelta | TapePosition


def check_start(start: Start) -> Start | None:
    """None for "live"; a TapePosition for the text of one. Raises InvalidConfiguration, InvalidPosition."""
    if isinstance(start, str) and start.startswith("p1."):
        return TapePosition.parse(start)
    if isinstance(start, str) and start not in ("live", "earliest"):
        raise InvalidConfiguration(
            f"start is 'live', 'earliest', a datetime, a timedelta (so long ago) or a position: {start!r}"
        )
    if isinstance(start, datetime):
        try:
            start.timestamp()
        except (ValueError, OverflowError):
            raise InvalidConfiguration(f"start is no time that this machine can tell: {start}") from None
    if not isinstance(start, Start):
        raise InvalidConfiguration(f"start is a text, a datetime, a timedelta or a position, got {type(start).__name__}")
    return None if start == "live" else start


class Tape(SegmentReader):
    """One tape. done: number of the last entry handed out; written: when it was (ms since 1970); time: when the one was that is
    handed out just now. ahead: entries read before their time. exchange: as an attachment has one, of no life. proved: it needs
    no proof."""

    proved = taped = True

    def __init__(self, view: gcm.TapeView, stores: Stores, of_queue: tuple[str, str] = ("", "")) -> None:
        super().__init__(view.log, stores)
        self.exchange = ExchangeAddress(view.exchange, "", 0, 0)
        self.done = self.written = self.time = 0
        self.ahead: deque[Entry] = deque()
        self.looked = 0.0  # when it was seen that nothing follows (monotonic)
        self.metadata = from_json(view.meta, LogMeta)
        self.of_queue = of_queue

    def update(self, view: gcm.TapeView) -> None:
        """What is known of it now."""
        self.metadata = from_json(view.meta, LogMeta)

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
    def head(self) -> int:
        """When the next entry was written, as far as one is known."""
        return entry_time(self.ahead[0][1])

    def begin_behind(self, done: int) -> None:
        """Raises InvalidPosition: it is behind the end of a tape that nobody writes, or no number of an entry."""
        last = self.metadata.segments[-1].first + TAPE_ENTRIES_MAX if self.is_open else self.metadata.next_first - 1
        if not 0 <= done <= last:
            raise InvalidPosition(f"entry {done} of Exchange {self.exchange.id}: its tape has none of that number")
        self.done = done

    async def fetch(self, wait_seconds: float = 0.0) -> int:
        """Read on, at the end after a wait for more; how many entries were trimmed that should have come next. Raises
        LogUnavailable, DataLost."""
        try:
            self.ahead.extend(await self.read_from(self.metadata, self.done, wait_seconds, ask_all=True))
            self.looked = 0.0 if self.ahead else time.monotonic()
            return 0
        except LogTrimmed:
            missed = self.metadata.trimmed - self.done
            self.done = self.metadata.trimmed
            return missed

    async def seek(self, time_ms: int) -> None:
        """Go on with the first entry that was written at that time or later."""
        low, meta = self.done, self.metadata
        for segment in meta.segments:
            if segment.closed_at and segment.closed_at < time_ms:
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
        self.done = low


class Told(NamedTuple):
    """What the Exchange said: its tape comes first, up to this entry. at: monotonic seconds."""

    entry: int
    at: float


class ReadUpTo(Protocol):
    """A tape that is read."""

    @property
    def written(self) -> int:
        """When the last entry was that was read."""

    @property
    def ended(self) -> bool:
        """Nothing follows it."""


def has_older(reading: Mapping[str, ReadUpTo], exchange: str, origin: Origin) -> bool:
    """Whether this Exchange's tape ("": any) may have something older than what comes from `origin`, another one, and when."""
    return any(
        name != origin[0] and not tape.ended and tape.written <= origin[1] + SKEW_MS
        for name, tape in reading.items()
        if exchange in ("", name)
    )


class PastReader(Protocol):
    """Who reads it: the subscriber."""

    async def join(self) -> None:
        """The queue: the end of all tapes was reached."""

    def fail(self, error: RoqError) -> None:
        """It can't be read."""

    def is_over(self) -> None:
        """There is only the present from now on."""

    def take_recorded(self, tape: Tape, frame: bytes) -> None:
        """A frame of a tape."""

    def reached(self, exchange: str, entry: int) -> None:
        """All of this entry was taken."""

    def missed(self, lost: MessagesLost) -> None:
        """Of which only the range of entries is known."""

    def settle(self) -> None:
        """Who waits for a tape may wait no longer."""

    def is_proved(self) -> None:
        """An attachment is, and its messages wait."""

    def is_full(self) -> bool:
        """There is no room for more; `Past.room` is set when there may be."""

    def is_ready(self) -> bool:
        """The Monitor says that we are."""


class Past:
    """`await open()`; then it reads beside the rest, and has the reader join when the end of all tapes was reached. Every
    attachment that is made until it is over is given to `hold`."""

    def __init__(self, client: GcmClient, queue: str, start: Start, reader: PastReader, *, follow: bool) -> None:
        """follow: on into the present; else it is over when the end of all tapes was reached."""
        self._client, self._queue, self._start, self._reader, self._follow = client, queue, start, reader, follow
        self.tapes = ""  # the queue's part of their names
        self.room = asyncio.Event()
        self._arrived = False  # the end of all tapes was reached
        self._tasks: list[asyncio.Task[None]] = []
        self._directory = StaticDirectory({})
        self._stores = Stores(self._directory)
        self._reading: dict[str, Tape] = {}  # by Exchange
        self._read: dict[str, int] = {}  # by Exchange: up to where a tape was read that is not read any more; it may grow again
        self._live: set[str] = set()  # Exchanges whose attachment was released
        self._holding: dict[Attachment, Told | None] = {}
        self._looked = 0.0  # when the last look began (monotonic); 0: look at once
        self._since = 0.0  # when the end was reached
        self._present = 0  # for one that does not follow: by any clock it was opened before that (milliseconds since 1970)
        self._recorded = True  # at the last look

    # --- tapes --------------------------------------------------------------------------------------------------------

    async def open(self, timeout_seconds: float) -> dict[str, int]:
        """Find the tapes, and where to begin: the entry before that, by Exchange. Raises QueueNotFound, NotRecorded,
        InvalidPosition, Unavailable, DeadlineExceeded."""
        try:
            async with asyncio.timeout(timeout_seconds):
                await self._look()
                await self._seek()
        except TimeoutError:
            raise DeadlineExceeded(f"the tapes of {self._queue!r} were not found in {timeout_seconds:g} s") from None
        self._present = 0 if self._follow else time.time_ns() // 1_000_000 + SKEW_MS
        self._start_task(self._run())
        return {exchange: tape.done for exchange, tape in self._reading.items()}

    async def _seek(self) -> None:
        start = self._start
        if isinstance(start, datetime | timedelta):
            since = start.timestamp() if isinstance(start, datetime) else time.time() - start.total_seconds()
            await asyncio.gather(*(tape.seek(round(since * 1000)) for tape in self._reading.values()))
        elif isinstance(start, TapePosition):
            if start.tapes != self.tapes:
                raise InvalidPosition("the position is of another queue, or of one that was removed and created anew")
            for exchange, done in start.done.items():
                if exchange in self._reading:
                    self._reading[exchange].begin_behind(done)
                else:  # its tape has expired, nobody knows whether there was more on it
                    self._reader.missed(MessagesLost(0, "", done + 1, done + 1, 0))

    def close(self) -> None:
        """Read no more."""
        for task in self._tasks:
            task.cancel()
        self._stores.close()

    def _start_task(self, work: Coroutine[Any, Any, None]) -> None:
        self._tasks.append(asyncio.get_running_loop().create_task(work, name=f"past of {self._queue}"))

    async def _join(self) -> None:
        for wait in delays(0.05, 1.0):
            try:
                await self._reader.join()
            except CallError as error:
                self._reader.fail(error)
            except RoqError as error:
                log.warning("joining failed; retrying", extra={"fields": {"queue": self._queue, "reason": str(error)}})
                await asyncio.sleep(wait)
                continue
            return

    async def _look(self) -> None:
        """Which tapes there are, and where."""
        began = time.monotonic()
        found = await self._client.request(gcm.DescribeTapes(self._queue), gcm.Tapes, REQUEST_SECONDS)
        if self.tapes not in ("", found.tapes):
            raise NotRecorded(f"queue {self._queue!r} was removed and created anew: what was on its tapes is gone")
        self.tapes, self._looked, self._recorded = found.tapes, began, found.recorded
        self._directory.endpoints.update(found.stores)
        self._directory.alive.update(found.stores)
        for view in found.views:
            if view.exchange in self._reading:
                self._reading[view.exchange].update(view)
            elif view.exchange not in self._live:
                tape = Tape(view, self._stores, (self._queue, found.made_by))
                tape.done = self._read.get(view.exchange, self._begin(tape))
                if view.exchange not in self._read or not tape.ended:
                    self._reading[view.exchange] = tape
        views = {view.exchange for view in found.views}
        for exchange in [exchange for exchange in self._reading if exchange not in views]:  # it has expired altogether
            if not (tape := self._reading.pop(exchange)).ended:
                self._reader.missed(MessagesLost(0, "", tape.done + 1, max(tape.done + 1, tape.metadata.next_first - 1), 0))

    def unread(self, exchange: str, origin: tuple[str, int]) -> bool:
        """As has_older, of what is read."""
        return has_older(self._reading, exchange, origin)

    def _begin(self, tape: Tape) -> int:
        return 0 if isinstance(self._start, TapePosition) else tape.metadata.trimmed

    def behind(self, exchange: str) -> bool:
        """Whether more may come from the tape of this Exchange (or "": from any), also if there is none just now: what was
        written last by one that is gone can be read when its tape is closed."""
        tapes = self._reading.values() if not exchange else [self._reading[exchange]] if exchange in self._reading else []
        return any(not tape.ended for tape in tapes)

    # --- reading ------------------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        try:
            while not self._over():
                try:
                    await self._step()
                except TemporaryError as error:
                    log.info("the tapes can't be read now, trying again: %s", error, extra={"fields": {"queue": self._queue}})
                    await asyncio.sleep(REFRESH_SECONDS)
                    self._looked = 0.0
        except RoqError as error:
            self._reader.fail(error)
        except Exception as error:  # a defect must not end in silence
            log.exception("defect while the past was read")
            self._reader.fail(ProcessFailed(f"the past could not be read: {error}"))
        else:
            self._stores.close()
            self._reader.is_over()

    def _over(self) -> bool:
        if not self._follow:
            return self._arrived
        return self._arrived and not self._reading and not self._holding and self._reader.is_ready()

    async def _step(self) -> None:
        """What comes next, or a look whether there is more."""
        if time.monotonic() - self._looked > (STALE_SECONDS if self._looked else 0.0):
            await self._look()
        await self._fetch()
        ready = [tape for tape in self._reading.values() if tape.ahead]
        if ready and not self._beyond(ready):
            await self._hand_out(min(ready, key=lambda tape: tape.head), ready)
            if self._follow and not self._arrived and self._is_near():
                await self._arrive()
        elif not self._arrived:
            await self._arrive()
        elif time.monotonic() - self._looked > REFRESH_SECONDS:
            await self._look()
        else:
            await asyncio.sleep(IDLE_SECONDS)
        self._finish()
        self._reader.settle()

    async def _arrive(self) -> None:
        """Nothing more is there just now."""
        if self._follow:  # that is near enough: each Exchange will say where its tape ends for us
            self._since, self._arrived = time.monotonic(), True
            self._start_task(self._join())
            return
        await self._look()
        for tape in self._reading.values():
            tape.looked = 0.0
        await self._fetch(END_SECONDS)
        ready = [tape for tape in self._reading.values() if tape.ahead]
        self._arrived = not ready or self._beyond(ready)

    def _is_near(self) -> bool:
        """Whether what was handed out last was written just now, on every tape that somebody writes."""
        now = time.time_ns() // 1_000_000
        return all(tape.written > now - NEAR_MS for tape in self._reading.values() if tape.ahead)

    def _beyond(self, ready: list[Tape]) -> bool:
        """Whether all that follows was written after this was opened: one that does not follow leaves it."""
        return 0 < self._present < min(tape.head for tape in ready)

    async def _fetch(self, wait_seconds: float = 0.0) -> None:
        """The next entries of every tape of which none is known; not at once again of one that is at its end."""
        before = time.monotonic() - IDLE_SECONDS
        lacking = [tape for tape in self._reading.values() if not (tape.ahead or tape.ended or tape.looked > before)]
        results = await asyncio.gather(*(tape.fetch(wait_seconds) for tape in lacking), return_exceptions=True)
        for tape, result in zip(lacking, results, strict=True):
            if isinstance(result, LogUnavailable) and self._arrived:
                self._looked = 0.0
            elif isinstance(result, DataLost) and await self._was_trimmed(tape):
                continue
            elif isinstance(result, BaseException):
                raise result
            elif result:
                self._reader.missed(MessagesLost(0, "", tape.done - result + 1, tape.done, 0))

    async def _was_trimmed(self, tape: Tape) -> bool:
        """Whether what no store has is no longer named: it has expired since we looked."""
        await self._look()
        return tape.done < tape.metadata.trimmed

    async def _hand_out(self, tape: Tape, ready: list[Tape]) -> None:
        """The entries of this tape that come before those of all others."""
        until = min((other.head for other in ready if other is not tape), default=None)
        while tape.ahead and (until is None or tape.head <= until):
            while self._reader.is_full():
                self.room.clear()
                await self.room.wait()
            position, entry = tape.ahead.popleft()
            time_ms, found = decode_entry(entry)
            tape.time = max(tape.written, time_ms)
            for frame in found:
                self._reader.take_recorded(tape, frame)
            tape.done, tape.written = position, tape.time  # not before: the rest of an entry may be much older than its time
            self._reader.reached(tape.exchange.id, position)
            await asyncio.sleep(0)

    # --- the present --------------------------------------------------------------------------------------------------

    def holds(self, attachment: Attachment) -> bool:
        """Whether what comes from it has to wait for the tape. Asked before anything of it is read, and when more came."""
        if attachment not in self._holding:
            return False
        if self._holding[attachment] is None:
            for frame in attachment.frames:
                if frame.startswith(TAPED_PREFIX):
                    self._holding[attachment] = Told(parse(frame)[1].sequence, time.monotonic())
                    attachment.proved = True
                    self._looked = 0.0  # its tape may be new
                    self._reader.is_proved()
                    break
            else:
                return True  # not `was_read`, which may stop the reading: that frame comes behind others if the tape is new
        attachment.was_read()
        return True

    def hold(self, attachment: Attachment) -> None:
        """It was made just now."""
        self._holding[attachment] = None
        self._live.discard(attachment.exchange.id)

    def drop(self, attachment: Attachment) -> bool:
        """Its Exchange is gone. Whether it was held: what came over it is on the tape, or is sent again."""
        held = attachment in self._holding
        self._holding.pop(attachment, None)
        return held

    def _finish(self) -> None:
        """Attachments whose tape is read are released, tapes that are read are closed."""
        live = {attachment.exchange.id for attachment in self._holding}
        for attachment, told in list(self._holding.items()):
            if told is None or self._looked < told.at:  # what was known before says nothing of a tape that was made since
                continue
            tape = self._reading.get(attachment.exchange.id)
            ends = not told.entry and not self._recorded  # it is not written any more
            if tape is None or tape.ended or (tape.is_open and tape.done >= told.entry and not ends):
                self._leave(attachment.exchange.id)
                self._live.add(attachment.exchange.id)
                del self._holding[attachment]
                attachment.unread_at = time.monotonic()
                attachment.look_soon()
        if not self._arrived or not self._follow:
            return
        late = time.monotonic() - self._since > ABANDONED_SECONDS
        for exchange, tape in list(self._reading.items()):
            if exchange not in live and (tape.ended or late):
                self._leave(exchange)
                if not tape.ended:
                    self._live.add(exchange)  # not read any more
                    self._reader.missed(MessagesLost(0, "", tape.done + 1, tape.done + 1, 0))
                    log.warning("the tape of Exchange %s, which is gone, was not closed: going on without its end", exchange)

    def _leave(self, exchange: str) -> None:
        if exchange in self._reading:
            self._read[exchange] = self._reading.pop(exchange).done
