"""The files of a local log: which segments there are, opening them, making the next one, removing old ones; snapshots of what
the records add up to, one file each, named by the position it covers, of which the newest counts; and what room is kept.

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
from roq.log.local.layout import HEAD, check_segment_head, pack_snapshot, segment_head, unpack_snapshot
from roq.runtime.files import FULL, Disk

SEGMENT_BYTES = 16 * 1024 * 1024
SEGMENT_BYTES_MIN = 256 * 1024  # of logs on small disks
SEGMENTS_OF_A_DISK = 16  # a segment of a new log takes at most this part of what is free
SMALLEST_DISK = 12 * SEGMENT_BYTES_MIN  # for two segments, what is kept, the publication list, small files
SPARE, KEPT = "spare", "kept"
RESERVE = "reserve"  # what the next snapshot is written over
AMPLE = 4
BLOCK = 4096
GROWTH = 1.5  # a leased task takes up to half as much again in a snapshot as its put did in the log
_SNAPSHOT_NAME = re.compile(r"([0-9a-f]{16})\.snapshot")
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


def _snapshot_path(folder: Path, position: int) -> Path:
    return folder / f"{position:016x}.snapshot"


def snapshot_positions(folder: Path) -> list[int]:
    """Positions of the snapshots there are, ascending."""
    return sorted(int(match[1], 16) for name in os.listdir(folder) if (match := _SNAPSHOT_NAME.fullmatch(name)))


def newest_snapshot(folder: Path) -> tuple[int, int]:
    """Position and bytes of the newest one; zeros if there is none."""
    while found := snapshot_positions(folder):
        with contextlib.suppress(FileNotFoundError):  # a newer one was put in place meanwhile
            return found[-1], _snapshot_path(folder, found[-1]).stat().st_size
    return 0, 0


def save_snapshot(folder: Path, disk: Disk, cookie: int, position: int, data: bytes) -> None:
    """Write a snapshot durably, then remove the older ones. One process at a time. Raises OSError."""
    disk.write_over(folder / RESERVE, _snapshot_path(folder, position), pack_snapshot(cookie, position, data))
    for older in snapshot_positions(folder):
        if older < position:
            disk.remove(_snapshot_path(folder, older))


def load_snapshot(folder: Path, cookie: int) -> tuple[int, bytes] | None:
    """The newest snapshot as (position, data), None if there is none. Raises StorageFailed when it is damaged."""
    while found := snapshot_positions(folder):
        path = _snapshot_path(folder, found[-1])
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            continue  # a newer one was put in place meanwhile
        return found[-1], unpack_snapshot(content, cookie, found[-1], str(path))
    return None


class DiskRoom:
    """The room on the disk that puts leave, so that acknowledgements alone bring room back, however full the disk is.

        kept      a segment that only acknowledgements begin, when there is no spare: the one before it can be trimmed then
        reserve   allocated bytes into which the next snapshot is written: it takes no room that is not there already

    Both are made when the disk gets tight: free bytes are less than AMPLE times what they need, looked at whenever a put begins
    a segment. Tight and one of them can't be made, puts are refused. The reserve is as large as a snapshot may get before
    anybody looks again: the newest one, the log behind it, and a segment, times GROWTH. It is written in place, cut to its
    length and renamed, so a process that dies leaves it as a reserve. Who changes or renames it holds the upkeep lock. Version
    0.1 knows neither file and leaves them alone.
    """

    def __init__(self, folder: Path, disk: Disk, segments: SegmentFiles) -> None:
        self._folder, self._disk, self._segments = folder, disk, segments

    def needed(self, end: int) -> int:
        """Bytes of the reserve, for a log that ends here."""
        position, size = newest_snapshot(self._folder)
        return int(GROWTH * (size + max(end - position, 0) + self._segments.segment_bytes))

    def is_ample(self, end: int) -> bool:
        """Whether there is so much free that nothing need be kept."""
        return self._disk.free(self._folder) >= AMPLE * (self.needed(end) + self._segments.segment_bytes)

    def is_kept(self, end: int) -> bool:
        """Whether all there should be is there."""
        return self._segments.has_spare(KEPT) and self._reserved() >= self.needed(end)

    def keep(self, end: int) -> None:
        """Make what is missing, free what is too much. OSError: there is not so much free; what there is is kept. Under the
        append lock and the upkeep lock."""
        needed, reserved = self.needed(end), self._reserved()
        if reserved > needed:
            self._reserve(needed)
        self._segments.make_spare(name=KEPT)
        if reserved < needed:
            try:
                self._reserve(needed)
            except OSError as error:
                part = min(needed, reserved + self._disk.free(self._folder) // BLOCK * BLOCK)
                if error.errno in FULL and part > reserved:
                    self._reserve(part)
                raise

    def _reserve(self, size: int) -> None:
        descriptor = self._disk.open(self._folder / RESERVE, os.O_CREAT)
        try:
            self._disk.truncate(descriptor, min(size, os.fstat(descriptor).st_size))
            self._disk.reserve(self._folder, descriptor, size)
            self._disk.sync(descriptor)
        finally:
            os.close(descriptor)

    def is_worth(self, size: int, freed: int, put: int) -> bool:
        """Whether a snapshot of this size, which frees so much, leaves room for a put of so many bytes, or has to be: what is
        kept was taken."""
        segment = self._segments.segment_bytes
        room = self._disk.free(self._folder) + self._reserved()
        leaves = room + freed - size >= GROWTH * (size + put + segment) + 2 * segment
        return room >= size and (leaves or not self._segments.has_spare(KEPT))

    def _reserved(self) -> int:
        with contextlib.suppress(FileNotFoundError):
            return (self._folder / RESERVE).stat().st_size
        return 0
