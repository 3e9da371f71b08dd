"""The store's journal: preallocated files of zeros, filled with batches, one sync per batch.

    file    journal-<16 hex digits, 1, 2, 3 …>, always of the size it was made with
            0  header   "RoQJ" · version u32 · number u64 · end of the file before u64 · crc u32      then zeros up to 64
            64 batches, one after the other, then zeros
    batch   magic u32 · body length u32 · sequence u64 · body crc u32 · header crc u32 · body
    body    records (index.py); an empty body is a marker

A batch is written only after the one before it was synced. So whatever follows a batch, be it an empty marker, proves that
the batch was durable: if it is unreadable then, it was *damaged*. An unreadable last batch is a torn write, and is cut, if
it shows a sector that was never written; otherwise it counts as damaged too. Damage is never taken for absence.

What a process that is gone wrote last may be in the page cache alone: it was killed before the sync, or the sync failed; then
the kernel calls the pages clean, and no later sync writes them. So the last batch is written again, as it reads, before it
counts.

Not covered: what records mean (index.py), who syncs in which thread (process.py).
"""

from __future__ import annotations

import errno
import struct
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from struct import Struct
from typing import NamedTuple
from zlib import crc32

from roq.errors import StorageFailed, UnknownFormat
from roq.runtime.files import TEMPORARY, Disk
from roq.runtime.observe import logger

log = logger(__name__)

FILE_BYTES = 32 * 1024 * 1024
HEADER_BYTES = 64
FILE_MAGIC = b"RoQJ"
VERSION = 1
BATCH_MAGIC = 0x426F5152
MAGIC_BYTES = BATCH_MAGIC.to_bytes(4, "little")
SECTOR_BYTES = 512  # what a disk writes whole or not at all
_ZEROS = bytes(64 * 1024)
_file_header = Struct("<4sIQQ")
_batch_header = Struct("<IIQI")
_crc = Struct("<I")
BATCH_HEADER_BYTES = _batch_header.size + _crc.size


class JournalWrite(NamedTuple):
    """Bytes to write and sync. number: of the file; offset: where `data` begins; body: where the records begin."""

    number: int
    offset: int
    data: bytes
    body: int


class Damage(NamedTuple):
    """Bytes that were durable and can't be read any more."""

    number: int
    offset: int


class JournalBatch(NamedTuple):
    """A batch that was read. offset: of its body in the file. intact: False if it is damaged, and records of it may be too."""

    number: int
    offset: int
    body: bytes
    intact: bool


@dataclass
class _JournalFile:
    number: int
    path: Path
    descriptor: int
    size: int
    header_written: bool = True


def path_of(directory: Path, number: int) -> Path:
    """Where the file of this number is."""
    return directory / f"journal-{number:016x}"


def encode_header(number: int, previous_end: int) -> bytes:
    """The header of a file; previous_end: where the batches of the file before end, 0 if there is none."""
    head = _file_header.pack(FILE_MAGIC, VERSION, number, previous_end)
    return (head + _crc.pack(crc32(head))).ljust(HEADER_BYTES, b"\0")


def encode_batch(sequence: int, body: bytes) -> bytes:
    """One batch."""
    head = _batch_header.pack(BATCH_MAGIC, len(body), sequence, crc32(body))
    return b"%b%b%b" % (head, _crc.pack(crc32(head)), body)


def decode_header(data: bytes, number: int) -> int | None:
    """previous_end, or None if the header is damaged. Raises UnknownFormat."""
    try:
        magic, version, found, previous_end = _file_header.unpack_from(data)
        (crc,) = _crc.unpack_from(data, _file_header.size)
    except struct.error:
        return None
    if magic != FILE_MAGIC or crc != crc32(data[: _file_header.size]) or found != number:
        return None
    if version != VERSION:
        raise UnknownFormat(f"journal file {number} has format {version}, this program reads {VERSION}")
    return int(previous_end)


def batch_at(data: bytes, offset: int) -> tuple[int, int, int] | None:
    """(body length, sequence, body crc) of the batch header at `offset`, None if there is none."""
    try:
        magic, length, sequence, body_crc = _batch_header.unpack_from(data, offset)
        (crc,) = _crc.unpack_from(data, offset + _batch_header.size)
    except struct.error:
        return None
    if magic != BATCH_MAGIC or crc != crc32(data[offset : offset + _batch_header.size]):
        return None
    return int(length), int(sequence), int(body_crc)


