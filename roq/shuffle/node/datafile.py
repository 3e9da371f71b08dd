"""A storage follower's files: blocks one after the other, never changed, only appended.

    "RoQs" · length of head u32 · length of data u32 · crc32 of head u32 · head · data      head: msgpack Head

A file that was closed is only read. What can't be read is skipped up to the next record that can; a torn tail is cut off.
After a sync that failed nothing is known of what was written since the one before: it is cut off, and the file takes no more.

Descriptors. Only so many files are open at a time; who reads one that was closed meanwhile opens it again. Thread-safe. A file
in use, or that was written and not synced yet, stays open: the kernel reports a failed write to the descriptors that are open
then, and to each only once. Not covered: which blocks there are (stored.py), when they are durable (committer.py).
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import threading
from collections import OrderedDict, deque
from collections.abc import Iterator
from pathlib import Path
from struct import Struct
from typing import NamedTuple
from zlib import crc32

import msgspec

from roq.runtime.files import DISK
from roq.wire.decoding import UNDECODABLE
from roq.wire.limits import CONTROL_BYTES_MAX
from roq.wire.shuffle import Block

OPEN_FILES_MAX = 256
OPEN_SHARE = 4  # of the process's limit, one part in so many: connections and work queues need descriptors too
MAGIC = b"RoQs"
SEARCH_BYTES = 1024 * 1024
PAGE_BYTES = 4096  # what can't be read is as large, or a multiple of it
_fixed = Struct("<4sIII")
UNREADABLE = (errno.EIO, errno.EBADMSG, errno.EUCLEAN)  # what a disk or file system says of bytes it has lost
_encode = msgspec.msgpack.Encoder().encode


class OpenFile:
    """One file's descriptor, -1 when closed. uses: by threads just now. kept: not to be closed by others."""

    __slots__ = ("descriptor", "kept", "path", "uses")

    def __init__(self, path: Path) -> None:
        self.path = path
        self.descriptor, self.uses, self.kept = -1, 0, False


