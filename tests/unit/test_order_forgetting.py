"""What the subscriber's order machine forgets, of publishers and topics, and what it says of that. The rest: test_order.py."""

from __future__ import annotations

import pytest

from roq.errors import MessagesLost
from roq.pubsub import order
from roq.pubsub.monitor.watermarks import REPEATS
from roq.pubsub.order import FrameEvent
from roq.pubsub.order_limits import FORGET_SECONDS
from roq.wire.frame import FrameKind, Header
from tests.unit.test_order import PUBLISHER, Subscriber

FORGET = 150.0


def ended(sweep_at: float, unread_at: float = 0.0) -> Subscriber:
    """b3 was the last of a publisher that has ended; it was last heard at 10."""
    one = Subscriber("A")
    one.now = 10.0
    one.opens(1, 0)
    assert [*one.data(1, "a", 1), *one.data(1, "b", 3)] == ["a1", "b3"]
    one.fin(1, 4)
    for now in (sweep_at - 100.0, sweep_at):
        one.machine.sweep(now, FORGET, unread_at)
    one.machine.check()
    return one


@pytest.mark.parametrize(("sweep_at", "unread_at"), [(125.0, 0.0), (1000.0, 900.0)])
def test_while_watermarks_are_repeated_an_ended_publisher_is_known(sweep_at: float, unread_at: float) -> None:
    """The last repeat comes a minute after the first, or still lies unread in a full subscriber."""
    one = ended(sweep_at, unread_at)
    assert one.watermark(1, 4, a=(4, 3), b=(3, 1)) == ["lost 2 of a2..4"]
    assert one.watermark(1, 4, a=(4, 3), b=(3, 1)) == []


def test_what_an_ended_publisher_sent_is_forgotten_but_not_its_end() -> None:
    one = ended(1000.0)
    assert (one.machine.publishers[PUBLISHER].topics, one.machine.known_bytes) == ({}, 0)
    assert one.machine.forgotten_topics == 0, "not for want of room"
    told = one.watermark(1, 4, a=(4, 3))
    assert told == ["lost any of a1..3", "lost 1 of a4..4"], "nothing above the last known number can have come"
    assert one.watermark(1, 4, a=(4, 3)) == []
    assert one.watermark(1, 4, b=(3, 1)) == ["lost any of b1..3"], "it may have come, or not"
    assert one.watermark(1, 4, b=(3, 1)) == []


def test_of_a_publisher_never_known_an_old_watermark_still_tells_nothing() -> None:
    one = ended(1000.0)
    header = Header(1, FrameKind.WATERMARK, 99, 1, 4, 0, 0, 0, 0)
    assert one.take(one.machine.handle(FrameEvent(b"", header, None, {"a": (4, 3)}), 1000.0)) == []
    assert 99 not in one.machine.publishers


def test_a_publisher_that_comes_back_after_it_was_forgotten_goes_on_in_order() -> None:
    one = ended(1000.0)
    one.opens(2, 4, "Z")
    assert one.data(2, "c", 5) == ["c5"], "nothing was sent on it before"
    assert one.data(2, "a", 6, previous=1, index=1) == ["lost any of a1..1", "a6"]
    assert one.data(2, "b", 9, previous=8, index=3) == ["lost any of b1..3", "lost 3 of b4..8", "b9"]
    assert one.data(2, "a", 10, previous=6, index=2) == ["a10"]


def test_a_gap_above_what_was_forgotten_leaves_a_doubt_of_what_is_below() -> None:
    """Of a a2 was lost, which nothing told before a1 was forgotten. Of c nothing was ever sent up to there."""
    for tell in (False, True):
        one = ended(1000.0)
        one.opens(2, 4, "Z")
        if tell:
            seen = one.watermark(2, 6, a=(6, 3), c=(5, 1))
            assert seen == ["lost any of a1..3", "lost 3 of a4..6", "lost 1 of c4..5"]
            assert one.data(2, "a", 7, previous=6, index=3) == ["a7"]
        else:
            assert one.data(2, "a", 7, previous=6, index=3) == ["lost any of a1..3", "lost 3 of a4..6", "a7"]
            assert one.data(2, "c", 8, previous=5, index=1) == ["lost 1 of c4..5", "c8"]


