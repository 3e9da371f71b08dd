"""Which rows lie in an interval of a shuffle's order."""

from __future__ import annotations

from roq.wire.shuffle import Interval, Position


def within(interval: Interval, position: Position) -> bool:
    """Whether the position lies in the interval: lower <= position < upper."""
    return (interval.lower is None or interval.lower <= position) and (interval.upper is None or position < interval.upper)
