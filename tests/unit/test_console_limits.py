"""`roq console` where something goes wrong half-way: bodies and heads that never end, requests at once, a letter that is
replaced, rights that end, streams that fail. Without a cluster.

Not covered: what passes the gate at once, sessions, patterns (test_console.py).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

import msgspec
import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import HTTPConnection, Request
from starlette.responses import Response
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocket

from roq import errors
from roq.console import errors as refusals
from roq.console import gate, hub, publishing, serve, source
from roq.console.answers import answer
from roq.console.app import problem_answer
from roq.console.context import Console, ConsoleSettings, Visit, check_token, until_ended, visit_of
from roq.console.desk import Desk, edition_key
from roq.console.gate import BODY_BYTES_MAX, SIGN_IN_BYTES_MAX, Gate, ListenPolicy, check_request, own_names
from roq.console.hub import LISTENERS_MAX, Hub, LiveListener, Streams
from roq.console.identity import ANYBODY, PERSONS_SESSIONS_MAX, Attempts, Person, Sessions, SignInKind
from roq.console.letters import SHOWN_BYTES_MAX, EditedPayload, shown_payload
from roq.console.outlet import CUT, FAILED, ReaderBuffer, _end
from roq.console.publishing import Publishers
from roq.console.serve import HastyProtocol, check_own
from roq.console.source import ConsoleSource
from roq.console.users import LOOKERS
from roq.console.work_routes import EditedLetter, edited
from roq.errors import DeadlineExceeded, InvalidConfiguration, NotReady, RoqError
from roq.wire import gcm, master
from roq.wire.card import Card, CardRole, Grant, Right
from roq.wire.headers import with_headers
from roq.wire.task import PayloadReference, TaskState
from roq.wire.work_queue import MasterAddress, WorkQueueRecord, WorkQueueSpec

SOON = 10.0


# --- a letter that is replaced ----------------------------------------------------------------------------------------------


def dead(payload: bytes | PayloadReference) -> master.PeekedTask:
    return master.PeekedTask("1-1", payload, TaskState.DEAD, 3, 0, 0, 0, "boom", "")


class AnsweringMaster:
    """Of one work queue, instead of the connections to all of them."""

    def __init__(self, answer: RoqError | master.Counted) -> None:
        self.answer = answer

    async def request(self, endpoint: str, request: msgspec.Struct, expect: type) -> Any:
        if isinstance(self.answer, RoqError):
            raise self.answer
        return self.answer


class AskedDesk(Desk):
    def __init__(self, answer: RoqError | master.Counted) -> None:
        self._source = cast(ConsoleSource, type("Masters", (), {"masters": AnsweringMaster(answer)}))
        record = WorkQueueRecord("jobs", WorkQueueSpec("log", 1, 1), 0, "a", 1, (), 0.0, "t")
        self.info = gcm.WorkQueueInfo(record, (MasterAddress("a", "127.0.0.1", 1, 1, active=True),), True)
        self.name = record.name


async def test_what_was_put_is_told_where_its_letter_may_still_be_there() -> None:
    await AskedDesk(master.Counted(1)).replaced("1-1", "2-7")
    for failed in (NotReady("it moves"), errors.RequestFailed("no")):
        with pytest.raises(DeadlineExceeded, match=r"put as 2-7, but letter 1-1 may still be there: remove it, do not redrive"):
            await AskedDesk(failed).replaced("1-1", "2-7")
    with pytest.raises(DeadlineExceeded, match="it was published, but"):
        await AskedDesk(NotReady()).replaced("1-1", "")
    with pytest.raises(refusals.LetterTaken, match="somebody has redriven or removed letter 1-1 meanwhile"):
        await AskedDesk(master.Counted(0)).replaced("1-1", "2-7")
    with pytest.raises(errors.TaskNotFound, match="no dead letter of jobs any more"):
        await AskedDesk(master.Counted(0)).requeue_one("1-1")


def test_editions_of_a_letter_differ_by_their_headers_too() -> None:
    keys = {edition_key("1-1", payload, headers) for payload in (b"a", b"b") for headers in ({}, {"h": "1"}, {"h": "2"})}
    assert len(keys) == 6
    assert edition_key("1-1", b"a", {"h": "1"}) in keys


def test_an_edited_letter_keeps_what_was_not_edited() -> None:
    whole = dead(with_headers(b"old", {"trace": "t"}))
    new = EditedPayload("new")
    assert edited(EditedLetter(new), whole) == (b"new", {"trace": "t"})
    assert edited(EditedLetter(new, {}), whole) == (b"new", {})
    assert edited(EditedLetter(headers={"trace": "u"}), whole) == (b"old", {"trace": "u"})
    kept = dead(PayloadReference("b", 9, 0, ()))
    assert edited(EditedLetter(new, {"trace": "u"}), kept) == (b"new", {"trace": "u"})
    for lossy in (EditedLetter(new), EditedLetter(headers={})):
        with pytest.raises(InvalidConfiguration, match=r"kept by stores|stores keep"):
            edited(lossy, kept)


@pytest.mark.parametrize("line", [b"a,b\r\n", b"text\n", b"\xff\xfe\x00"])
def test_what_was_shown_of_a_long_letter_does_not_take_its_place(line: bytes) -> None:
    payload = line * SHOWN_BYTES_MAX
    shown = shown_payload(payload)
    with pytest.raises(InvalidConfiguration, match="the rest would be lost"):
        edited(EditedLetter(EditedPayload(shown.text, shown.encoding)), dead(payload))
    if shown.encoding == "text":
        with pytest.raises(InvalidConfiguration, match="the rest would be lost"):  # as a textarea gives it back
            edited(EditedLetter(EditedPayload(shown.text.replace("\r\n", "\n"))), dead(payload))
    assert edited(EditedLetter(EditedPayload("another")), dead(payload)) == (b"another", {})


# --- bodies and heads that never end ----------------------------------------------------------------------------------------


async def take(request: Request) -> Response:
    try:
        return answer({"bytes": len(await request.body())})
    except RoqError as error:
        return problem_answer(request, error)


async def echo(socket: WebSocket) -> None:
    await socket.accept()
    await socket.send_text(await socket.receive_text())
    await socket.close()


@asynccontextmanager
async def served() -> AsyncIterator[int]:
    """The console's gate and its HTTP around an application that reads whatever comes; its port."""
    routes = [Route("/v1/session", take, methods=["POST"]), Route("/v1/queues", take, methods=["POST"])]
    app = Gate(Starlette(routes=[*routes, WebSocketRoute("/v1/ws", echo)]), ListenPolicy(frozenset({"127.0.0.1"})))
    config = uvicorn.Config(
        app, host="127.0.0.1", port=0, http=HastyProtocol, ws="websockets-sansio", lifespan="off", log_config=None
    )
    server = uvicorn.Server(config)
    serving = asyncio.create_task(server.serve())
    try:
        while not server.started:
            await asyncio.sleep(0.01)
        yield server.servers[0].sockets[0].getsockname()[1]
    finally:
        server.should_exit = True
        await serving


Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def begun(port: int, head: str) -> Connection:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(head.replace("\n", "\r\n").encode())
    await writer.drain()
    return reader, writer


