"""A machine's disk: what was synced outlives a loss of power; what was only written may, in whole, in part or not at all.

The journal's files are in memory (`SimulatedDisk`; the stores' own tests use it, too). Payloads, what followers keep of
shuffles, and what says whose the disk is, are files in the machine's folder; below them `os` is replaced (`Files`), where
roq/runtime/files.py uses it, and it is known what of them was not synced (pages.py). A killed process takes nothing
with it: what it wrote is in the page cache, for the next one to read. After a sync that failed it is there and nowhere else,
and no later sync writes it. Which names a folder durably has is known by links in a folder beside: a loss of power undoes any
of the renames and removals of files since its last sync. Syncs take time, in which a thread can be killed.
"""

from __future__ import annotations

import errno
import itertools
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any, BinaryIO, NamedTuple, Protocol

from roq.runtime.files import MODE, Disk, StrPath
from roq.tools.simulation.loop import PROCESS, SimulatedLoop
from roq.tools.simulation.pages import SECTOR_BYTES, TORN_PART, Pages
from roq.tools.simulation.threads import current

NEWEST_PART, NEWEST_BYTES = 0.5, 4096  # of what rots is among the last so many bytes
UNDONE_PART = 0.5  # of renames and removals whose folder was not synced
FIRST_DESCRIPTOR = 1 << 30  # of simulated ones: no real one is as high
EVICTED_PART = 0.5  # of syncs that fail: the pages that no sync will write are dropped at once


class _DiskFile:
    """data: what a loss of power leaves. Over it are seen writes, oldest first: cached are those whose sync failed, in the page
    cache alone; unsynced are what the next sync writes."""

    def __init__(self, data: bytes | bytearray) -> None:
        self.data = bytearray(data)
        self.cached: list[tuple[int, bytes]] = []
        self.unsynced: list[tuple[int, bytes]] = []

    def read(self, offset: int, count: int) -> bytes:
        """What a program sees."""
        seen = self.data[offset : offset + count]
        for begin, data in (*self.cached, *self.unsynced):
            first, last = max(begin, offset), min(begin + len(data), offset + len(seen))
            if first < last:
                seen[first - offset : last - offset] = data[first - begin : last - begin]
        return bytes(seen)


