"""What this host keeps of one shuffle: a folder with its spec and data files, and an index of them in memory.

    <id>/spec              crc32 u32 · msgpack (name, Spec); the folder counts from when it is there
    <id>/data-000001 …     datafile.py; only the last one grows
    <id>/winners-<digest>  which attempts count, if that was told (naming.py)

The index belongs to the follower's loop; files are read and written in threads.
"""

from __future__ import annotations

import os
import re
import shutil
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator
from pathlib import Path
from struct import Struct
from zlib import crc32

import msgspec

from roq.errors import CallError, StorageFailed
from roq.log.store.disk import TEMPORARY, sync_directory
from roq.runtime.observe import logger
from roq.shuffle.node.datafile import UNREADABLE, DataFile
from roq.shuffle.node.descriptors import Descriptors
from roq.shuffle.node.runindex import BlockEntry, RunIndex
from roq.shuffle.winners import Winners
from roq.wire.decoding import UNDECODABLE
from roq.wire.shuffle import BEGIN, Cursor, Spec

log = logger(__name__)
FILE_BYTES = 128 * 1024 * 1024  # a file is closed when it has so many: what is forgotten is given back file by file
EPOCH_DIGITS = 20
GONE, BAD = ".gone", ".bad"  # suffixes of folders: being removed; unreadable, kept for people
DEAD_MOST = 0.5  # of a file's bytes; then what lives in it is written again and the file deleted
RunKey = tuple[int, str, int]
_crc = Struct("<I")
_id = re.compile(r"[0-9A-Za-z_-]{1,100}")
_decode_spec = msgspec.msgpack.Decoder(tuple[str, Spec]).decode


def check_id(shuffle: str) -> str:
    """The id, if it can name a folder. Raises CallError."""
    if not _id.fullmatch(shuffle):
        raise CallError(f"{shuffle[:100]!r} can't be a shuffle's id")
    return shuffle


def write_durably(path: Path, data: bytes) -> None:
    """The file has these bytes or those it had before."""
    temporary = path.with_name(path.name + TEMPORARY)
    file = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(file, view) :]
        os.fsync(file)
    finally:
        os.close(file)
    temporary.rename(path)
    sync_directory(path.parent)


