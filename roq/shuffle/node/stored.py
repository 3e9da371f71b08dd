"""What this host keeps of one shuffle: a folder with its spec and data files, and an index of them in memory.

    <id>/spec              crc32 u32 · msgpack (name, Spec); the folder counts from when it is there
    <id>/data-000001 …     datafile.py; only the last one grows
    <id>/winners-<digest>  which attempts are committed, if that was reported (committed.py)

The index has blocks by row number per run, never overlapping, with holes. A border of a range is turned into a row number of
the run: that of the first row here that is not before it. Keys of first and last row of a block mostly tell; where they don't,
the block's keys have to be looked at. The index belongs to the follower's loop; files are read and written in threads.
"""

from __future__ import annotations

import re
import shutil
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator
from pathlib import Path
from struct import Struct
from zlib import crc32

import msgspec

from roq.errors import CallError, StorageFailed
from roq.runtime.files import DISK, TEMPORARY
from roq.runtime.observe import logger
from roq.shuffle.committed import CommittedAttempts
from roq.shuffle.node.datafile import UNREADABLE, DataFile, Descriptors
from roq.wire.decoding import UNDECODABLE
from roq.wire.shuffle import BEGIN, Cursor, Position, Spec

log = logger(__name__)
FILE_BYTES = 128 * 1024 * 1024  # a file is closed when it has so many: what is forgotten is given back file by file
EPOCH_DIGITS = 20
GONE, BAD = ".gone", ".bad"  # suffixes of folders: being removed; unreadable, kept for people
RunKey = tuple[int, str, int]
_crc = Struct("<I")
_id = re.compile(r"[0-9A-Za-z_-]{1,100}")
_decode_spec = msgspec.msgpack.Decoder(tuple[str, Spec]).decode


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


def check_id(shuffle: str) -> str:
    """The id, if it can name a folder. Raises CallError."""
    if not _id.fullmatch(shuffle):
        raise CallError(f"{shuffle[:100]!r} can't be a shuffle's id")
    return shuffle


def write_durably(path: Path, data: bytes) -> None:
    """The file has these bytes or those it had before."""
    DISK.write_file(path, data, path.with_name(path.name + TEMPORARY), 0o600)


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
        file = DISK.open(self._path)
        try:
            DISK.write_all(file, self._encode(epoch), 0)
            DISK.sync(file)
        finally:
            DISK.close(file)


class StoredShuffle:
    """One shuffle. damaged: something of it was found so, and may be missing now."""

    def __init__(self, directory: Path, name: str, spec: Spec, descriptors: Descriptors) -> None:
        self.id, self.directory, self.name, self.spec = directory.name, directory, name, spec
        self._descriptors = descriptors
        self.damaged = False
        self.files: dict[int, DataFile] = {}
        self.runs: dict[RunKey, RunIndex] = {}
        self.attempts: dict[tuple[int, str], set[int]] = {}
        self._command: list[tuple[int, str]] = []  # of all attempts
        self.current: DataFile | None = None
        self.last_number = 0
        self.live = 0  # bytes of blocks that are wanted

    @classmethod
    def create(cls, directory: Path, name: str, spec: Spec, descriptors: Descriptors) -> StoredShuffle:
        """A new folder. Blocking. Raises OSError."""
        directory.mkdir(exist_ok=True)
        data = msgspec.msgpack.encode((name, spec))
        write_durably(directory / "spec", _crc.pack(crc32(data)) + data)
        DISK.sync_folder(directory.parent)
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
        stored.damaged |= damaged > 0
        return stored, damaged

    def _load_file(self, number: int, *, last: bool) -> int:
        file = self.files[number] = DataFile(self.directory / f"data-{number:06d}", number, self._descriptors)
        self.last_number = number
        seen = end = damaged = 0
        for head, offset, size, begin in file.scan():
            self.damaged |= begin > seen  # something was there that can't be read, or was dropped and perhaps not mended yet
            seen = offset + size
            if last and file.intact(offset, size, head.crc) is None:  # written, not synced when the power went
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
            self.damaged |= seen < file.size
        return damaged

    def new_file(self) -> DataFile:
        """The file that grows from now on. Blocking. Raises OSError."""
        self.last_number += 1
        file = DataFile(self.directory / f"data-{self.last_number:06d}", self.last_number, self._descriptors)
        DISK.sync_folder(self.directory)
        self.files[file.number] = self.current = file
        return file

    # --- index --------------------------------------------------------------------------------------------------------

    def add(self, key: RunKey, entry: BlockEntry) -> bool:
        """False: its rows are here already."""
        run = self.runs.get(key)
        if run is None:
            run = self.runs[key] = RunIndex((key[0], key[2]))
            if key[:2] not in self.attempts:
                self.attempts[key[:2]] = set()
                insort(self._command, key[:2])
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
                del self.attempts[key[:2]], self._command[bisect_left(self._command, key[:2])]
        return True

    def replace(self, key: RunKey, old: BlockEntry, new: BlockEntry) -> bool:
        """The block lies elsewhere now."""
        run = self.runs.get(key)
        if run is None or not run.replace(old, new):
            return False
        old.file.live -= old.size
        new.file.live += new.size
        return True

    def runs_of(self, committed: CommittedAttempts | None, begin: Cursor = BEGIN) -> Iterator[tuple[RunKey, RunIndex]]:
        """The runs of these attempts (None: of all), in order, from one on. Others may come and go meanwhile."""
        for attempt in self._attempts(committed, begin):
            for number in sorted(self.attempts.get(attempt, ())):
                key = (*attempt, number)
                run = self.runs.get(key)
                if run is not None and key >= begin:
                    yield key, run

    def _attempts(self, committed: CommittedAttempts | None, begin: Cursor) -> Iterator[tuple[int, str]]:
        if committed is not None:
            for at in range(bisect_left(committed.partitions, begin[0]), len(committed)):
                partition = committed.partitions[at]
                yield partition, committed.by[partition]
            return
        index = bisect_left(self._command, begin[:2])
        while index < len(self._command):
            attempt = self._command[index]
            yield attempt
            index = bisect_right(self._command, attempt)


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
        directory.rename(gone)
    elif not gone.exists():  # the try before came so far
        return
    DISK.sync_folder(directory.parent)
    shutil.rmtree(gone)
