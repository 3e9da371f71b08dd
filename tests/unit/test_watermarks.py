"""Watermarks are repeated a few times, then never again, also when the last repetition returns; they outlive their Exchange."""

from __future__ import annotations

from collections.abc import Collection

from roq.pubsub.monitor.watermarks import REPEATS, RESTING_SECONDS, WATERMARKS_KEPT, Watermarks
from roq.wire.frame import FrameKind, Header

PUBLISHER = 7


def saw(
    watermarks: Watermarks, sequence: int, now: float, exchange: str = "x/1", topics: Collection[str] = "t", path: int = 1
) -> None:
    header = Header(1, FrameKind.WATERMARK, PUBLISHER, path, sequence, 0, 0, 0, 0)
    watermarks.saw(exchange, header, topics, f"{path}:{sequence}".encode(), now)


def due(watermarks: Watermarks, now: float, *living: str, publishes: bool = True) -> list[tuple[str, bytes]]:
    return watermarks.due(now, living, living, lambda publisher: publishes)


def test_repetitions_end() -> None:
    watermarks, now, sent = Watermarks(), 0.0, 0
    saw(watermarks, 5, now)
    for _ in range(1000):
        now += 1.0
        for exchange, frame in due(watermarks, now, "x/1"):
            assert (exchange, frame) == ("x/1", b"1:5")
            sent += 1
            saw(watermarks, 5, now)  # it comes out of the Exchange again
    assert sent == REPEATS


def test_old_ones_make_room() -> None:
    watermarks = Watermarks()
    for number in range(WATERMARKS_KEPT + 5):
        saw(watermarks, number, 0.0, topics=f"t{number}")
    assert len(due(watermarks, 2.0, "x/1")) <= WATERMARKS_KEPT


def test_a_newer_one_of_the_same_topics_takes_the_place_of_the_older() -> None:
    watermarks = Watermarks()
    saw(watermarks, 5, 0.0)
    saw(watermarks, 9, 0.5)
    saw(watermarks, 5, 0.7)  # an old repetition
    assert due(watermarks, 1.2, "x/1") == []
    assert due(watermarks, 2.0, "x/1") == [("x/1", b"1:9")]


def test_the_last_word_of_a_publisher_that_died_with_its_exchange_is_told_elsewhere() -> None:
    """Nobody else knows what was lost in that Exchange."""
    watermarks, sent = Watermarks(), []
    saw(watermarks, 5, 0.0)
    for now in range(1, 200):
        found = due(watermarks, float(now), "x/2", "y/1", publishes=now < 10)
        assert not found or now >= 10, "it lives: it sends again what was lost"
        sent += found
        for exchange, _ in found:
            saw(watermarks, 5, float(now), exchange)
    assert sent == [("x/2", b"1:5"), ("y/1", b"1:5")] * REPEATS


def test_it_waits_for_an_exchange_but_not_for_ever() -> None:
    watermarks = Watermarks()
    saw(watermarks, 5, 0.0)
    assert due(watermarks, 20.0, publishes=False) == []
    assert due(watermarks, 30.0, "x/2", publishes=False) == [("x/2", b"1:5")]
    rested = Watermarks()
    saw(rested, 9, 30.0)
    assert due(rested, 40.0 + RESTING_SECONDS, "x/2") == []
    assert due(rested, 41.0 + RESTING_SECONDS, "x/2", publishes=False) == []
