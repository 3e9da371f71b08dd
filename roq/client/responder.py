"""Requests over a queue, the side that answers: `Cluster.serve`. Who asks: requests.py; what travels: roq/wire/requests.py.

A Responder is a subscriber of a topic of its own, which tells the Monitor what it serves, and a publisher of answers. It reads
whatever comes at once, so a slow application never holds the queue back: what is beyond its capacity is refused, and callers go
on to another server. One that leaves says so first, refuses what it has not handed out, and answers what its application has
left open as lost.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import NamedTuple

import msgspec

from roq.coordination.locate import GcmClient
from roq.errors import (
    CallError,
    Closed,
    FrameError,
    IncompatibleVersion,
    InvalidConfiguration,
    ProcessFailed,
    RoqError,
    TemporaryError,
)
from roq.pubsub.publisher import Publisher
from roq.pubsub.subscriber import OPEN_SECONDS, Subscriber
from roq.pubsub.subscription import Message, TopicFilter, check_service, log_lost
from roq.runtime.observe import Counters, Refusals, logger
from roq.runtime.security import new_member_id
from roq.wire import monitor as wire
from roq.wire.headers import Headers
from roq.wire.requests import RequestHead, RequestOutcome, answer_headers, check_filters, request_head, serve_topic

log = logger(__name__)
CAPACITY = 1000  # requests that a server has at a time, waiting or in the hands of its application
HELD_BYTES_MAX = 64 * 1024 * 1024  # of all of them, and the last one may be beyond it
TEXT_BYTES_MAX = 4096  # of what went wrong
REFUSED_MAX = 10_000  # whose callers are still to be told; beyond, they wait until their time is over
FORGET_SECONDS = 1.0  # between two looks, while it is full, whose callers have given up
LEAVING_SECONDS = 0.2  # callers hear that it leaves in milliseconds; what they sent before is refused meanwhile
CLOSE_SECONDS = 5.0


Send = Callable[["Request", RequestHead, RequestOutcome, bytes, Headers | None], Awaitable[None]]


class Request:
    """One request. Answer it once, with `reply` or `fail`."""

    __slots__ = ("_expires", "_head", "_send", "answered", "payload")

    def __init__(self, send: Send, head: RequestHead, payload: bytes) -> None:
        self._send, self._head, self.payload = send, head, payload
        self._expires = time.monotonic() + head.seconds
        self.answered = False

    @property
    def topic(self) -> str:
        """What it is about."""
        return self._head.topic

    @property
    def headers(self) -> dict[str, str | bytes]:
        """What its caller said beside the payload."""
        return self._head.headers

    @property
    def seconds_left(self) -> float:
        """Until its caller gives up, at least; 0 or less: it has."""
        return self._expires - time.monotonic()

    async def reply(self, payload: bytes = b"", headers: Headers | None = None) -> None:
        """Answer it; what comes too late its caller drops. Raises PayloadTooLarge, InvalidHeaders, Closed; CallError if it was
        answered before."""
        await self._answer(RequestOutcome.DONE, payload, headers)

    async def fail(self, reason: str) -> None:
        """Its caller gets RequestFailed with this text. Raises Closed, CallError if it was answered before."""
        await self._answer(RequestOutcome.FAILED, reason.encode(errors="replace")[:TEXT_BYTES_MAX])

    async def _answer(self, outcome: RequestOutcome, payload: bytes, headers: Headers | None = None) -> None:
        if self.answered:
            raise CallError("this request was answered before")
        self.answered = True
        try:
            await self._send(self, self._head, outcome, payload, headers)
        except (RoqError, TypeError):
            self.answered = False
            raise


class _RequestSubscriber(Subscriber):
    """Gets a server's requests, and tells the Monitor what it serves."""

    def __init__(self, client: GcmClient, queue: str, service: wire.Service) -> None:
        identity = new_member_id()
        super().__init__(client, queue, (serve_topic(identity.id),), log_lost)
        self.id, self._membership.identity = identity.id, identity
        self._service, self._serving = service, False

    def join_request(self) -> wire.JoinSubscriber:
        """See membership.Member."""
        return msgspec.structs.replace(super().join_request(), service=self._service)

    def report(self) -> wire.SubscriberReport:
        """See membership.Member."""
        report = super().report()  # may find that it has been too slow
        return msgspec.structs.replace(report, serving=self._serving and self._failure is None)

    async def begin(self, timeout_seconds: float) -> None:
        """Have the Monitor tell callers; returns when it knows. Raises IncompatibleVersion."""
        self._serving = True
        self._membership.report_now()
        try:  # over the same connection, behind the report
            await self._membership.ask(wire.ListResponders(), wire.Responders, timeout_seconds)
        except FrameError as error:
            raise IncompatibleVersion("this queue's Monitor knows no requests: upgrade the cluster") from error
        except TemporaryError as error:  # the next Monitor hears it with the next report
            fields = {"queue": self.queue, "reason": str(error)}
            log.info("the Monitor has not said that it knows of this server", extra={"fields": fields})

    def end(self) -> None:
        """Have the Monitor tell callers."""
        self._serving = False
        self._membership.report_now()