class SimulatedDisk(Disk):
    """One machine's. loop: on whose clock it takes its time, None for none at all. failing: the next read, write or sync raises
    EIO. full: nothing new fits. files: the journal's."""

    def __init__(self, loop: SimulatedLoop | None, random: Random, folder: Path) -> None:
        self._loop, self._random, self.folder = loop, random, folder
        self._durable = folder.with_name(folder.name + ".durable")  # the names that a loss of power leaves, as links
        self.sync_seconds = 0.0002
        self.failing = ""
        self.full = False
        self.evicted_part = EVICTED_PART
        self.syncs = 0
        self.boot = 1  # of the machine
        self.files: dict[Path, _DiskFile] = {}
        self._removed: list[tuple[Path, _DiskFile]] = []  # and the folder not synced since
        self._open: dict[int, _DiskFile] = {}
        self._pages: dict[int, Pages] = {}  # of files that are not all synced, by inode
        self._made: dict[str, float] = {}  # when payloads were stored

    # --- the journal's files, in memory -----------------------------------------------------------------------------------

    def write_zeros(self, path: Path, size: int) -> None:
        """See Disk."""
        self._take_time()
        if self.full:
            raise OSError(errno.ENOSPC, "full")
        self.files[path] = _DiskFile(bytes(size))
        self._removed.clear()

    def open(self, path: StrPath, flags: int = 0, mode: int = MODE) -> int:
        """See Disk."""
        descriptor = len(self._open) + 1
        self._open[descriptor] = self.files[Path(path)]
        return descriptor

    def size(self, file: int) -> int:
        """See Disk."""
        return len(self._open[file].data)

    def read(self, file: int, size: int, offset: int) -> bytes:
        """See Disk."""
        self._fail("read")
        return self._open[file].read(offset, size)

    def write(self, file: int, data: bytes | memoryview, offset: int) -> int:
        """See Disk."""
        self._fail("write")
        self._open[file].unsynced.append((offset, bytes(data)))
        return len(data)

    def sync(self, file: int) -> None:
        """See Disk."""
        found = self._open[file]
        begun = len(found.unsynced)
        self._take_time()
        writes, found.unsynced = found.unsynced[:begun], found.unsynced[begun:]
        if self.failing == "sync":
            if self._random.random() >= self.evicted_part:
                found.cached += writes
            self._fail("sync")
        self.syncs += 1
        for offset, data in writes:
            found.data[offset : offset + len(data)] = data
        if found.cached:
            found.cached += writes  # over what is there

    def close(self, file: int) -> None:
        """See Disk."""

    def remove(self, path: StrPath) -> bool:
        """See Disk. A loss of power may undo it."""
        self._removed.append((Path(path), self.files.pop(Path(path))))
        return True

    def names(self, folder: StrPath) -> list[str]:
        """See Disk."""
        return sorted(path.name for path in self.files if path.parent == Path(folder))

    def _take_time(self) -> None:
        seconds = self.sync_seconds * (0.5 + self._random.random())
        thread = current()
        if thread is not None:
            thread.park(seconds)
        elif self._loop is not None:
            self._loop.hold_up(seconds)

    def _fail(self, what: str) -> None:
        if self.failing == what:
            self.failing = ""
            raise OSError(errno.EIO, f"the {what} failed")

    # --- in place of `os` -----------------------------------------------------------------------------------------------

    def opened(self, path: Any, flags: int, mode: int) -> int:
        """os.open: a real descriptor."""
        made = not os.path.exists(path)
        file = os.open(path, flags & ~(os.O_TRUNC | os.O_WRONLY) | os.O_RDWR, mode)  # what stood there is read
        if made:
            self._pages.pop(os.fstat(file).st_ino, None)  # of one that was removed
        elif flags & os.O_TRUNC:
            self.cut(file, 0)
        return file

    def _pages_of(self, file: int) -> Pages:
        return self._pages.setdefault(os.fstat(file).st_ino, Pages())

    def pwrite(self, file: int, data: Any, offset: int) -> int:
        """os.pwrite."""
        self._fail("write")
        if self.full and offset + len(data) > os.fstat(file).st_size:
            raise OSError(errno.ENOSPC, "full")
        return self._pages_of(file).write(file, bytes(data), offset)

    def cut(self, file: int, end: int) -> None:
        """os.ftruncate."""
        self._pages_of(file).cut(file, end)

    def fsync(self, file: int) -> None:
        """os.fsync of a file. The loop does it in no time, as there it is done to small files when a process starts."""
        pages = self._pages_of(file)
        waiting = pages.waiting()
        if current() is not None:
            self._take_time()
        if self.failing == "sync":
            pages.not_synced(file, waiting, evicted=self._random.random() < EVICTED_PART)
            self._fail("sync")
        pages.synced(waiting)
        if pages.clean:
            self._pages.pop(os.fstat(file).st_ino, None)

    def read_payload(self, path: Path) -> BinaryIO:
        """Open it to read."""
        self._fail("read")
        return path.open("rb")

    def sync_folder(self, folder: StrPath) -> None:
        """os.fsync of a folder. The loop does it in no time: there the folders of a whole disk are synced in a row."""
        if current() is not None:
            self._take_time()
        self._fail("sync")
        folder = Path(folder)
        durable = self._durable_of(folder)
        for name in self._changed(folder):
            self._link(folder / name, durable / name)
        for below in [path for path in durable.glob("*/") if not (folder / path.name).is_dir()]:
            shutil.rmtree(below)  # a folder that was renamed or removed

    def _durable_of(self, folder: Path) -> Path:
        return self._durable / folder.relative_to(self.folder)

    def _changed(self, folder: Path) -> list[str]:
        """Names of files that were made, renamed, replaced or removed there since its last sync."""
        now, before = _inodes(folder), _inodes(self._durable_of(folder))
        return sorted(name for name in now.keys() | before.keys() if now.get(name) != before.get(name))

    def _link(self, source: Path, target: Path) -> None:
        """Let `target` be what `source` is: a file, or nothing."""
        target.parent.mkdir(parents=True, exist_ok=True)
        target.unlink(missing_ok=True)
        if source.exists():
            os.link(source, target)

    def made(self, name: str, now: float) -> float:
        """When a payload was seen first."""
        return self._made.setdefault(name, now)

    # --- what goes wrong ------------------------------------------------------------------------------------------------

    def lose_power(self) -> None:
        """What was not synced is there in part or not at all. Files may be back that were removed just before."""
        self.boot += 1
        self.failing = ""
        if self._removed:
            for path, file in self._removed[self._random.randint(0, len(self._removed)) :]:
                self.files.setdefault(path, file)
        self._removed.clear()
        self._open.clear()
        for file in self.files.values():
            if not (file.unsynced or file.cached):
                continue
            for offset, data in file.unsynced[: self._random.randint(0, len(file.unsynced))]:
                torn = self._random.random() < TORN_PART
                for begin in range(offset - offset % SECTOR_BYTES, offset + len(data), SECTOR_BYTES):
                    if not torn or self._random.random() < 0.5:
                        first, last = max(begin, offset), min(begin + SECTOR_BYTES, offset + len(data))
                        file.data[first:last] = data[first - offset : last - offset]
            file.unsynced.clear()
            file.cached.clear()
        if self._pages:
            there = {path.stat().st_ino: path for path in self._all_files()}
            for inode, pages in self._pages.items():
                if inode in there:
                    pages.lose_power(there[inode], self._random)
        self._pages.clear()
        for folder in self._folders():
            for name in self._changed(folder):
                here, durable = folder / name, self._durable_of(folder) / name
                source, target = (durable, here) if self._random.random() < UNDONE_PART else (here, durable)
                self._link(source, target)

    def copied(self, random: Random) -> SimulatedDisk:
        """Another one with this one's journal: what is done there changes nothing here."""
        other = SimulatedDisk(self._loop, random, self.folder)
        for path, file in self.files.items():
            copy = other.files[path] = _DiskFile(file.data)
            copy.cached, copy.unsynced = file.cached[:], file.unsynced[:]
        return other

    def drop_cache(self) -> None:
        """The pages that no sync will write are needed for something else."""
        for file in self.files.values():
            file.cached.clear()

    def _all_files(self) -> list[Path]:
        """Also those whose names a loss of power brings back."""
        return [path for top in (self.folder, self._durable) for path in sorted(top.rglob("*")) if path.is_file()]

    def _folders(self) -> list[Path]:
        """With files that stores sync the folders of."""
        tops = (self.folder, self._durable)
        found = {path.parent.relative_to(top) for top in tops for path in top.rglob("*") if path.is_file()}
        return [self.folder / folder for folder in sorted(found)]

    def rot(self, choice: float) -> str:
        """Some bytes change, of a journal's file or a payload; which."""
        payloads = sorted(
            path for path in self.folder.glob("blobs/[0-9a-f][0-9a-f]/*") if path.stat().st_ino not in self._pages
        )
        used = [(path, file) for path, file in sorted(self.files.items()) if any(file.data)]
        if not used or (payloads and choice < 0.3):
            if not payloads:
                return ""
            path = payloads[int(choice / 0.3 * len(payloads)) % len(payloads)]
            data = bytearray(path.read_bytes())
            data[self._random.randrange(len(data))] ^= 0xFF
            path.write_bytes(data)
            return f"payload {path.name}"
        newest = self._random.random() < NEWEST_PART
        path, file = used[-1 if newest else self._random.randrange(len(used))]
        end = len(file.data.rstrip(b"\0"))
        place = self._random.randrange(max(0, end - NEWEST_BYTES) if newest else 0, end)
        file.data[place] ^= 0xFF
        return f"{path.name} at {place}"

    def replace(self) -> None:
        """Another disk, which is empty."""
        self.files.clear()
        self._removed.clear()
        self._open.clear()
        self._pages.clear()
        for folder in (self.folder, self._durable):
            shutil.rmtree(folder, ignore_errors=True)


