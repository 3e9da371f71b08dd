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
from operator import length_hint
from types import TracebackType
from typing import Any

from roq.coordination.locate import GcmClient
from roq.errors import Closed, DeadlineExceeded, FrameError, MessagesLost, RoqError, SlowSubscriber
from roq.ids import new_id
from roq.pubsub.inbox import Inbox
from roq.pubsub.links import Attachment
from roq.pubsub.membership import ClientMembership
from roq.pubsub.order import Deliver, FrameEvent, OrderMachine, Output
from roq.pubsub.past import TAPED_PREFIX, Past, Start, Tape, check_start
from roq.pubsub.subscription import Batch, SubscriberHealth, TopicFilter
from roq.runtime.observe import Counters, Refusals, logger
from roq.wire import frame as frames
from roq.wire import monitor as wire
from roq.wire.assignment import Overflow
from roq.wire.frame import FrameKind, Header
from roq.wire.recording import TapePosition

log = logger(__name__)
BUFFER_BYTES = 4 * 1024 * 1024  # payload bytes read ahead of the application
FRAMES_AT_ONCE = 64  # read from one Exchange before other work gets a turn
HELD_BYTES = 64 * 1024 * 1024  # held back for order before other reading stops: some 100 ms of all that a host can send
HELD_BYTES_MAX = 2 * HELD_BYTES  # what was sent before the awaited FINs and is held too fits in; beyond it the wait ends
HOLD_SECONDS = 5.0  # how long a publisher's new path waits for the end of its old one when nothing lies unread
# and in any case: a reader that needs longer for what came before does without; with "drop" the end itself may not have come
HOLD_MAX_SECONDS = {Overflow.BLOCK: 600.0, Overflow.DROP: 60.0}
SLOW_SECONDS = 10.0  # with overflow "block": no message taken for this long while the buffer is full
SWEEP_SECONDS = 60.0  # between two looks at who has ended
FORGET_SECONDS = 150.0  # after a publisher's end: the Monitor repeats its last watermark for 63 s, a busy one for longer
OPEN_SECONDS = 15.0
SILENT_SECONDS = 3.0  # of the Monitor: worth a word
LISTING_SECONDS = 3.5  # after a rejoin: until then a new Monitor may not have heard of every Exchange that lives


