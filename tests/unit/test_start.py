"""Where a subscriber or a group begins: what is accepted, and which millisecond a time is."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest

from roq.errors import InvalidConfiguration, InvalidPosition
from roq.pubsub.start import check_start, group_start, read_group_start, time_ms
from roq.wire.recording import TapePosition


@pytest.mark.parametrize("microseconds", [0, 1, 499, 500, 501, 999])
def test_a_time_is_the_millisecond_that_it_is_in(microseconds: int) -> None:
    """What is published after it, and be it in the same millisecond, is not before it."""
    for second in (0, 1, 1_795_000_000, -1):
        when = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(seconds=second, milliseconds=7, microseconds=microseconds)
        assert time_ms(when) == second * 1000 + 7
        assert time_ms(when.astimezone(timezone(timedelta(hours=-7)))) == second * 1000 + 7
        if second > 0:
            assert time_ms(when.astimezone().replace(tzinfo=None)) == second * 1000 + 7  # a naive one is this machine's


def test_so_long_ago() -> None:
    before = time.time_ns() // 1_000_000
    found = time_ms(timedelta(seconds=2, microseconds=10))
    assert before - 2000 <= found <= time.time_ns() // 1_000_000 - 2000
    assert time_ms(timedelta.max) < 0  # from the beginning, as everybody would say


def test_the_first_and_the_last_time_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine whose own time they are not, they are refused in words."""
    earliest = datetime.min.replace(tzinfo=timezone(timedelta(hours=14)))
    assert check_start(earliest) == earliest
    assert time_ms(earliest) < 0
    monkeypatch.setenv("TZ", "XXX-14")
    time.tzset()
    try:
        with pytest.raises(InvalidConfiguration, match="outside the range of times"):
            check_start(datetime(1, 1, 1))
    finally:
        monkeypatch.undo()
        time.tzset()


NOON = datetime(2026, 11, 26, 12, tzinfo=UTC)
PLACE = TapePosition("tapes", {"e": 3})


@pytest.mark.parametrize(
    ("start", "read"),
    [
        ("earliest", "earliest"),
        (timedelta(hours=2), NOON - timedelta(hours=2)),
        (NOON.astimezone(timezone(timedelta(hours=5))), NOON),
        (NOON.isoformat(), NOON),
        (PLACE, PLACE),
        (str(PLACE), PLACE),
    ],
    ids=str,
)
def test_a_group_reads_what_was_asked_for(start: Any, read: object) -> None:
    assert read_group_start(group_start(start, NOON)) == read


def test_now_is_asked_for_and_not_kept() -> None:
    assert group_start("now", NOON) == "now"
    with pytest.raises(InvalidConfiguration, match="a group starts at 'earliest'"):
        read_group_start("now")


@pytest.mark.parametrize(
    ("start", "error", "why"),
    [
        ("live", InvalidConfiguration, r"'now' \(not 'live'\)"),
        ("last", InvalidConfiguration, r"'earliest' \(not 'last'\)"),
        ("2026-11-26T12:00:00", InvalidConfiguration, "with its zone"),
        ("", InvalidConfiguration, "a group starts at"),
        ("p1.!", InvalidPosition, "not a position"),
        (timedelta.max, InvalidConfiguration, "outside the range of times"),
        (5, InvalidConfiguration, "got int"),
    ],
)
def test_where_no_group_can_begin(start: Any, error: type[Exception], why: str) -> None:
    with pytest.raises(error, match=why):
        group_start(start, NOON)


@pytest.mark.parametrize(
    ("start", "why"), [("now", "'live', 'earliest', 'last'"), (5, "got int"), (None, "got NoneType")], ids=str
)
def test_where_no_subscriber_can_begin(start: Any, why: str) -> None:
    with pytest.raises(InvalidConfiguration, match=why):
        check_start(start)
