"""What a group's feed makes of messages, and where it begins. Not covered: reading (test_past.py, tests/integration)."""

from __future__ import annotations

import logging
import time
from datetime import UTC, datetime

import pytest

from roq.groups.feed import FEED_BYTES, REPORT_SECONDS, HeaderReports, _records, begin
from roq.pubsub.subscription import Message
from roq.wire.headers import ENCODED_BYTES_MAX, split_headers
from roq.wire.recording import TapePosition
from roq.wire.work_queue import GroupSource


def test_a_message_is_a_task_with_its_headers() -> None:
    message = Message("eu.paris", b"120", 7, 3, 1_700_000_000_123_456_789, {"content-type": "text/plain"})
    (one,) = _records([message], True, 99, HeaderReports(time.monotonic))
    assert (one.publisher, one.topic, one.published, one.ordered, one.now) == (7, "eu.paris", 1_700_000_000_123, True, 99)
    ((number, payload),) = one.messages
    assert (number, split_headers(payload)) == (3, (b"120", {"content-type": "text/plain"}))


def test_those_that_ask_for_the_same_are_one_record_of_limited_size() -> None:
    soon: dict[str, str | bytes] = {"roq-ttl": "9"}
    other: dict[str, str | bytes] = {"roq-priority": "1", "n": "1"}
    asked: list[dict[str, str | bytes]] = [{}, {}, soon, soon, other, {"n": "2"}, {}]
    messages = [Message("t", b"%d" % n, 7, n, 10**12, headers) for n, headers in enumerate(asked, 1)]
    found = list(_records(messages, False, 0, HeaderReports(time.monotonic)))
    assert [(one.priority, one.expires, [n for n, _ in one.messages]) for one in found] == [
        (0, 0, [1, 2]),
        (0, 1_009_000, [3, 4]),
        (1, 0, [5]),
        (0, 0, [6, 7]),
    ]
    large = [Message("t", bytes(FEED_BYTES // 2), 7, n, 0) for n in range(1, 6)]
    assert [len(one.messages) for one in _records(large, False, 0, HeaderReports(time.monotonic))] == [2, 2, 1]


def test_a_message_that_no_task_can_be_is_left_out_alone(caplog: pytest.LogCaptureFixture) -> None:
    bad = Message("t", b"", 7, 2, 0, {"large": bytes(ENCODED_BYTES_MAX)})
    with caplog.at_level("ERROR", "roq.groups.feed"):
        found = list(
            _records([Message("t", b"a", 7, 1, 0), bad, Message("t", b"c", 7, 3, 0)], False, 0, HeaderReports(time.monotonic))
        )
    assert [number for one in found for number, _ in one.messages] == [1, 3]
    assert list(_records([bad], False, 0, HeaderReports(time.monotonic))) == []
    assert "message 2 of publisher 0000000000000007 on 't' does not come into the group" in caplog.text


def test_what_a_message_asks_of_its_group() -> None:
    asks: dict[str, str | bytes] = {"roq-priority": "7", "roq-ttl": "2.5"}
    message, over = (Message("t", b"x", 7, n, n * 10**12, asks) for n in (2, 1))
    (one,) = _records([message], False, 4_000, HeaderReports(time.monotonic))
    assert (one.priority, one.expires, split_headers(one.messages[0][1])) == (7, 2_002_500, (b"x", asks))
    (gone,) = _records([over], False, 1_002_500, HeaderReports(time.monotonic))
    assert (gone.expires, gone.messages) == (1_002_500, ((1, b""),)), "nobody will get it"
    (plain,) = _records([Message("t", b"x", 7, 1, 0)], False, 4_000, HeaderReports(time.monotonic))
    assert (plain.priority, plain.expires) == (0, 0)


def test_what_can_not_be_understood_is_told_and_passed_over(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("WARNING", "roq.groups.feed"):
        bad, half = _records(
            [
                Message("t", b"x", 7, 1, 0, {"roq-priority": "high", "roq-ttl": b"9"}),
                Message("t", b"y", 7, 2, 0, {"roq-priority": "high", "roq-ttl": "9"}),
            ],
            False,
            4_000,
            HeaderReports(time.monotonic),
        )
    assert (bad.priority, bad.expires, half.priority, half.expires) == (0, 0, 0, 9_000)
    assert "message 1 of publisher 0000000000000007 on 't' has no priority in the group" in caplog.text
    assert "message 1 of publisher 0000000000000007 on 't' has no end in the group" in caplog.text


def test_headers_that_can_not_be_understood_do_not_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    now = 0.0
    reports = HeaderReports(lambda: now)
    bad = [Message("t", b"x", 7, n, 0, {"roq-priority": "high"}) for n in range(1, 101)]
    assert len(list(_records(bad, False, 0, reports))) == 1
    now = REPORT_SECONDS
    assert len(list(_records(bad, False, 0, reports))) == 1
    lines = [record.getMessage() for record in caplog.records]
    assert [line.rpartition(": ")[2] for line in lines] == ["1)", "100)"]


def test_the_shortest_life_is_a_life() -> None:
    (one,) = _records([Message("t", b"x", 7, 1, 10**12, {"roq-ttl": "0.000000001"})], False, 0, HeaderReports(time.monotonic))
    assert one.expires == 1_000_001


def test_where_it_begins() -> None:
    source = GroupSource("orders", "tapes")
    assert begin(source, None) == "earliest"
    assert begin(source, {}) == TapePosition("tapes", {})
    assert begin(source, {"e": 4}) == TapePosition("tapes", {"e": 4})
    place = TapePosition("tapes", {"e": 9})
    assert begin(GroupSource("orders", "tapes", start=str(place)), None) == place
    noon = datetime(2026, 11, 26, 12, tzinfo=UTC)
    assert begin(GroupSource("orders", "tapes", start=noon.isoformat()), None) == noon
