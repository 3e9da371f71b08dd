"""Numbers: a set of message numbers kept as ranges, so that millions of them in a few pieces cost nothing. Pure."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable


class Numbers:
    """Whole numbers from 1. Ranges are inclusive, disjoint, sorted and not adjacent."""

    def __init__(self, ranges: Iterable[tuple[int, int]] = ()) -> None:
        self._firsts: list[int] = []
        self._lasts: list[int] = []
        for first, last in ranges:
            self.add(first, last)

    def __len__(self) -> int:
        return sum(last - first + 1 for first, last in self.ranges())

    def ranges(self) -> list[tuple[int, int]]:
        """First and last of each range."""
        return list(zip(self._firsts, self._lasts, strict=True))

    def overlap(self, first: int, last: int) -> int:
        """How many numbers of first..last are in."""
        low, high = bisect_left(self._lasts, first), bisect_right(self._firsts, last)
        pieces = zip(self._firsts[low:high], self._lasts[low:high], strict=True)
        return sum(min(last, end) - max(first, start) + 1 for start, end in pieces)

    def add(self, first: int, last: int) -> None:
        """Put first..last in; nothing if last < first."""
        if last < first:
            return
        low, high = bisect_left(self._lasts, first - 1), bisect_right(self._firsts, last + 1)
        if low < high:
            first, last = min(first, self._firsts[low]), max(last, self._lasts[high - 1])
        self._firsts[low:high], self._lasts[low:high] = [first], [last]

    def missing(self, first: int, last: int) -> list[tuple[int, int]]:
        """The ranges of first..last that are not in."""
        found = []
        for start, end in self.ranges():
            if start > last:
                break
            if start > first:
                found.append((first, start - 1))
            first = max(first, end + 1)
        return [*found, (first, last)] if first <= last else found


def count(ranges: Iterable[tuple[int, int]]) -> int:
    """How many numbers these disjoint ranges hold."""
    return sum(last - first + 1 for first, last in ranges)
