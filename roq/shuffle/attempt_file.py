"""The file of one attempt in a folder: its runs' blocks one after the other, and an index of them.

    "RoQrun" 0 1 · crc32 u32 · length u32 · owner           owner: msgpack Owner; the version is in the magic
    data of blocks …                                        Arrow IPC messages, each with its CRC in the index
    index                                                   msgpack list of RunIndex
    offset of index u64 · length u64 · crc32 u32 · "RoQend" 0 1

Written front to back, on stable storage before it gets its name, never changed. A file with its name that does not end like
this was damaged: DataLost. Not covered: who may write, where files lie (folder.py).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from fcntl import LOCK_UN, flock
from pathlib import Path
from struct import Struct
from typing import Any, NamedTuple
from zlib import crc32

import msgspec
import numpy as np

from roq.errors import DataLost
from roq.runtime.files import Disk
from roq.shuffle.keys import Rows
from roq.wire.shuffle import Block, Receipt, RunSample, RunSlice

MAGIC, END_MAGIC = b"RoQrun\x00\x01", b"RoQend\x00\x01"
_head = Struct("<8sII")
_tail = Struct("<QQI8s")


class Owner(msgspec.Struct, frozen=True, array_like=True):
    """Whose file it is. shuffle: the id."""

    shuffle: str
    partition: int
    attempt: str


class FileRunIndex(msgspec.Struct, frozen=True, array_like=True):
    """Where a run's blocks are. sample: a RunSample, only decoded for those who need it. starts: the first row of each block;
    offsets, lengths, crcs: of its data; all as <u8."""

    rows: int
    size: int
    sample: bytes
    starts: bytes
    offsets: bytes
    lengths: bytes
    crcs: bytes
    first_keys: list[bytes]
    last_keys: list[bytes]


class AttemptWriter:
    """Appends runs to a new file."""

    def __init__(self, disk: Disk, file: int, owner: Owner) -> None:
        """file: open and empty; `close` closes it. Raises OSError."""
        self._disk, self._file = disk, file
        self._runs: list[FileRunIndex] = []
        self._places: list[tuple[int, int, int, int]] = []  # of the run's blocks: first row, offset, length, crc
        self._first_keys: list[bytes] = []
        self._last_keys: list[bytes] = []
        self._syncs = ThreadPoolExecutor(1, "roq-shuffle-sync")  # the medium works while the next run is sorted
        self._pending: Future[None] | None = None
        self._at = 0
        self._indexed = False
        data = msgspec.msgpack.encode(owner)
        self._append(_head.pack(MAGIC, crc32(data), len(data)) + data)

    def send(self, blocks: Sequence[Block]) -> None:
        """Append blocks of the run. Raises OSError."""
        for block in blocks:
            self._places.append((block.first, self._at, len(block.data), block.crc))
            self._first_keys.append(block.first_key)
            self._last_keys.append(block.last_key)
            self._append(block.data)

    def end(self, sample: RunSample) -> None:
        """The run is complete. Raises OSError."""
        columns = np.array(self._places, "<u8").reshape(-1, 4).T
        starts, offsets, lengths, crcs = (column.tobytes() for column in columns)
        encoded = msgspec.msgpack.encode(sample)
        self._runs.append(
            FileRunIndex(sample.rows, sample.size, encoded, starts, offsets, lengths, crcs, self._first_keys, self._last_keys)
        )
        self._places, self._first_keys, self._last_keys = [], [], []
        if self._pending is None or self._pending.done():
            if self._pending is not None:
                self._pending.result()
            self._pending = self._syncs.submit(self._disk.sync, self._file)

    def finish(self) -> None:
        """Write the index; all is on stable storage afterwards. Raises OSError; after a failed sync for good: the kernel tells
        it once, has given up on the bytes, and would find nothing wrong the next time."""
        if not self._indexed:  # else only the sync has failed, or what came after it
            data = msgspec.msgpack.encode(self._runs)
            self._append(data + _tail.pack(self._at, len(data), crc32(data), END_MAGIC))
            self._indexed = True
        if self._pending is not None:
            self._pending.result()
        self._pending = self._syncs.submit(self._disk.sync, self._file)
        self._pending.result()

    def is_at(self, path: Path) -> bool:
        """Whether this is the file there. Raises OSError."""
        return same_file(path, self._file)

    def close(self) -> None:
        """Let go of the file and of its lock."""
        self._syncs.shutdown()
        flock(self._file, LOCK_UN)  # a process forked meanwhile would hold it on
        os.close(self._file)

    def _append(self, data: bytes) -> None:
        self._disk.write_all(self._file, data, self._at)
        self._at += len(data)


def same_file(path: Path, descriptor: int) -> bool:
    """Whether the descriptor is of the file that has this name now. Raises OSError."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False


