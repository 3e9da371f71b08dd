"""Resources of the REST API as they change: /v1/follow. Each is asked for inside the application, with the headers of the
stream's own request: rights are checked at each look, and whatever answers GET with JSON can be followed.

    at once      each is answered
    at times     `every` seconds after the answer before, PAUSE_SHARE times as long as that took if this is more
    soon         when something happened (hub.py) to what the resource is about; of a list, whatever happened

It is told when its answer is another one, a problem like any. The next look waits until that was taken: nothing piles up. Not
covered: what happened itself (/v1/events), numbers of a queue that come each second (/v1/queues/{queue}/kpis).
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, MutableMapping
from typing import Annotated, Any, NamedTuple
from urllib.parse import unquote

import msgspec
from fastapi import APIRouter, Query
from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match

from roq.console import cluster_routes, queue_routes, work_routes
from roq.console.answers import JSON_TYPE, EventStream, event, streams, with_quiet
from roq.console.context import Reader, Visit, still_good
from roq.console.errors import NotFollowed
from roq.console.hub import LiveListener
from roq.console.outlet import CUT, FAILED
from roq.console.source import PAUSE_SHARE
from roq.ids import GROUP_MARK
from roq.runtime.observe import logger

FOLLOWED_MAX = 4
EVERY_SECONDS, EVERY_SECONDS_LEAST, EVERY_SECONDS_MOST = 2.0, 1.0, 60.0
SOON_SECONDS = 0.1  # between two looks, whatever happens
MODULES = (cluster_routes, queue_routes, work_routes)  # GET /v1/session begins a session, messages are streams
OF_THE_STREAM = ("type", "asgi", "http_version", "scheme", "server", "client", "root_path", "headers")  # of its scope
ANSWER = "answer"
log = logger(__name__)
router = APIRouter()
Answered = tuple[int, bytes]  # status, JSON


class FollowedAnswer(msgspec.Struct, frozen=True):
    """of: the resource, as it was named. status: of HTTP; body: what GET answers, from 400 on a Problem."""

    of: str
    status: int
    body: msgspec.Raw


class FollowedResource(NamedTuple):
    """about: names in its path: of a queue, a host, …; none: it is a list, or the cluster's."""

    of: str
    path: str
    query: str
    about: tuple[str, ...]

    def concerns(self, happened: dict[str, Any]) -> bool:
        """Whether it may be another one after this event of the cluster."""
        names = {happened.get(kind) for kind in ("queue", "work_queue", "host")}
        return not self.about or any(one in names or one.partition(GROUP_MARK)[0] in names for one in self.about)


def resource_of(of: str) -> FollowedResource:
    """What is named so. Raises NotFollowed."""
    path, _, query = of.partition("?")
    scope = {"type": "http", "method": "GET", "path": unquote(path), "root_path": ""}
    for route in (one for module in MODULES for one in module.router.routes):
        fits, found = route.matches(scope)
        if fits is Match.FULL and isinstance(route, APIRoute) and of.isascii():
            if JSON_TYPE not in route.responses.get(200, {}).get("content", {}):
                break
            return FollowedResource(of, scope["path"], query, tuple(found["path_params"].values()))
    raise NotFollowed(f"{of!r} is no resource that can be followed")


def timeless(body: Any) -> Any:
    """As it would be at no particular moment: without `time` of the resource and its parts. Rows of its lists keep theirs."""
    return {name: timeless(part) for name, part in body.items() if name != "time"} if isinstance(body, dict) else body


def is_another(before: Answered | None, now: Answered) -> bool:
    """Whether it is told."""
    if before is None or before[0] != now[0]:
        return True
    return before[1] != now[1] and timeless(msgspec.json.decode(before[1])) != timeless(msgspec.json.decode(now[1]))


async def asked(request: Request, resource: FollowedResource) -> Answered:
    """What who sent this request is answered, when they ask for the resource now."""
    status, parts = 500, list[bytes]()

    async def receive() -> MutableMapping[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: MutableMapping[str, Any]) -> None:
        nonlocal status
        status = message.get("status", status)
        parts.append(message.get("body", b""))

    scope = {
        **{name: request.scope[name] for name in OF_THE_STREAM if name in request.scope},
        "method": "GET",
        "path": resource.path,
        "raw_path": resource.of.partition("?")[0].encode(),
        "query_string": resource.query.encode(),
    }
    try:
        await request.app(scope, receive, send)
    except Exception:  # it was answered before it was raised
        log.exception("a resource that is followed failed", extra={"fields": {"path": resource.path}})
    return status, b"".join(parts)