class Descriptors:
    """limit: files open at a time, as long as no more are in use or kept."""

    def __init__(self, limit: int = 0) -> None:
        """0: as fits the process's limit."""
        self._limit = limit or max(1, min(OPEN_FILES_MAX, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // OPEN_SHARE))
        self._lock = threading.Lock()
        self._idle: OrderedDict[OpenFile, None] = OrderedDict()  # the one not used for longest comes first
        self._dropped: deque[OpenFile] = deque()
        self.open = 0

    def take(self, file: OpenFile, flags: int = 0) -> int:
        """Its descriptor, which stays open until `give_back`. Raises OSError."""
        with self._lock:
            self._close_dropped()
            if file.descriptor < 0:
                self._make_room()
                file.descriptor = DISK.open(file.path, flags, 0o600)
                self.open += 1
            self._idle.pop(file, None)
            file.uses += 1
            return file.descriptor

    def give_back(self, file: OpenFile) -> None:
        """What `take` gave."""
        with self._lock:
            file.uses -= 1
            if not file.uses and not file.kept:
                self._idle[file] = None
            self._close_dropped()

    def keep(self, file: OpenFile) -> None:
        """Don't close it until `release`. It is in use by the caller."""
        with self._lock:
            file.kept = True

    def release(self, file: OpenFile) -> None:
        """It may be closed again. It is in use by the caller."""
        with self._lock:
            file.kept = False

    def drop(self, file: OpenFile) -> None:
        """Nobody needs it any more. Never waits: the collector of garbage may call it, in the middle of anything."""
        self._dropped.append(file)
        if self._lock.acquire(blocking=False):
            try:
                self._close_dropped()
            finally:
                self._lock.release()

    def _make_room(self) -> None:
        while self.open >= self._limit and self._idle:
            self._close(self._idle.popitem(last=False)[0])

    def _close_dropped(self) -> None:
        while self._dropped:
            file = self._dropped.popleft()
            self._idle.pop(file, None)
            if file.descriptor >= 0:
                self._close(file)

    def _close(self, file: OpenFile) -> None:
        DISK.close(file.descriptor)
        file.descriptor = -1
        self.open -= 1


def raise_limit() -> None:
    """As many descriptors as the system lets this process have: the default of most systems is far below."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(OSError, ValueError):  # it goes on with fewer
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


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


class FoundRecord(NamedTuple):
    """A record in a file. offset, size: of its data. begin: of the record."""

    head: Head
    offset: int
    size: int
    begin: int


_decode = msgspec.msgpack.Decoder(Head).decode


def encode(partition: int, attempt: str, run: int, block: Block) -> tuple[bytes, bytes]:
    """What stands before the data in the file, and the data."""
    head = _encode(Head(partition, attempt, run, block.first, block.rows, block.first_key, block.last_key, block.crc))
    return _fixed.pack(MAGIC, len(head), len(block.data), crc32(head)) + head, block.data


class DataFile:
    """One file, there as long as anybody has this object. size: of what is complete in it. broken: a sync failed.

    Opened when it is needed. One thread writes, any thread reads.
    """

    def __init__(self, path: Path, number: int, descriptors: Descriptors | None = None) -> None:
        self.path, self.number = path, number
        self._descriptors = descriptors if descriptors is not None else Descriptors()
        self._opened = OpenFile(path)
        self.live = 0  # bytes of its blocks that are still wanted
        self.broken: OSError | None = None
        with self._file(os.O_CREAT) as file:
            self.size = self._synced = DISK.size(file)

    @contextlib.contextmanager
    def _file(self, flags: int = 0) -> Iterator[int]:
        file = self._descriptors.take(self._opened, flags)
        try:
            yield file
        finally:
            self._descriptors.give_back(self._opened)

    def append(self, parts: list[bytes]) -> int:
        """Write behind the end; where it begins. Raises OSError: then nothing was added."""
        if self.broken is not None:
            raise OSError(self.broken.errno, f"{self.path} takes no more: {self.broken.strerror}")
        begin = at = self.size
        with self._file() as file:
            self._descriptors.keep(self._opened)
            try:
                for part in parts:
                    DISK.write_all(file, part, at)
                    at += len(part)
            except OSError:
                self.cut(begin)
                raise
        self.size = at
        return begin

    def cut(self, size: int) -> None:
        """Forget what stands behind `size`."""
        with self._file() as file:
            DISK.truncate(file, size)
        self.size = size
        self._synced = min(self._synced, size)

    def sync(self) -> None:
        """All is durable when this returns. Raises OSError, then and ever after."""
        if self.broken is not None:  # the kernel tells it once; what was to be written is lost for all that
            raise OSError(self.broken.errno, f"{self.path}: a sync failed before: {self.broken.strerror}")
        with self._file() as file:
            try:
                DISK.sync(file)
            except OSError as error:
                self.broken = error
                with contextlib.suppress(OSError):  # else it would count after a new start
                    self.cut(self._synced)
                raise
            finally:
                self._descriptors.release(self._opened)
        self._synced = self.size

    def read(self, offset: int, size: int) -> bytes:
        """That part of the file, shorter if the file is. Raises OSError."""
        with self._file() as file:
            return DISK.read(file, size, offset)

    def intact(self, offset: int, size: int, crc: int) -> bytes | None:
        """That part of the file, None if it is damaged. Raises OSError (it may be intact)."""
        data = self._readable(offset, size)
        return data if data is not None and len(data) == size and crc32(data) == crc else None

    def _readable(self, offset: int, size: int) -> bytes | None:
        try:
            return self.read(offset, size)
        except OSError as error:
            if error.errno in UNREADABLE:
                return None
            raise

    def void(self, offset: int) -> None:
        """The record whose data begins there is damaged: `scan` shall not tell of it again. Raises OSError."""
        with self._file() as file:
            (byte,) = DISK.read(file, 1, offset - 1)  # the last one of its head
            self._descriptors.keep(self._opened)
            DISK.write_all(file, bytes([byte ^ 0xFF]), offset - 1)
            self.sync()

    def scan(self) -> Iterator[FoundRecord]:
        """Every record whose head is complete and whose data is within the file."""
        at = 0
        while at < self.size:
            found = self._record(at)
            if found is None:
                at = self._search(at + 1)
            else:
                yield found
                at = found.offset + found.size

    def _record(self, at: int) -> FoundRecord | None:
        fixed = self._readable(at, _fixed.size)
        if fixed is None or len(fixed) < _fixed.size:
            return None
        magic, head_size, size, crc = _fixed.unpack(fixed)
        offset = at + _fixed.size + head_size
        if magic != MAGIC or max(head_size, size) > CONTROL_BYTES_MAX or offset + size > self.size:
            return None
        head = self.intact(at + _fixed.size, head_size, crc)
        if head is None:
            return None
        try:
            return FoundRecord(_decode(head), offset, size, at)
        except UNDECODABLE:
            return None

    def _search(self, at: int) -> int:
        """Where the next record may begin; the end of the file if none does."""
        while at < self.size:
            page = at + PAGE_BYTES - at % PAGE_BYTES  # the next one
            tries = (SEARCH_BYTES, page - at + len(MAGIC) - 1, page - at)
            data = next((data for size in tries if (data := self._readable(at, size)) is not None), None)
            if data is None:
                at = page
                continue
            found = data.find(MAGIC)
            if found >= 0:
                return at + found
            if at + len(data) >= self.size or not data:
                break
            at += max(1, len(data) - len(MAGIC) + 1)
        return self.size

    def remove(self) -> None:
        """Unlink it; whoever reads it can go on. Raises OSError."""
        with contextlib.suppress(FileNotFoundError), self._file():
            self._descriptors.keep(self._opened)  # it can't be opened again
            self.path.unlink()

    def __del__(self) -> None:
        self._descriptors.drop(self._opened)
