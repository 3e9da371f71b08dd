"""Doubts of the subscriber's order machine: what it says after a time in which messages may have passed it by.

The rest of it: test_order.py. Every interleaving: tests/model/test_moves.py.
"""

from __future__ import annotations

import pytest

from roq.pubsub import order
from roq.pubsub.order import FrameEvent, OrderMachine
from roq.pubsub.order_limits import FORGET_SECONDS
from roq.wire.frame import FrameKind, Header, PathOpening
from tests.unit.test_order import Subscriber


def passed_by(well_at: float = 0.0) -> Subscriber:
    """At 10 it learns that messages may have passed it by."""
    one = Subscriber("A", "B", wants="ab")
    one.now = 10.0
    assert one.take(one.machine.doubt(well_at, one.now)) == []
    return one


def test_of_a_publisher_first_met_after_a_gap_nobody_knows_what_came_before() -> None:
    one = passed_by()
    assert one.data(2, "a", 10, previous=9, index=6) == ["lost any of a1..9", "a10"]
    assert one.data(2, "a", 11, previous=10, index=7) == ["a11"]
    assert one.data(2, "b", 13, previous=11, index=2) == ["lost any of b1..9", "lost 2 of b10..11", "b13"]


def test_a_publisher_that_begins_after_the_gap_raises_no_doubt() -> None:
    one = passed_by()
    one.opens(1, 0)
    assert [*one.data(1, "a", 1), *one.data(1, "b", 2)] == ["a1", "b2"]
    other = passed_by()
    assert [*other.data(1, "a", 1), *other.data(1, "b", 2)] == ["a1", "b2"]


def test_a_replay_of_what_came_before_is_doubted_to_its_end() -> None:
    """It was cut off, met the publisher at its eighth message, and the replay that follows begins with the first one."""
    one = passed_by()
    assert one.data(1, "a", 8, previous=5, index=3) == ["lost any of a1..5", "a8"]
    one.opens(2, 0, "Z")
    told = [*one.data(2, "b", 1), *one.data(2, "b", 2, previous=1), *one.data(2, "b", 4, previous=2)]
    assert told == ["lost any of b1..7"], "each of them may have been for us"
    assert one.data(2, "b", 9, previous=4, index=4) == ["b9"]


def test_a_topic_that_begins_after_the_gap_raises_no_doubt() -> None:
    one = passed_by()
    assert one.data(2, "a", 10, previous=0, index=0) == ["a10"]
    assert one.data(2, "b", 11, previous=0, index=0) == ["b11"]


def test_a_publisher_known_before_the_gap_raises_no_doubt() -> None:
    """Its numbers tell."""
    one = Subscriber("A", "B")
    one.now = 5.0
    assert one.data(1, "a", 10, previous=9, index=6) == ["a10"]
    assert one.take(one.machine.doubt(5.0, 20.0)) == []
    one.opens(2, 12, "Z")
    assert one.data(2, "a", 13, previous=12, index=8) == ["lost 1 of a11..12", "a13"]
    assert one.data(2, "b", 14, previous=9, index=1) == ["b14"]


def test_a_publisher_met_just_before_the_gap_became_known_is_doubted_as_well() -> None:
    one = Subscriber("A", "B")
    one.now = 9.9
    assert one.data(1, "a", 10, previous=9, index=6) == ["a10"]
    assert one.take(one.machine.doubt(9.0, 10.0)) == ["lost any of a1..9"]
    assert one.data(1, "b", 11, previous=3, index=1) == ["lost any of b1..3", "b11"]


def test_a_watermark_tells_of_a_publisher_that_was_never_met_once() -> None:
    one = passed_by()
    assert one.watermark(1, 5, a=(5, 3), b=(0, 0), c=(4, 1)) == ["lost any of a1..5"]
    assert one.watermark(1, 5, a=(5, 3)) == [], "the Monitor repeats it"
    assert one.watermark(1, 7, a=(7, 4)) == ["lost any of a6..7"]
    assert one.data(3, "a", 10, previous=7, index=4) == ["a10"], "said already; and it begins with this path"
    assert one.watermark(3, 10, b=(6, 1), a=(10, 5)) == ["lost any of b1..6"], "a known publisher's topic that is new to us"


