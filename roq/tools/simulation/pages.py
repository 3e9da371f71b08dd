"""What was done to a file since it was last synced: a loss of power keeps of it what it likes, sector by sector.

The file itself is as programs see it, in the page cache. Each change tells what stood there before, so it can be undone. Not
covered: that files are made, renamed or removed.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from random import Random

SECTOR_BYTES = 512
TORN_PART = 0.5  # of writes that were not synced: of the last one some sectors are there, and some not


@dataclass(eq=False)
class _PageChange:
    """At this offset stood `old`, when the file was so large. new: None if it was cut off there. lost: a sync of it failed, no
    later one will write it."""

    offset: int
    size: int
    old: bytes
    new: bytes | None
    durable: bool = False
    lost: bool = False

    def undo(self, file: int) -> None:
        """As it was."""
        os.pwrite(file, self.old, self.offset)
        if self.new is not None:
            os.ftruncate(file, self.size)

    def redo(self, file: int) -> None:
        """All of it."""
        if self.new is None:
            os.ftruncate(file, self.offset)
        else:
            os.pwrite(file, self.new, self.offset)

    def tear(self, file: int, random: Random) -> None:
        """Some sectors of it."""
        if self.new is None:
            if random.random() < 0.5:
                self.redo(file)
            return
        end = self.offset + len(self.new)
        for begin in range(self.offset - self.offset % SECTOR_BYTES, end, SECTOR_BYTES):
            if random.random() < 0.5:
                first, last = max(begin, self.offset), min(begin + SECTOR_BYTES, end)
                os.pwrite(file, self.new[first - self.offset : last - self.offset], first)


class Pages:
    """Of one file: its changes, oldest first. file: a real descriptor of it."""

    def __init__(self) -> None:
        self._changes: list[_PageChange] = []

    @property
    def clean(self) -> bool:
        """All of it is durable."""
        return not self._changes

    def write(self, file: int, data: bytes, offset: int) -> int:
        """os.pwrite."""
        size, old = os.fstat(file).st_size, os.pread(file, len(data), offset)
        self._changes.append(_PageChange(offset, size, old, data))
        return os.pwrite(file, data, offset)

    def cut(self, file: int, end: int) -> None:
        """os.ftruncate, to a smaller size."""
        size = os.fstat(file).st_size
        if end < size:
            self._changes.append(_PageChange(end, size, os.pread(file, size - end, end), None))
            os.ftruncate(file, end)

    def waiting(self) -> list[_PageChange]:
        """What a sync that begins now would write."""
        return [change for change in self._changes if not (change.durable or change.lost)]

    def synced(self, those: list[_PageChange]) -> None:
        """They are on the disk."""
        for change in those:
            change.durable = True
        while self._changes and self._changes[0].durable:
            self._changes.pop(0)

    def not_synced(self, file: int, those: list[_PageChange], *, evicted: bool) -> None:
        """As Linux has it: their pages count as clean, and may be read once more from the disk."""
        for change in those:
            change.lost = True
        if evicted and self._changes[len(self._changes) - len(those) :] == those:
            for change in reversed(those):
                change.undo(file)
                self._changes.pop()

    def lose_power(self, path: Path, random: Random) -> None:
        """Nobody has the file open."""
        file = os.open(path, os.O_RDWR)
        try:
            for change in reversed(self._changes):
                change.undo(file)
            for change in self._changes:
                if change.durable:
                    change.redo(file)
            waiting = self.waiting()
            kept = random.randint(0, len(waiting))
            torn = random.random() < TORN_PART
            for number, change in enumerate(waiting[:kept], 1):
                if torn and number == kept:
                    change.tear(file, random)
                else:
                    change.redo(file)
        finally:
            os.close(file)
        self._changes.clear()
