"""A disk in memory that forgets what was not synced, as a power cut does: each unsynced sector stays old or becomes new."""

from __future__ import annotations

import errno
import random
from collections.abc import Iterable
from pathlib import Path

SECTOR = 512


class LossyDisk:
    """roq.store.disk.Disk. full: no new file can be made; failing: writes or syncs raise EIO from now on, or "once": the next
    sync does, and the pages count as clean from then on, as in Linux: they are seen, and no later sync writes them."""

    def __init__(self) -> None:
        self.files: dict[Path, bytearray] = {}
        self.unsynced: dict[Path, list[tuple[int, bytes]]] = {}
        self.cached: dict[Path, list[tuple[int, bytes]]] = {}  # what a failed sync left in the page cache alone
        self.full = False
        self.failing = ""
        self.syncs = 0
        self._open: dict[int, Path] = {}

    def create(self, path: Path, size: int) -> None:
        if self.full:
            raise OSError(errno.ENOSPC, "full")
        self.files[path] = bytearray(size)

    def open(self, path: Path) -> int:
        descriptor = len(self._open) + 1
        self._open[descriptor] = path
        return descriptor

    def size(self, file: int) -> int:
        return len(self.files[self._open[file]])

    def read(self, file: int, offset: int, count: int) -> bytes:
        """What a program sees: unsynced writes included."""
        path = self._open[file]
        return bytes(self._seen(path)[offset : offset + count])

    def _seen(self, path: Path) -> bytearray:
        return _over(self.files[path], self.cached.get(path, ()), self.unsynced.get(path, ()))

    def write(self, file: int, offset: int, data: bytes) -> None:
        if self.failing == "write":
            raise OSError(errno.EIO, "failing")
        self.unsynced.setdefault(self._open[file], []).append((offset, bytes(data)))

    def sync(self, file: int) -> None:
        if self.failing == "sync":
            raise OSError(errno.EIO, "failing")
        path = self._open[file]
        if self.failing == "once":
            self.failing = ""
            self.cached.setdefault(path, []).extend(self.unsynced.pop(path, ()))
            raise OSError(errno.EIO, "failing once")
        self.syncs += 1
        self.files[path] = _over(self.files[path], self.unsynced.pop(path, ()))

    def close(self, file: int) -> None:
        pass

    def remove(self, path: Path) -> None:
        del self.files[path]

    def names(self, directory: Path) -> list[str]:
        return sorted(path.name for path in self.files if path.parent == directory)

    def dropped_cache(self) -> None:
        """The pages that no sync will write are needed for something else."""
        self.cached.clear()

    def power_cut(self, draw: random.Random) -> LossyDisk:
        """The disk after a power cut: of every unsynced write, each sector reached the disk or did not."""
        after = LossyDisk()
        after.files = {path: bytearray(data) for path, data in self.files.items()}
        for path, writes in self.unsynced.items():
            for offset, data in writes:
                for begin in range(offset - offset % SECTOR, offset + len(data), SECTOR):
                    if draw.random() < 0.5:
                        first, last = max(begin, offset), min(begin + SECTOR, offset + len(data))
                        after.files[path][first:last] = data[first - offset : last - offset]
        return after


def _over(data: bytearray, *layers: Iterable[tuple[int, bytes]]) -> bytearray:
    if not any(layers):
        return data
    data = bytearray(data)
    for layer in layers:
        for offset, written in layer:
            data[offset : offset + len(written)] = written
    return data
