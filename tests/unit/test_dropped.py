"""What an Exchange remembers of frames that it dropped for one subscriber. When it says so: tests/model/test_dropping.py."""

from __future__ import annotations

from roq.pubsub.exchange import dropped
from roq.pubsub.exchange.dropped import DroppedTopics
from roq.wire.frame import FrameKind, encode_bundle, encode_data, parse, watermark_body
from roq.wire.limits import WATERMARK_TOPICS_MAX


def data(topic: str, publisher: int, number: int, count: int = 1, path: int = 1) -> bytes:
    return encode_data(topic.encode(), publisher, path, number, number - 1, number - 1, [b"x"] * count, 0)


def told(ledger: DroppedTopics) -> list[tuple[int, int, int, int, dict[str, tuple[int, int]]]]:
    """By watermark: publisher, path, first number that was dropped, last one named, topics."""
    found = []
    for frame in ledger.watermarks(5):
        _, header, body = parse(frame)
        assert (header.kind, header.timestamp) == (FrameKind.WATERMARK, 5)
        found.append((header.publisher, header.path, header.previous, header.sequence, watermark_body(body)))
    return found


def test_it_says_of_each_topic_how_far_it_went() -> None:
    ledger = DroppedTopics()
    assert not ledger
    ledger.add(data("t", 7, 1, 3))
    ledger.add(data("t", 7, 4))
    ledger.add(data("u", 7, 5))
    ledger.add(data("t", 8, 1))
    ledger.add(data("t", 7, 9, path=2))
    assert ledger
    assert told(ledger) == [
        (7, 1, 1, 5, {"t": (4, 4), "u": (5, 5)}),
        (8, 1, 1, 1, {"t": (1, 1)}),
        (7, 2, 9, 9, {"t": (9, 9)}),
    ]
    assert not ledger
    assert told(ledger) == []
    ledger.add(data("t", 7, 6))
    assert told(ledger) == [(7, 1, 6, 6, {"t": (6, 6)})]


def test_what_was_sent_again_counts_with_all_that_was_in_its_bundle() -> None:
    ledger = DroppedTopics()
    ledger.add(encode_bundle(7, 2, 3, [data("t", 7, 2, path=2), data("u", 7, 3, path=2)], 0))
    ledger.add(data("t", 7, 1, path=2))
    assert told(ledger) == [(7, 2, 1, 3, {"t": (2, 2), "u": (3, 3)})]


def test_what_cannot_be_read_is_passed_over() -> None:
    ledger = DroppedTopics()
    for frame in (b"", b"no header", b"\xfe\xfd" + data("t", 7, 1)):
        ledger.add(frame)
    assert not ledger


def test_one_watermark_names_so_many_topics_at_most() -> None:
    ledger = DroppedTopics()
    for number in range(1, WATERMARK_TOPICS_MAX + 2):
        ledger.add(data(f"t{number}", 7, number))
    found = [(first, number, len(topics)) for _, _, first, number, topics in told(ledger)]
    assert found == [(1, WATERMARK_TOPICS_MAX, 1000), (1, 1001, 1)]


def test_it_is_full_when_it_has_so_many() -> None:
    ledger = DroppedTopics()
    for number in range(1, dropped.DROPPED_TOPICS_MAX + 1):
        assert not ledger.is_full
        ledger.add(data(f"t{number}", 7, number))
    assert ledger.is_full
