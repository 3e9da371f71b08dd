"""Which rows of one run are here and where: blocks by row number, never overlapping, with holes. Pure.

A border of a range is turned into a row number of the run: that of the first row here that is not before it. Keys of first and
last row of a block mostly tell; where they don't, the block's keys have to be looked at.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence

import msgspec

from roq.shuffle.node.datafile import DataFile
from roq.wire.shuffle import Position


class BlockEntry(msgspec.Struct, frozen=True, gc=False, eq=False):
    """One block. offset, size: of its data in the file. There may be millions, and none is ever part of a cycle: the garbage
    collector, which would stop everything to look at them, does not see them."""

    first: int
    rows: int
    first_key: bytes
    last_key: bytes
    crc: int
    file: DataFile
    offset: int
    size: int

    @property
    def end(self) -> int:
        """Number of the row behind its last one."""
        return self.first + self.rows


def split_keys(keys: Sequence[bytes], first: int, place: tuple[int, int], border: Position) -> int:
    """The same, with all keys of the block at hand. first: number of its first row."""
    lower = bisect_left(keys, border.key)
    other = (border.partition, border.run)
    if place > other:
        return lower
    upper = bisect_right(keys, border.key, lo=lower)
    return upper if place < other else min(max(border.row - first, lower), upper)


class RunIndex:
    """The blocks of one run. place: (partition, run)."""

    __slots__ = ("_borders", "_firsts", "_lasts", "entries", "place")

    def __init__(self, place: tuple[int, int]) -> None:
        self.place = place
        self.entries: list[BlockEntry] = []
        self._firsts: list[int] = []  # of the entries: what is searched
        self._lasts: list[bytes] = []  # their last keys
        self._borders: dict[Position, int] = {}  # what was found out by looking at keys

    def _at(self, row: int) -> int:
        """Index of the first block that ends behind `row`."""
        index = bisect_right(self._firsts, row)
        return index - 1 if index and self.entries[index - 1].end > row else index

    def missing(self, first: int, end: int) -> list[tuple[int, int]]:
        """Rows first … end-1 that are not here: (begin, end) of each stretch."""
        holes = []
        index = self._at(first)
        while first < end:
            if index == len(self.entries) or self.entries[index].first >= end:
                holes.append((first, end))
                break
            entry = self.entries[index]
            if entry.first > first:
                holes.append((first, entry.first))
            first, index = entry.end, index + 1
        return holes

    def add(self, entry: BlockEntry) -> bool:
        """False: some of its rows are here already, nothing was added."""
        if self.missing(entry.first, entry.end) != [(entry.first, entry.end)]:
            return False
        index = bisect_left(self._firsts, entry.first)
        self.entries.insert(index, entry)
        self._firsts.insert(index, entry.first)
        self._lasts.insert(index, entry.last_key)
        self._borders.clear()
        return True

    def remove(self, entry: BlockEntry) -> bool:
        """Forget it; False: it was not here any more."""
        index = bisect_left(self._firsts, entry.first)
        if index == len(self.entries) or self.entries[index] is not entry:
            return False
        del self.entries[index], self._firsts[index], self._lasts[index]
        self._borders.clear()
        return True

    def replace(self, old: BlockEntry, new: BlockEntry) -> bool:
        """The same rows in another place; False: the old one was not here any more."""
        index = bisect_left(self._firsts, old.first)
        if index == len(self.entries) or self.entries[index] is not old:
            return False
        self.entries[index] = new
        return True

    @property
    def begin(self) -> int:
        """Number of the first row here."""
        return self.entries[0].first if self.entries else 0

    @property
    def end(self) -> int:
        """Number of the row behind the last one here."""
        return self.entries[-1].end if self.entries else 0

    def row_of(self, border: Position) -> int | BlockEntry:
        """Number of the first row here that is not before the border, or the block whose keys tell it."""
        low, place, other = bisect_left(self._lasts, border.key), self.place, (border.partition, border.run)
        if low < len(self._lasts) and self._lasts[low] == border.key and place <= other:
            high = bisect_right(self._lasts, border.key, lo=low)  # blocks that end with this very key
            low = high if place < other else max(low, min(high, self._at(border.row)))
        if low == len(self.entries):
            return self.end
        entry = self.entries[low]
        if (entry.first_key, *place, entry.first) >= border:
            return entry.first
        return self._borders.get(border, entry)

    def learn(self, border: Position, entry: BlockEntry, row: int) -> None:
        """What the block's keys told."""
        index = bisect_left(self._firsts, entry.first)
        if index < len(self.entries) and self.entries[index].first == entry.first:
            self._borders[border] = row

    def between(self, first: int, end: int) -> list[BlockEntry]:
        """Blocks with rows in first … end-1."""
        index, found = self._at(first), []
        while index < len(self.entries) and self.entries[index].first < end:
            found.append(self.entries[index])
            index += 1
        return found

    def tally(self, first: int, end: int) -> tuple[int, int]:
        """How many of the rows first … end-1 are here, and their bytes, about."""
        rows = size = 0
        for index in range(self._at(first), len(self.entries)):
            entry = self.entries[index]
            if entry.first >= end:
                break
            here = min(end, entry.first + entry.rows) - max(first, entry.first)
            rows += here
            size += entry.size if here == entry.rows else entry.size * here // entry.rows
        return rows, size

    def stretches(self, first: int, end: int) -> list[tuple[int, int, int]]:
        """What is here of rows first … end-1, without gaps: (begin, end, bytes, about)."""
        found: list[tuple[int, int, int]] = []
        for entry in self.between(first, end):
            begin, stop = max(first, entry.first), min(end, entry.end)
            size = entry.size * (stop - begin) // entry.rows
            if found and found[-1][1] == begin:
                found[-1] = (found[-1][0], stop, found[-1][2] + size)
            else:
                found.append((begin, stop, size))
        return found
