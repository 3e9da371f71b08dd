"""The segment files of a local log: which there are, opening them, making the next one, removing old ones.

A spare segment waits allocated beside the log, so that starting the next segment is a rename and a full disk is noticed while
there is still room for acknowledgements. Who may call what is decided by `log.py`, which holds the locks.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
from bisect import bisect_right
from pathlib import Path

from roq.errors import StorageFailed
from roq.log.local.layout import HEAD, check_segment_head, segment_head
from roq.runtime.files import FULL, Disk

SEGMENT_BYTES = 16 * 1024 * 1024
SEGMENT_BYTES_MIN = 256 * 1024  # of logs on small disks
SEGMENTS_OF_A_DISK = 16  # a segment of a new log takes at most this part of what is free
SMALLEST_DISK = 12 * SEGMENT_BYTES_MIN  # for two segments, what is kept (room.py), the publication list and the small files
SPARE, KEPT = "spare", "kept"
_NAME = re.compile(r"([0-9a-f]{16})\.segment")


def fitting(free: int) -> int:
    """Bytes of a segment of a new log on a disk with so many free."""
    return min(max(free // SEGMENTS_OF_A_DISK // 4096 * 4096, SEGMENT_BYTES_MIN), SEGMENT_BYTES)


class SegmentFile:
    """One open segment file. Closed when nobody refers to it any more, so that no thread reads from a reused descriptor."""

    def __init__(self, path: Path, base: int, descriptor: int) -> None:
        self.path, self.base, self.descriptor = path, base, descriptor
        self.end_max = base + os.fstat(descriptor).st_size - HEAD  # where the file is full

    def offset(self, position: int) -> int:
        """Where in the file this position of the log lies."""
        return HEAD + position - self.base

    def __del__(self) -> None:
        with contextlib.suppress(OSError):
            os.close(self.descriptor)


class SegmentFiles:
    """The segments of one folder."""

    def __init__(self, folder: Path, cookie: int, disk: Disk, segment_bytes: int) -> None:
        self._folder, self._cookie, self._disk, self.segment_bytes = folder, cookie, disk, segment_bytes
        self._open: dict[int, SegmentFile] = {}
        self._bases: list[int] = []
        self._sparing = threading.Lock()

    def bases(self) -> list[int]:
        """Bases of the segments there are, ascending."""
        return sorted(int(match[1], 16) for name in os.listdir(self._folder) if (match := _NAME.fullmatch(name)))

    def path(self, base: int) -> Path:
        """The file of a segment."""
        return self._folder / f"{base:016x}.segment"

    def open(self, base: int) -> SegmentFile:
        """The segment with this base. FileNotFoundError: it is not there."""
        segment = self._open.get(base)
        if segment is None:
            path = self.path(base)
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            segment = SegmentFile(path, base, descriptor)
            check_segment_head(self._disk.read(descriptor, HEAD, 0), self._cookie, base, str(path))
            while len(self._open) >= 3:
                self._open.pop(next(iter(self._open)), None)
            self._open[base] = segment
        return segment

    def holding(self, position: int, active: int) -> tuple[SegmentFile, int | None]:
        """The segment that holds what follows `position`, and the position where it ends: None for the active one."""
        if position >= active:
            return self.open(active), None
        if not self._bases or self._bases[-1] < active:
            self._bases = self.bases()
        at = bisect_right(self._bases, position)
        if at == 0 or at == len(self._bases):
            raise FileNotFoundError(self.path(position))
        return self.open(self._bases[at - 1]), self._bases[at]

    def create(self, base: int, room: int, *, take_kept: bool = False) -> SegmentFile:
        """The segment after the last, with room for at least `room` bytes of entries. OSError: the disk is full."""
        size = max(self.segment_bytes, HEAD + room)
        spare = self._folder / SPARE
        try:
            self.make_spare(size if size > self.segment_bytes else 0)
        except OSError as error:
            if error.errno not in FULL or size > self.segment_bytes or not (take_kept and self.has_spare(KEPT)):
                raise
            spare = self._folder / KEPT
        mine = self._folder / f"{base:016x}.tmp"  # nobody else makes this one; the spare may be replaced at any time
        os.replace(spare, mine)
        descriptor = self._disk.open(mine, os.O_CREAT)
        try:
            self._disk.write_all(descriptor, segment_head(self._cookie, base), 0)
            self._disk.sync(descriptor)
        finally:
            os.close(descriptor)
        self._disk.rename(mine, self.path(base))
        return self.open(base)

    def has_spare(self, name: str = SPARE) -> bool:
        """Whether the next segment is allocated; KEPT: the one that puts leave."""
        return (self._folder / name).exists()

    def make_spare(self, size: int = 0, name: str = SPARE) -> None:
        """Allocate the next segment, if it is not; with a size: anew. OSError: the disk is full."""
        with self._sparing:
            if size or not self.has_spare(name):
                self._allocate_spare(size or self.segment_bytes, name)

    def _allocate_spare(self, size: int, name: str) -> None:
        temporary = self._folder / f"{name}.{os.getpid()}.{os.urandom(4).hex()}.tmp"
        descriptor = self._disk.open(temporary, os.O_CREAT)
        try:
            self._disk.reserve(self._folder, descriptor, size)
            self._disk.sync(descriptor)
            self._disk.rename(temporary, self._folder / name)
        except OSError:
            self._disk.remove(temporary)
            raise
        finally:
            os.close(descriptor)

    def remove_below(self, first: int) -> None:
        """Remove the segments with a base below `first`."""
        for base in self.bases():
            if base < first:
                self._open.pop(base, None)
                self._disk.remove(self.path(base))
        self._bases = []

    def allocated(self, first: int) -> int:
        """Bytes of the segments with a base below `first`."""
        sizes = 0
        for base in self.bases():
            if base < first:
                with contextlib.suppress(FileNotFoundError):
                    sizes += self.path(base).stat().st_size
        return sizes

    def remove_leftovers(self) -> None:
        """Remove the temporary files of processes that died. Only while nobody else has the log open."""
        for path in self._folder.glob("*.tmp"):
            self._disk.remove(path)

    def missing(self, position: int) -> StorageFailed:
        """The error for a segment that should be there and is not."""
        return StorageFailed(f"{self._folder}: the segment that holds position {position} is missing")
