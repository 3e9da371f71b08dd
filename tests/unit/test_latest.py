"""Which messages are kept of each topic, when only the latest are wanted. From tapes: test_past.py, tests/integration."""

from __future__ import annotations

from collections import deque

import pytest

from roq.errors import MessagesLost
from roq.pubsub.latest import LatestByTopic
from roq.pubsub.subscription import Batch
from roq.wire import frame as frames
from roq.wire.where import Where


def batch(topic: bytes, first: int, *payloads: bytes, headers: dict[str, str | bytes] | None = None) -> Batch:
    items = [(payload, headers) for payload in payloads] if headers else list(payloads)
    version = frames.HEADERS_VERSION if headers else frames.VERSION
    frame = frames.encode_data(topic, 7, 1, first, 0, 0, items, 0, version)
    _, header, body = frames.parse(frame)
    return Batch(topic, header, frames.payloads(header, body), len(frame))


def kept(latest: LatestByTopic) -> list[tuple[bytes, int, object]]:
    return [(one.topic, one.header.sequence, one.payloads[0]) for one in latest.give()]


def test_the_last_payload_of_each_topic_stays_in_the_order_in_which_they_came() -> None:
    latest = LatestByTopic(None)
    first = [batch(b"t", 1, b"1", b"2"), batch(b"u", 3, b"3"), batch(b"t", 4, b"4", b"5")]
    buffer: deque[Batch | MessagesLost] = deque(first)
    assert latest.take(buffer, 0) == sum(one.size for one in first)
    assert not buffer
    assert kept(latest) == [(b"u", 3, b"3"), (b"t", 5, b"5")]
    assert kept(latest) == [], "they are given once"


def test_what_lies_before_stays_where_it_is_and_so_do_the_news_of_gaps() -> None:
    latest = LatestByTopic(None)
    old, lost = batch(b"t", 1, b"1"), MessagesLost(7, "t", 2, 2, 1)
    buffer: deque[Batch | MessagesLost] = deque([old, batch(b"t", 3, b"3"), lost, batch(b"u", 4, b"4")])
    latest.take(buffer, 1)
    assert list(buffer) == [old, lost]
    assert kept(latest) == [(b"t", 3, b"3"), (b"u", 4, b"4")]


@pytest.mark.parametrize(("condition", "numbers"), [("price > 2", [2, 5]), ("price > 9", []), ("price < 2", [3, 4])])
def test_it_is_the_last_that_meets_the_condition(condition: str, numbers: list[int]) -> None:
    latest = LatestByTopic(Where(condition))
    first = batch(b"t", 1, b'{"price": 1}', b'{"price": 3}', b'{"price": 0}')
    prices = [first, batch(b"u", 4, b'{"price": 1}', b'{"price": 7}')]
    latest.take(deque[Batch | MessagesLost](prices), 0)
    assert [number for _, number, _ in kept(latest)] == numbers


def test_its_headers_stay_with_it() -> None:
    latest = LatestByTopic(None)
    latest.take(deque[Batch | MessagesLost]([batch(b"t", 1, b"1", b"2", headers={"a": "b"})]), 0)
    assert kept(latest) == [(b"t", 2, (b"2", {"a": "b"}))]