def posting(path: str, length: int) -> str:
    return f"POST {path} HTTP/1.1\nHost: 127.0.0.1\nContent-Length: {length}\n\n"


async def status_of(connection: Connection) -> int:
    async with asyncio.timeout(SOON):
        return int((await connection[0].readline()).split()[1])


async def test_a_body_that_does_not_come_ends_its_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "BODY_SECONDS", 0.2)
    async with served() as port:
        slow = await begun(port, posting("/v1/session", 100) + "half")
        assert await status_of(slow) == 408
        quick = await begun(port, posting("/v1/session", 4) + "body")
        assert await status_of(quick) == 200
        for _, writer in (slow, quick):
            writer.close()


async def test_who_signs_in_sends_a_card_and_no_more() -> None:
    check_request(scope("/v1/session", SIGN_IN_BYTES_MAX), LOCAL)
    check_request(scope("/v1/queues", BODY_BYTES_MAX), LOCAL)
    with pytest.raises(refusals.BodyTooLarge):
        check_request(scope("/v1/session", SIGN_IN_BYTES_MAX + 1), LOCAL)
    head = "POST /v1/session HTTP/1.1\nHost: 127.0.0.1\nTransfer-Encoding: chunked\n\n"
    piece = f"{SIGN_IN_BYTES_MAX // 2:x}\n{'x' * (SIGN_IN_BYTES_MAX // 2)}\n"
    async with served() as port:
        chunked = await begun(port, head + piece * 3)  # and it goes on
        assert await status_of(chunked) == 413
        chunked[1].close()


