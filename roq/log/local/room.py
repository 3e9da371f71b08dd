"""The room on the disk that puts leave, so that acknowledgements alone bring room back, however full the disk is.

    kept      a segment that only acknowledgements begin, when there is no spare: the one before it can be trimmed then
    reserve   allocated bytes into which the next snapshot is written: it takes no room that is not there already

Both are made when the disk gets tight: free bytes are less than AMPLE times what they need, looked at whenever a put begins a
segment. Tight and one of them can't be made, puts are refused. The reserve is as large as a snapshot may get before anybody
looks again: the newest one, the log behind it, and a segment, times GROWTH. It is written in place, cut to its length and
renamed, so a process that dies leaves it as a reserve. Who changes or renames it holds the upkeep lock. Version 0.1 knows
neither file and leaves them alone.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from roq.log.local import snapshots
from roq.log.local.segments import KEPT, SegmentFiles
from roq.runtime.files import FULL, Disk

AMPLE = 4
BLOCK = 4096
GROWTH = 1.5  # a leased task takes up to half as much again in a snapshot as its put did in the log


class DiskRoom:
    """What is kept of one folder's disk."""

    def __init__(self, folder: Path, disk: Disk, segments: SegmentFiles) -> None:
        self._folder, self._disk, self._segments = folder, disk, segments

    def needed(self, end: int) -> int:
        """Bytes of the reserve, for a log that ends here."""
        position, size = snapshots.newest(self._folder)
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
        descriptor = self._disk.open(self._folder / snapshots.RESERVE, os.O_CREAT)
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
            return (self._folder / snapshots.RESERVE).stat().st_size
        return 0
