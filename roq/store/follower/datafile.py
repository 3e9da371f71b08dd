"""A storage follower's files: blocks one after the other, never changed, only appended.

    "RoQs" · length of head u32 · length of data u32 · crc32 of head u32 · head · data      head: msgpack Head

A file that was closed is only read. What can't be read is skipped up to the next record that can; a torn tail is cut off.
Blocking code. Not covered: which blocks there are (runindex.py), when they are durable (committer.py).
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from struct import Struct
from typing import NamedTuple
from zlib import crc32

import msgspec

from roq.errors import RoqError, StorageFailed, StorageFull
from roq.wire.decoding import UNDECODABLE
from roq.wire.limits import CONTROL_BYTES_MAX
from roq.wire.shuffle import Block

MAGIC = b"RoQs"
SEARCH_BYTES = 1024 * 1024
_fixed = Struct("<4sIII")
NO_SPACE = (errno.ENOSPC, errno.EDQUOT)


class Head(NamedTuple):
    """A block without its data, and whose it is."""

    partition: int
    attempt: str
    run: int
    first: int
    rows: int
    first_key: bytes
    last_key: bytes
    crc: int


class Found(NamedTuple):
    """A record in a file. offset, size: of its data."""

    head: Head
    offset: int
    size: int


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Head).decode


def storage_error(error: OSError, what: object) -> RoqError:
    """StorageFull or StorageFailed."""
    if error.errno in NO_SPACE:
        return StorageFull(f"no space for {what}")
    return StorageFailed(f"{what}: {error}")


def encode(partition: int, attempt: str, run: int, block: Block) -> tuple[bytes, bytes]:
    """What stands before the data in the file, and the data."""
    head = _encode(Head(partition, attempt, run, block.first, block.rows, block.first_key, block.last_key, block.crc))
    return _fixed.pack(MAGIC, len(head), len(block.data), crc32(head)) + head, block.data


class DataFile:
    """One file, open as long as anybody has this object. size: of what is whole in it."""

    def __init__(self, path: Path, number: int) -> None:
        self.path, self.number = path, number
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self.size = os.fstat(self._file).st_size
        self.live = 0  # bytes of its blocks that are still wanted

    def append(self, parts: list[bytes]) -> int:
        """Write behind the end; where it begins. Raises OSError: then nothing was added."""
        begin = at = self.size
        try:
            for part in parts:
                view = memoryview(part)
                while view:
                    written = os.pwrite(self._file, view, at)
                    at += written
                    view = view[written:]
        except OSError:
            self.cut(begin)
            raise
        self.size = at
        return begin

    def cut(self, size: int) -> None:
        """Forget what stands behind `size`."""
        os.ftruncate(self._file, size)
        self.size = size

    def sync(self) -> None:
        """All is durable when this returns."""
        os.fdatasync(self._file)

    def read(self, offset: int, size: int) -> bytes:
        """That part of the file, shorter if the file is."""
        return os.pread(self._file, size, offset)

    def void(self, offset: int) -> None:
        """The record whose data begins there is damaged: `scan` shall not tell of it again."""
        (byte,) = os.pread(self._file, 1, offset - 1)  # the last one of its head
        os.pwrite(self._file, bytes([byte ^ 0xFF]), offset - 1)
        os.fdatasync(self._file)

    def scan(self) -> Iterator[Found]:
        """Every record whose head is whole and whose data is within the file."""
        at = 0
        while at < self.size:
            found = self._record(at)
            if found is None:
                at = self._search(at + 1)
            else:
                yield found
                at = found.offset + found.size

    def _record(self, at: int) -> Found | None:
        fixed = self.read(at, _fixed.size)
        if len(fixed) < _fixed.size:
            return None
        magic, head_size, size, crc = _fixed.unpack(fixed)
        offset = at + _fixed.size + head_size
        if magic != MAGIC or max(head_size, size) > CONTROL_BYTES_MAX or offset + size > self.size:
            return None
        head = self.read(at + _fixed.size, head_size)
        if crc32(head) != crc:
            return None
        try:
            return Found(_decode(head), offset, size)
        except UNDECODABLE:
            return None

    def _search(self, at: int) -> int:
        """Where the next record may begin; the end of the file if none does."""
        while at < self.size:
            data = self.read(at, SEARCH_BYTES)
            found = data.find(MAGIC)
            if found >= 0:
                return at + found
            if len(data) < SEARCH_BYTES:
                break
            at += len(data) - len(MAGIC) + 1
        return self.size

    def remove(self) -> None:
        """Unlink it; whoever reads it can go on."""
        self.path.unlink(missing_ok=True)

    def __del__(self) -> None:
        os.close(self._file)
