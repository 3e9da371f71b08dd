"""Which resources /v1/follow takes, what counts as another answer, and when it looks again. Without a cluster.

Not covered: what it tells of a cluster (tests/integration/test_console_follow.py).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, cast

import httpx
import msgspec
import pytest
from starlette.requests import Request

from roq.console import follow_routes
from roq.console.app import build
from roq.console.context import Console, ConsoleSettings, Visit
from roq.console.errors import NotFollowed
from roq.console.follow_routes import Answered, FollowedResource, ResourceFollower, is_another, resource_of, timeless
from roq.console.gate import ListenPolicy
from roq.console.hub import Hub, LiveListener, Streams
from roq.console.identity import ANYBODY, Attempts, Sessions, SignInKind
from roq.console.outlet import FAILED
from roq.console.source import ConsoleSource
from roq.console.users import LOOKERS

SOON = 10.0
NAME, HOST = "/v1/queues/orders", "console.test"
GOOD: Answered = (200, b'{"rows":1}')


@pytest.mark.parametrize(
    ("of", "path", "query", "about"),
    [
        ("/v1/queues?search=a%20b", "/v1/queues", "search=a%20b", ()),
        ("/v1/queues/a%23%3Fb", "/v1/queues/a#?b", "", ("a#?b",)),
        ("/v1/hosts/host-1/logs?process=store", "/v1/hosts/host-1/logs", "process=store", ("host-1",)),
        ("/v1/doctor", "/v1/doctor", "", ()),
    ],
)
def test_a_resource_is_known_by_its_address(of: str, path: str, query: str, about: tuple[str, ...]) -> None:
    assert resource_of(of) == FollowedResource(of, path, query, about)


@pytest.mark.parametrize(
    "of", ["/v1/events", "/v1/follow", "/v1/session", "/v1/queues/x/kpis", "/v1/queues/x/stop", "/v1/é", ""]
)
def test_nothing_else_is_followed(of: str) -> None:
    with pytest.raises(NotFollowed, match="no resource that can be followed"):
        resource_of(of)


@pytest.mark.parametrize(
    ("of", "happened", "concerned"),
    [
        (NAME, {"queue": "orders"}, True),
        (NAME, {"queue": "other", "host": "orders-1"}, False),
        (NAME, {}, False),
        ("/v1/queues", {"queue": "other"}, True),
        ("/v1/zookeeper", {"kind": "leader-changed"}, True),
        ("/v1/hosts/a", {"queue": "orders", "host": "a"}, True),
        ("/v1/work-queues/jobs", {"work_queue": "jobs"}, True),
        ("/v1/work-queues/orders@billing", {"queue": "orders"}, True),
    ],
)
def test_what_happened_concerns_what_it_names(of: str, happened: dict[str, Any], concerned: bool) -> None:
    assert resource_of(of).concerns(happened) == concerned


def test_a_clock_alone_is_no_change() -> None:
    before: Answered = (200, b'{"time":1,"capacity":{"time":1,"disk":5},"decisions":[{"time":1}]}')
    assert is_another(None, before)
    assert not is_another(before, before)
    assert not is_another(before, (200, before[1].replace(b'"time":1,', b'"time":2,')))
    assert is_another(before, (200, before[1].replace(b"5", b"6")))
    assert is_another(before, (200, before[1].replace(b'[{"time":1}]', b'[{"time":2}]')))
    assert is_another(before, (503, before[1]))
    assert timeless([{"time": 1}]) == [{"time": 1}]


class AskedInTurn:
    """Answers, the last one again and again; when each was asked for, and what was told of them."""

    def __init__(self, *answers: Answered) -> None:
        self._answers = list(answers)
        self.asked = list[float]()
        self.told = list[bytes | None]()

    async def ask(self, resource: FollowedResource) -> Answered:
        self.asked.append(time.monotonic())
        return self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]

    async def tell(self, piece: bytes | None) -> None:
        self.told.append(piece)

    async def until(self, met: Callable[[], bool]) -> None:
        async with asyncio.timeout(SOON):
            while not met():
                await asyncio.sleep(0.01)


@asynccontextmanager
async def watched(found: AskedInTurn, every: float) -> AsyncIterator[ResourceFollower]:
    watch = ResourceFollower(resource_of(NAME), found.ask, found.tell, every)
    running = asyncio.create_task(watch.run())
    yield watch
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_it_looks_by_the_clock_and_tells_changes_only() -> None:
    found = AskedInTurn(GOOD, GOOD, (404, b'{"title":"QueueNotFound"}'))
    async with watched(found, 0.2):
        await found.until(lambda: len(found.asked) > 3)
    assert min(later - earlier for earlier, later in zip(found.asked, found.asked[1:], strict=False)) > 0.19
    assert found.told == [
        b'event: answer\ndata: {"of":"/v1/queues/orders","status":200,"body":{"rows":1}}\n\n',
        b'event: answer\ndata: {"of":"/v1/queues/orders","status":404,"body":{"title":"QueueNotFound"}}\n\n',
    ]


async def test_it_looks_soon_after_something_happened_once_for_all_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follow_routes, "SOON_SECONDS", 0.05)
    found = AskedInTurn(GOOD)
    async with watched(found, 60.0) as watch:
        await found.until(lambda: len(found.asked) == 1)
        for _ in range(10):
            watch.look()
        await found.until(lambda: len(found.asked) == 2)
        await asyncio.sleep(0.2)
        assert len(found.asked) == 2


async def test_what_takes_long_is_asked_for_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    found = AskedInTurn(GOOD)
    ask = found.ask

    async def slowly(resource: FollowedResource) -> Answered:
        await asyncio.sleep(0.2)
        return await ask(resource)

    monkeypatch.setattr(found, "ask", slowly)
    async with watched(found, 0.1):
        await found.until(lambda: len(found.asked) == 2)
    assert found.asked[1] - found.asked[0] > 0.9  # four times as long, and the look itself


async def test_whose_session_is_over_is_told_so_at_last() -> None:
    found = AskedInTurn(GOOD, (401, b'{"detail":"the session is over"}'))
    async with watched(found, 0.01):
        await found.until(lambda: len(found.told) == 3)
        await asyncio.sleep(0.05)
    assert found.told[1:] == [b'event: cut\ndata: {"reason":"the session is over"}\n\n', None]
    assert len(found.asked) == 2


# --- streams ----------------------------------------------------------------------------------------------------------------


class QuietHub:
    """Of a cluster in which nothing happens."""

    def __init__(self) -> None:
        self.listeners = set[LiveListener]()

    def add(self, listener: LiveListener) -> None:
        self.listeners.add(listener)

    def remove(self, listener: LiveListener) -> None:
        self.listeners.discard(listener)


def made(hub: QuietHub) -> Console:
    settings = ConsoleSettings(False, SignInKind.NONE, "", LOOKERS, None, "page")
    source = cast(ConsoleSource, type("Source", (), {"security": None}))
    sessions, attempts = Sessions(time.monotonic), Attempts(time.monotonic)
    listening = ListenPolicy(frozenset({HOST}))
    return Console(settings, listening, source, cast(Hub, hub), Streams(), sessions, attempts, cast(Any, None), None)


def requested(app: Callable[..., Any]) -> Request:
    headers = [(b"host", HOST.encode()), (b"cookie", b"page=x")]
    return Request(
        {"type": "http", "method": "GET", "path": "/v1/follow", "headers": headers, "app": app, "query_string": b"of=x"}
    )


async def test_the_console_asks_itself_as_who_listens_would_until_nobody_does() -> None:
    hub, scopes = QuietHub(), list[dict[str, Any]]()

    async def app(scope: dict[str, Any], receive: Any, send: Any) -> None:
        scopes.append(scope)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b'{"rows":', "more_body": True})
        await send({"type": "http.response.body", "body": b"%d}" % len(scopes)})

    visit = Visit(made(hub), ANYBODY, "")
    pieces = follow_routes._followed(requested(app), visit, [resource_of(f"{NAME}?x=y%20z")], 0.05)
    assert b'"body":{"rows":1}' in await anext(pieces)
    assert (scopes[0]["path"], scopes[0]["query_string"], scopes[0]["method"]) == (NAME, b"x=y%20z", "GET")
    assert (b"cookie", b"page=x") in scopes[0]["headers"]
    assert len(hub.listeners) == 1
    await pieces.aclose()
    assert hub.listeners == set()
    count = len(scopes)
    await asyncio.sleep(0.3)
    assert len(scopes) == count


async def test_a_stream_that_fails_says_so() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 401, "headers": []})  # and no body

    hub = QuietHub()
    visit = Visit(made(hub), ANYBODY, "")
    pieces = follow_routes._followed(requested(app), visit, [resource_of(NAME)], 1.0)
    assert msgspec.json.decode((await anext(pieces)).partition(b"data: ")[2]) == {"reason": FAILED}
    with pytest.raises(StopAsyncIteration):
        await anext(pieces)
    assert hub.listeners == set()


async def test_streams_of_resources_count_as_all_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("roq.console.hub.LISTENERS_MAX", 0)
    app = build(made(QuietHub()))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(cast(Any, app)), base_url=f"http://{HOST}") as client:
        refused = await client.get("/v1/follow", params={"of": NAME})
    assert (refused.status_code, refused.json()["title"]) == (429, "TooManyStreams")
