"""Where a subscriber or a group begins in a recorded queue, and what comes after what was there."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta
from enum import StrEnum

from roq.errors import InvalidConfiguration
from roq.wire.recording import TapePosition, is_position

Start = str | datetime | timedelta | TapePosition
LIVE, EARLIEST, LAST = "live", "earliest", "last"
NOW = "now"  # for groups, in place of LIVE
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class Follow(StrEnum):
    """What comes after the past: the Exchanges themselves, what is stored from then on, nothing."""

    LIVE = "live"
    STORED = "stored"
    NOTHING = "nothing"


def check_follow(follow: bool | str) -> Follow:
    """Raises InvalidConfiguration."""
    if isinstance(follow, bool):
        return Follow.LIVE if follow else Follow.NOTHING
    if follow != Follow.STORED:
        raise InvalidConfiguration(f"follow is True (on, live), False (only what there is) or 'stored', got {follow!r}")
    return Follow.STORED


def time_ms(when: datetime | timedelta) -> int:
    """The millisecond since 1970 that a time (a timedelta: so long ago) is in. Entries of tapes are dated by the one that they
    were written in: nothing that is published after a time is before it, as it would be if this was rounded up."""
    if isinstance(when, timedelta):
        return time.time_ns() // 1_000_000 - when // timedelta(milliseconds=1)
    return ((when if when.tzinfo else when.astimezone()) - _EPOCH) // timedelta(milliseconds=1)


def check_start(start: Start) -> Start:
    """Of a subscriber. Itself; a TapePosition for the text of one. Raises InvalidConfiguration, InvalidPosition."""
    if isinstance(start, str) and is_position(start):
        return TapePosition.parse(start)
    if isinstance(start, str) and start not in (LIVE, EARLIEST, LAST):
        raise InvalidConfiguration(
            f"start is 'live', 'earliest', 'last', a datetime, a timedelta (so long ago) or a position: {start!r}"
        )
    if isinstance(start, datetime):
        try:
            time_ms(start)
        except (ValueError, OverflowError):
            raise _outside(start) from None
    return _of_a_kind(start)


def group_start(start: Start, now: datetime) -> str:
    """Of a group, as it is asked for: NOW, or what read_group_start reads. A time says its zone, since whoever reads it has
    another. now: what a timedelta counts back from. Raises InvalidConfiguration, InvalidPosition."""
    if isinstance(start, datetime | timedelta):
        try:
            return (start if isinstance(start, datetime) else now - start).astimezone(UTC).isoformat()
        except (ValueError, OverflowError):
            raise _outside(start) from None
    text = str(_of_a_kind(start))
    if text != NOW:
        read_group_start(text)
    return text


def read_group_start(text: str) -> Start:
    """What a group keeps of its start: EARLIEST, a time (ISO 8601, with its zone) or a position. Raises InvalidConfiguration,
    InvalidPosition."""
    if text == EARLIEST:
        return EARLIEST
    if is_position(text):
        return TapePosition.parse(text)
    try:
        when = datetime.fromisoformat(text)
    except ValueError:
        when = None
    if when is None or when.tzinfo is None:
        possible = f"{EARLIEST!r} (not 'last'), {NOW!r} (not 'live'), a time (as text: ISO 8601, with its zone) or a position"
        raise InvalidConfiguration(f"a group starts at {possible}, got {text!r}")
    return when


def _of_a_kind(start: Start) -> Start:
    if not isinstance(start, Start):
        raise InvalidConfiguration(f"start is a text, a datetime, a timedelta or a position, got {type(start).__name__}")
    return start


def _outside(start: datetime | timedelta) -> InvalidConfiguration:
    return InvalidConfiguration(f"start is outside the range of times: {start}")
