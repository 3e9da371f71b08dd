"""A subscriber's past: what is on the tapes of a recorded queue, in the order in which it was written; then the present.

Theory of operation. For a subscriber a tape is a slow Exchange: frames of it go through the same order machine as live ones. So
each Exchange's messages come from its tape up to an entry, and behind that from the attachment; the Exchange says which entry
that is (TAPED), and what the attachment brings before it is reached waits there.

    past       every tape is read, the entry that was written first comes first; nobody knows of us
    arriving   the end of all tapes was reached once: the subscriber joins, attaches, and waits for what TAPED says of each
    present    everything that came before is handed out: attachments alone

One that follows what is stored never joins: at the end of a tape it waits there for more, tape by tape, for ever. While nobody
waits for messages it asks for more only now and then: there may be a thousand that rest so.

Clocks of hosts differ, so an entry may come too early by that much. So the order machine asks before it follows a publisher to
another Exchange: not while the tape of the one that it left may have something older (`unread`), which it may until it was read
up to SKEW_MS later, or until it is certain that it has none (tape.py). And a watermark waits while another tape may have what
it speaks of.

A tape whose Exchange is gone ends when whoever looks after it has closed it; that is waited for, ABANDONED_SECONDS at most. Who
follows what is stored waits for longer, also for hosts that are down, and leaves other tapes unread meanwhile, if need be.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Coroutine, Iterator
from typing import Any, Protocol

from roq.coordination.locate import GcmClient
from roq.errors import (
    AccessDenied,
    CallError,
    DataLost,
    DeadlineExceeded,
    LogUnavailable,
    MessagesLost,
    ProcessFailed,
    RoqError,
)
from roq.pubsub.handover import Handover
from roq.pubsub.inbox import EXPIRED
from roq.pubsub.order import HELD_FRAME_BYTES, FrameEvent, Origin
from roq.pubsub.outage import may_pass
from roq.pubsub.start import Follow, Start
from roq.pubsub.subscription import TopicFilter
from roq.pubsub.tape import ABANDONED_SECONDS, REST_SECONDS, SKEW_MS, Tape
from roq.pubsub.tape_list import TapeList
from roq.pubsub.tape_watches import POLL_SECONDS, TapeWatches
from roq.runtime.backoff import delays
from roq.runtime.observe import logger
from roq.wire.recording import decode_entry

STALE_SECONDS = 5.0  # in any case: segments end, are trimmed and copied
NEAR_MS = 1_000  # what was written so lately is the present, for one that goes on into it
REFRESH_SECONDS = 0.5  # between two looks at which tapes there are, or whether one goes on while others do
IDLE_SECONDS = 0.02  # between two looks for more of them
END_SECONDS = 0.2  # stores hear a few ms later what is stored on enough of them: nothing more for so long is the end
LOOK_SECONDS = 1.0  # at most, between two looks whether those that wait may go on
SETTLE_SECONDS = 0.05  # between two looks at who waits, meanwhile: they may be many
WATERMARK_BYTES_MAX = 8 * 1024 * 1024  # that wait
BEHIND_MS = 10_000  # who reads what is so old does not keep up

log = logger(__name__)


class PastReader(Protocol):
    """Who reads it: the subscriber."""

    async def join(self) -> None:
        """The queue: the end of all tapes was reached."""

    def is_present(self) -> None:
        """The same, of one that does not join."""

    def fail(self, error: RoqError) -> None:
        """It can't be read."""

    def is_over(self) -> None:
        """There is only the present from now on."""

    def is_done(self) -> None:
        """There is nothing more, for one that does not follow."""

    def take_recorded(self, tape: Tape, frame: bytes) -> None:
        """A frame of a tape."""

    def reached(self, exchange: str, entry: int) -> None:
        """All of this entry was taken; EXPIRED: nothing is left of that tape."""

    def missed(self, lost: MessagesLost) -> None:
        """Of which only the range of entries is known."""

    def settle(self) -> None:
        """Who waits for a tape may wait no longer."""

    def is_proved(self) -> None:
        """An attachment is, and its messages wait."""

    def holds_back(self) -> bool:
        """Something waits."""

    def is_full(self) -> bool:
        """There is no room for more; `Past.room` is set when there may be."""

    def rests(self) -> bool:
        """Nobody waits for messages, of one that follows what is stored; `Past.room` is set when somebody does."""

    def admits(self, exchange: str) -> bool:
        """What is held back has room, or waits for the tape of this Exchange."""

    def awaits(self, exchange: str) -> bool:
        """What is held back waits for what may lie on the tape of this Exchange, and was written before."""

    def is_ready(self) -> bool:
        """The Monitor says that we are."""