def test_a_replay_of_what_was_forgotten_delivers_nothing_twice() -> None:
    one = ended(1000.0)
    one.opens(2, 0, "A", finished=False)
    assert one.data(2, "a", 1) == ["lost any of a1..1"]
    assert one.data(2, "a", 2, previous=1, index=1) == ["lost 1 of a2..2"], "nothing but b3 was delivered after a1"
    assert one.data(2, "b", 3) == ["lost any of b1..3"]
    assert one.data(2, "a", 4, previous=2, index=2) == ["a4"]


def test_an_old_paths_watermark_tells_what_can_not_come_any_more() -> None:
    """The Monitor repeats it after a move; what a replay may still bring is not lost yet."""
    one = Subscriber("A", "B")
    one.opens(1, 0)
    one.data(1, "a", 1)
    one.opens(2, 3, "Z")
    assert one.watermark(1, 3, a=(3, 3)) == ["lost 2 of a2..3"]
    one.data(2, "b", 4)
    one.opens(3, 0, "B", finished=False)
    assert one.watermark(2, 6, a=(6, 4), b=(4, 1)) == []
    assert one.data(3, "b", 5, previous=4, index=1) == ["b5"]
    assert one.data(3, "a", 6, previous=3, index=3) == ["a6"]


def test_too_many_topics_are_forgotten_the_longest_unheard_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(order, "KNOWN_BYTES_MAX", 40 * (order.TOPIC_BYTES + 1))
    one = Subscriber(wants="".join(map(chr, range(97, 197))))
    for publisher in range(8):
        one.now = publisher
        for number in range(1, 11):
            event = FrameEvent(bytes([96 + number]), Header(1, 0, publisher, 1, number, 0, 0, 1, 0))
            assert len(one.take(one.machine.handle(event, one.now))) == 1
            assert one.machine.known_bytes <= order.KNOWN_BYTES_MAX
    known = [len(each.topics) for each in one.machine.publishers.values()]
    assert (known[0], known[-1]) == (0, 10)
    assert one.machine.forgotten_topics == 80 - sum(known) > 0
    event = FrameEvent(b"a", Header(1, 0, 0, 1, 11, 1, 1, 1, 0))
    assert one.take(one.machine.handle(event, 9.0)) == ["lost any of a1..1", "a11"]


def test_one_publisher_with_too_many_topics_loses_its_oldest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(order, "KNOWN_BYTES_MAX", 40 * (order.TOPIC_BYTES + 1))
    one = Subscriber()
    one.opens(1, 0)
    for number in range(1, 101):
        event = FrameEvent(bytes([number]), Header(1, 0, PUBLISHER, 1, number, 0, 0, 1, 0))
        one.take(one.machine.handle(event, 0.0))
    topics = one.machine.publishers[PUBLISHER].topics
    assert 20 <= len(topics) <= 40
    assert bytes([100]) in topics
    event = FrameEvent(bytes([1]), Header(1, 0, PUBLISHER, 1, 102, 101, 2, 1, 0))
    outputs = one.machine.handle(event, 0.0)
    doubt, lost, _ = outputs
    assert isinstance(doubt, MessagesLost)
    assert isinstance(lost, MessagesLost)
    assert (doubt.first, doubt.last, doubt.count) == (1, lost.first - 1, 0)
    assert lost.last == 101
    assert lost.count >= 1


def test_too_many_publishers_are_forgotten_those_that_ended_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(order, "PUBLISHERS_KEPT", 16)
    one = Subscriber("A")
    one.opens(1, 0)
    one.data(1, "a", 1)
    one.fin(1, 1)
    for publisher in range(100, 140):
        one.now += 1.0
        one.take(one.machine.handle(FrameEvent(b"a", Header(1, 0, publisher, 1, 1, 0, 0, 1, 0)), one.now))
        assert len(one.machine.publishers) <= 16
    assert PUBLISHER not in one.machine.publishers
    assert {139, 138, 137} <= one.machine.publishers.keys()
    assert one.machine.forgotten_publishers == 41 - len(one.machine.publishers)


def test_an_ended_publisher_is_known_for_longer_than_its_watermarks_are_repeated() -> None:
    assert 2 * sum(2**turn for turn in range(REPEATS)) < FORGET_SECONDS