def test_watermarks_are_looked_through_for_topics_only_where_they_may_tell_something() -> None:
    """The Monitor repeats those of all that have ended, to everybody: most tell nothing new."""
    asked: list[bytes] = []

    def wants(topic: bytes) -> bool:
        asked.append(topic)
        return True

    machine = OrderMachine(lambda exchange: True, wants)
    names = {"a": (5, 3), "b": (9, 1), "c": (12, 1)}
    machine.handle(FrameEvent(b"", Header(1, FrameKind.WATERMARK, 99, 3, 12, 0, 0, 0, 0), None, names), 1.0)
    assert asked == [], "one never met, and nothing passed us by"
    machine.handle(FrameEvent(b"", Header(1, FrameKind.OPEN, 99, 3, 5, 0, 0, 0, 0), None, PathOpening("", False)), 1.0)
    machine.handle(FrameEvent(b"", Header(1, FrameKind.WATERMARK, 99, 3, 9, 0, 0, 0, 0), None, names), 1.0)
    assert asked == [b"b"], "one was before our time, one is still to come"
    machine.doubt(0.0, 2.0)
    machine.handle(FrameEvent(b"", Header(1, FrameKind.WATERMARK, 98, 3, 12, 0, 0, 0, 0), None, names), 2.0)
    assert asked == [b"b", b"a", b"b", b"c"]


def test_a_publisher_is_doubted_no_longer_than_the_doubt_lasts() -> None:
    """Another gap, later: what is known of it by then was learnt from its numbers."""
    one = passed_by()
    assert one.data(1, "a", 6, previous=5, index=3) == ["lost any of a1..5", "a6"]
    one.machine.sweep(10.0 + FORGET_SECONDS, FORGET_SECONDS, 0.0)
    assert one.take(one.machine.doubt(150.0, 200.0)) == []
    assert one.data(1, "b", 7, previous=2, index=1) == ["b7"]


def test_a_replay_of_what_was_before_the_first_message_met_is_doubted() -> None:
    one = passed_by()
    assert one.data(1, "a", 6, previous=5, index=3) == ["lost any of a1..5", "a6"]
    one.opens(2, 0, "A", finished=False)
    assert one.data(2, "a", 1) == []
    assert one.data(2, "b", 2, count=2) == ["lost any of b1..5"]


def test_doubts_end_when_every_watermark_of_that_time_has_come() -> None:
    one = passed_by()
    one.machine.sweep(10.0 + FORGET_SECONDS - 1.0, FORGET_SECONDS, 0.0)
    assert one.data(1, "a", 6, previous=5, index=3) == ["lost any of a1..5", "a6"]
    one.machine.sweep(10.0 + FORGET_SECONDS + 5.0, FORGET_SECONDS, 20.0)
    assert one.watermark(1, 6, b=(4, 1)) == ["lost any of b1..4"], "one may have lain unread"
    one.machine.sweep(20.0 + FORGET_SECONDS, FORGET_SECONDS, 20.0)
    header = Header(1, 0, 99, 1, 6, 5, 3, 1, 0)
    assert one.take(one.machine.handle(FrameEvent(b"a", header), 200.0)) == ["a6"]


def test_doubts_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(order, "DOUBTS_KEPT", 3)
    one = passed_by()
    for publisher in range(100, 110):
        header = Header(1, FrameKind.WATERMARK, publisher, 1, 5, 0, 0, 0, 0)
        assert one.take(one.machine.handle(FrameEvent(b"", header, None, {"a": (5, 3)}), 10.0)) == ["lost any of a1..5"]
        assert one.machine._doubts is not None
        assert len(one.machine._doubts) <= 3