class Past:
    """`await open()`; then it reads beside the rest, and has the reader join when the end of all tapes was reached. Every
    attachment that is made until it is over is given to `handover`."""

    def __init__(
        self, client: GcmClient, queue: str, start: Start, reader: PastReader, follow: Follow, topics: TopicFilter
    ) -> None:
        """start: "live" for one that follows what is stored from now on."""
        self._queue, self._reader, self._follow = queue, reader, follow
        wants = None if topics.takes_all else topics.wants
        self.tapes = TapeList(client, queue, start, reader.missed, self._expired, wants)
        self.handover = Handover(self.tapes, reader.is_proved)
        self.room = asyncio.Event()
        self._arrived = False  # the end of all tapes was reached
        self._is_over = False
        self._tasks: list[asyncio.Task[None]] = []
        self._since = 0.0  # when the end was reached
        self._present = 0  # for one that does not follow: by any clock it was opened before that (milliseconds since 1970)
        self._ends: dict[str, int] = {}  # likewise: the last entry of each tape that was known to be stored, by Exchange
        self._watermarks: deque[FrameEvent] = deque()  # that wait, oldest first
        self._watermark_bytes = 0
        self._watches = TapeWatches(queue, self.tapes, self._waits, self._missed)
        self._settled = 0.0
        self._behind_at = 0.0  # when it did not keep up last (monotonic)

    # --- what there is ------------------------------------------------------------------------------------------------

    async def open(self, timeout_seconds: float) -> dict[str, int]:
        """Find the tapes, and where to begin: the entry before that, by Exchange. Raises QueueNotFound, NotRecorded,
        InvalidPosition, Unavailable, DeadlineExceeded."""
        try:
            async with asyncio.timeout(timeout_seconds):
                await self.tapes.look()
                await self.tapes.seek()
        except TimeoutError:
            raise DeadlineExceeded(f"the tapes of {self._queue!r} were not found in {timeout_seconds:g} s") from None
        if self._follow is Follow.NOTHING and not self._present:
            self._present = time.time_ns() // 1_000_000 + SKEW_MS
            self._ends = await self.tapes.ends()
        self._start_task(self._run())
        return {exchange: tape.done for exchange, tape in self.tapes.reading.items()} | self.tapes.begins

    def end_at(self, time_ms: int) -> None:
        """Leave what was written then or later, though it was before this was opened, but what the reader awaits. Before
        `open`."""
        self._present = time_ms - 1

    def close(self) -> None:
        """Read no more."""
        for task in self._tasks:
            task.cancel()
        self._watches.close()
        self.tapes.stores.close()

    def _start_task(self, work: Coroutine[Any, Any, None]) -> None:
        self._tasks.append(asyncio.get_running_loop().create_task(work, name=f"past of {self._queue}"))

    async def _join(self) -> None:
        for wait in delays(0.05, 1.0):
            try:
                await self._reader.join()
            except RoqError as error:
                if not isinstance(error, CallError) or may_pass(error):
                    log.warning("joining failed; retrying", extra={"fields": {"queue": self._queue, "reason": str(error)}})
                    await asyncio.sleep(wait)
                    continue
                self._reader.fail(error)
            return

    def _expired(self, exchange: str) -> None:
        """A position that is kept for months names no tapes that are gone."""
        if self._follow is Follow.STORED:
            self._reader.reached(exchange, EXPIRED)

    def unread(self, exchange: str, origin: Origin) -> bool:
        """See TapeList."""
        return not self._is_over and self.tapes.unread(exchange, origin)

    def defers(self, watermark: FrameEvent) -> bool:
        """It waits here, for `ripe`: what it speaks of may lie on a tape. If too many wait, it is forgotten. Not if an Exchange
        says in it what it has dropped: the position moves past that."""
        if watermark.origin is None or watermark.header.previous or not self.unread("", watermark.origin):
            return False
        if self._watermark_bytes < WATERMARK_BYTES_MAX:
            self._watermarks.append(watermark)
            self._watermark_bytes += watermark.size + HELD_FRAME_BYTES
        return True

    def ripe(self) -> Iterator[FrameEvent]:
        """Watermarks that count by now."""
        while self._watermarks and ((origin := self._watermarks[0].origin) is None or not self.unread("", origin)):
            self._watermark_bytes -= self._watermarks[0].size + HELD_FRAME_BYTES
            yield self._watermarks.popleft()

    def unread_at(self, exchange: str) -> float:
        """When what this Exchange's tape has (or "": any) last lay unread; now, while more may come from it (monotonic)."""
        if self.keeps_up:
            return self.tapes.unread_at(exchange)
        return time.monotonic() if self.tapes.more else 0.0

    def behind_at(self, exchange: str) -> float:
        """When the tape of this Exchange (or "": any) was not read up to the present last (monotonic)."""
        return self._behind_at if self.keeps_up else time.monotonic()

    @property
    def keeps_up(self) -> bool:
        """It follows what is stored, and has come into the present."""
        return self._arrived and self._follow is Follow.STORED

    # --- reading ------------------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        try:
            while not self._over():
                try:
                    await (self._keep_up() if self.keeps_up else self._step())
                except RoqError as error:
                    if self._follow is Follow.NOTHING and isinstance(error, AccessDenied):
                        raise  # it is not there to wait
                    self.tapes.outage.wait_out(error)
                    await asyncio.sleep(REFRESH_SECONDS)
                    self.tapes.looked = 0.0
        except RoqError as error:
            self._reader.fail(error)
        except Exception as error:  # a defect must not end in silence
            log.exception("defect while the past was read", extra={"fields": {"queue": self._queue}})
            self._reader.fail(ProcessFailed(f"the past could not be read: {error}"))
        else:
            self.tapes.stores.close()
            self._is_over = True
            (self._reader.is_over if self._follow is Follow.LIVE else self._reader.is_done)()

    def _over(self) -> bool:
        if self._follow is not Follow.LIVE:
            return self._arrived and self._follow is Follow.NOTHING
        return self._arrived and not self.tapes.reading and not self.handover.waiting and self._reader.is_ready()

    async def _step(self) -> None:
        """What comes next, or a look whether there is more."""
        if time.monotonic() - self.tapes.looked > (STALE_SECONDS if self.tapes.looked else 0.0):
            await self.tapes.look()
        if self._watches:
            await self._take_news()
        await self._fetch()
        ahead = [tape for tape in self.tapes.reading.values() if tape.ahead and not self._is_beyond(tape)]
        ready = [tape for tape in ahead if self._admits(tape)]
        if ready:
            await self._hand_out(min(ready, key=lambda tape: tape.head), ready)
            if self._follow is not Follow.NOTHING and not self._arrived and self._is_near():
                await self._arrive()
        elif not self._arrived:
            await self._arrive()
        elif time.monotonic() - self.tapes.looked > REFRESH_SECONDS:
            await self.tapes.look()
        else:
            await asyncio.sleep(IDLE_SECONDS)
        self._finish()
        self._reader.settle()

    async def _arrive(self) -> None:
        """Nothing more is there just now."""
        if self._follow is not Follow.NOTHING:  # that is near enough: each Exchange will say where its tape ends for us
            self._since = self._behind_at = time.monotonic()
            self._arrived = True
            if self._follow is Follow.LIVE:
                self._start_task(self._join())
            else:
                self._reader.is_present()
            return
        await self.tapes.look()
        for tape in self.tapes.reading.values():
            tape.looked = 0.0
        self._since = self._since or time.monotonic()
        await self._fetch(END_SECONDS, prove=True)
        if any(tape.ahead and not self._is_beyond(tape) for tape in self.tapes.reading.values()):
            return
        unknown = [tape for tape in self.tapes.reading.values() if not (tape.ahead or tape.ended or tape.is_empty)]
        if not unknown or time.monotonic() - self._since > ABANDONED_SECONDS:
            self._arrived = True
            for tape in unknown:
                self._miss_end(tape)

    def _is_near(self) -> bool:
        """Whether what was handed out last was written just now, on every tape that somebody writes."""
        now = time.time_ns() // 1_000_000
        return all(tape.written > now - NEAR_MS for tape in self.tapes.reading.values() if tape.ahead)

    def _is_beyond(self, tape: Tape) -> bool:
        """Whether what follows on it was written after this was opened: one that does not follow leaves it. A clock that is
        ahead says so of what was there before, also of what others have sent on: that is waited for."""
        late = 0 < self._present < max(tape.head, tape.written)
        beyond = late and tape.ahead[0][0] > self._ends.get(tape.exchange.id, 0)
        return beyond and not self._reader.awaits(tape.exchange.id)

    async def _fetch(self, wait_seconds: float = 0.0, *, prove: bool = False) -> None:
        """The next entries of every tape of which none is known; not at once again of one that is at its end, and less often
        while others are not: each look may take a while. prove: their ends."""
        tapes = self.tapes.reading.values()
        before = time.monotonic() - (REFRESH_SECONDS if any(tape.ahead for tape in tapes) else IDLE_SECONDS)
        lacking = [tape for tape in tapes if not (tape.ahead or tape.ended or tape.looked > before or tape in self._watches)]
        prove = prove or self._waits()
        results = await asyncio.gather(*(tape.fetch(wait_seconds, prove) for tape in lacking), return_exceptions=True)
        for tape, result in zip(lacking, results, strict=True):
            await self._fetched(tape, result)

    def _waits(self) -> bool:
        """Whether something may wait for the end of a tape."""
        return self._reader.holds_back() or bool(self._watermarks) or (self._arrived and self._follow is Follow.LIVE)

    def _admits(self, tape: Tape) -> bool:
        """One that follows what is stored leaves on the tapes what ends no wait while too much waits."""
        return self._follow is not Follow.STORED or self._reader.admits(tape.exchange.id)

    async def _fetched(self, tape: Tape, result: int | BaseException) -> None:
        if isinstance(result, LogUnavailable | DataLost) and self._follow is Follow.STORED:
            self._watches.ask(tape)  # the others go on
        elif isinstance(result, LogUnavailable) and self._arrived:
            self.tapes.outage.failed(result)
            self.tapes.looked = 0.0
        elif isinstance(result, DataLost) and await self._was_trimmed(tape):
            return
        elif isinstance(result, BaseException):
            raise result
        elif result:
            self._missed(tape, result)

    def _miss_end(self, tape: Tape) -> None:
        """Nobody knows what more there is on it."""
        self._reader.missed(MessagesLost(0, "", tape.done + 1, tape.done + 1, 0))
        log.warning("tape of Exchange %s was left open: messages after entry %d may be missing", tape.exchange.id, tape.done)

    def _missed(self, tape: Tape, count: int) -> None:
        """So many entries, the last of which it is to be behind."""
        self._reader.missed(MessagesLost(0, "", tape.done - count + 1, tape.done, 0))
        self._reader.reached(tape.exchange.id, tape.done)  # so that it is told once

    async def _was_trimmed(self, tape: Tape) -> bool:
        """Whether what no store has is no longer named: it has expired since we looked."""
        await self.tapes.look()
        return tape.done < tape.metadata.trimmed

    async def _hand_out(self, tape: Tape, ready: list[Tape]) -> None:
        """The entries of this tape that come before those of all others."""
        until = min((other.head for other in ready if other is not tape), default=None)
        while tape.ahead and (until is None or tape.head <= until) and self._admits(tape) and not self._is_beyond(tape):
            while self._reader.is_full():
                self.room.clear()
                await self.room.wait()
            position, entry = tape.ahead.popleft()
            time_ms, found = decode_entry(entry)
            self._watches.handed_out()
            if time_ms < time.time_ns() // 1_000_000 - BEHIND_MS:
                tape.late_at = time.monotonic()
            tape.time = max(tape.written, time_ms)
            for frame in found:
                self._reader.take_recorded(tape, frame)
            tape.done, tape.written = position, tape.time  # not before: the rest of an entry may be much older than its time
            self._reader.reached(tape.exchange.id, position)
            await asyncio.sleep(0)

    # --- what is stored from now on -----------------------------------------------------------------------------------

    async def _keep_up(self) -> None:
        """In the present, which never ends: what was stored since, in turn; nobody waits for a tape that is at its end."""
        if self._reader.rests() and not self._waits():
            await self._rest()
        self._watches.news.clear()
        await self._take_news()
        await self._fetch()
        rests = self._reader.rests() and not self._waits()
        for tape in [tape for tape in self.tapes.reading.values() if not (tape.ahead or tape.ended or tape in self._watches)]:
            if not rests:
                self._watches.ask(tape)
        ready = [tape for tape in self.tapes.reading.values() if tape.ahead and self._admits(tape)]
        if ready:
            oldest = min(ready, key=lambda tape: tape.head)
            if oldest.head < time.time_ns() // 1_000_000 - BEHIND_MS:
                self._behind_at = time.monotonic()
            await self._hand_out(oldest, ready)
        elif not rests:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_SECONDS if self._waits() else POLL_SECONDS):
                    await self._watches.news.wait()
        if not ready or time.monotonic() - self._settled > SETTLE_SECONDS:
            self._settled = time.monotonic()
            self._finish()
            self._reader.settle()
            self._watches.hurry()

    async def _rest(self) -> None:
        """Until somebody waits for messages, or it is time to look at which tapes there are."""
        self.room.clear()
        try:
            async with asyncio.timeout(REST_SECONDS):
                while self._reader.rests():
                    await self.room.wait()
                    self.room.clear()
        except TimeoutError:
            await self.tapes.look()

    async def _take_news(self) -> None:
        """What was found beside the reading, which goes on while the GCM or a store does not answer."""
        for tape, found in self._watches.answers():
            await self._fetched(tape, found)
        self._watches.look()

    # --- the present --------------------------------------------------------------------------------------------------

    def _finish(self) -> None:
        """Attachments whose tape is read are released, tapes that are read are closed."""
        live = {attachment.exchange.id for attachment in self.handover.waiting}
        self.handover.release()
        if not self._arrived or self._follow is Follow.NOTHING:
            return
        if self.keeps_up:
            for exchange in [exchange for exchange, tape in self.tapes.reading.items() if tape.ended]:
                self.tapes.leave(exchange)
            return
        late = time.monotonic() - self._since > ABANDONED_SECONDS
        for exchange, tape in list(self.tapes.reading.items()):
            if exchange not in live and (tape.ended or late):
                self.tapes.leave(exchange, for_good=not tape.ended)
                if not (tape.ended or tape.is_empty):
                    self._miss_end(tape)
