"""Fences of producers when a Monitor has taken over, and while what an Exchange took is not stored.

Not covered: what a Monitor and an Exchange refuse (test_producers.py), real Exchanges (tests/integration/test_producers.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec
import pytest

from roq.errors import NotReady
from roq.pubsub.exchange.forwarder import Forwarder
from roq.pubsub.exchange.process import MonitorConnection
from roq.pubsub.exchange.recorder import Recorder
from roq.pubsub.monitor.membership import EXCHANGE_SILENT_SECONDS, Membership
from roq.pubsub.monitor.takeover import NEWCOMER_SECONDS, Takeover
from roq.runtime.observe import Counters
from roq.runtime.rpc import RpcServer
from roq.wire import monitor as wire
from roq.wire.assignment import QueueSettings
from roq.wire.recording import Record, Recording
from tests.unit.small_queue import USE, address

LOCAL = "127.0.0.1"
P, ABOVE = 0x1122334455667788, 1 << 12
BEGUN = 100.0
REPEATS = 50


# --- a Monitor that has taken over --------------------------------------------------------------------------------------


def report(queue: Membership, id: str, now: float) -> None:
    totals = (7, 0, 0, 0, 0.0, 0, 0.0, 0.0, 0, 0)
    queue.exchange_report(wire.ExchangeReport(address(id), "h", *totals, wire.SERVER_PROTOCOL), now, id.encode())
    queue.exchange_heard(address(id).token, now)


@pytest.fixture
def successor() -> Membership:
    """Of a queue that nobody subscribes to; one of its two Exchanges has reported to it."""
    queue = Membership(3, USE, Takeover(BEGUN, {}))
    report(queue, "a", BEGUN + 0.1)
    return queue


def test_a_producer_that_is_in_is_let_in_again_at_once(successor: Membership) -> None:
    """It goes on where it is though Exchanges may not have stored yet what they took of it."""
    joins = wire.JoinPublisher(P, ABOVE + 1, "a", address("a").token, above=ABOVE)
    assert successor.fence(joins, b"p", BEGUN + 0.2) != [], "the lives before are to be fenced all the same"
    assert successor.join_publisher(joins, b"p", BEGUN + 0.2).path == ABOVE + 1


def test_a_producer_that_is_opened_waits_until_every_exchange_may_have_reported(successor: Membership) -> None:
    joins = wire.JoinPublisher(P, above=ABOVE)
    successor.fence(joins, b"p", BEGUN + 0.2)
    successor.fences.done(P, ABOVE, address("a").token)
    with pytest.raises(NotReady, match="have not reported to this Monitor yet"):
        successor.join_publisher(joins, b"p", BEGUN + 0.2)
    report(successor, "b", BEGUN + 1.5)
    late = BEGUN + EXCHANGE_SILENT_SECONDS + 0.1
    assert late < BEGUN + NEWCOMER_SECONDS, "subscribers are known: nothing else is waited for"
    report(successor, "a", late)
    successor.fence(joins, b"p", late)
    with pytest.raises(NotReady, match=r": b$"):
        successor.join_publisher(joins, b"p", late)
    successor.fences.done(P, ABOVE, address("b").token)
    successor.tick(late)
    assert successor.join_publisher(joins, b"p", late).path == ABOVE + 1


# --- an Exchange that is told again and again ---------------------------------------------------------------------------


class SlowTape(Recorder):
    """Of which nothing is stored until the test says so."""

    def __init__(self) -> None:
        recording = Recording(Record(), "t", on=True)
        super().__init__("q", "a", recording, lambda full: None, lambda position: None, Counters())
        self.asked: asyncio.Queue[Callable[[int], None]] = asyncio.Queue()

    def when_stored(self, told: Callable[[int], None]) -> None:
        self.asked.put_nowait(told)

    async def asks(self) -> list[Callable[[int], None]]:
        """Who waits, once there is one: all that came at once."""
        async with asyncio.timeout(5):
            found = [await self.asked.get()]
        while not self.asked.empty():
            found.append(self.asked.get_nowait())
        return found


class FencingMonitor:
    """Of one Exchange. told: by it."""

    def __init__(self) -> None:
        self._server = RpcServer(LOCAL, 0, wire.Request, self._refuse, wire.NoticeToMonitor, self._notice)
        self._peer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self.endpoint = f"tcp://{LOCAL}:{self._server.port}"
        self.told: asyncio.Queue[wire.PathsFenced] = asyncio.Queue()
        self.close = self._server.close

    async def _refuse(self, peer: bytes, request: Any) -> msgspec.Struct:
        raise AssertionError(request)

    def _notice(self, peer: bytes, notice: Any) -> None:
        if isinstance(notice, wire.PathsFenced):
            self.told.put_nowait(notice)
        else:
            self._peer.set_result(peer)

    async def fence(self, *publishers: int) -> None:
        """Tell the Exchange, in this order."""
        async with asyncio.timeout(5):
            peer = await self._peer
        for publisher in publishers:
            self._server.notify(peer, wire.FencePublisher(publisher, ABOVE))

    async def hears(self, count: int) -> list[int]:
        """The next so many publishers that are fenced."""
        async with asyncio.timeout(5):
            return [(await self.told.get()).publisher for _ in range(count)]


@pytest.fixture
async def monitor() -> AsyncIterator[FencingMonitor]:
    made = FencingMonitor()
    yield made
    made.close()


@pytest.fixture
async def forwarder(monitor: FencingMonitor) -> AsyncIterator[Forwarder]:
    """Of an Exchange that has reported there."""
    token = address("a").token
    made = Forwarder(LOCAL, 0, 0, token, QueueSettings(), Counters())
    exchange = MonitorConnection(monitor.endpoint, token, made)
    exchange.notify(wire.ExchangeReport(address("a"), "h", 0, 0, 0, 0, 0.0, 0, 0.0, 0.0, 0, 0))
    yield made
    exchange.close()
    made.stop()


async def test_a_fence_that_is_repeated_is_waited_for_once(monitor: FencingMonitor, forwarder: Forwarder) -> None:
    """The Monitor repeats it whenever the producer tries to join, which may be for minutes while stores are away."""
    tape = forwarder.recorder = SlowTape()
    await monitor.fence(*[P] * REPEATS, P + 1)
    asked = await tape.asks()
    while P + 1 not in forwarder.fences:
        asked += await tape.asks()
    first, last = asked
    last(1)
    first(1)
    assert await monitor.hears(2) == [P + 1, P]
    await monitor.fence(P)
    (again,) = await tape.asks()
    again(1)
    assert await monitor.hears(1) == [P], "what the Monitor did not hear is said again"


async def test_a_fence_is_waited_for_anew_on_another_tape(monitor: FencingMonitor, forwarder: Forwarder) -> None:
    """What waits on one that is not written any more may wait for ever."""
    first = forwarder.recorder = SlowTape()
    await monitor.fence(P)
    await first.asks()
    second = forwarder.recorder = SlowTape()
    await monitor.fence(P)
    (told,) = await second.asks()
    forwarder.recorder = None
    await monitor.fence(P)
    assert await monitor.hears(1) == [P], "nothing is recorded: nothing is waited for"
    told(1)
    assert await monitor.hears(1) == [P]
