"""The Monitor's membership machine: what a Monitor that ends tells its members, and what they tell the one that follows.
Random order of everything: tests/model/test_membership.py.
"""

from __future__ import annotations

import pytest

from roq.errors import NotReady
from roq.pubsub.monitor.records import ExchangeState
from roq.pubsub.monitor.takeover import EXPECTED_SECONDS, LIVING_SECONDS, REJOIN_SECONDS, Takeover
from roq.wire import monitor as wire
from tests.unit.small_queue import Queue, S, T, taken_over


def last_word(queue: Queue) -> wire.ReadyCount | None:
    return queue.machine.standby(queue.now, 3).ready


def comes_back(queue: Queue, subscriber: int, before: wire.ReadyCount | None) -> None:
    queue.did(queue.machine.tick(queue.now))
    request = wire.JoinSubscriber(subscriber, (">",), True, wire.PROTOCOL, before=before)
    queue.machine.join_subscriber(request, b"s%d" % subscriber, queue.now)
    queue.proves("A/1", id=subscriber)


def told_that_it_ends(ready: wire.ReadyCount, *subscribers: int, sought: bool = True) -> Queue:
    """Under the next term, and each of these has come back to it."""
    queue = taken_over("A", sought=sought)
    for one in subscribers:
        comes_back(queue, one, ready)
    return queue


def test_a_monitor_that_ends_tells_how_many_were_ready_and_how_many_of_them_lived() -> None:
    queue = Queue("A")
    for one in (S, T, 23):
        queue.subscribe(one)
    for one in (S, T):
        queue.proves("A/1", id=one)
    queue.tick(LIVING_SECONDS + 0.1, "A")
    queue.proves("A/1", id=S)
    assert last_word(queue) == wire.ReadyCount(3, 1, 2)


def test_one_that_has_just_taken_over_itself_knows_only_how_many_lived() -> None:
    queue = taken_over("A")
    comes_back(queue, S, None)
    assert last_word(queue) == wire.ReadyCount(3, 1, None)


def test_with_the_last_of_them_back_nothing_is_waited_for() -> None:
    queue = told_that_it_ends(wire.ReadyCount(2, 2, 2), S)
    assert queue.state("A") is ExchangeState.STARTING
    comes_back(queue, T, wire.ReadyCount(2, 2, 2))
    assert queue.state("A") is ExchangeState.ACTIVE
    assert (queue.join().path, queue.join(path=4).path) == (1, 5)


@pytest.mark.parametrize("why", ["of another term", "of an unknown number", "here before"])
def test_their_number_may_say_too_little(why: str) -> None:
    ready = wire.ReadyCount(1 if why == "of another term" else 2, 2, None if why == "of an unknown number" else 2)
    queue = told_that_it_ends(ready, S, T, sought=why != "here before")
    assert queue.state("A") is ExchangeState.STARTING, "there may be others"
    queue.tick(REJOIN_SECONDS, "A")
    assert queue.state("A") is ExchangeState.ACTIVE


def test_one_that_did_not_get_to_hear_it_is_waited_for_until_it_has_noticed_the_silence() -> None:
    queue = told_that_it_ends(wire.ReadyCount(2, 2, 2), S)
    while queue.now < 100.0 + EXPECTED_SECONDS - 0.6:
        queue.tick(0.5, "A")
        queue.proves("A/1", id=S)
        assert queue.state("A") is ExchangeState.STARTING, queue.now
    comes_back(queue, T, None)
    queue.tick(0.0, "A")
    assert queue.state("A") is ExchangeState.ACTIVE


def test_a_subscriber_of_0_1_that_comes_is_one_of_those_that_were_counted() -> None:
    """It does not say that it returns, nor what it was told. Publishers of 0.1 remember for 5 s what they have sent: they must
    not be kept waiting for as long by somebody who is back."""
    queue = told_that_it_ends(wire.ReadyCount(2, 2, 2), S)
    queue.machine.join_subscriber(wire.JoinSubscriber(T, (">",)), b"s%d" % T, queue.now)
    queue.proves("A/1", id=T)
    queue.tick(REJOIN_SECONDS, "A")
    assert queue.state("A") is ExchangeState.ACTIVE


def test_one_that_was_silent_by_then_is_not_waited_for_longer_than_without_their_number() -> None:
    queue = told_that_it_ends(wire.ReadyCount(2, 1, 2), S)
    queue.tick(REJOIN_SECONDS, "A")
    assert queue.state("A") is ExchangeState.ACTIVE
    with pytest.raises(NotReady, match="taken over"):
        queue.join()


@pytest.mark.parametrize(("sought", "found"), [(False, 0.0), (True, 0.0), (True, 2.0)])
def test_it_says_when_time_alone_changes_something(sought: bool, found: float) -> None:
    takeover = Takeover(100.0, None, None, sought)
    assert takeover.due(100.0) == (100.0 + (EXPECTED_SECONDS if sought else REJOIN_SECONDS))
    takeover.returns(100.0 + found, None)
    assert takeover.due(100.0) == 100.0 + found + REJOIN_SECONDS
    assert takeover.due(200.0) is None
    assert Takeover().due(100.0) is None