class ResourceFollower:
    """One resource of a stream. ask: gives its answer; tell: what is sent, None ends the stream."""

    def __init__(
        self,
        resource: FollowedResource,
        ask: Callable[[FollowedResource], Awaitable[Answered]],
        tell: Callable[[bytes | None], Awaitable[None]],
        every: float,
    ) -> None:
        self.resource = resource
        self._ask, self._tell, self._every = ask, tell, every
        self._happened = asyncio.Event()

    def look(self) -> None:
        """Soon."""
        self._happened.set()

    async def run(self) -> None:
        """Until nobody is signed in any more, which is told."""
        before: Answered | None = None
        while True:
            self._happened.clear()
            begun = time.monotonic()
            now = await self._ask(self.resource)
            took = time.monotonic() - begun
            if now[0] == 401:
                await self._tell(cut(msgspec.json.decode(now[1])["detail"]))
                await self._tell(None)
                return
            if is_another(before, now):
                before = now
                told = FollowedAnswer(self.resource.of, now[0], msgspec.Raw(now[1]))
                await self._tell(event(ANSWER, msgspec.json.encode(told)))
            least = max(SOON_SECONDS, took)
            await asyncio.sleep(least)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(self._every, PAUSE_SHARE * took) - least):
                    await self._happened.wait()


def cut(reason: str) -> bytes:
    """The last event of a stream."""
    return event(CUT, msgspec.json.encode({"reason": reason}))


@router.get("/v1/follow", response_class=Response, responses=streams("answer, cut"))
async def follow(
    request: Request,
    visit: Reader,
    of: Annotated[list[str], Query(min_length=1, max_length=FOLLOWED_MAX)],
    every: Annotated[float, Query(ge=EVERY_SECONDS_LEAST, le=EVERY_SECONDS_MOST)] = EVERY_SECONDS,
) -> Response:
    """What GET answers, at once and whenever it is another answer: server-sent events. of: a resource with JSON as
    `/v1/queues?state=problem`, percent-encoded as in an address, repeatable; every: seconds between two looks, where nothing
    happens that is known to change it."""
    resources = [resource_of(one) for one in of]
    return EventStream(_followed(request, visit, resources, every), visit.console.streams)


async def _followed(
    request: Request, visit: Visit, resources: Iterable[FollowedResource], every: float
) -> AsyncGenerator[bytes, None]:
    line: asyncio.Queue[bytes | None] = asyncio.Queue(1)
    watches = [ResourceFollower(one, lambda found: asked(request, found), line.put, every) for one in resources]
    listener = LiveListener(lambda: still_good(visit.console, visit.person, visit.token))

    async def guarded(work: Callable[[], Awaitable[None]]) -> None:
        try:
            await work()
        except Exception:
            log.exception(
                "a stream of resources failed", extra={"fields": {"paths": [watch.resource.path for watch in watches]}}
            )
            await line.put(cut(FAILED))
            await line.put(None)

    works = [lambda: _hear(listener, watches, line), *(watch.run for watch in watches)]
    visit.console.hub.add(listener)
    tasks = [asyncio.create_task(guarded(work)) for work in works]
    try:
        async for piece in with_quiet(line):
            yield piece
    finally:
        visit.console.hub.remove(listener)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _hear(listener: LiveListener, watches: Iterable[ResourceFollower], line: asyncio.Queue[bytes | None]) -> None:
    """What the hub tells, until it cuts the stream."""
    while True:
        name, data = await listener.line.get()
        if name == CUT:
            await line.put(event(name, data))
            await line.put(None)
            return
        happened = msgspec.json.decode(data) if name == "cluster" else {}
        for watch in watches:
            if name in ("unreachable", "reachable") or (name == "cluster" and watch.resource.concerns(happened)):
                watch.look()
