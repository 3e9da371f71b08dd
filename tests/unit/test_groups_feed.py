"""What a group's feed makes of messages, and where it begins. Not covered: reading (test_past.py, tests/integration)."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from roq.groups.feed import _records, begin
from roq.pubsub.subscription import Message
from roq.wire.headers import ENCODED_BYTES_MAX, split_headers
from roq.wire.recording import TapePosition
from roq.wire.work_queue import GroupSource


def test_a_message_is_a_task_with_its_headers() -> None:
    message = Message("eu.paris", b"120", 7, 3, 1_700_000_000_123_456_789, {"content-type": "text/plain"})
    (one,) = _records([message], True, 99)
    assert (one.publisher, one.sequence, one.topic, one.published, one.ordered, one.now) == (
        7,
        3,
        "eu.paris",
        1_700_000_000_123,
        True,
        99,
    )
    assert split_headers(one.payload) == (b"120", {"content-type": "text/plain"})


def test_a_message_that_no_task_can_be_is_left_out_alone(caplog: pytest.LogCaptureFixture) -> None:
    bad = Message("t", b"", 7, 2, 0, {"large": bytes(ENCODED_BYTES_MAX)})
    with caplog.at_level("ERROR", "roq.groups.feed"):
        found = list(_records([Message("t", b"a", 7, 1, 0), bad, Message("t", b"c", 7, 3, 0)], False, 0))
    assert [one.sequence for one in found] == [1, 3]
    assert "message 2 of publisher 0000000000000007 on 't' does not come into the group" in caplog.text


def test_where_it_begins() -> None:
    source = GroupSource("orders", "tapes")
    assert begin(source, None) == "earliest"
    assert begin(source, {}) == TapePosition("tapes", {})
    assert begin(source, {"e": 4}) == TapePosition("tapes", {"e": 4})
    place = TapePosition("tapes", {"e": 9})
    assert begin(GroupSource("orders", "tapes", start=str(place)), None) == place
    noon = datetime(2026, 11, 26, 12, tzinfo=UTC)
    assert begin(GroupSource("orders", "tapes", start=noon.isoformat()), None) == noon
