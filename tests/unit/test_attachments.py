"""To which Exchanges a subscriber stays attached when its Monitor tells a list. Not covered: frames, tests/integration."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from roq.coordination.locate import GcmClient
from roq.pubsub import subscriber as module
from roq.pubsub.attachments import LISTING_SECONDS
from roq.pubsub.subscriber import Subscriber
from roq.wire import monitor as wire
from roq.wire.assignment import Overflow


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
