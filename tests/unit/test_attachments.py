"""To which Exchanges a subscriber stays attached when its Monitor tells a list. Not covered: frames, tests/integration."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from roq.coordination.locate import GcmClient
from roq.pubsub import subscriber as module
from roq.pubsub.attachments import LISTING_SECONDS, REPLAY_SECONDS, Attachments
from roq.pubsub.order import FrameEvent
from roq.pubsub.subscriber import Subscriber
from roq.wire import monitor as wire
from roq.wire.assignment import Overflow
from roq.wire.frame import FrameKind, Header


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


def watermark(sequence: int, previous: int = 0) -> FrameEvent:
    """As a publisher sends it, or (previous) an Exchange that has dropped."""
    return FrameEvent(
        b"", Header(0, FrameKind.WATERMARK, 7, 3, sequence, previous, 0, 0, 0), None, {"t": (sequence, sequence)}, 100
    )


async def test_what_was_said_before_a_connection_was_made_anew_waits_until_publishers_are_back(
    subscriber: Subscriber, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr("roq.pubsub.links.time", clock)
    all_of_them: Attachments = subscriber._exchanges
    a, b = subscriber._attachments.values()
    assert a.attached()
    assert b.attached()
    assert not all_of_them.defers(a, watermark(1), clock.now), "the first connection of all"
    assert not a.attached()
    assert all_of_them.defers(a, watermark(2), clock.now)
    assert not all_of_them.defers(a, watermark(3, previous=1), clock.now), "nobody replays what was dropped"
    assert not all_of_them.defers(b, watermark(4), clock.now)
    clock.now += REPLAY_SECONDS / 2
    assert list(all_of_them.ripe(clock.now)) == []
    assert not a.attached()
    clock.now += REPLAY_SECONDS / 2
    assert list(all_of_them.ripe(clock.now)) == [], "it broke once more"
    assert all_of_them.defers(a, watermark(5), clock.now)
    clock.now += REPLAY_SECONDS / 2
    assert [event.header.sequence for event in all_of_them.ripe(clock.now)] == [2, 5]
    assert not all_of_them.defers(a, watermark(6), clock.now)


async def test_what_an_exchange_said_that_is_gone_does_not_count_and_what_waits_is_bounded(
    subscriber: Subscriber, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a publisher that is gone as well the Monitor repeats it elsewhere."""
    clock = Clock()
    monkeypatch.setattr("roq.pubsub.links.time", clock)
    monkeypatch.setattr("roq.pubsub.attachments.WAITING_BYTES_MAX", 1)
    a, b = subscriber._attachments.values()
    for one in (a, a, b, b):
        one.attached()
    assert subscriber._exchanges.defers(a, watermark(1), clock.now)
    assert subscriber._exchanges.defers(b, watermark(2), clock.now), "and forgotten: there is no room"
    a.close()
    assert list(subscriber._exchanges.ripe(clock.now)) == []
    assert subscriber._exchanges.defers(b, watermark(3), clock.now), "there is room again"
    assert [event.header.sequence for event in subscriber._exchanges.ripe(clock.now + REPLAY_SECONDS)] == [3]