async def test_bodies_are_bounded_together_and_signing_in_is_not_shut_by_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "BODIES_BYTES_MAX", 100_000)
    async with served() as port:
        first = await begun(port, posting("/v1/queues", 90_001) + "x" * 90_000)
        second = await begun(port, posting("/v1/queues", 90_001) + "x" * 90_000)
        assert await status_of(second) == 429
        card = await begun(port, posting("/v1/session", 50_000) + "x" * 50_000)
        assert await status_of(card) == 200
        first[1].write(b"x")
        assert await status_of(first) == 200
        third = await begun(port, posting("/v1/queues", 200) + "x" * 199)  # what has ended counts no more
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                await third[0].readline()
        third[1].write(b"x")
        assert await status_of(third) == 200
        for _, writer in (first, second, card, third):
            writer.close()


async def test_a_connection_that_asks_nothing_is_closed_and_one_that_waits_for_an_answer_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(serve, "HEAD_SECONDS", 0.3)
    upgrade = (
        "Connection: Upgrade\nUpgrade: websocket\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\nSec-WebSocket-Version: 13\n"
    )
    async with served() as port, asyncio.timeout(SOON):
        silent, part = await begun(port, ""), await begun(port, "GET / HTTP/1.1\nHost: 127.")
        again = await begun(port, posting("/v1/session", 0) + "GET / HTT")
        busy = await begun(port, posting("/v1/session", 4) + "bo")
        socket = await begun(port, f"GET /v1/ws HTTP/1.1\nHost: 127.0.0.1\n{upgrade}\n")
        assert await status_of(socket) == 101
        await socket[0].readuntil(b"\r\n\r\n")
        assert (await silent[0].read(), await part[0].read()) == (b"", b"")
        assert (await again[0].read()).startswith(b"HTTP/1.1 200")
        busy[1].write(b"dy")
        assert await status_of(busy) == 200
        socket[1].write(b"\x81\x82\0\0\0\0hi")
        assert await socket[0].readexactly(4) == b"\x81\x02hi"
        for _, writer in (silent, part, again, busy, socket):
            writer.close()


LOCAL = ListenPolicy(own_names("127.0.0.1", 443, ()))


def scope(path: str, length: int, **more: str) -> dict[str, Any]:
    told = {"host": "127.0.0.1:443", "content-length": str(length), **more}
    headers = [(name.encode(), value.encode()) for name, value in told.items()]
    return {"type": "http", "method": "POST", "path": path, "headers": headers, "client": ("127.0.0.1", 1)}


def test_browsers_leave_out_the_port_that_is_understood() -> None:
    check_request(scope("/v1/queues", 0, host="127.0.0.1", origin="https://127.0.0.1"), LOCAL)
    with pytest.raises(refusals.ForeignOrigin):
        check_request(scope("/v1/queues", 0, origin="https://127.0.0.1:8000"), LOCAL)
    with pytest.raises(refusals.UnknownHost):
        check_request(scope("/v1/queues", 0, host="127.0.0.1"), ListenPolicy(own_names("127.0.0.1", 9470, ())))


# --- rights that end, and tokens --------------------------------------------------------------------------------------------


class AskedSource:
    """Of a console whose cluster is asked for nothing but cards. raises: what reading the access list raises."""

    def __init__(self, *, secured: bool = False, raises: Exception | None = None) -> None:
        self.security, self._raises = (object() if secured else None), raises

    async def take_access(self) -> None:
        if self._raises is not None:
            raise self._raises

    def has_changed(self) -> None: ...


def made(kind: SignInKind, source: AskedSource) -> Console:
    asked = cast(ConsoleSource, source)
    settings = ConsoleSettings(True, kind, "", LOOKERS, None, "page")
    sessions, attempts = Sessions(time.monotonic), Attempts(time.monotonic)
    return Console(settings, LOCAL, asked, Hub(asked), Streams(), sessions, attempts, cast(Publishers, None), None)