class Subscriber(Inbox):
    """Made by `Cluster.subscriber`; use as an async context manager, then iterate. Not thread-safe (see roq.blocking)."""

    def __init__(
        self,
        client: GcmClient,
        queue: str,
        topics: tuple[str, ...],
        on_lost: Callable[[MessagesLost], None],
        start: Start = "live",
        follow: bool = True,
    ) -> None:
        begin = check_start(start)
        self.id = new_id()
        self.queue = queue
        super().__init__(on_lost)
        self.counters = Counters()
        self._filter = TopicFilter(topics or (">",))
        self._past: Past | None = None if begin is None else Past(client, queue, begin, self, follow=follow)
        self._follows = follow or begin is None
        self._tapes = ""  # once the past was found
        unread = (lambda exchange, origin: False) if self._past is None else self._past.unread
        self._order = OrderMachine(self._is_attached, self._filter.wants, unread=unread)
        self._order.amid = begin not in (None, "earliest")
        self._membership = ClientMembership(client, queue, self)
        self._attachments: dict[str, Attachment] = {}
        self._retired: set[str] = set()
        self._version = 0
        self._listed: dict[str, wire.ExchangeAddress] = {}  # by token: what the Monitor listed last
        self._listing_until = 0.0
        self._overflow = Overflow.DROP
        self._max_frame_bytes = 0  # not welcomed yet
        self._unread: dict[Attachment, None] = {}  # not read to the end for want of room, longest first
        self._ready = asyncio.Event()
        self._started = 0.0  # when it was ready for the first time: what comes earlier is not ours, and is not kept
        self._passed_by = 0  # see wire.Heard
        self._well_at = 0.0  # when the last report was sent after which that had not grown
        self._waits: tuple[str, ...] = ()  # what the Monitor waits for before it says that we are ready
        self._opened = self._was_ready = False
        self._progress = (0, time.monotonic())
        self._refusals = Refusals(log, self.counters)
        self._swept = time.monotonic()

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
                self._started, self._live_since = time.monotonic(), math.inf
                self._done.update(await self._past.open(timeout_seconds))
                self._tapes = self._past.tapes
        except BaseException:
            await self.close(0)
            raise
        return self

    async def ready(self, timeout_seconds: float = OPEN_SECONDS) -> None:
        """Return once every subscription is active at every Exchange. Raises DeadlineExceeded naming those missing, Closed."""
        self._check_opened()
        try:
            async with asyncio.timeout(timeout_seconds):
                await self._ready.wait()
        except TimeoutError:
            missing = ", ".join((*self.health().missing, *self._waits)) or "the Monitor's word"
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
            await self._membership.close(self.id, timeout_seconds)
        finally:
            self._membership.stop()

    def _check_opened(self) -> None:
        if not self._opened and not self._max_frame_bytes:
            raise Closed("open this subscriber first: async with …")

    def _drop_attachments(self) -> None:
        if self._past is not None:
            self._past.close()
        for attachment in self._attachments.values():
            attachment.close()
        self._attachments.clear()
        self._unread.clear()

    def fail(self, error: RoqError) -> None:
        """The queue goes on without us; the application is told when it has taken what is buffered."""
        self._failure = error
        self._ready.clear()
        self._drop_attachments()
        self._wake()

    # --- reading ------------------------------------------------------------------------------------------------------

    def _is_attached(self, exchange: str) -> bool:
        return any(one.proved and one.exchange.id == exchange for one in self._attachments.values())

    def _read(self, attachment: Attachment) -> None:
        """Take what the Exchange has for us, up to the bounds."""
        if self._past is not None and self._past.holds(attachment):
            return
        waiting, order = attachment.frames, self._order
        for turn in range(FRAMES_AT_ONCE):
            if not waiting or attachment.closed:
                break
            if (self._buffered >= BUFFER_BYTES or order.held_bytes >= HELD_BYTES) and not self._has_room(attachment):
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

    def _has_room(self, attachment: Attachment) -> bool:
        """Whether it may be read: the application keeps up, and what is held back has room or waits for this Exchange."""
        if self._buffered >= BUFFER_BYTES:
            return False
        if self._order.held_bytes < HELD_BYTES:
            return True
        awaited = self._order.awaits()
        return "" in awaited or attachment.exchange.id in awaited

    def _overrun(self, attachment: Attachment) -> None:
        """Reading stops: an Exchange that drops may drop the beginning of a publisher, or has since all was read."""
        if attachment not in self._unread and self._started and self._overflow is Overflow.DROP:
            read_at = min((one.read_at for one in self._attachments.values() if one.proved), default=0.0)
            self._give(self._order.doubt(max(read_at, self._started), time.monotonic()))

    def _unread_at(self, exchange: str) -> float:
        """When frames that had come from this Exchange (or "": from any) last lay unread."""
        if self._past is not None and self._past.behind(""):
            return time.monotonic()
        those = [one for one in self._attachments.values() if exchange in ("", one.exchange.id)]
        if any(one in self._unread or one.looking for one in those):
            return time.monotonic()
        return max((one.unread_at for one in those), default=0.0)

    def _look_at_unread(self) -> None:
        if self._buffered < BUFFER_BYTES:
            for attachment in self._unread:
                attachment.look_soon()

    def _take_frame(self, attachment: Attachment | Tape, frame: bytes) -> None:
        try:
            topic, header, body = frames.parse(frame)
            if header.kind:
                self._control(attachment, header, body)
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
            self._handle(FrameEvent(topic, header, (payloads, len(frame)), None, len(frame)))

    def _control(self, attachment: Attachment | Tape, header: Header, body: memoryview) -> None:
        match header.kind:
            case FrameKind.ATTACHED:
                if frames.text_body(body) == attachment.exchange.token and not attachment.proved:
                    attachment.proved = True
                    self._membership.report_now()
            case FrameKind.RETIRE:
                if isinstance(attachment, Attachment) and frames.text_body(body) == attachment.exchange.token:
                    self._retire(attachment)
            case FrameKind.OPEN:
                self._handle(FrameEvent(b"", header, None, frames.opening_body(body), len(body), attachment.origin))
            case FrameKind.TAPED if frames.text_body(body) == attachment.exchange.token:
                if attachment.taped:  # the first one names what may not be stored yet
                    self.reached(attachment.exchange.id, header.sequence)
                attachment.taped = True
            case FrameKind.WATERMARK:
                self._handle(FrameEvent(b"", header, None, frames.watermark_body(body), len(body), attachment.origin))
            case FrameKind.BUNDLE:
                for part in frames.bundle_body(body):
                    self._take_frame(attachment, part)
            case FrameKind.FIN:
                self._handle(FrameEvent(b"", header))

    def _handle(self, event: FrameEvent) -> None:
        now = time.monotonic()
        outputs = self._order.handle(event, now)
        if self._order.held_bytes > HELD_BYTES_MAX:
            outputs += self._order.relieve(now, HELD_BYTES_MAX)
        self._give(outputs)

    def _give(self, outputs: list[Output]) -> None:
        for output in outputs if self._started else ():
            if isinstance(output, Deliver):
                payloads, size = output.event.body
                header = output.event.header
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
        self._version = version
        self._listed = {exchange.token: exchange for exchange in exchanges}
        self._retired &= self._listed.keys()
        self._leave_unlisted(time.monotonic())
        for token, exchange in self._listed.items():
            if token not in (*self._attachments, *self._retired) and self._failure is None and not self._closed:
                prefixes = [*self._filter.prefixes, frames.CONTROL_PREFIX, *([TAPED_PREFIX] if self._tapes else [])]
                attachment = self._attachments[token] = Attachment(exchange, prefixes, self._max_frame_bytes, self._read)
                if self._past is not None:
                    self._past.hold(attachment)
        self._membership.report_now()

    def _leave_unlisted(self, now: float) -> None:
        """Detach from Exchanges that are gone: another life of them is listed, or the Monitor had its time to hear of them."""
        ids = {one.id for one in self._listed.values()}
        for token in [token for token in self._attachments if token not in self._listed]:
            if now >= self._listing_until or self._attachments[token].exchange.id in ids:
                self._read_rest(self._attachments.pop(token))
        self._give(self._order.detached(now))

    def _read_rest(self, attachment: Attachment) -> None:
        """An Exchange is gone: take what had come from it, and close."""
        self._unread.pop(attachment, None)
        if self._past is not None and self._past.drop(attachment):
            attachment.close()
            return
        attachment.take_rest()
        while attachment.frames and not attachment.closed:
            self._take_frame(attachment, attachment.frames.popleft())
        attachment.close()

    def _retire(self, attachment: Attachment) -> None:
        """Nothing comes through this Exchange any more."""
        token = attachment.exchange.token
        self._retired.add(token)
        self._attachments.pop(token, None)
        self._unread.pop(attachment, None)
        if self._past is not None:
            self._past.drop(attachment)
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
        await self._membership.join(OPEN_SECONDS)

    def is_over(self) -> None:
        """Live from now on, or at the end."""
        self._past, self._live_since = None, time.time_ns()
        self._order.live()
        if not self._follows:
            while self._order.waiting:  # nothing follows that could end it
                self._give(self._order.expire(time.monotonic(), 0.0, 0.0, lambda exchange: 0.0))
            self.put_marks()
            self._closed = True
        self._wake()
        log.info("the past of the queue was read", extra={"fields": {"queue": self.queue}})

    def take_recorded(self, tape: Tape, frame: bytes) -> None:
        """As if it came over an attachment."""
        self._take_frame(tape, frame)

    def missed(self, lost: MessagesLost) -> None:
        """It takes its turn."""
        self._buffer.append(lost)
        self._wake()

    def settle(self) -> None:
        """Also the moment to look after time limits: the Monitor does not know of us yet."""
        if self._order.waiting:
            now = time.monotonic()
            self._give(self._order.detached(now))
            self._end_holds(now)

    def is_proved(self) -> None:
        """Tell the Monitor."""
        self._membership.report_now()

    def is_full(self) -> bool:
        """The application does not keep up."""
        return self._buffered >= BUFFER_BYTES

    def is_ready(self) -> bool:
        """The Monitor says so."""
        return self._ready.is_set()

    # --- for the inbox --------------------------------------------------------------------------------------------------

    def holds_back(self) -> bool:
        """Some of what was read is not in the inbox."""
        return bool(self._order.waiting)

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
        returning = self._was_ready and self._failure is None
        return wire.JoinSubscriber(self.id, self._filter.patterns, returning, wire.PROTOCOL)

    def report(self) -> wire.SubscriberReport:
        """See membership.Member. Also the moment to look after time limits."""
        now = time.monotonic()
        self._leave_unlisted(now)
        if self._order.waiting:
            self._end_holds(now)
        if now - self._swept > SWEEP_SECONDS:
            self._swept = now
            self._order.sweep(now, FORGET_SECONDS, self._unread_at(""))
        self._note_limits()
        for attachment in self._unread if self._overflow is Overflow.BLOCK else ():
            attachment.show_life(now)
        taken = self.messages - length_hint(self._current)
        if self._buffered < BUFFER_BYTES or taken != self._progress[0]:
            self._progress = (taken, now)
        elif self._overflow is Overflow.BLOCK and now - self._progress[1] > SLOW_SECONDS and self._failure is None:
            self.fail(SlowSubscriber(f"no message was taken for {SLOW_SECONDS:g} s while others waited"))
        attached = tuple(token for token, one in self._attachments.items() if one.proved)
        totals = (self.messages, self.bytes, self.lost, self.duplicated)
        return wire.SubscriberReport(self.id, self._version, attached, *totals, *self.latencies(), now)

    def _note_limits(self) -> None:
        """Say aloud what was given up to stay within the bounds of time and memory."""
        totals = self._order.given_up()
        if any(total != self.counters[name] for name, total in totals.items()):
            self.counters.update({name: total - self.counters[name] for name, total in totals.items()})
            fields = {"queue": self.queue, **totals}
            log.warning("ordering limits reached: gaps are reported", extra={"fields": fields})

    def _end_holds(self, now: float) -> None:
        """Go on where the end of a path was awaited for too long, after a look at what has come while the loop was busy."""
        for attachment in list(self._attachments.values()):
            attachment.catch_up()
            if not attachment.looking:
                self._read(attachment)
        most = HOLD_MAX_SECONDS[self._overflow] if self._past is None else math.inf
        self._give(self._order.expire(now, HOLD_SECONDS, most, self._unread_at))

    def take(self, notice: Any) -> None:
        """See membership.Member."""
        match notice:
            case wire.SubscriberWelcome():
                self._overflow, self._max_frame_bytes = notice.overflow, notice.max_frame_bytes
                self._passed_by = 0
                self._retired.clear()  # a Monitor that lists it again did not know of its end, and may use it again
                self._listing_until = time.monotonic() + LISTING_SECONDS if self._attachments else 0.0
                self._attach(notice.version, notice.exchanges)
            # One that overtakes the first welcome is repeated: before it no socket can be made, the limit of frames is unknown.
            case wire.Exchanges() if self._max_frame_bytes and notice.version >= self._version:
                self._attach(notice.version, notice.exchanges)
            case wire.Heard(ready=ready):
                if notice.answers:
                    self._look_back(notice)
                self._started = self._started or (time.monotonic() if ready else 0.0)
                self._was_ready = self._was_ready or ready
                self._waits = notice.waits
                (self._ready.set if ready else self._ready.clear)()
            case wire.Evicted():
                self.fail(SlowSubscriber(f"silent for {notice.silent_seconds:.0f} s: disconnected so that others could go on"))

    def _look_back(self, heard: wire.Heard) -> None:
        """Messages may have passed us by since we were last known to be well, though we were ready."""
        if heard.passed_by > self._passed_by and self._started:
            self._give(self._order.doubt(self._well_at, time.monotonic()))
        else:
            self._well_at = heard.answers
        self._passed_by = heard.passed_by

    def health(self) -> SubscriberHealth:
        """What is well and what is not."""
        proved = {one.exchange.id: one.proved for one in self._attachments.values()}
        silent = self._membership.monitor_silent_seconds() if self._membership.joined or self._past is None else 0.0
        missing = tuple(id for id, is_proved in proved.items() if not is_proved)
        problems = [] if self._failure is None else [str(self._failure)]
        if not (self._membership.joined or self._past is not None) or silent > SILENT_SECONDS:
            problems.append(f"the Monitor has been silent for {silent:.1f} s")
        if self._buffered >= BUFFER_BYTES:
            problems.append("the application does not keep up: the buffer is full")
        ready = self._ready.is_set() and self._failure is None and not self._closed
        attached, buffered = tuple(id for id in proved if id not in missing), self._buffered + self._order.held_bytes
        return SubscriberHealth.of(ready, self._closed, attached, missing, silent, buffered, self.lost, problems)