class BlockPlace(NamedTuple):
    """A block in the file. offset, length: of its data."""

    first: int
    rows: int
    first_key: bytes
    last_key: bytes
    crc: int
    offset: int
    length: int


class RunBlocks:
    """The index of one run, in memory. ends: the row behind each block."""

    def __init__(self, index: FileRunIndex) -> None:
        self.rows, self.size, self._sample = index.rows, index.size, index.sample
        self.first_keys, self.last_keys = index.first_keys, index.last_keys
        columns = (index.starts, index.offsets, index.lengths, index.crcs)
        self.starts, self.offsets, self.lengths, self.crcs = (np.frombuffer(each, "<u8").astype(np.int64) for each in columns)
        self.ends: Rows = np.append(self.starts[1:], np.int64(index.rows))

    @property
    def sample(self) -> RunSample:
        """As the writer took it."""
        return msgspec.msgpack.decode(self._sample, type=RunSample)

    def place(self, number: int) -> BlockPlace:
        """Where block `number` is."""
        first, rows = int(self.starts[number]), int(self.ends[number] - self.starts[number])
        numbers = (int(column[number]) for column in (self.crcs, self.offsets, self.lengths))
        return BlockPlace(first, rows, self.first_keys[number], self.last_keys[number], *numbers)

    def covering(self, piece: RunSlice) -> list[BlockPlace]:
        """Where the blocks are that these rows lie in."""
        if not piece.rows:
            return []
        begin = int(np.searchsorted(self.ends, piece.first, "right"))
        end = int(np.searchsorted(self.ends, piece.first + piece.rows, "left"))
        return [self.place(number) for number in range(begin, end + 1)]


class AttemptFile:
    """A whole file: its owner and its runs. Any thread; nothing is held open."""

    def __init__(self, disk: Disk, path: Path) -> None:
        """Raises DataLost (damaged), OSError."""
        self.path = path
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            magic, crc, length = self._unpack(_head, disk.read(file, _head.size, 0))
            size = os.fstat(file).st_size
            owner = disk.read(file, min(length, size), _head.size)
            at, index_length, index_crc, end_magic = self._unpack(_tail, disk.read(file, _tail.size, max(0, size - _tail.size)))
            fits = end_magic == END_MAGIC and at + index_length + _tail.size == size
            index = disk.read(file, index_length, at) if fits else b""
        finally:
            os.close(file)
        if magic != MAGIC or not fits or crc32(owner) != crc or crc32(index) != index_crc:
            raise DataLost(f"{path} is damaged: its head or its index can't be read")
        self.owner = msgspec.msgpack.decode(owner, type=Owner)
        self.runs = [RunBlocks(run) for run in msgspec.msgpack.decode(index, type=list[FileRunIndex])]

    @property
    def receipt(self) -> Receipt:
        """What its writer was given."""
        rows, size = sum(run.rows for run in self.runs), sum(run.size for run in self.runs)
        return Receipt(self.owner.partition, self.owner.attempt, rows, size, len(self.runs))

    def _unpack(self, layout: Struct, data: bytes) -> tuple[Any, ...]:
        if len(data) < layout.size:
            raise DataLost(f"{self.path} is cut off")
        return layout.unpack(data)


def read_block(disk: Disk, path: Path, place: BlockPlace) -> Block:
    """One block of a file; its CRC is not checked here. Raises DataLost, OSError."""
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)  # each time: a merge reads more files than may be open at once
    try:
        data = disk.read(file, place.length, place.offset)
    finally:
        os.close(file)
    if len(data) < place.length:
        raise DataLost(f"{path} is cut off")
    return Block(place.first, place.rows, place.first_key, place.last_key, place.crc, data)