class Journal:
    """The open journal. Reading it through (`scan`) comes first, then `ready`, then writing.

    `stage` gives the place of the next batch; the caller performs the Write (any thread, one at a time, in order).
    """

    def __init__(self, disk: Disk, directory: Path, file_bytes: int = FILE_BYTES) -> None:
        self._disk, self._directory, self.file_bytes = disk, directory, file_bytes
        self._files: dict[int, _JournalFile] = {}
        self._prepared: int | None = None
        self._current: _JournalFile | None = None
        self._position = 0  # where the next batch goes
        self._end_before = 0  # previous_end for the current file's header
        self._sequence = 0
        self._last = 0, HEADER_BYTES  # where the last intact batch of the file read last is
        self._clean: int | None = None  # the last file in use, if nothing but zeros follows its last batch
        for name in disk.names(directory):
            if name.endswith(TEMPORARY):
                disk.remove(directory / name)
            elif name.startswith("journal-"):
                self._open(int(name[8:], 16))

    def _open(self, number: int) -> _JournalFile:
        path = path_of(self._directory, number)
        descriptor = self._disk.open(path)
        file = self._files[number] = _JournalFile(number, path, descriptor, self._disk.size(descriptor))
        return file

    # --- reading it through -------------------------------------------------------------------------------------------

    def scan(self) -> Iterator[JournalBatch | Damage]:
        """Every batch in order, and every damage in its place. Raises UnknownFormat, OSError."""
        numbers = sorted(self._files)
        headers = {number: self._header(number) for number in numbers}
        if numbers and headers[numbers[-1]] == -1 and not _blank(data := self._content(numbers[-1]), 0):
            if self._next_batch(data, 0, len(data)) is not None:
                headers[numbers[-1]] = None  # its first sector is lost
            else:  # its first write was torn
                log.warning("journal file with only a torn batch removed", extra={"fields": {"file": numbers[-1]}})
                self.remove(numbers.pop())
        unused = [number for number in numbers if headers[number] == -1]
        for number in unused[:-1] if unused and unused[-1] == numbers[-1] else unused:
            yield Damage(number, 0)  # zeros where a file was in use
        used = [number for number in numbers if headers[number] != -1]
        end = HEADER_BYTES
        for place, number in enumerate(used):
            following = used[place + 1] if place + 1 < len(used) else None
            limit = headers[following] if following == number + 1 else None
            if following is not None and following != number + 1:
                yield Damage(number + 1, 0)
            if headers[number] is None:
                yield Damage(number, 0)
            end = yield from self._scan_file(number, limit)
        self._end_before = end if used else 0
        if not used or self._clean != used[-1] or headers[used[-1]] is None:
            self._clean = None
        if used:
            self._secure_last(self._files[used[-1]].descriptor)
        if unused and unused[-1] == numbers[-1]:
            self._prepared = unused[-1]

    def _secure_last(self, descriptor: int) -> None:
        """What the last write of the process before brought is answered as durable from now on. Raises OSError."""
        for begin, end in {(0, HEADER_BYTES), self._last}:
            self._disk.write_all(descriptor, self._disk.read(descriptor, end - begin, begin), begin)
        self._disk.sync(descriptor)

    def _header(self, number: int) -> int | None:
        """As decode_header; -1 for a file that was prepared and not used yet."""
        data = self._disk.read(self._files[number].descriptor, HEADER_BYTES, 0)
        return -1 if not any(data) and data else decode_header(data, number)

    def _scan_file(self, number: int, limit: int | None) -> Generator[JournalBatch | Damage, None, int]:
        """The batches of one file; returns where they end. limit: where they must end, None for the last file."""
        file = self._files[number]
        data = self._content(number)
        end = len(data) if limit is None else min(limit, len(data))
        offset = HEADER_BYTES
        self._last = 0, HEADER_BYTES
        while offset < end:
            head = batch_at(data, offset)
            if head is not None:
                length, sequence, body_crc = head
                body = data[offset + BATCH_HEADER_BYTES : offset + BATCH_HEADER_BYTES + length]
                if len(body) == length and crc32(body) == body_crc:
                    self._sequence = max(self._sequence, sequence)
                    yield JournalBatch(number, offset + BATCH_HEADER_BYTES, body, True)
                    self._last = offset, offset + BATCH_HEADER_BYTES + length
                    offset = self._last[1]
                    continue
            if limit is None and _blank(data, offset):
                self._clean = number if file.size == self.file_bytes else None
                break
            after = self._next_batch(data, offset + 1, end)
            if after is None and limit is None and file.size == self.file_bytes and _torn(data, offset, head):
                log.warning("torn batch truncated", extra={"fields": {"file": number, "offset": offset}})
                break
            yield Damage(number, offset)
            if head is not None:  # some of its records may be intact
                yield JournalBatch(number, offset + BATCH_HEADER_BYTES, data[offset + BATCH_HEADER_BYTES : after or end], False)
            offset = after if after is not None else end
        if (limit is not None and len(data) < limit) or (limit is None and file.size < self.file_bytes):
            yield Damage(number, len(data))
            return max(self.file_bytes, len(data) + 1)  # so that it is seen as damaged next time, too
        return offset

    def _content(self, number: int) -> bytes:
        return self._disk.read(self._files[number].descriptor, self._files[number].size, 0)

    def _next_batch(self, data: bytes, offset: int, end: int) -> int | None:
        """Where the next batch with a good header and a higher sequence begins."""
        while (offset := data.find(MAGIC_BYTES, offset, end)) >= 0:
            head = batch_at(data, offset)
            if head is not None and head[1] > self._sequence:
                return offset
            offset += 1
        return None

    # --- writing ------------------------------------------------------------------------------------------------------

    def ready(self) -> None:
        """Begin to write: behind the last batch, or in a new file if that end is torn or damaged. Raises OSError."""
        if self._clean is not None:
            self._current, self._position = self._files[self._clean], self._end_before
            return
        if self._prepared is None:
            self.adopt(self.create())
        self._position = self._end_before
        self.switch()

    @property
    def room(self) -> int:
        """Bytes of records that still fit in the current file."""
        return self.file_bytes - self._position - BATCH_HEADER_BYTES * 2

    @property
    def sequence(self) -> int:
        """Of the last batch that was read or staged; the next one's is higher."""
        return self._sequence

    def skip(self, sequence: int) -> None:
        """The next batch's is higher than this."""
        self._sequence = max(self._sequence, sequence)

    @property
    def number(self) -> int:
        """Number of the current file."""
        assert self._current is not None
        return self._current.number

    @property
    def numbers(self) -> list[int]:
        """All files in use, oldest first."""
        return sorted(number for number in self._files if number != self._prepared)

    @property
    def has_prepared(self) -> bool:
        """Is there a file to go on in when the current one is full?"""
        return self._prepared is not None

    def create(self) -> int:
        """Make the next file, so that `switch` needs neither time nor space; its number. In any thread. Raises OSError."""
        number = max(list(self._files), default=0) + 1
        self._disk.write_zeros(path_of(self._directory, number), self.file_bytes)
        return number

    def adopt(self, number: int) -> None:
        """The file was created."""
        self._open(number)
        self._prepared = number

    def switch(self) -> None:
        """Go on in the prepared file."""
        if self._prepared is None:
            raise OSError(errno.ENOSPC, "no journal file is prepared")
        self._end_before = self._position
        self._current = self._files[self._prepared]
        self._current.header_written = False
        self._prepared = None
        self._position = HEADER_BYTES

    def stage(self, body: bytes) -> JournalWrite:
        """Where this batch goes. It must fit (`room`)."""
        file = self._current
        assert file is not None
        self._sequence += 1
        batch = encode_batch(self._sequence, body)
        at = self._position
        self._position += len(batch)
        assert self._position <= self.file_bytes
        if file.header_written:
            return JournalWrite(file.number, at, batch, at + BATCH_HEADER_BYTES)
        file.header_written = True
        return JournalWrite(file.number, 0, encode_header(file.number, self._end_before) + batch, at + BATCH_HEADER_BYTES)

    def perform(self, write: JournalWrite) -> None:
        """Write and sync. Raises StorageFailed: what is on the disk is unknown then, and nothing may be written any more."""
        descriptor = self._files[write.number].descriptor
        try:
            self._disk.write_all(descriptor, write.data, write.offset)
            self._disk.sync(descriptor)
        except OSError as error:
            raise StorageFailed(f"journal file {write.number}: {error}") from error

    def read(self, number: int, offset: int, count: int) -> bytes:
        """Bytes of a file; fewer at its end. Raises OSError, KeyError if the file is gone."""
        return self._disk.read(self._files[number].descriptor, count, offset)

    def remove(self, number: int) -> None:
        """Delete an old file."""
        file = self._files.pop(number)
        self._disk.close(file.descriptor)
        self._disk.remove(file.path)

    def close(self) -> None:
        """Close all files."""
        for file in self._files.values():
            self._disk.close(file.descriptor)
        self._files.clear()


def _blank(data: bytes, offset: int) -> bool:
    """Nothing but zeros from `offset` on? Stripping them takes thirty times as long."""
    pieces = (data[at : at + len(_ZEROS)] for at in range(offset, len(data), len(_ZEROS)))
    return all(piece == _ZEROS[: len(piece)] for piece in pieces)


def _torn(data: bytes, offset: int, head: tuple[int, int, int] | None) -> bool:
    """May the unreadable last bytes be a write that was never synced? Then some sector of it was never written.

    A header may be on both sides of a border. What follows all of one, unless it is a marker's, begins with a record's kind.
    """
    if head is not None:
        end = offset + BATCH_HEADER_BYTES + head[0]
    else:
        end = max(len(data.rstrip(b"\0")), offset + BATCH_HEADER_BYTES)
        if not any(data[offset + BATCH_HEADER_BYTES - 1 : end]):
            return True  # not even the header is all there
    if end > len(data):
        return True
    first = offset - offset % SECTOR_BYTES
    for sector in range(first, end, SECTOR_BYTES):
        if not data[max(sector, offset) : min(sector + SECTOR_BYTES, end)].strip(b"\0"):
            return True
    return False
