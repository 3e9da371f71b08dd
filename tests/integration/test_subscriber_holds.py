"""A planned move, and a new publisher, beside a slow reader: a real subscriber at two real sockets of Exchanges, and a clock
that can be moved on.

Not covered: the Monitor's part of a move (test_moves.py) and the order machine by itself (tests/unit/test_order.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from itertools import count

import pytest
import zmq

from roq.coordination.locate import GcmClient
from roq.errors import MessagesLost
from roq.pubsub import subscriber as module
from roq.pubsub.order_limits import HOLD_SECONDS
from roq.pubsub.subscriber import Subscriber
from roq.wire import monitor as wire
from roq.wire.assignment import Overflow
from roq.wire.frame import FrameKind, PathOpening, encode_control, encode_data
from tests.harness import libzmq

PUBLISHER, OTHER = 7, 8
PAYLOAD = bytes(10_000)
BUFFER, HELD = 40_000, 60_000
MAX_FRAME = 1024 * 1024


class Clock:
    """What the subscriber takes for the time."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def time_ns(self) -> int:
        return int(self.now * 1e9)


def _back() -> zmq.Socket[bytes]:
    made = libzmq.socket(zmq.XPUB)
    made.set(zmq.XPUB_NODROP, 1)
    return made


class Exchange:
    """The back of an Exchange; frames wait here while the subscriber takes none."""

    def __init__(self, id: str) -> None:
        self.socket = _back()
        self.address = wire.ExchangeAddress(id, "127.0.0.1", 1, libzmq.bind(self.socket, "127.0.0.1", 0), 1)
        self._waiting: list[bytes] = []

    def send(self, frame: bytes) -> None:
        self._waiting.append(frame)

    def pump(self) -> int:
        """Send what can be sent; how many frames could not."""
        try:
            while self._waiting:
                self.socket.send(self._waiting[0], zmq.NOBLOCK)
                del self._waiting[0]
        except zmq.Again:
            pass
        return len(self._waiting)


class Scene:
    """Exchanges A and B, and a subscriber that is ready at both and reads only when told."""

    def __init__(self, clock: Clock, overflow: Overflow) -> None:
        self.clock, self.overflow = clock, overflow
        self.lost: list[MessagesLost] = []
        self.a, self.b = Exchange("A"), Exchange("B")
        self.subscriber = Subscriber(GcmClient("127.0.0.1:1"), "q", (), self.lost.append)
        self._numbers = {publisher: count(1) for publisher in (PUBLISHER, OTHER)}

    async def open(self) -> None:
        exchanges = (self.a.address, self.b.address)
        self.subscriber.take(wire.SubscriberWelcome(1, 1, exchanges, self.overflow, MAX_FRAME))

        def proved() -> bool:
            for exchange in (self.a, self.b):
                exchange.send(encode_control(FrameKind.ATTACHED, 1, 0, 0, exchange.address.token, 0))
            return not self.subscriber.health().missing

        await self.until(proved)
        self.subscriber.take(wire.Heard(1, True))

    async def until(self, done: Callable[[], bool]) -> None:
        async with asyncio.timeout(20):
            while not done():
                self.a.pump()
                self.b.pump()
                await asyncio.sleep(0.002)

    async def settle(self) -> None:
        """The loop turns for a while, and the frames that can move do."""
        for _ in range(30):
            self.a.pump()
            self.b.pump()
            await asyncio.sleep(0.002)

    def data(self, exchange: Exchange, path: int, publisher: int = PUBLISHER) -> None:
        number = next(self._numbers[publisher])
        exchange.send(encode_data(b"t", publisher, path, number, number - 1, number - 1, [PAYLOAD], 0))

    def control(self, exchange: Exchange, kind: FrameKind, path: int, last: int, body: PathOpening | None = None) -> None:
        exchange.send(encode_control(kind, PUBLISHER, path, last, body, 0))

    async def read(self, messages: int, publisher: int = PUBLISHER) -> list[int]:
        """The numbers of the next messages of one publisher."""
        numbers: list[int] = []
        async with asyncio.timeout(20):
            while len(numbers) < messages:
                self.a.pump()
                self.b.pump()
                reading = asyncio.ensure_future(self.subscriber.next_batch())
                while not reading.done():
                    self.a.pump()
                    self.b.pump()
                    await asyncio.sleep(0.001)
                numbers += [one.sequence for one in reading.result() or () if one.publisher == publisher]
        return numbers