class HeldRequest(NamedTuple):
    """One that a server has. size: bytes of payload and headers as they came; the application may change them."""

    request: Request
    head: RequestHead
    size: int

    @classmethod
    def of(cls, request: Request, head: RequestHead) -> HeldRequest:
        """With its size."""
        return cls(request, head, len(request.payload) + sum(len(name) + len(text) for name, text in head.headers.items()))


class HeldRequests:
    """What a server has: requests that wait for its application, and those that it has handed out and that are not answered.
    Full with `capacity` of them, or HELD_BYTES_MAX. Pure but for the clock in Request.

    Invariant (`check`): `bytes` is what all of them have."""

    def __init__(self, capacity: int) -> None:
        self.bytes = 0
        self._waiting: deque[HeldRequest] = deque()
        self._open: dict[Request, HeldRequest] = {}
        self._capacity = capacity
        self._looked = -math.inf  # monotonic seconds

    def put(self, one: HeldRequest) -> None:
        """It waits."""
        self.bytes += one.size
        self._waiting.append(one)

    def hand_out(self) -> tuple[Request | None, list[RequestHead]]:
        """The one that has waited longest, None if none does; and those before it whose callers have given up."""
        expired = list[RequestHead]()
        while self._waiting:
            one = self._waiting.popleft()
            if one.request.seconds_left > 0:
                self._open[one.request] = one
                return one.request, expired
            self.bytes -= one.size
            expired.append(one.head)
        return None, expired

    def end(self, request: Request) -> None:
        """It was answered, or its caller has given up."""
        if (one := self._open.pop(request, None)) is not None:
            self.bytes -= one.size

    def take_waiting(self) -> list[RequestHead]:
        """None waits any more."""
        waiting, self._waiting = self._waiting, deque()
        self.bytes -= sum(one.size for one in waiting)
        return [one.head for one in waiting]

    def unanswered(self) -> list[RequestHead]:
        """Those that were handed out."""
        return [one.head for one in self._open.values()]

    def is_full(self) -> bool:
        """Whether there is no room for one more."""
        return len(self._waiting) + len(self._open) >= self._capacity or self.bytes >= HELD_BYTES_MAX

    def make_room(self, now: float) -> list[RequestHead]:
        """Forget those whose callers have given up, unless the last look was just now; which of them had waited."""
        if now - self._looked < FORGET_SECONDS:
            return []
        self._looked = now
        for request in [one for one in self._open if one.seconds_left <= 0]:
            self.end(request)
        expired = [one for one in self._waiting if one.request.seconds_left <= 0]
        if expired:
            gone = {one.request for one in expired}
            self._waiting = deque(one for one in self._waiting if one.request not in gone)
            self.bytes -= sum(one.size for one in expired)
        return [one.head for one in expired]

    def check(self) -> None:
        """The invariant; AssertionError if it is broken."""
        held = [*self._waiting, *self._open.values()]
        assert self.bytes == sum(one.size for one in held), "bytes are miscounted"
        assert len({one.request for one in held}) == len(held), "one is held twice"


