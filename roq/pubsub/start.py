"""Where a subscriber begins in a recorded queue, and what comes after what was there."""

from __future__ import annotations

from datetime import datetime, timedelta
from enum import StrEnum

from roq.errors import InvalidConfiguration
from roq.wire.recording import TapePosition

Start = str | datetime | timedelta | TapePosition
LIVE, EARLIEST, LAST = "live", "earliest", "last"


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


def check_start(start: Start) -> Start:
    """Itself; a TapePosition for the text of one. Raises InvalidConfiguration, InvalidPosition."""
    if isinstance(start, str) and start.startswith("p1."):
        return TapePosition.parse(start)
    if isinstance(start, str) and start not in (LIVE, EARLIEST, LAST):
        raise InvalidConfiguration(
            f"start is 'live', 'earliest', 'last', a datetime, a timedelta (so long ago) or a position: {start!r}"
        )
    if isinstance(start, datetime):
        try:
            start.timestamp()
        except (ValueError, OverflowError):
            raise InvalidConfiguration(f"start is no time that this machine can tell: {start}") from None
    if not isinstance(start, Start):
        raise InvalidConfiguration(f"start is a text, a datetime, a timedelta or a position, got {type(start).__name__}")
    return start