class EpochFile:
    """A number that is written in place, so that it can be on a full disk too. Blocking. Raises OSError, StorageFailed."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self) -> int:
        """0 before the first one."""
        if not self._path.exists():
            write_durably(self._path, self._encode(0))
        data = self._path.read_bytes()
        if not data[:EPOCH_DIGITS].isdigit() or data != self._encode(int(data[:EPOCH_DIGITS])):
            raise StorageFailed(f"{self._path} is damaged")
        return int(data[:EPOCH_DIGITS])

    @staticmethod
    def _encode(epoch: int) -> bytes:
        digits = b"%0*d" % (EPOCH_DIGITS, epoch)
        return digits + b" %08x\n" % crc32(digits)

    def write(self, epoch: int) -> None:
        """Durably."""
        file = os.open(self._path, os.O_WRONLY)
        try:
            os.pwrite(file, self._encode(epoch), 0)
            os.fdatasync(file)
        finally:
            os.close(file)


class StoredShuffle:
    """One shuffle. hurt: something of it was found damaged, and may be missing now."""

    def __init__(self, directory: Path, name: str, spec: Spec, descriptors: Descriptors) -> None:
        self.id, self.directory, self.name, self.spec = directory.name, directory, name, spec
        self._descriptors = descriptors
        self.hurt = False
        self.files: dict[int, DataFile] = {}
        self.runs: dict[RunKey, RunIndex] = {}
        self.attempts: dict[tuple[int, str], set[int]] = {}
        self._order: list[tuple[int, str]] = []  # of all attempts
        self.current: DataFile | None = None
        self.last_number = 0
        self.live = 0  # bytes of blocks that are wanted

    @classmethod
    def create(cls, directory: Path, name: str, spec: Spec, descriptors: Descriptors) -> StoredShuffle:
        """A new folder. Blocking. Raises OSError."""
        directory.mkdir(exist_ok=True)
        data = msgspec.msgpack.encode((name, spec))
        write_durably(directory / "spec", _crc.pack(crc32(data)) + data)
        sync_directory(directory.parent)
        return cls(directory, name, spec, descriptors)

    @classmethod
    def load(cls, directory: Path, descriptors: Descriptors) -> tuple[StoredShuffle, int]:
        """What is in the folder, and how many damaged blocks were found. Blocking. Raises OSError, StorageFailed: its spec is
        damaged."""
        data = (directory / "spec").read_bytes()
        try:
            if _crc.pack(crc32(data[_crc.size :])) != data[: _crc.size]:
                raise StorageFailed(f"{directory / 'spec'} is damaged")
            stored = cls(directory, *_decode_spec(data[_crc.size :]), descriptors)
        except UNDECODABLE as error:
            raise StorageFailed(f"{directory / 'spec'} is damaged: {error}") from None
        numbers = sorted(int(path.name.removeprefix("data-")) for path in directory.glob("data-*"))
        damaged = sum(stored._load_file(number, last=number == numbers[-1]) for number in numbers)
        stored.hurt |= damaged > 0
        return stored, damaged

    def _load_file(self, number: int, *, last: bool) -> int:
        file = self.files[number] = DataFile(self.directory / f"data-{number:06d}", number, self._descriptors)
        self.last_number = number
        seen = end = damaged = 0
        for head, offset, size, begin in file.scan():
            self.hurt |= begin > seen  # something was there that can't be read, or was dropped and perhaps not mended yet
            seen = offset + size
            if last and file.whole(offset, size, head.crc) is None:  # written, not synced when the power went
                damaged += 1
                continue
            self._add_newer((head.partition, head.attempt, head.run), BlockEntry(*head[3:], file, offset, size))
            end = seen
        if last:
            damaged += end < file.size
            file.cut(end)
            file.sync()  # of what the process before wrote it is not known whether it was synced
            self.current = file
        else:
            self.hurt |= seen < file.size
        return damaged

    def new_file(self) -> DataFile:
        """The file that grows from now on. Blocking. Raises OSError."""
        self.last_number += 1
        file = DataFile(self.directory / f"data-{self.last_number:06d}", self.last_number, self._descriptors)
        sync_directory(self.directory)
        self.files[file.number] = self.current = file
        return file

    def close_current(self) -> None:
        """What is written next goes to a new file. In the thread that writes."""
        self.current = None

    # --- index --------------------------------------------------------------------------------------------------------

    def run(self, key: RunKey) -> RunIndex | None:
        """The blocks of a run, None if there are none."""
        return self.runs.get(key)

    def add(self, key: RunKey, entry: BlockEntry) -> bool:
        """False: its rows are here already."""
        run = self.runs.get(key)
        if run is None:
            run = self.runs[key] = RunIndex((key[0], key[2]))
            if key[:2] not in self.attempts:
                self.attempts[key[:2]] = set()
                insort(self._order, key[:2])
            self.attempts[key[:2]].add(key[2])
        if not run.add(entry):
            return False
        entry.file.live += entry.size
        self.live += entry.size
        return True

    def _add_newer(self, key: RunKey, entry: BlockEntry) -> None:
        """One that was stored later: what it overlaps had been forgotten by then, and may lack rows that it has."""
        if not self.add(key, entry):
            for forgotten in self.runs[key].between(entry.first, entry.end):
                self.remove(key, forgotten)
            self.add(key, entry)

    def remove(self, key: RunKey, entry: BlockEntry) -> bool:
        """Forget a block; False: it was not here any more."""
        run = self.runs.get(key)
        if run is None or not run.remove(entry):
            return False
        entry.file.live -= entry.size
        self.live -= entry.size
        if not run.entries:
            del self.runs[key]
            self.attempts[key[:2]].discard(key[2])
            if not self.attempts[key[:2]]:
                del self.attempts[key[:2]], self._order[bisect_left(self._order, key[:2])]
        return True

    def replace(self, key: RunKey, old: BlockEntry, new: BlockEntry) -> bool:
        """The block lies elsewhere now."""
        run = self.runs.get(key)
        if run is None or not run.replace(old, new):
            return False
        old.file.live -= old.size
        new.file.live += new.size
        return True

    def runs_of(self, winners: Winners | None, begin: Cursor = BEGIN) -> Iterator[tuple[RunKey, RunIndex]]:
        """The runs of these attempts (None: of all), in order, from one on. Others may come and go meanwhile."""
        for attempt in self._attempts(winners, begin):
            for number in sorted(self.attempts.get(attempt, ())):
                key = (*attempt, number)
                run = self.runs.get(key)
                if run is not None and key >= begin:
                    yield key, run

    def _attempts(self, winners: Winners | None, begin: Cursor) -> Iterator[tuple[int, str]]:
        if winners is not None:
            for at in range(bisect_left(winners.partitions, begin[0]), len(winners)):
                partition = winners.partitions[at]
                yield partition, winners.by[partition]
            return
        index = bisect_left(self._order, begin[:2])
        while index < len(self._order):
            attempt = self._order[index]
            yield attempt
            index = bisect_right(self._order, attempt)

    def entries(self) -> Iterator[tuple[RunKey, BlockEntry]]:
        """All blocks."""
        for key, run in self.runs.items():
            for entry in run.entries:
                yield key, entry

    def closed(self) -> list[DataFile]:
        """Files nothing is appended to any more. In the thread that writes."""
        return [file for file in self.files.values() if file is not self.current]


def mostly_dead(file: DataFile) -> bool:
    """It is worth being written again, or deleted."""
    return file.live <= (1 - DEAD_MOST) * file.size


def load_all(directory: Path, descriptors: Descriptors) -> tuple[dict[str, StoredShuffle], int]:
    """All shuffles in a folder, and how many damaged blocks were dropped; one whose spec or files can't be read is put aside.
    Blocking. Raises OSError."""
    shuffles: dict[str, StoredShuffle] = {}
    total = 0
    for path in sorted(path for path in directory.iterdir() if path.is_dir() and not path.name.endswith(BAD)):
        try:
            if path.name.endswith(GONE) or not (path / "spec").exists():
                shutil.rmtree(path)
                continue
            stored, damaged = StoredShuffle.load(path, descriptors)
        except (StorageFailed, OSError) as error:
            if isinstance(error, OSError) and error.errno not in UNREADABLE:
                raise  # it may be whole
            _put_aside(path, error)
            continue
        shuffles[stored.id] = stored
        total += damaged
        if damaged:
            log.warning("damaged blocks were dropped", extra={"fields": {"shuffle": stored.id, "blocks": damaged}})
    return shuffles, total


def _put_aside(path: Path, reason: Exception) -> None:
    """The others go on without it."""
    log.error("damaged shuffle quarantined", extra={"fields": {"shuffle": path.name, "reason": str(reason)}})
    try:
        path.rename(path.with_name(path.name + BAD))
    except OSError as error:
        log.error("damaged shuffle could not be renamed", extra={"fields": {"shuffle": path.name, "reason": str(error)}})


def remove_folder(directory: Path) -> None:
    """All of a shuffle, if there is anything; half of it is never seen, and it does not come back. Blocking. Raises OSError."""
    gone = directory.with_name(directory.name + GONE)
    if directory.exists():
        os.rename(directory, gone)
    elif not gone.exists():  # the try before came so far
        return
    sync_directory(directory.parent)
    shutil.rmtree(gone)
