"""Ranges: intervals of the total order that together cover all of it, cut so that each has about as many bytes as any other.
A border is the position of a row, so a key with many rows is cut too, and only a single row can be too large for its range.
Not covered: where the bytes are (sampling.py), who holds a range (placement.py)."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from roq.shuffle.sampling import Distribution
from roq.wire.shuffle import RANGES_MAX, Interval, Position, Range

RANGE_BYTES = 64 * 1024 * 1024  # what a range should have, if nobody says how many there should be
RANGES_PER_HOST = (10, 100)  # an order of magnitude more ranges than hosts spreads the load; more than two is only overhead


def range_count(size: int, hosts: int, wanted: int) -> int:
    """How many ranges to cut. size: bytes of all data, as far as is known. wanted: 0 for as many as fit hosts and data."""
    if wanted:
        return min(wanted, RANGES_MAX)
    fewest, most = (each * max(1, hosts) for each in RANGES_PER_HOST)
    return min(RANGES_MAX, most, max(fewest, -(-size // RANGE_BYTES)))


def cut(distribution: Distribution, count: int) -> list[Position]:
    """Borders of `count` ranges of about the same bytes: at most count - 1, fewer when a sampled row (or gap) is larger than a
    range should be. Each border is the sampled position nearest to where it should be, so with exact samples no range has
    more than the mean and the largest row."""
    before, points = distribution.candidates()
    borders: list[Position] = []
    last = 0  # index of the point that was cut at last; a cut at the first point would leave an empty range
    for number in range(1, count):
        target = distribution.total * number // count
        index = bisect_left(before, target, lo=last)
        if index == len(before) or (index > 0 and target - before[index - 1] <= before[index] - target):
            index -= 1
        if index > last:
            borders.append(Position(*points[index][:4]))
            last = index
    return borders


def intervals(borders: Sequence[Position]) -> list[Interval]:
    """The intervals between the borders, the unbounded ones at both ends included."""
    return [Interval(lower, upper) for lower, upper in zip([None, *borders], [*borders, None], strict=True)]


def table_of(borders: Sequence[Position], identities: Sequence[int] | None = None) -> tuple[Range, ...]:
    """The table with these borders. identities: one per range; 1, 2, … if there are none."""
    parts = intervals(borders)
    numbers = range(1, len(parts) + 1) if identities is None else identities
    return tuple(Range(at, identity, part) for at, (identity, part) in enumerate(zip(numbers, parts, strict=True)))


def borders_of(table: Sequence[Range]) -> list[Position]:
    """The borders a table was made of."""
    return [each.interval.lower for each in table[1:] if each.interval.lower is not None]


def imbalance(sizes: Sequence[int]) -> float:
    """Largest / mean; 1.0 when there is nothing."""
    total = sum(sizes)
    return max(sizes) * len(sizes) / total if total else 1.0


def within(interval: Interval, position: Position) -> bool:
    """Whether the position lies in the interval: lower <= position < upper."""
    return (interval.lower is None or interval.lower <= position) and (interval.upper is None or position < interval.upper)


def intersection(one: Interval, other: Interval) -> Interval | None:
    """What both cover; None if that is nothing."""
    lower = one.lower if other.lower is None else other.lower if one.lower is None else max(one.lower, other.lower)
    upper = one.upper if other.upper is None else other.upper if one.upper is None else min(one.upper, other.upper)
    return None if lower is not None and upper is not None and lower >= upper else Interval(lower, upper)