def connection(console: Console, **headers: str) -> HTTPConnection:
    app = type("App", (), {"state": type("State", (), {"console": console})})
    raw = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    return HTTPConnection({"type": "http", "headers": raw, "app": app})


async def test_a_console_of_a_cluster_that_gets_cards_lets_nobody_in_any_more() -> None:
    asked = AskedSource()
    console = made(SignInKind.NONE, asked)
    visit = await visit_of(connection(console))
    assert visit.person == ANYBODY
    asked.security = object()  # a client found one that is kept for this cluster
    with pytest.raises(refusals.NotSignedIn, match="start the console again"):
        await visit_of(connection(console))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("roq.console.context.RIGHTS_SECONDS", 0.01)
        async with asyncio.timeout(SOON):
            assert "start the console again" in await until_ended(visit)


async def test_a_proxys_bearer_token_is_not_taken_for_ones_own() -> None:
    console = made(SignInKind.NONE, AskedSource())
    page, program = console.sessions.open(ANYBODY), console.sessions.open(ANYBODY)
    foreign = {"authorization": "Bearer of-the-proxy", "cookie": f"page={page}"}
    visit = await visit_of(connection(console, **foreign))
    assert visit.token == page
    check_token(connection(console, **foreign, x_csrf_token=console.sessions.csrf(page)), visit)
    for wrong in (foreign, {"authorization": "Bearer of-the-proxy"}, {}):
        with pytest.raises(refusals.CsrfMissing):
            check_token(connection(console, **wrong), visit)
    check_token(connection(console, authorization=f"Bearer {program}"), visit)


async def test_a_stream_ends_where_its_rights_can_not_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("roq.console.context.RIGHTS_SECONDS", 0.01)
    for error, told in ((errors.FrameError("odd"), "odd"), (ValueError("odd"), FAILED)):
        console, outlet = made(SignInKind.CARD, AskedSource(secured=True, raises=error)), ReaderBuffer()
        async with asyncio.timeout(SOON):
            await _end(Visit(console, ANYBODY, ""), outlet)
            name, data = await outlet.next()
        assert (name, msgspec.json.decode(data)) == (CUT, {"reason": told})


async def test_an_access_list_that_can_not_be_read_is_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    class Leader:
        asked = 0

        async def request(self, *_: Any) -> Any:
            self.asked += 1
            raise errors.RequestFailed("another version")

        def close(self) -> None: ...

    made = ConsoleSource("127.0.0.1:1")
    made.leader.close()
    made.leader = leader = cast(Any, Leader())
    monkeypatch.setattr(source, "process_security", object)
    await made.take_access()
    await made.take_access()
    assert leader.asked == 2
    await made.close()


async def test_a_change_that_is_not_answered_may_have_been_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "CHANGE_SECONDS", 0.01)
    made = ConsoleSource("127.0.0.1:1")
    with pytest.raises(DeadlineExceeded, match="whether it was done is unknown"):
        await made.change(asyncio.sleep(SOON))
    assert made.outage is None
    await made.close()


@pytest.mark.parametrize(("error", "failure"), [(asyncio.CancelledError(), "CancelledError"), (NotReady(), "NotReady")])
def test_what_ended_half_way_is_written_down(
    error: BaseException, failure: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("roq.audit"), "propagate", True)
    visit = Visit(made(SignInKind.NONE, AskedSource()), ANYBODY, "")
    with caplog.at_level(logging.INFO, "roq.audit"), pytest.raises(type(error)), visit.acts(gcm.StopQueue("orders", "1")):
        raise error
    [line] = [cast(Any, one).fields for one in caplog.records if one.name == "roq.audit"]
    assert (line["who"], line["request"], line["failure"]) == ("anybody", "StopQueue", failure)


