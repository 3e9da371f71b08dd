"""Requests with correlation ids and deadlines over DEALER/ROUTER; a time-out never bricks the socket (no REQ/REP here).

The server answers every decodable request, with an error if the handler raises; undecodable input is counted, logged and
dropped. The client matches replies by id, drops late ones, and hands notices to a callback.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable, Collection
from enum import StrEnum
from functools import partial
from typing import Any, TypeVar

import msgspec

from roq.errors import (
    AccessDenied,
    CallError,
    Closed,
    DeadlineExceeded,
    FrameError,
    NotLeader,
    RoqError,
    TemporaryError,
    Unavailable,
)
from roq.runtime.audit import acted, refused
from roq.runtime.observe import Counters, Refusals, logger
from roq.runtime.router import Dealer, Router
from roq.runtime.security import members_only
from roq.wire.card import Card, CardRole, denial
from roq.wire.decoding import UNDECODABLE
from roq.wire.envelope import EnvelopeKind, error_of, open_envelope, seal, seal_error
from roq.wire.limits import CONTROL_BYTES_MAX, REQUESTS_IN_FLIGHT, REQUESTS_OF_ONE, UNFINISHED_BYTES_MAX

T = TypeVar("T", bound=msgspec.Struct)
log = logger(__name__)
IDLE_SECONDS = 60.0  # a pooled client that was not used for so long is closed
IDLE_LOOK_SECONDS = 10.0  # between two looks which are idle


async def answered_within(seconds: float, asked: Collection[asyncio.Task[Any]]) -> None:
    """Waits for all of these, so long at most; what has not answered by then is cancelled, and has ended on return."""
    if asked:
        try:
            await asyncio.wait(asked, timeout=seconds)
        finally:
            for task in asked:
                task.cancel()
            await asyncio.wait(asked)


def members_only_for(card: Card, request: object) -> None:
    """Requests between processes of the cluster. Raises AccessDenied."""
    members_only(card)


class RpcServer:
    """A bound Router. `handle(peer, request)` returns the reply or raises a RoqError; `notice(peer, body)` returns nothing.

    `requests` and `notices` are the unions of the conversation. `peer` is opaque bytes, valid for `notify`. `drained()` is
    called after messages that came together. unfinished_max: bytes that may be coming at a time.
    allow(card, request or notice): raises AccessDenied for what a peer may not do, if this process has a card; everything that
    clients ask if it is not given. audited: requests that are written down with who asked for them.
    """

    def __init__(  # noqa: PLR0913 - most by name
        self,
        address: str,
        port: int,
        requests: Any,
        handle: Callable[[bytes, Any], Awaitable[msgspec.Struct]],
        notices: Any = None,
        notice: Callable[[bytes, Any], None] | None = None,
        counters: Counters | None = None,
        *,
        drained: Callable[[], None] | None = None,
        unfinished_max: int = UNFINISHED_BYTES_MAX,
        allow: Callable[[Card, Any], None] = members_only_for,
        audited: Collection[type] = (),
    ) -> None:
        self._allow, self._audited = allow, audited
        self._router = Router(address, port, self._message, drained, unfinished_max)
        self.port = self._router.port
        self.counters = counters if counters is not None else Counters()
        self._refusals = Refusals(log, self.counters)
        self._decode_request = msgspec.msgpack.Decoder(requests).decode
        self._decode_notice = msgspec.msgpack.Decoder(notices).decode if notices is not None else None
        self._handle, self._notice = handle, notice
        self._tasks: dict[asyncio.Task[None], tuple[bytes, int]] = {}
        self._under_way: dict[bytes | str, int] = {}  # requests, by who asked

    def _message(self, parts: list[bytes]) -> None:
        try:
            if len(parts) != 2:
                raise FrameError(f"{len(parts)} parts instead of 2")
            envelope = open_envelope(parts[1])
        except FrameError as error:
            self._refusals.note("undecodable", error)
            return
        if envelope.kind == EnvelopeKind.NOTICE:
            self._take_notice(parts[0], envelope.body)
        elif envelope.kind == EnvelopeKind.REQUEST:
            self._take_request(parts[0], envelope.id, envelope.body)
        else:
            self._refusals.note("unexpected_kind", envelope.kind)

    def _take_notice(self, peer: bytes, body: msgspec.Raw) -> None:
        if self._decode_notice is None or self._notice is None:
            self._refusals.note("unexpected_notice", len(body))
            return
        try:
            notice = self._decode_notice(body)
        except UNDECODABLE as error:
            self._refusals.note("undecodable_notice", error)
            return
        try:
            self.check(peer, notice)
        except AccessDenied as denied:
            self._refusals.note("denied", denied)
            return
        self._notice(peer, notice)

    def card_of(self, peer: bytes) -> Card | None:
        """None without security."""
        return self._router.card_of(peer)

    def check(self, peer: bytes, what: Any) -> None:
        """Raises AccessDenied, also for a peer that is gone."""
        if (security := self._router.security) is not None:
            card = self._router.card_of(peer)
            if card is not None:
                self._allow(card, what)
            elif not security.mixed:
                raise AccessDenied("the connection ended")

    def _take_request(self, peer: bytes, id: int, body: msgspec.Raw) -> None:
        try:
            request = self._decode_request(body)
        except UNDECODABLE as error:
            self._refusals.note("undecodable_request", error)
            self._router.send(peer, seal_error(id, FrameError(f"undecodable request: {error}")))
            return
        card = self.card_of(peer)
        holder = peer if card is None or card.role is not CardRole.CLIENT else card.name
        under_way = self._under_way.get(holder, 0)
        if len(self._tasks) >= REQUESTS_IN_FLIGHT or under_way >= REQUESTS_OF_ONE:
            self.counters["refused_busy"] += 1
            self._router.send(peer, seal_error(id, TemporaryError("too many requests in flight: try again")))
            return
        task = asyncio.get_running_loop().create_task(self._answer(peer, id, request))
        self._tasks[task], self._under_way[holder] = (peer, id), under_way + 1
        task.add_done_callback(partial(self._answered, holder))

    def _answered(self, holder: bytes | str, task: asyncio.Task[None]) -> None:
        del self._tasks[task]
        self._under_way[holder] -= 1
        if not self._under_way[holder]:
            del self._under_way[holder]

    async def _answer(self, peer: bytes, id: int, request: msgspec.Struct) -> None:
        self.counters["requests"] += 1
        card = self.card_of(peer)
        try:
            self.check(peer, request)
            answer = _checked(seal(EnvelopeKind.REPLY, id, await self._handle(peer, request)), request)
            self._acted(card, request)
        except AccessDenied as error:
            self._refusals.note("denied", error)
            refused(card, request, error)
            answer = seal_error(id, error)
        except RoqError as error:
            if not isinstance(error, NotLeader):
                self._acted(card, request, type(error).__name__)
            answer = seal_error(id, error)
        except Exception as error:  # a defect must not take the server down: it is logged whole and told to the caller
            log.exception("request failed", extra={"fields": {"request": type(request).__name__}})
            answer = seal_error(id, RoqError(f"{type(error).__name__}: {error}"))
        self._router.send(peer, answer)

    def _acted(self, card: Card | None, request: msgspec.Struct, failure: str = "") -> None:
        if type(request) in self._audited:
            acted(card, request, failure)

    def notify(self, peer: bytes, body: msgspec.Struct) -> bool:
        """Send a notice; False if the peer is gone."""
        return self._router.send(peer, seal(EnvelopeKind.NOTICE, 0, body))

    def connected(self, peer: bytes) -> bool:
        """Whether it can be told something."""
        return peer in self._router.peers

    def unsent(self) -> int:
        """Bytes of answers that wait for the network."""
        return self._router.unsent()

    def unfinished(self) -> int:
        """Bytes of messages that are coming."""
        return self._router.budget.total

    def close(self) -> None:
        """Refuse what is being answered and close the socket."""
        for task, (peer, id) in self._tasks.items():
            task.cancel()
            self._router.send(peer, seal_error(id, TemporaryError("the process is stopping")))
        self._router.close()


def _checked(answer: bytes, request: msgspec.Struct) -> bytes:
    """Raises CallError: whoever gets it would end the connection, and ask again."""
    if len(answer) > CONTROL_BYTES_MAX:
        name = type(request).__name__
        raise CallError(f"the answer to {name} has {len(answer):,} bytes, a message at most {CONTROL_BYTES_MAX:,}")
    return answer


class OnDisconnect(StrEnum):
    """What becomes of requests under way when the connection ends or is refused. Either way what had not left yet is sent once
    there is a connection again, and what had left is lost with its reply."""

    WAIT = "wait"  # until their deadline: the server may be starting, or be replaced at its endpoint
    FAIL = "fail"  # at once, with Unavailable: the caller can ask somebody else, or the same one again


class RpcClient:
    """A Dealer to one endpoint; it reconnects for ever.

    `replies` and `notices` are the unions of the conversation; `on_notice` must not block.
    """

    def __init__(
        self,
        endpoint: str,
        replies: Any,
        notices: Any = None,
        on_notice: Callable[[Any], None] | None = None,
        counters: Counters | None = None,
        *,
        on_disconnect: OnDisconnect = OnDisconnect.WAIT,
    ) -> None:
        self.endpoint = endpoint
        self.counters = counters if counters is not None else Counters()
        self._refusals = Refusals(log, self.counters)
        self._decode_reply = msgspec.msgpack.Decoder(replies).decode
        self._decode_notice = msgspec.msgpack.Decoder(notices).decode if notices is not None else None
        self._on_notice = on_notice
        self._ids = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._closed = False
        self._on_disconnect = on_disconnect
        self._dealer = Dealer(endpoint, self._message, self._connection_ended)

    @property
    def denied(self) -> str:
        """Why the server did not let us in, if so."""
        return self._dealer.denied

    async def request(self, body: msgspec.Struct, expect: type[T], timeout_seconds: float = 10.0) -> T:
        """The reply, of type `expect`. Raises what the server raised, DeadlineExceeded, or Closed."""
        if self._closed:
            raise Closed(f"the connection to {self.endpoint} is closed")
        id = next(self._ids)
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting[id] = future
        try:
            if not self._dealer.send(seal(EnvelopeKind.REQUEST, id, body)):
                raise TemporaryError(f"the backlog to {self.endpoint} is full")
            async with asyncio.timeout(timeout_seconds):
                reply = await future
        except TimeoutError:
            name = type(body).__name__
            raise DeadlineExceeded(f"no answer to {name} from {self.endpoint} in {timeout_seconds:g} s") from None
        finally:
            self._waiting.pop(id, None)
        if not isinstance(reply, expect):
            raise FrameError(f"{type(reply).__name__} in reply to {type(body).__name__}")
        return reply

    def notify(self, body: msgspec.Struct) -> bool:
        """Send a notice; False if it could not even be queued."""
        return self._dealer.send(seal(EnvelopeKind.NOTICE, 0, body))

    def _message(self, parts: list[bytes]) -> None:
        try:
            envelope = open_envelope(parts[-1])
            if envelope.kind == EnvelopeKind.NOTICE:
                if self._decode_notice is not None and self._on_notice is not None:
                    self._on_notice(self._decode_notice(envelope.body))
                return
            future = self._waiting.get(envelope.id)
            if future is None or future.done():
                self.counters["late_replies"] += 1
            elif envelope.kind == EnvelopeKind.ERROR:
                future.set_exception(error_of(envelope.body))
            else:
                future.set_result(self._decode_reply(envelope.body))
        except (FrameError, *UNDECODABLE) as error:
            self._refusals.note("undecodable", error)

    def _connection_ended(self) -> None:
        if self._dealer.denied:
            self._fail(denial(self._dealer.denied), self._dealer.denied)
        elif self._on_disconnect is OnDisconnect.FAIL:
            self._fail(Unavailable, f"no connection to {self.endpoint}")

    def _fail(self, error: type[RoqError], reason: str) -> None:
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(error(reason))

    def close(self) -> None:
        """Fail what is waiting with Closed and close the socket."""
        if self._closed:
            return
        self._closed = True
        self._fail(Closed, f"the connection to {self.endpoint} was closed")
        self._dealer.close()


class RpcPool:
    """Clients by endpoint, on the running loop: made when they are needed, closed when they were not used for a while. A
    request fails at once when its connection ends, and after `seconds`."""

    def __init__(self, replies: Any, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._replies, self._seconds, self._clock = replies, seconds, clock
        self._clients: dict[str, RpcClient] = {}
        self._used: dict[str, float] = {}
        self._busy: dict[str, int] = {}
        self._looked = clock()

    async def request(self, endpoint: str, body: msgspec.Struct, expect: type[T]) -> T:
        """One request. Raises what the server raised, Unavailable, DeadlineExceeded, Closed."""
        self._close_idle()
        client = self._clients.get(endpoint)
        if client is None:
            client = self._clients[endpoint] = RpcClient(endpoint, self._replies, on_disconnect=OnDisconnect.FAIL)
        self._busy[endpoint] = self._busy.get(endpoint, 0) + 1
        try:
            return await client.request(body, expect, self._seconds)
        finally:
            self._busy[endpoint] -= 1
            self._used[endpoint] = self._clock()

    def _close_idle(self) -> None:
        now = self._clock()
        if now < self._looked + IDLE_LOOK_SECONDS:
            return
        self._looked = now
        for endpoint in [name for name, used in self._used.items() if now - used > IDLE_SECONDS and not self._busy[name]]:
            self._clients.pop(endpoint).close()
            del self._used[endpoint], self._busy[endpoint]

    def close(self) -> None:
        """Requests under way fail with Closed."""
        for client in self._clients.values():
            client.close()
        self._clients.clear()