@pytest.fixture
async def scene(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> AsyncIterator[Scene]:
    """What an Exchange of a queue that drops (parameter Overflow.DROP) drops is what the test does not send."""
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    monkeypatch.setattr(module, "BUFFER_BYTES", BUFFER)
    monkeypatch.setattr(module, "HELD_BYTES", HELD)
    monkeypatch.setattr(module, "HELD_BYTES_MAX", 2 * HELD)
    made = Scene(clock, getattr(request, "param", Overflow.BLOCK))
    await made.open()
    yield made
    await made.subscriber.close(0)
    made.a.socket.close(0)
    made.b.socket.close(0)


@pytest.mark.quick
async def test_a_move_beside_a_reader_that_pauses_loses_nothing(scene: Scene) -> None:
    """The end of the old path lies unread behind a full buffer for longer than a hold lasts."""
    scene.control(scene.a, FrameKind.OPEN, 1, 0, PathOpening("", False))
    scene.control(scene.b, FrameKind.OPEN, 2, 20, PathOpening("A", True))
    await scene.until(lambda: bool(scene.subscriber._order.waiting))
    for _ in range(20):
        scene.data(scene.a, 1)
    scene.control(scene.a, FrameKind.FIN, 1, 20)
    await scene.until(lambda: scene.subscriber.health().buffered_bytes >= BUFFER)
    await scene.settle()
    for _ in range(5):
        scene.data(scene.b, 2)
    for _ in range(8):
        scene.clock.now += 1.0
        scene.subscriber.report()
        await scene.settle()
    assert await scene.read(25) == list(range(1, 26))
    assert scene.lost == []


async def test_held_frames_do_not_keep_the_end_that_releases_them_from_being_read(scene: Scene) -> None:
    """More is held than there is room for: B is not read any more, A is, and with its FIN everything comes in order."""
    scene.control(scene.a, FrameKind.OPEN, 1, 0, PathOpening("", False))
    scene.data(scene.a, 1)
    assert await scene.read(1) == [1]
    next(scene._numbers[PUBLISHER])  # message 2 is still on its way to A
    scene.control(scene.b, FrameKind.OPEN, 2, 2, PathOpening("A", True))
    for _ in range(60):
        scene.data(scene.b, 2)
    await scene.until(lambda: scene.subscriber._order.held_bytes >= HELD)
    await scene.settle()
    assert HELD <= scene.subscriber._order.held_bytes < HELD + 2 * len(PAYLOAD)
    for _ in range(10):
        scene.data(scene.a, 1, OTHER)
    assert await scene.read(10, OTHER) == list(range(1, 11)), "A is read while B is not"
    scene.a.send(encode_data(b"t", PUBLISHER, 1, 2, 1, 1, [PAYLOAD], 0))
    scene.control(scene.a, FrameKind.FIN, 1, 2)
    assert await scene.read(61) == list(range(2, 63))
    assert scene.lost == []


async def test_beyond_the_last_bound_the_wait_ends_and_what_is_missing_is_reported(scene: Scene) -> None:
    """The awaited Exchange itself brings more and more that must be held: its end does not come."""
    scene.control(scene.a, FrameKind.OPEN, 1, 0, PathOpening("", False))
    scene.data(scene.a, 1)
    assert await scene.read(1) == [1]
    next(scene._numbers[PUBLISHER])
    scene.control(scene.b, FrameKind.OPEN, 2, 2, PathOpening("B", True))  # said to have been on B itself
    for _ in range(20):
        scene.data(scene.b, 2)
    assert await scene.read(20) == list(range(3, 23))
    assert [(one.first, one.last, one.count) for one in scene.lost] == [(2, 2, 1)]


async def test_both_exchanges_get_their_turn_while_the_reader_is_slow(scene: Scene) -> None:
    """With room for one frame at a time, who is first must not always be the same."""
    for exchange, publisher in ((scene.a, PUBLISHER), (scene.b, OTHER)):
        for _ in range(60):
            scene.data(exchange, 1, publisher)
    await scene.until(lambda: scene.subscriber.health().buffered_bytes >= BUFFER and len(scene.subscriber._unread) == 2)
    publishers = []
    for _ in range(30):
        batch = await scene.subscriber.next_batch()
        assert batch is not None
        publishers += [one.publisher for one in batch]
        await scene.until(lambda: scene.subscriber.health().buffered_bytes >= BUFFER)
    late = publishers[15:]
    assert min(late.count(PUBLISHER), late.count(OTHER)) >= 3, publishers


async def test_an_end_that_never_comes_is_not_waited_for_longer_than_a_hold(scene: Scene) -> None:
    scene.control(scene.a, FrameKind.OPEN, 1, 0, PathOpening("", False))
    scene.data(scene.a, 1)
    assert await scene.read(1) == [1]
    scene.control(scene.b, FrameKind.OPEN, 2, 1, PathOpening("A", True))
    scene.data(scene.b, 2)
    await scene.until(lambda: bool(scene.subscriber._order.held_bytes))
    await scene.settle()
    scene.clock.now += HOLD_SECONDS
    scene.subscriber.report()
    assert await scene.read(1) == [2]
    assert scene.lost == []


@pytest.mark.parametrize(("scene", "doubted"), [(Overflow.DROP, 1), (Overflow.BLOCK, 0)], indirect=["scene"])
async def test_who_begins_while_the_buffer_is_full_may_have_been_dropped(scene: Scene, doubted: int) -> None:
    """With "drop" its first messages may be gone; with "block" whoever is met in the middle began before our time."""
    known, new = PUBLISHER, OTHER
    scene.data(scene.a, 1, known)
    assert await scene.read(1) == [1]
    await scene.settle()
    scene.clock.now += 1.0
    for _ in range(20):
        scene.data(scene.a, 1, known)
    await scene.until(lambda: bool(scene.subscriber._unread))
    for _ in range(5):
        next(scene._numbers[new])
    scene.clock.now += 1.0
    assert await scene.read(20) == list(range(2, 22))
    await scene.settle()
    assert not scene.subscriber._unread
    scene.data(scene.a, 1, new)
    assert await scene.read(1, new) == [6]
    assert [(one.publisher, one.first, one.last, one.count) for one in scene.lost] == [(new, 1, 5, 0)] * doubted


@pytest.mark.parametrize("scene", [Overflow.DROP], indirect=True)
async def test_who_was_met_in_what_led_to_the_full_buffer_may_have_been_dropped_too(scene: Scene) -> None:
    """Since all was read for the last time, the Exchange may have dropped something at any moment; not before."""
    next(scene._numbers[PUBLISHER])
    scene.data(scene.a, 1)
    assert await scene.read(1) == [2]
    await scene.settle()
    scene.clock.now += 1.0
    for _ in range(3):
        next(scene._numbers[OTHER])
    for _ in range(20):
        scene.data(scene.a, 1, OTHER)
    await scene.until(lambda: bool(scene.subscriber._unread))
    assert await scene.read(20, OTHER) == list(range(4, 24))
    assert [(one.publisher, one.first, one.last, one.count) for one in scene.lost] == [(OTHER, 1, 3, 0)]
