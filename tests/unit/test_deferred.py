"""Watermarks that wait after a connection was made anew: until when, and that none is forgotten."""

from __future__ import annotations

import pytest

from roq.pubsub import deferred as module
from roq.pubsub.deferred import DEFER_SECONDS, REPLAY_SECONDS, UNREAD_SECONDS, DeferredWatermarks
from roq.pubsub.order import FrameEvent
from roq.wire.frame import FrameKind, Header
from roq.wire.monitor import ExchangeAddress

A, B = (ExchangeAddress(id, "127.0.0.1", 1, 1, 1) for id in "AB")


def watermark(sequence: int, *topics: str, previous: int = 0) -> FrameEvent:
    """As a publisher sends it, or (previous) an Exchange that has dropped."""
    header = Header(0, FrameKind.WATERMARK, 7, 3, sequence, previous, 0, 0, 0)
    return FrameEvent(b"", header, None, dict.fromkeys(topics or ("t",), (sequence, sequence)), 100)


class Reader:
    """A subscriber's deferred watermarks, on a clock."""

    def __init__(self) -> None:
        self.deferred, self.now = DeferredWatermarks(), 1000.0
        self.unread = dict[str, float]()

    def after(self, seconds: float) -> list[int]:
        """What counts by then: the numbers that are told."""
        self.now += seconds
        return [one.header.sequence for one in self.deferred.ripe(self.now, lambda exchange: self.unread.get(exchange, 0.0))]

    def defers(self, exchange: ExchangeAddress, event: FrameEvent) -> bool:
        return self.deferred.defers(exchange, event, self.now)

    def anew(self, exchange: ExchangeAddress) -> None:
        self.deferred.anew(exchange.token, self.now)


@pytest.fixture
def reader() -> Reader:
    return Reader()


def test_it_waits_where_the_connection_was_made_anew_and_nowhere_else(reader: Reader) -> None:
    assert not reader.defers(A, watermark(1))
    reader.anew(A)
    assert reader.defers(A, watermark(2))
    assert not reader.defers(B, watermark(3))
    assert not reader.defers(A, watermark(4, previous=1)), "nobody replays what was dropped"
    assert reader.after(REPLAY_SECONDS - 0.1) == []
    assert reader.after(0.1) == [2]
    assert not reader.defers(A, watermark(5))
    assert not reader.deferred


def test_a_later_one_of_the_same_topics_takes_its_place(reader: Reader) -> None:
    reader.anew(A)
    for number in range(1, 1000):
        assert reader.defers(A, watermark(number))
    assert reader.defers(A, watermark(1000, "t", "u"))
    assert reader.defers(A, watermark(998)), "late itself, it says nothing new"
    assert reader.after(REPLAY_SECONDS) == [999, 1000]


def test_what_may_lie_unread_is_read_first(reader: Reader) -> None:
    reader.anew(A)
    assert reader.defers(A, watermark(1))
    reader.unread["A"] = reader.now + 20.0
    assert reader.after(20.0) == []
    assert reader.after(REPLAY_SECONDS) == [1]


def test_it_does_not_wait_for_ever(reader: Reader) -> None:
    reader.anew(A)
    assert reader.defers(A, watermark(1))
    for _ in range(9):  # it breaks again and again
        assert reader.after(DEFER_SECONDS / 10) == []
        reader.anew(A)
    assert reader.after(DEFER_SECONDS / 10) == [1]
    assert reader.defers(A, watermark(2))
    reader.unread["A"] = reader.now + 2 * UNREAD_SECONDS  # nor for a reader that is behind all the time
    assert reader.after(UNREAD_SECONDS - 0.1) == []
    assert reader.after(0.1) == [2]


def test_one_that_breaks_again_and_again_holds_up_no_other(reader: Reader) -> None:
    reader.anew(B)
    assert reader.defers(B, watermark(1))
    reader.anew(A)
    assert reader.defers(A, watermark(2))
    reader.now += REPLAY_SECONDS - 1.0
    reader.anew(B)
    assert reader.after(1.0) == [2]
    assert reader.after(REPLAY_SECONDS) == [1]


def test_where_an_exchange_has_retired_it_counts_at_once_and_where_it_is_gone_when_publishers_are_back(reader: Reader) -> None:
    for one in (A, B):
        reader.anew(one)
        assert reader.defers(one, watermark(1 if one is A else 2))
    reader.now += 1.0
    reader.deferred.retired(A.token)
    reader.deferred.left(B.token, reader.now)
    assert reader.after(0.0) == [1]
    assert reader.after(REPLAY_SECONDS - 0.1) == []
    assert reader.after(0.1) == [2]


def test_where_there_is_no_room_it_counts_at_once(reader: Reader, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "DEFER_BYTES_MAX", 1)
    reader.anew(A)
    assert reader.defers(A, watermark(1))
    assert not reader.defers(A, watermark(2, "another"))
    assert reader.defers(A, watermark(3)), "it takes a place that is there"
    assert reader.after(REPLAY_SECONDS) == [3]
    reader.anew(A)
    assert reader.defers(A, watermark(4, "another")), "there is room again"
