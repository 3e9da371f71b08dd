"""To which Exchanges a subscriber stays attached when its Monitor tells a list. Not covered: frames, tests/integration."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from roq.coordination.locate import GcmClient
from roq.errors import MessagesLost
from roq.pubsub import subscriber as module
from roq.pubsub.attachments import LISTING_SECONDS
from roq.pubsub.deferred import REPLAY_SECONDS
from roq.pubsub.subscriber import Subscriber
from roq.pubsub.subscription import Batch
from roq.wire import monitor as wire
from roq.wire.assignment import Overflow
from roq.wire.frame import FrameKind, encode_control
from tests.unit.past_rig import P, data, opens


class Clock:
    """What the subscriber takes for the time."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def time_ns(self) -> int:
        return int(self.now * 1e9)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(module, "time", made)
    return made


@pytest.fixture
async def subscriber(clock: Clock) -> AsyncIterator[Subscriber]:
    made = Subscriber(GcmClient("127.0.0.1:1"), "q", (), lambda gap: None)
    made.take(welcome("A/1", "B/1"))
    yield made
    await made.close(0)


def exchanges(*tokens: str) -> tuple[wire.ExchangeAddress, ...]:
    parts = (token.split("/") for token in tokens)
    return tuple(wire.ExchangeAddress(id, "127.0.0.1", 1, 1, int(life)) for id, life in parts)


def welcome(*tokens: str) -> wire.SubscriberWelcome:
    return wire.SubscriberWelcome(1, 1, exchanges(*tokens), Overflow.BLOCK, 4096)


def told(*tokens: str) -> wire.Exchanges:
    return wire.Exchanges(1, 2, exchanges(*tokens))


def attached(subscriber: Subscriber) -> set[str]:
    return set(subscriber.health().missing)  # by id: none of them answers


async def test_who_is_not_listed_any_more_is_left(subscriber: Subscriber) -> None:
    subscriber.take(told("B/1"))
    assert attached(subscriber) == {"B"}


async def test_a_monitor_that_has_just_begun_need_not_know_them_all(subscriber: Subscriber, clock: Clock) -> None:
    """What flows through them would be lost."""
    links = {one.exchange.token: one.link for one in subscriber._attachments.values()}
    subscriber.take(welcome())
    assert attached(subscriber) == {"A", "B"}
    subscriber.take(told("B/1"))
    assert {one.exchange.token: one.link for one in subscriber._attachments.values()} == links, "the same connections"
    clock.now += LISTING_SECONDS
    subscriber.report()
    assert attached(subscriber) == {"B"}


async def test_another_life_of_an_exchange_ends_the_old_one_at_once(subscriber: Subscriber) -> None:
    subscriber.take(welcome("A/2"))
    assert set(subscriber._attachments) == {exchange.token for exchange in exchanges("A/2", "B/1")}


async def test_what_the_monitor_tells_during_the_close_attaches_to_nothing(subscriber: Subscriber) -> None:
    await subscriber.close(0)
    subscriber.take(welcome("A/1", "C/1"))
    assert subscriber._attachments == {}


def come(subscriber: Subscriber, id: str, *frames: bytes) -> None:
    """Over the connection to this Exchange."""
    (attachment,) = [one for one in subscriber._attachments.values() if one.exchange.id == id]
    attachment.frames.extend(frames)
    subscriber._read(attachment)


def said(kind: FrameKind, id: str) -> bytes:
    (exchange,) = exchanges(f"{id}/1")
    return encode_control(kind, 0, 0, 0, exchange.token, 0)


def watermark(path: int, last: int) -> bytes:
    return encode_control(FrameKind.WATERMARK, P, path, last, {"t": (last, last)}, 0)


def lost(subscriber: Subscriber) -> list[tuple[int, int]]:
    """Ranges that were reported so far."""
    return [(one.first, one.last) for one in subscriber._buffer if isinstance(one, MessagesLost)]


def cut_off(subscriber: Subscriber, clock: Clock) -> None:
    """It had message 1 of P through A, when its connection broke; now it is back, and the Monitor says that there were 3."""
    subscriber._started = clock.now
    come(subscriber, "A", said(FrameKind.ATTACHED, "A"), opens(P, 1, 0), data(P, 1, 1))
    come(subscriber, "A", said(FrameKind.ATTACHED, "A"), watermark(1, 3))
    assert lost(subscriber) == []


async def test_what_was_lost_on_a_broken_connection_is_reported_when_it_does_not_come_again(
    subscriber: Subscriber, clock: Clock
) -> None:
    cut_off(subscriber, clock)
    clock.now += REPLAY_SECONDS - 1.0
    subscriber.report()
    assert lost(subscriber) == []
    clock.now += 1.0
    subscriber.report()
    assert lost(subscriber) == [(2, 3)]


async def test_what_its_publisher_replays_is_not_reported(subscriber: Subscriber, clock: Clock) -> None:
    cut_off(subscriber, clock)
    come(subscriber, "A", opens(P, 2, 0), data(P, 2, 1), data(P, 2, 2), data(P, 2, 3))
    clock.now += REPLAY_SECONDS
    subscriber.report()
    assert lost(subscriber) == []
    assert sum(one.header.count for one in subscriber._buffer if isinstance(one, Batch)) == 3


async def test_where_the_exchange_has_retired_it_is_reported_at_once(subscriber: Subscriber, clock: Clock) -> None:
    cut_off(subscriber, clock)
    come(subscriber, "A", said(FrameKind.RETIRE, "A"))
    subscriber.report()
    assert lost(subscriber) == [(2, 3)]


async def test_where_the_exchange_is_gone_it_is_reported_all_the_same(subscriber: Subscriber, clock: Clock) -> None:
    cut_off(subscriber, clock)
    subscriber.take(told("B/1"))
    clock.now += REPLAY_SECONDS
    subscriber.report()
    assert lost(subscriber) == [(2, 3)]


async def test_a_first_connection_says_at_once_what_is_missing(subscriber: Subscriber, clock: Clock) -> None:
    subscriber._started = clock.now
    come(subscriber, "A", said(FrameKind.ATTACHED, "A"), opens(P, 1, 0), data(P, 1, 1), watermark(1, 3))
    assert lost(subscriber) == [(2, 3)]