def test_one_persons_sessions_do_not_sign_others_out() -> None:
    sessions = Sessions(time.monotonic)
    other = sessions.open(Person("other"))
    page, *programs = [sessions.open(ANYBODY) for _ in range(PERSONS_SESSIONS_MAX)]
    assert sessions.person(page)
    programs += [sessions.open(ANYBODY) for _ in range(10)]
    assert sessions.person(page) == ANYBODY  # it was used meanwhile
    assert sum(sessions.person(one) is not None for one in programs) == PERSONS_SESSIONS_MAX - 1
    assert sessions.person(programs[9]) is None
    assert sessions.person(other)


def test_a_console_learns_which_cards_are_revoked_or_does_not_start() -> None:
    check_own(Card("1", "console", CardRole.CLIENT, b"", (Grant(Right.DESCRIBE, "*"),), 0.0, 2000.0))
    with pytest.raises(errors.AccessDenied, match="which cards are revoked: console needs the right `describe`"):
        check_own(Card("1", "console", CardRole.CLIENT, b"", (Grant(Right.ADMIN, "*"),), 0.0, 2000.0))


# --- at once ----------------------------------------------------------------------------------------------------------------


class TimedPublisher:
    """Takes time to close; publishes for ever."""

    def __init__(self) -> None:
        self.closed, self.closing = False, asyncio.Event()

    async def open(self) -> None: ...

    async def publish(self, *_: Any) -> None:
        await asyncio.Event().wait()

    async def close(self) -> None:
        self.closed = True
        self.closing.set()
        await asyncio.sleep(0.05)


class TimedCluster:
    def __init__(self) -> None:
        self.made = list[TimedPublisher]()

    def publisher(self, _: str) -> TimedPublisher:
        self.made.append(TimedPublisher())
        return self.made[-1]


async def test_publishers_that_are_idle_are_closed_once_and_none_that_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = TimedCluster()
    publishers = Publishers(cast(Any, cluster))
    for queue in "ab":
        async with publishers.of(queue):
            pass
    first, second = cluster.made
    monkeypatch.setattr(publishing, "IDLE_SECONDS", 0.0)

    async def use(queue: str) -> None:
        async with publishers.of(queue) as publisher:
            await asyncio.sleep(0.3)
            assert not cast(Any, publisher).closed

    one = asyncio.create_task(use("c"))
    await first.closing.wait()  # one closes what is idle: the first of two
    async with asyncio.timeout(SOON):
        await asyncio.gather(one, use("d"), use("b"))
    assert (first.closed, second.closed, len(cluster.made)) == (True, True, 5)
    await publishers.close()


async def test_who_publishes_where_the_way_is_full_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publishing, "PUBLISH_SECONDS", 0.01)
    cluster = TimedCluster()
    publishers = Publishers(cast(Any, cluster))
    async with asyncio.timeout(SOON):
        with pytest.raises(DeadlineExceeded, match="may be yet"):
            await publishers.publish("a", "t", b"", None, "routed")
    assert cluster.made[0].closed  # the next one has another
    await publishers.close()


class BusySource(AskedSource):
    """beats: how often it was looked at."""

    outage = live = None

    def __init__(self) -> None:
        super().__init__()
        self.beats, self.changed = 0, asyncio.Event()
        self.ending, self.end, self.beaten = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.cluster = self

    async def beat(self) -> None:
        self.beats += 1
        self.beaten.set()
        await asyncio.Event().wait()

    watch = beat

    async def events(self) -> AsyncIterator[Any]:
        try:
            await asyncio.Event().wait()
            yield None
        finally:
            self.ending.set()
            await self.end.wait()


async def test_who_comes_while_the_look_ends_is_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "LINGER_SECONDS", 0.05)
    monkeypatch.setattr(hub, "LOOK_SECONDS", 0.01)
    asked = BusySource()
    looking = Hub(cast(Any, asked))
    looking.want()
    async with asyncio.timeout(SOON):
        await asked.ending.wait()
        asked.beaten.clear()
        looking.add(LiveListener(lambda: None))
        asked.end.set()
        await asked.beaten.wait()
    await looking.close()


def test_streams_are_counted() -> None:
    streams = Streams()
    held = [streams.one() for _ in range(LISTENERS_MAX)]
    for one in held:
        one.__enter__()
    with pytest.raises(refusals.TooManyStreams), streams.one():
        pass
    held[0].__exit__(None, None, None)
    with streams.one():
        assert streams.open == LISTENERS_MAX
