"""Bodies in and out: structs as JSON, server-sent events; and what OpenAPI says of them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Coroutine
from typing import Any, TypeVar, get_args, get_origin

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from roq.console.errors import BodyTooLarge, BodyTooSlow, TooManyBodies, WrongContentType
from roq.console.hub import Streams
from roq.console.problem import PROBLEM_TYPE
from roq.errors import InvalidConfiguration
from roq.runtime.observe import logger

S = TypeVar("S", bound=msgspec.Struct)
JSON_TYPE, STREAM_TYPE = "application/json", "text/event-stream"
REFERENCE = "#/components/schemas/{name}"
WRITE_SECONDS = 20.0  # for the next piece of a stream to be taken: who needs longer is gone or stands still
QUIET_SECONDS = 10.0  # of a stream, then a comment: proxies and browsers see that it lives
RETRY = b"retry: 2000\n\n"
QUIET = b": \n\n"
log = logger(__name__)


def answer(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """A struct, or a list of them."""
    return Response(msgspec.json.encode(value), status, headers, JSON_TYPE)


def done() -> Response:
    """There is nothing to say."""
    return Response(status_code=204)


async def body_of(request: Request, kind: type[S]) -> S:
    """What was sent. Raises WrongContentType, InvalidConfiguration, BodyTooLarge."""
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != JSON_TYPE:
        raise WrongContentType
    try:
        return msgspec.json.decode(await request.body(), type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidConfiguration(f"the body of the request: {error}") from None


# --- server-sent events ---------------------------------------------------------------------------------------------------


def event(name: str, data: bytes) -> bytes:
    """data: JSON, so without a line break."""
    return b"event: " + name.encode() + b"\ndata: " + data + b"\n\n"


def place(id: str) -> bytes:
    """From where the stream is asked for again: Last-Event-ID."""
    return b"id: " + id.encode() + b"\n\n"


class EventStream(Response):
    """Pieces of text/event-stream as they come, until there are no more, or whoever reads has gone or stands still. What is
    raised before the first one is an answer like that of any request. streams: among which it counts."""

    def __init__(self, pieces: AsyncGenerator[bytes, None], streams: Streams) -> None:
        super().__init__(None, 200, {"x-accel-buffering": "no"}, STREAM_TYPE)
        del self.headers["content-length"]
        self._pieces, self._streams = pieces, streams

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        async with contextlib.aclosing(self._pieces):
            with self._streams.one():
                await until_first(self._write(send), _gone(receive))

    async def _write(self, send: Send) -> None:
        first = await anext(self._pieces)
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        try:
            await _send(send, RETRY + first)
            async for piece in self._pieces:
                await _send(send, piece)
        except TimeoutError:
            log.info("a stream was cut: nobody reads it")
            return  # the connection is closed behind it
        await send({"type": "http.response.body", "body": b""})


async def _send(send: Send, piece: bytes) -> None:
    async with asyncio.timeout(WRITE_SECONDS):
        await send({"type": "http.response.body", "body": piece, "more_body": True})


async def until_first(*work: Coroutine[Any, Any, None]) -> None:
    """Run these together until one of them ends; the others are cancelled. Raises what it ended with."""
    tasks = {asyncio.create_task(one) for one in work}
    try:
        ended, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in ended:
        task.result()


async def _gone(receive: Receive) -> None:
    with contextlib.suppress(BodyTooLarge, BodyTooSlow, TooManyBodies):  # nobody asked for a body
        while (await receive())["type"] != "http.disconnect":
            pass


async def with_quiet(pieces: asyncio.Queue[bytes | None]) -> AsyncGenerator[bytes, None]:
    """What is put there, until None; comments while there is nothing."""
    while True:
        try:
            async with asyncio.timeout(QUIET_SECONDS):
                piece = await pieces.get()
        except TimeoutError:
            yield QUIET
            continue
        if piece is None:
            return
        yield piece


# --- OpenAPI --------------------------------------------------------------------------------------------------------------


def _schema(kind: Any) -> dict[str, Any]:
    if get_origin(kind) is list:
        return {"type": "array", "items": _schema(get_args(kind)[0])}
    return {"$ref": REFERENCE.format(name=kind.__name__)}


def gives(kind: Any, what: str, status: int = 200) -> dict[int | str, dict[str, Any]]:
    """`responses=` of a route. kind: a struct, or list of one; None: nothing, or no JSON."""
    content = {} if kind is None else {"content": {JSON_TYPE: {"schema": _schema(kind)}}}
    return {status: {"description": what, **content}, "default": _wrong()}


def _wrong() -> dict[str, Any]:
    content = {PROBLEM_TYPE: {"schema": {"$ref": REFERENCE.format(name="Problem")}}}
    return {"description": "What went wrong", "content": content}


def streams(what: str) -> dict[int | str, dict[str, Any]]:
    """The same of server-sent events."""
    return {200: {"description": what, "content": {STREAM_TYPE: {"schema": {"type": "string"}}}}, "default": _wrong()}


def takes(kind: type[msgspec.Struct]) -> dict[str, Any]:
    """`openapi_extra=` of a route."""
    return {"requestBody": {"required": True, "content": {JSON_TYPE: {"schema": _schema(kind)}}}}
