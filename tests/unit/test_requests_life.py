"""Requests: what a server holds, what it does with what is no request of its, and how callers and servers begin and end.

The Monitor is a bare RpcServer that answers as each test says. With all processes: tests/integration/test_requests.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from roq.cli.requests import _run
from roq.client.requests import Caller, Question
from roq.client.responder import FORGET_SECONDS, HELD_BYTES_MAX, HeldRequest, HeldRequests, Request, Responder
from roq.coordination.locate import GcmClient
from roq.errors import (
    Closed,
    InvalidConfiguration,
    NoResponder,
    NotReady,
    Overloaded,
    ProcessFailed,
    QueueConflict,
    RoqError,
    SlowSubscriber,
)
from roq.ids import topic_bytes
from roq.pubsub.membership import ClientMembership
from roq.pubsub.publisher import Publisher
from roq.pubsub.subscription import Batch, Message
from roq.runtime.rpc import RpcServer
from roq.wire import frame as frames
from roq.wire import gcm
from roq.wire import monitor as wire
from roq.wire.assignment import MonitorAddress, Overflow, QueueRecord, QueueSettings
from roq.wire.headers import Headers
from roq.wire.policy import Policy
from roq.wire.requests import FILTERS_BYTES_MAX, RequestHead, RequestOutcome, reply_topic, request_headers, serve_topic

BOUND_SECONDS = 10.0
HOPELESS = "_reply." + "x" * 300  # nothing can be published there

# --- what a server holds ----------------------------------------------------------------------------------------------


async def never(*_: Any) -> None:
    raise AssertionError("nobody answers")


def held(number: int, size: int = 1, seconds: float = 60.0) -> HeldRequest:
    head = RequestHead(number, reply_topic(1), "t", seconds, {})
    return HeldRequest.of(Request(never, head, bytes(size)), head)


def test_requests_are_bounded_in_number_and_in_bytes() -> None:
    many, large = HeldRequests(2), HeldRequests(1000)
    many.put(held(1))
    many.hand_out()
    assert not many.is_full()
    many.put(held(2))
    assert many.is_full()
    for number in range(64):
        assert not large.is_full()
        large.put(held(number, HELD_BYTES_MAX // 64))
    assert large.is_full()
    request, _ = large.hand_out()
    assert large.is_full(), "it is held until it is answered"
    assert request is not None
    large.end(request)
    large.end(request)
    assert not large.is_full()
    large.check()
    assert len(large.take_waiting()) == 63
    assert (large.bytes, large.take_waiting()) == (0, [])


def test_headers_count_as_they_came() -> None:
    head = RequestHead(1, reply_topic(1), "t", 60.0, {"name": b"value"})
    requests, request = HeldRequests(10), Request(never, head, b"payload")
    requests.put(HeldRequest.of(request, head))
    assert requests.bytes == len("name" + "value" + "payload")
    requests.hand_out()
    request.headers["name"] = b"changed by the application"
    requests.end(request)
    assert requests.bytes == 0


def test_one_look_forgets_all_whose_callers_have_given_up() -> None:
    requests = HeldRequests(4)
    short = held(1)
    for one in (short, held(2, 10, seconds=0.0), held(3), held(4, 10, seconds=0.0)):
        requests.put(one)
    assert requests.hand_out() == (short.request, [])
    short.request._expires = 0.0
    assert requests.is_full()
    assert [head.number for head in requests.make_room(100.0)] == [2, 4], "they had waited"
    requests.check()
    assert (requests.unanswered(), requests.bytes) == ([], 1)
    requests.put(held(5, seconds=0.0))
    assert requests.make_room(100.0 + FORGET_SECONDS / 2) == [], "not at every request"
    assert [head.number for head in requests.make_room(100.0 + FORGET_SECONDS)] == [5]


def test_what_expired_is_not_handed_out() -> None:
    requests = HeldRequests(4)
    good = held(2)
    for one in (held(1, seconds=0.0), good):
        requests.put(one)
    request, expired = requests.hand_out()
    assert (request, [head.number for head in expired]) == (good.request, [1])
    assert requests.hand_out() == (None, [])
    requests.check()


# --- what comes to a server -------------------------------------------------------------------------------------------


class Telling(Publisher):
    """Keeps what is published; takes what a publisher takes."""

    told: list[tuple[str, str]]

    async def publish(self, topic: str, payload: bytes, headers: Headers | None = None, confirm: str | None = None) -> None:
        topic_bytes(topic)
        assert headers is not None
        self.told.append((topic, str(headers.get("roq-outcome", "done"))))


def made_responder(*topics: str, capacity: int = 10) -> tuple[Responder, list[tuple[str, str]]]:
    """And what it publishes."""
    responder = Responder(GcmClient("127.0.0.1:1"), "q", topics, "", capacity)
    publisher = Telling(GcmClient("127.0.0.1:1"), "q")
    publisher.told = []
    responder._publisher = publisher
    return responder, publisher.told


def message(responder: Responder, number: int, topic: str = "t", reply_to: str = "") -> Message:
    headers = request_headers(RequestHead(number, reply_to or reply_topic(number), topic, 60.0, {}))
    return Message(serve_topic(responder.id), b"x", 1, number, 0, headers)


async def refused(responder: Responder) -> None:
    """All that were to be told are."""
    assert responder._refusing is not None
    await responder._refusing


async def test_a_server_drops_what_is_no_request_and_refuses_what_it_does_not_serve() -> None:
    """Everybody who may publish can write to its topic."""
    responder, told = made_responder("eu.*")
    for wrong in (
        message(responder, 1, "eu.paris", reply_to=HOPELESS),
        message(responder, 2, "eu.pa\x00ris"),
        message(responder, 3, "eu." + "x" * 200_000),
    ):
        responder._take(wrong)
    responder._take(message(responder, 4, "us.nyc"))
    responder._take(message(responder, 5, "eu.paris"))
    request = await anext(responder)
    assert request.topic == "eu.paris"
    await request.reply(b"120")
    await refused(responder)
    assert sorted(told) == [(reply_topic(4), "refused"), (reply_topic(5), "done")]
    assert (responder.counters["refused_no_request"], responder.counters["requests"]) == (3, 2)


async def test_what_can_not_be_told_to_one_caller_keeps_nothing_from_the_others() -> None:
    responder, told = made_responder()
    for number in (1, 2, 3):
        responder._take(message(responder, number))
        await anext(responder)
    responder._held._open = {
        request: one._replace(head=one.head._replace(reply_to=HOPELESS)) if one.head.number == 1 else one
        for request, one in responder._held._open.items()
    }
    await responder._give_back()
    assert told == [(reply_topic(2), "lost"), (reply_topic(3), "lost")]
    told.clear()
    for reply_to in (HOPELESS, reply_topic(4), HOPELESS, reply_topic(5)):
        responder._refuse(RequestHead(7, reply_to, "t", 60.0, {}))
    await refused(responder)
    assert told == [(reply_topic(4), "refused"), (reply_topic(5), "refused")]
    assert responder.counters["refused_answer"] == 3


async def test_a_full_server_refuses_those_that_waited_too_long() -> None:
    responder, told = made_responder(capacity=2)
    for number in (1, 2):
        responder._take(message(responder, number))
    responder._held._waiting[0].request._expires = 0.0
    responder._take(message(responder, 3))
    await refused(responder)
    assert told == [(reply_topic(1), "refused")]
    assert (responder.counters["expired"], responder.counters["refused"]) == (1, 0)
    assert len(responder._held._waiting) == 2


async def test_one_that_was_cut_off_says_that_it_serves_no_more() -> None:
    responder, _ = made_responder()
    subscriber = responder._subscriber
    subscriber._serving = True
    assert subscriber.report().serving
    subscriber.fail(SlowSubscriber("the loop stood still"))
    assert not subscriber.report().serving


@pytest.mark.parametrize("where", ["read", "refuse"])
async def test_a_defect_ends_the_iteration_with_an_error(where: str) -> None:
    responder, _ = made_responder()
    responder._subscriber._opened = responder._subscriber._serving = True
    responder._take(message(responder, 1))
    responder._reading = asyncio.create_task(responder._read())
    if where == "read":
        header = frames.Header(1, frames.FrameKind.DATA, 1, 1, 1, 0, 0, 1, 0)
        broken: Any = None
        responder._subscriber._buffer.append(Batch(b"t", header, broken, 1))
        responder._subscriber._wake()
    else:
        undone: Any = None
        responder._publisher = undone
        responder._refuse(RequestHead(2, reply_topic(2), "t", 60.0, {}))
    async with asyncio.timeout(BOUND_SECONDS):
        assert (await anext(responder)).topic == "t", "what waited is handed out first"
        with pytest.raises(ProcessFailed, match="could not be"):
            await anext(responder)
    assert not responder._subscriber.report().serving
    await responder._reading


async def test_filters_that_are_long_together_are_refused() -> None:
    with pytest.raises(InvalidConfiguration, match=f"at most {FILTERS_BYTES_MAX}"):
        made_responder(*("t" * 100 + str(number) for number in range(50)))


async def test_a_command_that_can_not_be_run_fails_the_request() -> None:
    told = list[tuple[RequestOutcome, bytes]]()

    async def send(_: Request, head: RequestHead, outcome: RequestOutcome, payload: bytes, headers: Headers | None) -> None:
        told.append((outcome, payload))

    await _run(Request(send, RequestHead(1, reply_topic(1), "t", 60.0, {}), b""), "echo \0")
    assert told == [(RequestOutcome.FAILED, b"the command could not be run: embedded null byte")]


# --- callers begin and end --------------------------------------------------------------------------------------------


class OneQueue(GcmClient):
    """A cluster with one queue, and its Monitor: who joined, who reports; joins wait until `let_in` is set."""

    def __init__(self) -> None:
        super().__init__("127.0.0.1:1")
        self.server = RpcServer("127.0.0.1", 0, wire.Request, self.handle, wire.NoticeToMonitor, self.notice)
        self.let_in, self.waits = asyncio.Event(), asyncio.Event()
        self.publishers_refused = False
        self.term = 1
        self.listed = tuple[wire.ResponderView, ...]()
        self.reports = list[int]()

    async def request(self, body: msgspec.Struct, expect: type[Any], timeout_seconds: float = 15.0) -> Any:
        record = QueueRecord("q", QueueSettings(), True, "h", 1, {}, 0.0)
        return gcm.QueueInfo(record, (MonitorAddress("h", "127.0.0.1", self.server.port, 1),), True, Policy())

    async def handle(self, peer: bytes, request: Any) -> msgspec.Struct:
        match request:
            case wire.JoinSubscriber():
                self.waits.set()
                await self.let_in.wait()
                return wire.SubscriberWelcome(1, 1, (), Overflow.BLOCK, 4096)
            case wire.JoinPublisher() if self.publishers_refused:
                await self.waits.wait()
                raise QueueConflict("no more publishers")
            case wire.JoinPublisher():
                return wire.PublisherWelcome(1, 1, wire.ExchangeAddress("A", "127.0.0.1", 1, 2, 1), Overflow.BLOCK, 4096)
            case wire.ListResponders():
                return wire.Responders(self.term, 7, True, self.listed)
            case _:
                return wire.Left()

    def notice(self, peer: bytes, report: Any) -> None:
        if isinstance(report, wire.SubscriberReport):
            self.reports.append(report.subscriber)


@pytest.fixture
async def cluster() -> AsyncIterator[OneQueue]:
    made = OneQueue()
    yield made
    made.server.close()


async def ended(caller: Caller) -> RoqError:
    """Why."""
    async with asyncio.timeout(BOUND_SECONDS):
        await caller._opened.wait()
        await caller._opening
    assert caller.ended is not None
    return caller.ended


def is_silent(membership: ClientMembership) -> bool:
    return membership._task is None and not membership._monitors and not membership.joined


def joining() -> list[str]:
    """What still opens, or keeps a membership up."""
    names = [getattr(task.get_coro(), "__qualname__", "") for task in asyncio.all_tasks()]
    return [name for name in names if name.endswith((".open", "._open", "._keep_up", ".join"))]


async def test_a_caller_that_could_not_publish_leaves_no_subscriber(cluster: OneQueue) -> None:
    """That would report for ever, and nobody would take its answers."""
    cluster.publishers_refused = True
    caller = Caller(cluster, "q")
    assert isinstance(await ended(caller), QueueConflict)
    assert joining() == []
    assert is_silent(caller._subscriber._membership)
    assert cluster.reports == []


async def test_closing_ends_a_join_that_is_under_way(cluster: OneQueue) -> None:
    caller = Caller(cluster, "q")
    async with asyncio.timeout(BOUND_SECONDS):
        await cluster.waits.wait()
        asked = asyncio.create_task(caller.request(Question("t", b"", None, None, BOUND_SECONDS)))
        await asyncio.sleep(0)
        await caller.close()
        with pytest.raises(Closed):
            await asked
    assert joining() == []
    assert is_silent(caller._subscriber._membership)
    assert is_silent(caller._publisher._membership)
    assert cluster.reports == []


async def test_a_membership_that_was_stopped_does_not_join(cluster: OneQueue) -> None:
    """Whoever closes a publisher or subscriber need not have the task that opens it."""
    membership = made_responder()[0]._subscriber._membership
    membership._gcm = cluster
    under_way = asyncio.create_task(membership.join(BOUND_SECONDS))
    async with asyncio.timeout(BOUND_SECONDS):
        await cluster.waits.wait()
        membership.stop()
        with pytest.raises(Closed, match="'q' was closed"):
            await under_way
    assert is_silent(membership)
    cluster.let_in.set()
    with pytest.raises(Closed):
        await membership.join(BOUND_SECONDS)
    assert is_silent(membership)


async def test_a_defect_while_it_begins_is_told_to_callers(cluster: OneQueue) -> None:
    caller = Caller(cluster, "q")
    undone: Any = None
    caller._subscriber._membership._member = undone
    async with asyncio.timeout(BOUND_SECONDS):
        with pytest.raises(ProcessFailed, match="could not be begun"):
            await caller.request(Question("t", b"", None, None, BOUND_SECONDS))
    await caller._opening


async def joined(cluster: OneQueue) -> Caller:
    """The half of one that hears who serves; there is no Exchange to publish to."""
    cluster.let_in.set()
    caller = Caller(cluster, "q")
    async with asyncio.timeout(BOUND_SECONDS):
        while not caller._subscriber._membership.joined:
            await asyncio.sleep(0.01)
    return caller


def server(id: int) -> wire.ResponderView:
    return wire.ResponderView(id, wire.Service("", (">",)))


async def test_all_are_overloaded_only_after_a_look(cluster: OneQueue) -> None:
    caller = await joined(cluster)
    caller._listed(wire.Responders(1, 1, True, (server(31),)))
    asked = Question("t", b"", None, None, BOUND_SECONDS)
    asked.refused.append(31)
    cluster.listed = (server(31), server(32))
    assert await caller._choose(asked) == 32, "it came meanwhile"
    asked.refused.append(32)
    with pytest.raises(Overloaded, match="2 servers of 't'"):
        await caller._choose(asked)
    await caller.close()


async def test_a_monitor_that_was_replaced_is_not_believed(cluster: OneQueue) -> None:
    caller = await joined(cluster)
    cluster.listed = (server(31),)
    caller._subscriber._membership._term = 2
    with pytest.raises(NotReady, match="replaced meanwhile"):
        await caller._subscriber.ask_who_serves()
    with pytest.raises(NoResponder, match="replaced meanwhile"):
        await caller._choose(Question("t", b"", None, None, BOUND_SECONDS))
    cluster.term = 2
    assert await caller._choose(Question("t", b"", None, None, BOUND_SECONDS)) == 31
    await caller.close()
