"""Subscriber: attached to every Exchange of the queue, each publisher's messages in order, gaps reported.

Frames are read into a bounded buffer whether or not the application iterates, so that proofs and hand-overs go on; a full
buffer stops reading, and the Exchange's queue for us fills. What the order machine holds back has a bound of its own: beyond
it only those Exchanges are read from which the end of a path is awaited, so that what is held can always be released; at the
last bound the longest wait ends without it. The decisions about order are in order.py.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

from roq.coordination.locate import GcmClient
from roq.errors import Closed, DeadlineExceeded, FrameError, MessagesLost, RoqError, SlowSubscriber
from roq.pubsub.attachments import Attachments
from roq.pubsub.handover import TAPED_PREFIX
from roq.pubsub.inbox import Inbox
from roq.pubsub.links import Attachment
from roq.pubsub.membership import ClientMembership
from roq.pubsub.order import Deliver, FrameEvent, OrderMachine, Output
from roq.pubsub.order_limits import OrderLimits
from roq.pubsub.past import Past
from roq.pubsub.standing import SLOW_SECONDS, Standing
from roq.pubsub.start import EARLIEST, LAST, LIVE, Follow, Start, check_follow, check_start
from roq.pubsub.subscription import Batch, SubscriberHealth, TopicFilter
from roq.pubsub.tape import Tape
from roq.runtime.observe import Counters, Refusals, logger
from roq.runtime.security import new_member_id
from roq.wire import frame as frames
from roq.wire import monitor as wire
from roq.wire.assignment import Overflow
from roq.wire.frame import FrameKind, Header
from roq.wire.recording import TapePosition
from roq.wire.where import Where

log = logger(__name__)
BUFFER_BYTES = 4 * 1024 * 1024  # payload bytes read ahead of the application
FRAMES_AT_ONCE = 64  # read from one Exchange before other work gets a turn
HELD_BYTES = 64 * 1024 * 1024  # held back for order before other reading stops: some 100 ms of all that a host can send
HELD_BYTES_MAX = 2 * HELD_BYTES  # what was sent before the awaited FINs and is held too fits in; beyond it the wait ends
OPEN_SECONDS = 15.0
SILENT_SECONDS = 3.0  # of the Monitor: worth a word


class Subscriber(Inbox):
    """Made by `Cluster.subscriber`; use as an async context manager, then iterate. Not thread-safe (see roq.blocking)."""

    _begins_on_tapes = False  # also one that begins with the present

    def __init__(
        self,
        client: GcmClient,
        queue: str,
        topics: tuple[str, ...],
        on_lost: Callable[[MessagesLost], None],
        start: Start = "live",
        follow: bool | str = True,
        where: str = "",
    ) -> None:
        begin, after = check_start(start), check_follow(follow)
        has_past = begin != LIVE or after is Follow.STORED or self._begins_on_tapes
        self.id, self.queue = (identity := new_member_id()).id, queue
        super().__init__(on_lost, Where(where) if where else None, latest=begin == LAST)
        self.counters = Counters()
        self._filter = TopicFilter(topics or (">",))
        self._past: Past | None = Past(client, queue, begin, self, after, self._filter) if has_past else None
        self._tapes, self._opened = "", False  # once the past was found
        self._exchanges = Attachments(self._connect)
        self._order = OrderMachine(self._exchanges.are_proved, self._filter.wants)
        if self._past is not None:
            self._order.read_tapes(self._past.unread, self._past.tapes.switched_on, entire=begin in (EARLIEST, LAST))
        self._membership = ClientMembership(client, queue, self, identity)
        self._standing = Standing(time.monotonic())
        self._unread: dict[Attachment, None] = {}  # not read to the end for want of room, longest first
        self._ready = asyncio.Event()
        self._started = 0.0  # when it was ready for the first time: what comes earlier is not ours, and is not kept
        self._refusals = Refusals(log, self.counters)
        self._limits = OrderLimits(self._order, queue, self.counters, time.monotonic())

    @property
    def _attachments(self) -> dict[str, Attachment]:
        return self._exchanges.by_token

    @property
    def duplicated(self) -> int:
        """Messages that arrived again and were dropped before delivery."""
        return self._order.duplicated

    # --- life ---------------------------------------------------------------------------------------------------------

    async def open(self, timeout_seconds: float = OPEN_SECONDS) -> Subscriber:
        """Join the queue and wait until ready; with a `start`, find where to begin and read from there on: it joins in the
        present. Raises QueueNotFound, QueueStopped, Unavailable, DeadlineExceeded, NotRecorded, InvalidPosition."""
        deadline = time.monotonic() + timeout_seconds
        self._opened = True
        try:
            if self._past is None:
                await self._membership.join(timeout_seconds)
                await self.ready(max(0.1, deadline - time.monotonic()))
            else:
                await self._begin(self._past, timeout_seconds)
        except BaseException:
            await self.close(0)
            raise
        return self

    async def _begin(self, past: Past, timeout_seconds: float) -> None:
        self._started, self._latencies.since = time.monotonic(), math.inf
        self._done.update(await past.open(timeout_seconds))
        self._tapes = past.tapes.name

    async def ready(self, timeout_seconds: float = OPEN_SECONDS) -> None:
        """Return once every subscription is active at every Exchange. Raises DeadlineExceeded naming those missing, Closed."""
        self._check_opened()
        try:
            async with asyncio.timeout(timeout_seconds):
                await self._ready.wait()
        except TimeoutError:
            missing = ", ".join((*self.health().missing, *self._standing.waits)) or "the Monitor's word"
            raise DeadlineExceeded(f"not ready in {timeout_seconds:g} s: {missing} missing") from None

    async def __aenter__(self) -> Subscriber:
        return await self.open()

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        await self.close()

    async def close(self, timeout_seconds: float = 1.0) -> None:
        """Leave the queue; iteration ends. Takes at most about `timeout_seconds`."""
        if self._closed:
            return
        self._closed = True
        self._drop_attachments()
        self._wake()
        try:
            await self._membership.close(timeout_seconds)
        finally:
            self._membership.stop()

    def _check_opened(self) -> None:
        if not self._opened and not self._standing.max_frame_bytes:
            raise Closed("open this subscriber first: async with …")

    def _drop_attachments(self) -> None:
        if self._past is not None:
            self._past.close()
        self._exchanges.close()
        self._unread.clear()

    def fail(self, error: RoqError) -> None:
        """The queue goes on without us; the application is told when it has taken what is buffered."""
        self._failure = error
        self._ready.clear()
        self._drop_attachments()
        self._wake()

    # --- reading ------------------------------------------------------------------------------------------------------

    def _read(self, attachment: Attachment) -> None:
        """Take what the Exchange has for us, up to the bounds."""
        if self._past is not None and self._past.handover.holds(attachment):
            return
        waiting, order = attachment.frames, self._order
        for turn in range(FRAMES_AT_ONCE):
            if not waiting or attachment.closed:
                break
            held = order.held_bytes >= HELD_BYTES and not self._limits.waits_for(attachment.exchange.id)
            if held or self._buffered >= BUFFER_BYTES:
                self._overrun(attachment)
                if turn:
                    self._unread.pop(attachment, None)  # it had its turn: the others go first
                self._unread.setdefault(attachment)
                break
            self._take_frame(attachment, waiting.popleft())
            if self._waiters and self._buffer and waiting:
                attachment.look_soon()  # the application waits: it goes first
                break
        else:
            attachment.look_soon()
        if not waiting:
            attachment.read_at = time.monotonic()
            if attachment in self._unread:
                del self._unread[attachment]
                attachment.unread_at = attachment.read_at
        attachment.was_read()
        if self._buffer:
            self._wake()

    def _overrun(self, attachment: Attachment) -> None:
        """Reading stops: an Exchange that drops may drop the beginning of a publisher, or has since all was read."""
        if attachment not in self._unread and self._started and self._standing.overflow is Overflow.DROP:
            self._give(self._order.doubt(max(self._exchanges.read_at(), self._started), time.monotonic()))

    def _unread_at(self, exchange: str) -> float:
        """When frames that had come from this Exchange (or "": from any) last lay unread."""
        on_tape = 0.0 if self._past is None else self._past.unread_at(exchange)
        return max(on_tape, self._exchanges.unread_at(exchange, self._unread, time.monotonic()))

    def _look_at_unread(self) -> None:
        for attachment in self._unread if self._buffered < BUFFER_BYTES else ():
            attachment.look_soon()

    def _take_frame(self, source: Attachment | Tape, frame: bytes) -> None:
        try:
            topic, header, body = frames.parse(frame)
            if header.kind:
                self._control(source, header, body)
                return
            if not self._filter.wants(topic):
                return
            payloads = frames.payloads(header, body)
        except (FrameError, ValueError) as error:
            self._refusals.note("undecodable", error)
            return
        if self._order.accept(topic, header):
            if self._started:
                self._buffer.append(Batch(topic, header, payloads, len(frame)))
                self._buffered += len(frame)
        else:
            origin = None if self._past is None else source.origin
            self._handle(FrameEvent(topic, header, (payloads, len(frame)), None, len(frame), origin))

    def _control(self, attachment: Attachment | Tape, header: Header, body: memoryview) -> None:
        match header.kind:
            case FrameKind.ATTACHED if frames.text_body(body) == attachment.exchange.token:
                self.begins_behind(attachment.exchange.id)
                if isinstance(attachment, Attachment) and self._exchanges.prove(attachment, time.monotonic()):
                    self._membership.report_now()
            case FrameKind.RETIRE:
                if isinstance(attachment, Attachment) and frames.text_body(body) == attachment.exchange.token:
                    self._retire(attachment)
            case FrameKind.OPEN:
                self._handle(FrameEvent(b"", header, None, frames.opening_body(body), len(body), attachment.origin))
            case FrameKind.TAPED if frames.text_body(body) == attachment.exchange.token:
                (self.reached if attachment.taped else self.begins_behind)(attachment.exchange.id, header.sequence)
                attachment.taped = True  # the first one names what may not be stored yet
            case FrameKind.WATERMARK:
                event = FrameEvent(b"", header, None, frames.watermark_body(body), len(body), attachment.origin)
                if not self._defers(attachment, event):
                    self._handle(event)
            case FrameKind.BUNDLE:
                for part in frames.bundle_body(body):
                    self._take_frame(attachment, part)
            case FrameKind.FIN:
                self._handle(FrameEvent(b"", header, origin=None if self._past is None else attachment.origin))

    def _defers(self, source: Attachment | Tape, watermark: FrameEvent) -> bool:
        if self._past is not None and self._past.defers(watermark):
            return True
        live = self._started > 0 and isinstance(source, Attachment)
        return live and self._exchanges.deferred.defers(source.exchange, watermark, time.monotonic())

    def _handle(self, event: FrameEvent) -> None:
        now = time.monotonic()
        outputs = self._order.handle(event, now)
        if self._order.held_bytes > HELD_BYTES_MAX:
            outputs += self._order.relieve(now, HELD_BYTES_MAX)
        self._give(outputs)

    def _give(self, outputs: list[Output]) -> None:
        for output in outputs if self._started else ():
            if isinstance(output, Deliver):
                header, (payloads, size) = output.event.header, output.event.body
                if output.skip:
                    header = header._replace(sequence=header.sequence + output.skip, count=header.count - output.skip)
                self._buffer.append(Batch(output.event.topic, header, payloads[output.skip :], size))
                self._buffered += size
            else:
                self._buffer.append(output)
        if outputs:
            self._wake()
        if self._unread:
            self._look_at_unread()  # what was held may have been released

    # --- attachments --------------------------------------------------------------------------------------------------

    def _attach(self, version: int, exchanges: tuple[wire.ExchangeAddress, ...]) -> None:
        """Be attached to these (those that retired excepted)."""
        self._exchanges.take(version, exchanges)
        self._leave_unlisted(time.monotonic())
        if self._failure is None and not self._closed:
            self._exchanges.attach()
        self._membership.report_now()

    def _connect(self, exchange: wire.ExchangeAddress) -> Attachment:
        prefixes = [*self._filter.prefixes, frames.CONTROL_PREFIX, *([TAPED_PREFIX] if self._tapes else [])]
        attachment = Attachment(exchange, prefixes, self._standing.max_frame_bytes, self._read)
        self._order.attaching()
        if self._past is not None:
            self._past.handover.hold(attachment)
        return attachment

    def _leave_unlisted(self, now: float) -> None:
        for attachment in self._exchanges.leave_unlisted(now - self._membership.monitor_silent_seconds()):
            self._read_rest(attachment)
        self._give(self._order.detached(now))

    def _read_rest(self, attachment: Attachment) -> None:
        """An Exchange is gone: take what had come from it, and close."""
        self._unread.pop(attachment, None)
        if self._past is not None and self._past.handover.drop(attachment):
            attachment.close()
            return
        attachment.take_rest()
        while attachment.frames and not attachment.closed:
            self._take_frame(attachment, attachment.frames.popleft())
        self._exchanges.deferred.left(attachment.exchange.token, time.monotonic())
        attachment.close()

    def _retire(self, attachment: Attachment) -> None:
        """Nothing comes through this Exchange any more."""
        self._exchanges.retire(attachment.exchange.token)
        self._unread.pop(attachment, None)
        if self._past is not None:
            self._past.handover.drop(attachment)
        attachment.close()
        self._give(self._order.detached(time.monotonic()))
        self._membership.report_now()

    # --- the past, see past.py ------------------------------------------------------------------------------------------

    @property
    def position(self) -> TapePosition | None:
        """Up to where everything was taken, for the `start` of another subscriber, which may get some of what follows again.
        None for one that did not begin with the past."""
        return TapePosition(self._tapes, dict(self._done)) if self._tapes else None

    async def join(self) -> None:
        """See past.PastReader; likewise the others. Join, once the past was read up to the present."""
        self.give_latest()
        await self._membership.join(OPEN_SECONDS)

    def is_present(self) -> None:
        """The application may be told."""
        self.give_latest()
        self._ready.set()

    def is_over(self) -> None:
        """Live from now on."""
        self._take_ripe()
        self._past, self._latencies.since, self._standing.present_at = None, time.time_ns(), time.monotonic()
        self._order.live()
        self._wake()
        log.info("the past of the queue was read", extra={"fields": {"queue": self.queue}})

    def is_done(self) -> None:
        """The end."""
        before = len(self._buffer)
        self._take_ripe()
        self._past = None
        while self._order.waiting:  # nothing follows that could end it
            self._give(self._order.expire(time.monotonic(), 0.0, 0.0, lambda exchange: 0.0))
        self.keep_latest(before)
        self.give_latest()
        self.put_marks()
        self._closed = True
        self._wake()

    def take_recorded(self, tape: Tape, frame: bytes) -> None:
        """As if it came over an attachment."""
        before = len(self._buffer)
        self._take_frame(tape, frame)
        self.keep_latest(before)

    def _take_ripe(self) -> None:
        for watermark in self._past.ripe() if self._past is not None else ():
            self._handle(watermark)

    def missed(self, lost: MessagesLost) -> None:
        """It takes its turn."""
        self._buffer.append(lost)
        self._wake()

    def settle(self) -> None:
        """Also the moment to look after time limits: the Monitor does not know of us."""
        now, before = time.monotonic(), len(self._buffer)
        self._take_ripe()
        if self._order.waiting:
            self._give(self._order.detached(now))
        self._keep_bounds(now)
        self.keep_latest(before)

    def is_proved(self) -> None:
        """Tell the Monitor."""
        self._membership.report_now()

    def is_full(self) -> bool:
        """The application does not keep up."""
        return self._buffered >= BUFFER_BYTES

    def admits(self, exchange: str) -> bool:
        """What is held back has room."""
        return self._limits.admits(exchange, HELD_BYTES)

    def awaits(self, exchange: str) -> bool:
        """What is held back does."""
        return self._order.waits_for_older(exchange)

    def is_ready(self) -> bool:
        """The Monitor says so."""
        return self._ready.is_set()

    # --- for the inbox --------------------------------------------------------------------------------------------------

    def holds_back(self) -> bool:
        """Some of what was read is not in the inbox."""
        return bool(self._order.waiting)

    def behind_since(self, now_ms: int) -> list[int]:
        """On tapes, and held back."""
        return [] if self._past is None else [*self._past.tapes.behind_since(now_ms), *self._limits.held_since()]

    def look(self) -> None:
        """At everything that has come."""
        self._check_opened()
        for attachment in list(self._attachments.values()):
            if not attachment.looking:
                self._read(attachment)

    def took(self) -> None:
        """What was left unread may be read."""
        if self._unread:
            self._look_at_unread()
        if self._past is not None:
            self._past.room.set()

    # --- a Member, see membership.py ------------------------------------------------------------------------------------

    def join_request(self) -> wire.JoinSubscriber:
        """See membership.Member."""
        returning = self._standing.was_ready and self._failure is None
        return wire.JoinSubscriber(self.id, self._filter.patterns, returning, wire.PROTOCOL)

    def report(self) -> wire.SubscriberReport:
        """See membership.Member. Also the moment to look after time limits."""
        now = time.monotonic()
        self._leave_unlisted(now)
        self._keep_bounds(now)
        self.put_marks()
        for attachment in self._unread if self._standing.overflow is Overflow.BLOCK else ():
            attachment.show_life(now)
        self._exchanges.look_if_quiet(now)
        if self._standing.is_too_slow(self.taken, self._buffered >= BUFFER_BYTES, now) and self._failure is None:
            self.fail(SlowSubscriber(f"no message was taken for {SLOW_SECONDS:g} s while others waited"))
        numbers = (self.messages, self.bytes, self.lost, self.duplicated, *self._latencies.all(time.time_ns()))
        return wire.SubscriberReport(self.id, self._exchanges.version, self._exchanges.attached(), *numbers, now)

    def _keep_bounds(self, now: float) -> None:
        """Of time and memory. What has come while the loop was busy is looked at before somebody goes on without it."""
        past, unread_at = self._past, self._unread_at
        if self._order.waiting or self._exchanges.deferred:
            for attachment in list(self._attachments.values()):
                attachment.catch_up()
                if not attachment.looking:
                    self._read(attachment)
            for watermark in self._exchanges.deferred.ripe(now, unread_at):
                self._handle(watermark)
        if self._order.waiting:
            if past is None:
                self._give(self._limits.end_holds(now, self._standing.overflow, unread_at))
            elif past.keeps_up:
                self._give(self._limits.end_holds_of_stored(now, past.unread_at, HELD_BYTES))
            else:
                self._give(self._limits.end_holds_of_tapes(now, unread_at))
        self._limits.forget(now, unread_at if past is None else past.behind_at)

    def take(self, notice: Any) -> None:
        """See membership.Member."""
        match notice:
            case wire.SubscriberWelcome():
                self._standing.welcome(notice)
                self._exchanges.welcome(time.monotonic())
                self._attach(notice.version, notice.exchanges)
            # One that overtakes the first welcome is repeated: before it no socket can be made, the limit of frames is unknown.
            case wire.Exchanges() if self._standing.max_frame_bytes and notice.version >= self._exchanges.version:
                self._attach(notice.version, notice.exchanges)
            case wire.Heard(ready=ready):
                ours = self._started > 0 and (self._past is None or not self._past.tapes.recorded)  # else it is on a tape
                if (since := self._standing.heard(notice, ours)) is not None:
                    self._give(self._order.doubt(since, time.monotonic()))
                self._started = self._started or (time.monotonic() if ready else 0.0)
                (self._ready.set if ready else self._ready.clear)()
            case wire.Evicted():
                self.fail(SlowSubscriber(f"silent for {notice.silent_seconds:.0f} s: disconnected so that others could go on"))

    def health(self) -> SubscriberHealth:
        """What is well and what is not."""
        proved, joined, has_past = self._exchanges.proved(), self._membership.joined, self._past is not None
        silent = self._membership.monitor_silent_seconds() if joined or not has_past else 0.0
        problems = [] if self._failure is None else [str(self._failure)]
        problems += [f"the Monitor has been silent for {silent:.1f} s"] * (silent > SILENT_SECONDS or not (joined or has_past))
        problems += ["the application does not keep up: the buffer is full"] * self.is_full()
        ready = self._ready.is_set() and self._failure is None and not self._closed
        buffered = self._buffered + self._order.held_bytes
        return SubscriberHealth.of(ready, self._closed, proved, silent, buffered, self.lost, problems)