def _inodes(folder: Path) -> dict[str, int]:
    """Of the files in it, by name."""
    if not folder.is_dir():
        return {}
    return {entry.name: entry.inode() for entry in os.scandir(folder) if entry.is_file()}


class _FolderEntry:
    """Of a folder, as os.scandir tells it."""

    def __init__(self, path: str, made: float) -> None:
        self.path, self.name, self._made = path, os.path.basename(path), made

    def stat(self) -> SimpleNamespace:
        """Its size, and when it was stored on its machine's clock."""
        return SimpleNamespace(st_size=os.stat(self.path).st_size, st_mtime=self._made)


class DiskOwner(Protocol):
    """A machine."""

    disk: SimulatedDisk


class _OpenFile(NamedTuple):
    """A descriptor of a simulated process. real: the one beneath. folder: what is open, if it is none of files."""

    disk: SimulatedDisk
    real: int
    folder: Path | None = None


class Files:
    """In place of the module `os`, and of BOOT_ID: what a process finds on its machine's disk. machines: by address."""

    def __init__(self, machines: Callable[[], Mapping[str, DiskOwner]], now: Callable[[], float]) -> None:
        self._machines, self._now = machines, now
        self._numbers = itertools.count(FIRST_DESCRIPTOR)  # none is used again: who is killed may give it back late
        self._open: dict[int, _OpenFile] = {}

    def disk(self) -> SimulatedDisk:
        """Of whoever asks."""
        process = PROCESS.get()
        assert process is not None, "only simulated processes have disks"
        return self._machines()[process.address].disk

    def read(self, path: Path) -> BinaryIO:
        """In place of roq.log.store.blobs.opened."""
        return self.disk().read_payload(path)

    def module(self) -> SimpleNamespace:
        """As much of `os` as roq/runtime/files.py and stores use. Files beside a disk's folder are real ones."""
        flags = ("O_RDONLY", "O_RDWR", "O_CREAT", "O_EXCL", "O_TRUNC", "O_CLOEXEC", "O_DIRECTORY")
        names = (*flags, "path", "unlink", "replace", "strerror")
        return SimpleNamespace(
            **{name: getattr(os, name) for name in names},
            open=self._opened,
            close=self._close,
            fstat=lambda descriptor: os.fstat(self._real(descriptor)),
            pread=lambda descriptor, count, offset: os.pread(self._real(descriptor), count, offset),
            pwrite=self._pwrite,
            ftruncate=self._cut,
            fsync=self._fsync,
            fdatasync=self._fsync,
            listdir=lambda path: sorted(os.listdir(path)),
            scandir=self._entries,
            statvfs=self._space,
        )

    def _opened(self, path: Any, flags: int, mode: int = 0o777) -> int:
        disk = self.disk()
        if not Path(path).is_relative_to(disk.folder):
            return os.open(path, flags, mode)
        descriptor = next(self._numbers)
        if flags & os.O_DIRECTORY:
            self._open[descriptor] = _OpenFile(disk, os.open(path, flags), Path(path))
        else:
            self._open[descriptor] = _OpenFile(disk, disk.opened(path, flags, mode))
        process = PROCESS.get()
        assert process is not None
        process.on_end.append(lambda: self._close(descriptor))
        return descriptor

    def _close(self, descriptor: int) -> None:
        """Also by whoever forgets a file last, whichever process that was in."""
        if (found := self._open.pop(descriptor, None)) is not None:
            os.close(found.real)
        elif descriptor < FIRST_DESCRIPTOR:
            os.close(descriptor)

    def _real(self, descriptor: int) -> int:
        return self._open[descriptor].real if descriptor >= FIRST_DESCRIPTOR else descriptor

    def _pwrite(self, descriptor: int, data: Any, offset: int) -> int:
        if descriptor < FIRST_DESCRIPTOR:
            return os.pwrite(descriptor, data, offset)
        disk, real, _ = self._open[descriptor]
        return disk.pwrite(real, data, offset)

    def _cut(self, descriptor: int, end: int) -> None:
        disk, real, _ = self._open[descriptor]
        disk.cut(real, end)

    def _fsync(self, descriptor: int) -> None:
        if descriptor < FIRST_DESCRIPTOR:
            os.fsync(descriptor)
            return
        disk, real, folder = self._open[descriptor]
        if folder is not None:
            disk.sync_folder(folder)
        else:
            disk.fsync(real)

    def _entries(self, folder: Any) -> list[_FolderEntry]:
        return [
            _FolderEntry(os.path.join(folder, name), self.disk().made(name, self._now())) for name in sorted(os.listdir(folder))
        ]

    def _space(self, path: Any) -> SimpleNamespace:
        return SimpleNamespace(f_bavail=0 if self.disk().full else 1 << 20, f_frsize=4096)

    def read_bytes(self) -> bytes:
        """Which boot of the machine this is, as in the kernel's boot_id."""
        return b"%d" % self.disk().boot
