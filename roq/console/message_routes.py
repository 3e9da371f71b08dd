"""Messages for programs without an SDK: publish with POST, subscribe with server-sent events or a WebSocket."""

from __future__ import annotations

import asyncio
import base64
import binascii
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Annotated, Any, Literal

import msgspec
from fastapi import APIRouter, Query
from starlette.requests import HTTPConnection, Request
from starlette.responses import Response
from starlette.websockets import WebSocket, WebSocketDisconnect

from roq.console.answers import (
    QUIET,
    QUIET_SECONDS,
    WRITE_SECONDS,
    EventStream,
    answer,
    body_of,
    event,
    gives,
    place,
    streams,
    takes,
    until_first,
)
from roq.console.context import Reader, Visit, Writer, visit_of
from roq.console.outlet import CUT, PLACE, Piece, StreamRequest, pieces
from roq.console.problem import PROBLEM_TYPE, problem_of
from roq.console.queue_routes import since_of
from roq.errors import InvalidConfiguration, RoqError
from roq.pubsub.publisher import ROUTED, STORED
from roq.pubsub.start import LIVE
from roq.wire import monitor

CUT_CODE = 4000  # of a WebSocket that we close
REASON_BYTES_MAX = 120  # RFC 6455: 123 with the code
TOPICS_MAX = 100
router = APIRouter()
Topics = Annotated[list[str] | None, Query(max_length=TOPICS_MAX)]


class NewMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A message: one of text, base64 and json is its payload (json: as it is written here). confirm: answer when it was handed
    to those who subscribed ("routed"), or is on stable storage, too ("stored", recorded queues)."""

    topic: str
    text: str | None = None
    base64: str | None = None
    json: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    headers: dict[str, str] | None = None
    confirm: Literal["routed", "stored"] = ROUTED  # type: ignore[assignment]

    def payload(self) -> bytes:
        """Raises InvalidConfiguration."""
        if (self.text is not None) + (self.base64 is not None) + (self.json is not msgspec.UNSET) != 1:
            raise InvalidConfiguration('a message has one of "text", "base64" and "json"')
        try:
            if self.text is not None:
                return self.text.encode()
            if self.base64 is not None:
                return base64.b64decode(self.base64, validate=True)
        except (UnicodeEncodeError, binascii.Error, ValueError) as error:
            raise InvalidConfiguration(f"the payload: {error}") from None
        return bytes(self.json) if isinstance(self.json, msgspec.Raw) else b""


class PublishedMessage(msgspec.Struct, frozen=True):
    """level: "routed" or "stored"; copies: stores that have it; position: behind it, for a subscriber's `start`, "" if it is
    not stored."""

    queue: str
    topic: str
    level: str
    copies: int
    position: str


@router.post(
    "/v1/queues/{queue}/messages",
    responses=gives(PublishedMessage, "It was published", 201),
    status_code=201,
    openapi_extra=takes(NewMessage),
)
async def publish(request: Request, visit: Writer, queue: str) -> Response:
    """Publish one message and wait until that is confirmed."""
    told = await body_of(request, NewMessage)
    visit.may_at_monitor(queue, monitor.JoinPublisher(0))
    payload = told.payload()
    await visit.source.view()  # away: told at once
    receipt = await visit.console.publishers.publish(queue, told.topic, payload, told.headers, told.confirm)
    position = str(receipt.position) if receipt.position is not None and receipt.level == STORED else ""
    return answer(PublishedMessage(queue, told.topic, receipt.level, receipt.copies, position), 201)


def _asked(visit: Visit, queue: str, topics: list[str] | None, where: str, start: str, after: str = "") -> StreamRequest:
    """after: Last-Event-ID. Raises AccessDenied, InvalidConfiguration, InvalidPosition."""
    begin = after or start
    if begin == LIVE:
        visit.may_at_monitor(queue, monitor.JoinSubscriber(0, ()))
        return StreamRequest(queue, tuple(topics or ()), where, LIVE)
    visit.may_read(queue)
    return StreamRequest(queue, tuple(topics or ()), where, since_of(begin))


@router.get("/v1/queues/{queue}/messages", response_class=Response, responses=streams("ready, message, lost, cut"))
async def subscribe(
    request: Request, visit: Reader, queue: str, topic: Topics = None, where: str = "", start: str = LIVE
) -> Response:
    """Messages as they come: server-sent events. topic: a filter, repeatable; where: a condition; start: live, or of a recorded
    queue earliest, last, 2h, a time, a position. Of what is read from the past `id` says where to go on (Last-Event-ID). A
    reader that is too slow for live messages is cut."""
    asked = _asked(visit, queue, topic, where, start, request.headers.get("last-event-id", ""))
    await visit.source.read(visit.source.cluster.queue(queue))
    return EventStream(_sent(pieces(visit, asked)), visit.console.streams)


async def _sent(found: AsyncGenerator[Piece, None]) -> AsyncGenerator[bytes, None]:
    """With comments while nothing comes."""
    async with aclosing(found):
        coming: asyncio.Future[Piece] | None = None
        try:
            while True:
                coming = coming or asyncio.ensure_future(anext(found))
                await asyncio.wait({coming}, timeout=QUIET_SECONDS)
                if not coming.done():
                    yield QUIET
                    continue
                name, data = coming.result()
                coming = None
                yield place(data.decode()) if name == PLACE else event(name, data)
                if name == CUT:
                    return
        finally:
            if coming is not None:
                coming.cancel()
                await asyncio.gather(coming, return_exceptions=True)


@router.websocket("/v1/queues/{queue}/messages/ws")
async def subscribe_by_websocket(
    socket: WebSocket, queue: str, topic: Topics = None, where: str = "", start: str = LIVE
) -> None:
    """The same as JSON texts: {"event": "message", …}. Closed with 4000 and the reason when it is cut."""
    try:
        visit = await visit_of(socket)
        asked = _asked(visit, queue, topic, where, start)
        await visit.source.read(visit.source.cluster.queue(queue))
        async with aclosing(pieces(visit, asked)) as found:
            with visit.console.streams.one():
                await _feed(socket, found)
    except RoqError as error:
        await _deny(socket, error)


async def _feed(socket: WebSocket, found: AsyncGenerator[Piece, None]) -> None:
    first = await anext(found)  # raises while it can be answered
    await socket.accept()
    await until_first(_write(socket, first, found), _left(socket))


async def _write(socket: WebSocket, piece: Piece, found: AsyncGenerator[Piece, None]) -> None:
    try:
        while True:
            async with asyncio.timeout(WRITE_SECONDS):
                await socket.send_text(_framed(*piece))
            if piece[0] == CUT:
                reason = str(msgspec.json.decode(piece[1])["reason"])
                await socket.close(CUT_CODE, reason.encode()[:REASON_BYTES_MAX].decode(errors="ignore"))
                return
            piece = await anext(found)
    except (TimeoutError, WebSocketDisconnect):
        return


def _framed(name: str, data: bytes) -> str:
    if name == PLACE:
        return msgspec.json.encode({"event": name, "position": data.decode()}).decode()
    told: dict[str, Any] = msgspec.json.decode(data)
    return msgspec.json.encode({"event": name, **told}).decode()


async def _left(socket: WebSocket) -> None:
    """What it sends means nothing."""
    while (await socket.receive())["type"] != "websocket.disconnect":
        pass


async def _deny(socket: HTTPConnection, error: RoqError) -> None:
    """By an ordinary answer to its handshake."""
    assert isinstance(socket, WebSocket)
    problem = problem_of(error, socket.url.path)
    await socket.send_denial_response(Response(msgspec.json.encode(problem), problem.status, media_type=PROBLEM_TYPE))