class Responder:
    """Made by `Cluster.serve`; use as an async context manager, then iterate. Not thread-safe (see roq.blocking)."""

    def __init__(self, client: GcmClient, queue: str, topics: tuple[str, ...], group: str, capacity: int) -> None:
        service = wire.Service(group, topics or (">",))
        check_service(service)
        check_filters(service.topics)
        if capacity < 1:
            raise InvalidConfiguration(f"capacity is at least 1, got {capacity}")
        self.queue = queue
        self.counters = Counters()
        self._publisher = Publisher(client, queue)
        self._subscriber = _RequestSubscriber(client, queue, service)
        self._filter = TopicFilter(service.topics)
        self._held = HeldRequests(capacity)
        self._refused: deque[RequestHead] = deque()  # their callers are to be told
        self._refusing: asyncio.Task[None] | None = None
        self._waiters: list[asyncio.Future[None]] = []
        self._unreadable = Refusals(log, self.counters)
        self._ended: RoqError | None = None
        self._stopped = 0.0  # monotonic seconds
        self._closing = False
        self._reading: asyncio.Task[None] | None = None

    @property
    def id(self) -> int:
        """Callers see it in `Reply.responder`."""
        return self._subscriber.id

    # --- life ---------------------------------------------------------------------------------------------------------

    async def open(self, timeout_seconds: float = OPEN_SECONDS) -> Responder:
        """Join the queue and wait until requests arrive. Raises as Subscriber.open and Publisher.open; Overloaded: the queue
        has as many servers as its callers can be told of."""
        deadline = time.monotonic() + timeout_seconds
        try:
            await self._publisher.open(timeout_seconds)
            await self._subscriber.open(max(0.1, deadline - time.monotonic()))
            self._reading = asyncio.get_running_loop().create_task(self._read(), name=f"requests of {self.queue}")
            await self._subscriber.begin(max(0.1, deadline - time.monotonic()))
        except BaseException:
            await self._leave(0)
            raise
        return self

    async def __aenter__(self) -> Responder:
        return await self.open()

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        await self.close()

    def stop(self) -> None:
        """Take no more requests: iteration ends, and what was not handed out goes to other servers. What was handed out can be
        answered until `close`."""
        if self._stopped:
            return
        self._stopped = time.monotonic()
        if self._reads():
            self._subscriber.end()
        for head in self._held.take_waiting():
            self._refuse(head)
        self._wake()

    def _reads(self) -> bool:
        return self._reading is not None and not self._reading.done()

    async def close(self, timeout_seconds: float = CLOSE_SECONDS) -> None:
        """Leave: stop, and what was handed out and is not answered is lost to its callers at once (ResponderLost). Takes at
        most about `timeout_seconds`."""
        if self._closing:
            return
        self._closing, deadline = True, time.monotonic() + timeout_seconds
        self.stop()
        try:
            async with asyncio.timeout(timeout_seconds):
                await self._give_back()
        except (TimeoutError, RoqError) as error:
            log.info("some callers were not notified", extra={"fields": {"queue": self.queue, "reason": str(error)}})
        finally:
            await self._leave(max(0.0, deadline - time.monotonic()))

    async def _give_back(self) -> None:
        for head in self._held.unanswered():
            await self._tell(head, RequestOutcome.LOST, b"the server left without an answer to the request")
        if self._reads():
            await asyncio.sleep(max(0.0, self._stopped + LEAVING_SECONDS - time.monotonic()))
        if self._refusing is not None:
            await self._refusing

    async def _tell(self, head: RequestHead, outcome: RequestOutcome, payload: bytes = b"") -> None:
        """What can't be told to one caller keeps nothing from the others."""
        try:
            await self._publisher.publish(head.reply_to, payload, answer_headers(head.number, outcome))
        except RoqError as error:
            self._unreadable.note("answer", error)

    async def _leave(self, timeout_seconds: float) -> None:
        """Answers first: with the good-bye callers take what is open for lost."""
        self._closing = True
        for task in (self._reading, self._refusing):
            if task is not None:
                task.cancel()
        try:
            await self._publisher.close(timeout_seconds)
        except RoqError as error:
            log.warning("answers may be lost", extra={"fields": {"queue": self.queue, "reason": str(error)}})
        finally:
            await self._subscriber.close(min(1.0, timeout_seconds))

    # --- requests -----------------------------------------------------------------------------------------------------

    def __aiter__(self) -> Responder:
        return self

    async def __anext__(self) -> Request:
        """The next request. Raises StopAsyncIteration once stopped or closed, otherwise as next_request."""
        if (request := await self.next_request()) is None:
            raise StopAsyncIteration
        return request

    async def next_request(self) -> Request | None:
        """The next one, None once stopped or closed. Raises SlowSubscriber: it was cut off; ProcessFailed: a defect,
        see the log."""
        while not self._stopped:
            request, expired = self._held.hand_out()
            self._refuse_expired(expired)
            if request is not None:
                return request
            if self._ended is not None:
                raise self._ended
            if self._reading is None:
                raise Closed("open this responder first: async with …")
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiters.append(waiter)
            try:
                await waiter
            finally:
                self._waiters.remove(waiter)
        return None

    async def _send(
        self, request: Request, head: RequestHead, outcome: RequestOutcome, payload: bytes, headers: Headers | None = None
    ) -> None:
        """See Request.reply."""
        if self._closing:
            raise Closed("the responder was closed: the request's caller gets ResponderLost")
        await self._publisher.publish(head.reply_to, payload, answer_headers(head.number, outcome, headers))
        self._held.end(request)

    def _refuse_expired(self, heads: list[RequestHead]) -> None:
        """Their callers count them until they hear of it."""
        for head in heads:
            self.counters["expired"] += 1
            self._refuse(head)

    def _refuse(self, head: RequestHead) -> None:
        """Whoever reads never waits for what is sent: each could wait for the other."""
        if len(self._refused) >= REFUSED_MAX:
            self.counters["unanswered"] += 1
            return
        self._refused.append(head._replace(topic="", headers={}))  # what is told needs neither
        if self._refusing is None or self._refusing.done():
            self._refusing = asyncio.get_running_loop().create_task(self._send_refusals(), name=f"refusals of {self.queue}")

    async def _send_refusals(self) -> None:
        try:
            while self._refused:
                await self._tell(self._refused.popleft(), RequestOutcome.REFUSED)
        except Exception as error:  # a defect must not end in silence; likewise in `_read`
            log.exception("defect while requests were refused", extra={"fields": {"queue": self.queue}})
            self._fail(ProcessFailed(f"requests of queue {self.queue!r} could not be refused: {error}"))

    async def _read(self) -> None:
        try:
            while (batch := await self._subscriber.next_batch()) is not None:
                for message in batch:
                    self._take(message)
            self._ended = self._ended or Closed("the queue was left")
            self._wake()
        except RoqError as error:
            self._fail(error)
        except Exception as error:
            log.exception("defect while requests were read", extra={"fields": {"queue": self.queue}})
            self._fail(ProcessFailed(f"requests of queue {self.queue!r} could not be read: {error}"))

    def _fail(self, error: RoqError) -> None:
        """Iteration ends with it once what waits was handed out; callers are told at once that there is nobody here."""
        self._ended = self._ended or error
        self._subscriber.fail(error)
        self._subscriber.end()
        self._wake()

    def _take(self, message: Message) -> None:
        try:
            head = request_head(message.headers)
        except FrameError as error:
            self._unreadable.note("no_request", error)
            return
        self.counters["requests"] += 1
        if self._stopped or not self._filter.wants(head.topic.encode()) or self._is_full():
            self.counters["refused"] += 1
            self._refuse(head)
        else:
            self._held.put(HeldRequest.of(Request(self._send, head, message.payload), head))
            self._wake()

    def _is_full(self) -> bool:
        if self._held.is_full():
            self._refuse_expired(self._held.make_room(time.monotonic()))
        return self._held.is_full()

    def _wake(self) -> None:
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)
