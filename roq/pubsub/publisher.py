"""Publisher: natural batching, order kept, planned moves without loss, honest about what it could not do.

In a recorded queue a publisher may ask for more than that its messages were forwarded: that they are stored (`confirm`). Then
everything it is told of is at that level, what is not stored is kept and sent again, and it waits rather than to give any up.

`publish` appends to a batch; the batch leaves when the loop turns or when it is full (128 KiB). Within a batch, consecutive
payloads of one topic form one frame, so order holds across topics too. The decisions about paths are in path.py.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Iterable
from types import TracebackType
from typing import Any, NamedTuple

from roq.coordination.locate import GcmClient
from roq.errors import (
    Closed,
    DeadlineExceeded,
    IncompatibleVersion,
    InvalidConfiguration,
    InvalidTopic,
    NotRecorded,
    PayloadTooLarge,
    RoqError,
)
from roq.pubsub.links import BACKLOG_BYTES
from roq.pubsub.membership import ClientMembership
from roq.pubsub.path_sender import ASK_SECONDS, PathSender
from roq.pubsub.publisher_health import PublisherHealth
from roq.pubsub.storing import Storing
from roq.pubsub.watermarks import TOPICS_REMEMBERED, TopicRecord, TopicWatermarks
from roq.runtime.security import new_member_id
from roq.wire import monitor as wire
from roq.wire.assignment import Overflow
from roq.wire.frame import HEADERS_VERSION, VERSION, Item, encode_data
from roq.wire.headers import Headers, check_message_headers
from roq.wire.limits import BATCH_BYTES, FRAME_OVERHEAD_BYTES
from roq.wire.member_id import MemberId
from roq.wire.recording import TapePosition

CHUNK_MESSAGES = 512  # taken from publish_many's iterable at once
ITEM_BYTES = 6  # what one payload adds to a batch besides itself, about
HEADER_BYTES = 8  # what one header adds besides its name and value, at most
UNBUNDLED = 1  # bytes of a bundle that holds one frame
DROP_PATIENCE_SECONDS = 0.005  # with overflow "drop": how long a full link is waited for before frames are dropped
OPEN_SECONDS, CONFIRM_SECONDS = 15.0, 10.0
ROUTED, STORED = "routed", "stored"  # levels of confirmation


class PublishReceipt(NamedTuple):
    """What became of a message, and of all that this publisher published before. level: "routed", it was handed to those who
    subscribed, or "stored", it is also on stable storage of at least `copies` stores. position: where, up to there at most."""

    level: str
    copies: int = 0
    position: TapePosition | None = None


class Publisher:  # with more than 30 attributes CPython 3.11 would read them all more slowly: 4 % of one to one
    """Made by `Cluster.publisher`; use as an async context manager. Not thread-safe (see roq.blocking)."""

    def __init__(self, client: GcmClient, queue: str, confirm: str = ROUTED) -> None:
        if confirm not in (ROUTED, STORED):
            raise InvalidConfiguration(f"confirm is {ROUTED!r} or {STORED!r}, got {confirm!r}")
        self.id = (member := new_member_id()).id
        self.queue = queue
        self.dropped = 0  # messages given up with overflow "drop"
        self.messages = self.bytes = 0
        self.blocked_seconds = 0.0
        self._asked = 0.0  # monotonic: when a confirmation was asked for because there was no room
        self._loop = asyncio.get_running_loop()
        self._membership = ClientMembership(client, queue, self, member)
        self._storing = Storing(client, queue, wanted=confirm == STORED)
        self._sender = self._make_sender(member)
        self._topics: dict[str, TopicRecord] = {}
        self._sequence = self._payload_max = self._batch_bytes = 0
        self._overflow = Overflow.DROP
        # the batch being filled; `_room` is 0 while there is none, which sends `publish` the slow way
        self._topic: str | None = None
        self._record: TopicRecord | None = None
        self._run: list[Item] = []
        self._runs: list[tuple[TopicRecord, list[Item]]] = []
        self._append = self._run.append
        self._room = self._batch_time = 0
        self._annotated = False  # something in it has headers
        self._scheduled = self._closed = False
        self._failed: RoqError | None = None  # then it is closed, too
        self._watermarks = TopicWatermarks(self._sender)
        self.protocol = wire.PROTOCOL  # what every subscriber understands
        self._needs = 1  # what they have to understand that are to read this publisher

    def _make_sender(self, member: MemberId) -> PathSender:
        return PathSender(member, self._flush, self._membership.report_now, lambda: self._sequence)

    # --- life ---------------------------------------------------------------------------------------------------------

    async def open(self, timeout_seconds: float = OPEN_SECONDS) -> Publisher:
        """Join the queue and attach to an Exchange. Raises QueueNotFound, QueueStopped, Unavailable, DeadlineExceeded;
        NotRecorded, for `confirm="stored"`."""
        deadline = time.monotonic() + timeout_seconds
        try:
            await self._prepare(timeout_seconds)
            await self._membership.join(timeout_seconds)
            async with asyncio.timeout(await self._begin(max(0.1, deadline - time.monotonic()))):
                await self._sender.opened.wait()
            if self._failed is not None:
                raise self._failed
        except TimeoutError:
            await self.close(0)
            raise DeadlineExceeded(f"no Exchange of {self.queue!r} took this publisher in {timeout_seconds:g} s") from None
        except BaseException:
            await self.close(0)
            raise
        return self

    async def _prepare(self, timeout_seconds: float) -> None:
        if self._storing.wanted:
            await self._ask_for_stored(timeout_seconds)

    async def _begin(self, timeout_seconds: float) -> float:
        """It has joined: what comes before it publishes. Seconds that its first path may take to open."""
        return timeout_seconds

    def _gone(self, text: str) -> RoqError:
        """Why it takes nothing more."""
        return self._failed or Closed(text)

    def fail(self, error: RoqError) -> None:
        """It ends here: all that it is asked for raises this."""
        self._failed = self._failed or error
        self._closed, self._room, self._topic = True, 0, None
        self._membership.stop()
        self._sender.close(self._failed)
        self._sender.opened.set()  # nobody waits for that any more

    async def __aenter__(self) -> Publisher:
        return await self.open()

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        await self.close()

    async def close(self, timeout_seconds: float = 5.0) -> None:
        """Send what is batched, end the path, wait until the Exchange has forwarded all of it. Takes at most about
        `timeout_seconds`; raises DeadlineExceeded if by then the Exchange had not confirmed everything, NotConfirmed if it
        never will have (see `flush`), NotRecorded if it should be stored, and is not, AccessDenied (see `publish`)."""
        if self._closed:
            if self._failed is not None and timeout_seconds > 0:
                raise self._failed
            return
        deadline = time.monotonic() + timeout_seconds
        self._flush()
        self._watermarks.send_all(self._payload_max)
        self._closed, self._room, self._topic = True, 0, None
        try:
            confirmed = await self._sender.finish(timeout_seconds) or not self.messages
            await self._membership.close(min(1.0, max(0.0, deadline - time.monotonic())))
        finally:
            self._membership.stop()
            self._sender.close()
        if timeout_seconds > 0:
            if self._failed is not None:
                raise self._failed
            self._sender.raise_unknown()
            if self._storing.wanted and self._sender.unstored:
                raise self._not_recorded()
        if not confirmed and timeout_seconds > 0:
            raise DeadlineExceeded(f"closed after {timeout_seconds:g} s without confirmation that all messages were forwarded")

    # --- publishing ---------------------------------------------------------------------------------------------------

    async def publish(
        self, topic: str, payload: bytes, headers: Headers | None = None, confirm: str | None = None
    ) -> PublishReceipt | None:
        """Publish one message. Returns at once unless the queue's overflow is "block" and the way is full.

        topic: 1..255 bytes of UTF-8 without NUL. payload: bytes-like. headers: {name: text or bytes}, 4 KiB at most, see
        roq.wire.headers. confirm: "routed" or "stored": wait until it is that (CONFIRM_SECONDS at most), and return a receipt;
        many at once share their confirmations.
        Raises InvalidTopic, PayloadTooLarge, InvalidHeaders, Closed; IncompatibleVersion for headers while a subscriber, or the
        cluster, has version 0.1; AccessDenied once this publisher is taken no more. With `confirm` also NotRecorded,
        and DeadlineExceeded and NotConfirmed: then it may be published or not.
        """
        if (
            headers is confirm  # type: ignore[comparison-overlap]  # both are None: the quick way
            and topic == self._topic
            and payload.__class__ is bytes
            and (room := self._room - len(payload)) > 0
        ):
            self._append(payload)
            self._room = room - ITEM_BYTES
            return None
        if confirm is None:
            await self._publish_slowly(topic, payload, headers)
            return None
        await self._will_confirm(confirm)
        await self._publish_slowly(topic, payload, headers)
        await asyncio.sleep(0)  # one batch and one confirmation for all who publish in this turn of the loop
        return await self._confirmed()

    async def _publish_slowly(self, topic: str, payload: bytes, headers: Headers | None = None) -> None:
        """First of a batch, first of a topic, the one that fills the batch, one with headers, or one that is refused."""
        self._check_open()
        copied, size = self._checked_headers(headers) if headers else (None, 0)
        payload = self._checked(payload, size)
        size += len(payload) + ITEM_BYTES
        if (self._sender.stores or not self._scheduled) and self._sender.backlog() > BACKLOG_BYTES:
            await self._find_room()  # batches that leave with the turn of the loop, however small, wait as full ones do
            if self._closed:
                raise self._gone("the publisher was closed meanwhile")
        if topic != self._topic or self._record is None:
            self._switch(topic)
        idle = not self._scheduled
        self._make_room(size)
        self._append(payload if copied is None else (payload, copied))
        if copied is not None:
            self._has_headers()
        self._room -= size
        if idle:
            self._flush()  # the first message of a loop turn has nothing to wait for; those after it form a batch
        elif self._room <= 0:
            self._flush()
            await self._take_breath()

    def _make_room(self, size: int) -> None:
        """Open a batch unless one is open that can take `size` bytes more within one frame."""
        batched = self._batch_bytes - self._room if self._run or self._runs else 0
        if batched + size > self._payload_max:
            self._flush()
            batched = 0
        if not batched:
            self._room, self._batch_time = self._batch_bytes, time.time_ns()
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._loop_turned)

    async def _will_confirm(self, confirm: str) -> None:
        if confirm == STORED:
            self._check_open()
            if not self._sender.stores:
                async with self._storing.asking:  # whoever calls meanwhile comes next, in the order of their calls
                    if not self._sender.stores:
                        await self._ask_for_stored(CONFIRM_SECONDS)
        elif confirm != ROUTED:
            raise InvalidConfiguration(f"confirm is {ROUTED!r} or {STORED!r}, got {confirm!r}")

    async def _ask_for_stored(self, timeout_seconds: float) -> None:
        """From now on this is what confirmations say. Raises NotRecorded."""
        await self._storing.find(timeout_seconds)
        if self.messages:  # what was not recorded is confirmed as what it is
            self._flush()
            await self._sender.confirm(timeout_seconds, again=True)
        self._sender.stores = self._sender.blocks = True

    async def _confirmed(self, timeout_seconds: float = CONFIRM_SECONDS) -> PublishReceipt:
        """Of everything published so far."""
        if self._failed is not None:
            raise self._failed
        self._flush()
        try:
            await self._sender.confirm(timeout_seconds)
        except NotRecorded:
            if not self._storing.wanted:  # it asks again when it is asked for
                self._storing.tapes, self._sender.stores, self._sender.blocks = "", False, self._overflow is Overflow.BLOCK
            raise self._not_recorded() from None
        if not self._sender.stores or self._sender.stored is None:
            return PublishReceipt(ROUTED)
        exchange, stored = self._sender.stored
        return PublishReceipt(STORED, stored.copies, TapePosition(self._storing.tapes, {exchange: stored.entry}))

    def _not_recorded(self) -> NotRecorded:
        return NotRecorded(f"queue {self.queue!r} is not recorded any more: what is not stored was forwarded")

    async def publish_many(
        self, topic: str, payloads: Iterable[bytes], headers: Headers | None = None, *, confirm: str | None = None
    ) -> PublishReceipt | None:
        """Publish several messages on one topic, in order; cheaper than one by one. headers: of each of them. confirm: as in
        `publish`, of all of them. Errors as `publish`: messages before the offending one are published."""
        self._check_open()
        if confirm is not None:
            await self._will_confirm(confirm)
        source = iter(payloads)
        while chunk := list(itertools.islice(source, CHUNK_MESSAGES)):
            if (self._sender.stores or not self._scheduled) and self._sender.backlog() > BACKLOG_BYTES:
                await self._find_room()
            if self._closed:
                raise self._gone("the publisher was closed meanwhile")
            copied, beside = self._checked_headers(headers) if headers else (None, 0)
            plain = set(map(type, chunk)) == {bytes}
            size = sum(map(len, chunk)) + (ITEM_BYTES + beside) * len(chunk) if plain else 0
            if not plain or size > self._batch_bytes:
                for payload in chunk:
                    await self._publish_slowly(topic, payload, headers)
                continue
            if topic != self._topic:
                self._switch(topic)
            self._make_room(size)
            self._run.extend(chunk if copied is None else [(payload, copied) for payload in chunk])
            if copied is not None:
                self._has_headers()
            self._room -= size
            if self._room <= 0:
                self._flush()
                await self._take_breath()
        return None if confirm is None else await self._confirmed()

    def _check_open(self) -> None:
        if self._closed:
            raise self._gone("the publisher is closed")
        if not self._payload_max:  # not welcomed yet
            raise Closed("open this publisher first: async with …")

    def _checked_headers(self, headers: Headers) -> tuple[dict[str, str | bytes], int]:
        """A copy, and the bytes they take."""
        copied, size = check_message_headers(headers)
        if self.protocol < wire.PROTOCOL_0_2:
            raise IncompatibleVersion("no headers while a subscriber of the queue, or the cluster, has version 0.1: upgrade it")
        return copied, size + HEADER_BYTES * len(copied)

    def _has_headers(self) -> None:
        """Something of this batch does; from now on nobody joins who can't read them."""
        self._annotated = True
        if self._needs < wire.PROTOCOL_0_2:
            self._needs = wire.PROTOCOL_0_2
            self._membership.report_now()

    def _checked(self, payload: bytes, beside: int) -> bytes:
        """beside: bytes of its headers."""
        if payload.__class__ is not bytes:
            try:
                payload = bytes(memoryview(payload))
            except TypeError:
                raise TypeError(f"a payload is bytes-like, got {type(payload).__name__}") from None
        if len(payload) + beside > self._payload_max:
            size = f"{len(payload)} bytes" + (f" with headers of {beside}" if beside else "")
            raise PayloadTooLarge(f"payload of {size}; this queue takes at most {self._payload_max}")
        return payload

    def _switch(self, topic: str) -> None:
        """The next payloads are of `topic`: the run of the last topic is complete."""
        record = self._topics.get(topic) if topic.__class__ is str else None
        if record is None:
            if topic.__class__ is not str:
                raise InvalidTopic(f"a topic is a string, got {type(topic).__name__}")
            if len(self._topics) >= TOPICS_REMEMBERED:
                for name in list(self._topics)[: TOPICS_REMEMBERED // 2]:
                    del self._topics[name]
            record = self._topics[topic] = TopicRecord(topic)
        if self._run and self._record is not None:
            self._runs.append((self._record, self._run))
        self._run = []
        self._append = self._run.append
        self._topic, self._record = topic, record

    def _loop_turned(self) -> None:
        self._scheduled = False
        self._flush()

    def _flush(self) -> None:
        """Send the batch as it is."""
        runs, self._runs = self._runs, []
        if self._run and self._record is not None:
            runs.append((self._record, self._run))
            self._run = []
            self._append = self._run.append
        self._room = 0
        annotated, self._annotated = self._annotated, False
        for record, run in runs:
            with_headers = annotated and any(item.__class__ is tuple for item in run)
            self._send_run(record, run, self._batch_time, HEADERS_VERSION if with_headers else VERSION)

    def _send_run(self, record: TopicRecord, run: list[Item], timestamp: int, version: int) -> None:
        first, count, path = self._sequence + 1, len(run), self._sender.path
        frame = encode_data(record.encoded, self.id, path, first, record.last, record.sent, run, timestamp, version)
        self._sequence = record.last = first + count - 1
        record.sent += count
        self.messages += count
        self.bytes += len(frame)
        self._watermarks.touched[record.name] = record
        self.dropped += self._sender.send(frame, self._sequence)

    async def _take_breath(self) -> None:
        """After a full batch: let the loop turn, and wait or drop if the way is full."""
        if self._sender.backlog() > BACKLOG_BYTES:
            await self._find_room()
        else:
            await asyncio.sleep(0)

    async def _find_room(self) -> None:
        """The way is full: wait until it is not, or drop what has waited longest."""
        started = time.monotonic()
        try:
            if self._overflow is Overflow.BLOCK or self._sender.stores:
                while self._sender.backlog() > BACKLOG_BYTES and not self._closed:
                    self._sender.has_room.clear()
                    if self._sender.held_back():
                        await self._ask_for_room()
                    else:
                        await self._sender.has_room.wait()
            else:
                self._sender.has_room.clear()
                try:
                    async with asyncio.timeout(DROP_PATIENCE_SECONDS):
                        await self._sender.has_room.wait()
                except TimeoutError:
                    self.dropped += self._sender.drop()
        finally:
            self.blocked_seconds += time.monotonic() - started

    async def _ask_for_room(self) -> None:
        """The replay buffer is full of what is not confirmed: ask the Exchange until it confirms, or has not for too long."""
        try:
            async with asyncio.timeout(ASK_SECONDS):
                await self._sender.has_room.wait()
        except TimeoutError:
            if time.monotonic() - self._asked < ASK_SECONDS:
                return  # another of those who wait has
            self._asked = time.monotonic()
            self._sender.ask()

    async def flush(self, timeout_seconds: float = CONFIRM_SECONDS) -> PublishReceipt:
        """Return when everything published so far has passed the Exchange, and is stored if this publisher confirms that.

        Raises NotRecorded; DeadlineExceeded; Closed; NotConfirmed if messages had left the replay buffer unconfirmed when their
        path broke: once for each such loss, to all who wait just then, else to the next who calls. (What was given up at this
        end with overflow "drop" because a link was full is in `dropped`.)
        """
        self._check_open()
        self._flush()
        self._watermarks.send_all(self._payload_max)  # if this publisher dies, the Monitor knows what there was
        return await self._confirmed(timeout_seconds)

    @property
    def number(self) -> int:
        """Of the last message that is confirmed with all before it, 0 if none is. With a `producer` they go on from before."""
        return self._sender.confirmed

    @property
    def payload_bytes_max(self) -> int:
        """Bytes of one payload and its headers that this queue takes; 0 before it is open."""
        return self._payload_max

    @property
    def replays(self) -> int:
        """How often recent messages were sent again because an Exchange died."""
        return self._sender.replays

    # --- a Member, see membership.py ------------------------------------------------------------------------------------

    def join_request(self) -> wire.JoinPublisher:
        """See membership.Member."""
        return wire.JoinPublisher(self.id, *self._sender.place, wire.PROTOCOL, self._needs)

    def report(self) -> wire.PublisherReport:
        """See membership.Member. Also the moment for watermarks, and to ask for confirmation."""
        self._watermarks.look_after(self._payload_max, closed=self._closed)
        sender = self._sender
        sender.keep_asking()
        place = (sender.path, sender.exchange, sender.lost_token, sender.leaving)
        totals = (self.messages, self.bytes, self.dropped, self.blocked_seconds)
        return wire.PublisherReport(self.id, *place, *totals, self._needs)

    def take(self, notice: Any) -> None:
        """See membership.Member."""
        match notice:
            case wire.PublisherWelcome():
                self._overflow = notice.overflow
                self._payload_max = notice.max_frame_bytes - FRAME_OVERHEAD_BYTES
                self._batch_bytes = min(BATCH_BYTES, self._payload_max)
                self._understood(notice.protocol)
                self._sender.blocks = self._overflow is Overflow.BLOCK or self._sender.stores
                self._sender.welcome(notice.exchange, notice.path, notice.abandon)
            case wire.Relocate():
                self._sender.assign(notice.exchange, notice.path, notice.abandon)
            case wire.Forwarded(path, mark):  # of a Monitor of version 0.1
                self._sender.forwarded(path, mark)
            case wire.Heard(gone=token):
                self._understood(notice.protocol)
                if token:
                    self._sender.abandoned(token, notice.gone_path)

    def _understood(self, protocol: int) -> None:
        """Every subscriber understands this; 0: nobody knows."""
        self.protocol = protocol or self.protocol
        self._sender.bundle_bytes = self._batch_bytes if self.protocol >= wire.PROTOCOL_0_2 else UNBUNDLED

    def health(self) -> PublisherHealth:
        """What is well and what is not."""
        membership, sender = self._membership, self._sender
        ended = str(self._failed or "closed") if self._closed else ""
        place = sender.exchange, sender.path, membership.monitor_silent_seconds()
        return PublisherHealth.of(ended, *place, sender.backlog(), self.dropped, joined=membership.joined)
