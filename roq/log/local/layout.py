"""The bytes of a segment file: its head, the entries, and what a scan of them finds; and of a snapshot. Pure.

Positions are bytes of the whole log: an entry that starts at position p of the log lies at file offset HEAD + p - base of the
segment with the largest base <= p. An entry's own position, the one everybody names it by, is where it *ends*.

    segment   magic 8 · version u32 · crc32 of the rest u32 · cookie u64 · base u64                      (HEAD = 32 bytes)
    entry     length u32 · crc32 u32 · start u64 · durable u64 · payload · zeros to a multiple of 8      (little endian)
    snapshot  magic 8 · version u32 · crc32 of the data u32 · cookie u64 · position u64 · data

The crc is that of the payload, xor both halves of `durable`, inverted so that zeros are no entry; `start` is compared with
where the entry lies, so that a stale or misplaced entry can't pass for a good one. `durable` is how far the log was on stable
storage when the entry was written: it proves, after a crash, that everything below was synced, so that damage there is told
apart from a torn tail.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple
from zlib import crc32

from roq.errors import StorageFailed, UnknownFormat

MAGIC = b"ROQ-LOG\n"
SNAPSHOT_MAGIC = b"ROQ-SNP\n"
VERSION = 1
HEAD = 32
ENTRY_HEAD = 24
ENTRY_BYTES_MAX = 256 * 1024 * 1024  # of one entry: what a reader must be able to hold

_SEGMENT = struct.Struct("<8sIIQQ")
_SEGMENT_REST = struct.Struct("<QQ")
_ENTRY = struct.Struct("<IIQQ")
_SNAPSHOT = struct.Struct("<8sIIQQ")
_ZEROS = [bytes(-length % 8) for length in range(8)]


class Scan(NamedTuple):
    """What lies behind a point of a segment. end: position behind the last good entry in a row; proved: the highest durable
    mark in any good entry, also behind the damage; dirty: file offset behind the last byte that is not zero; needed: bytes the
    file had when its last entry was written."""

    end: int
    proved: int
    dirty: int
    needed: int


def segment_head(cookie: int, base: int) -> bytes:
    """The first HEAD bytes of a segment."""
    return _SEGMENT.pack(MAGIC, VERSION, crc32(_SEGMENT_REST.pack(cookie, base)), cookie, base)


def check_segment_head(head: bytes, cookie: int, base: int, name: str) -> None:
    """Raise unless `head` is that of segment `base` of the log `cookie`."""
    if len(head) < HEAD or head[:8] != MAGIC:
        raise StorageFailed(f"{name} is not a segment of a log, or its first bytes are damaged")
    _, version, crc, found_cookie, found_base = _SEGMENT.unpack(head[:HEAD])
    if version != VERSION:
        raise UnknownFormat(f"{name} has format {version}; this program reads format {VERSION}")
    if crc != crc32(_SEGMENT_REST.pack(found_cookie, found_base)):
        raise StorageFailed(f"the first bytes of {name} are damaged")
    if (found_cookie, found_base) != (cookie, base):
        raise StorageFailed(f"{name} belongs to another log or place (cookie {found_cookie:016x}, base {found_base})")


def padded(length: int) -> int:
    """Bytes of an entry with a payload of `length`."""
    return ENTRY_HEAD + length + -length % 8


def pack(entries: Sequence[bytes], checksums: Sequence[int], start: int, durable: int) -> bytes:
    """Entries as they lie in the file from position `start` on. checksums: crc32 of each payload."""
    parts: list[bytes] = []
    mask = ~(durable ^ durable >> 32) & 0xFFFFFFFF
    for payload, checksum in zip(entries, checksums, strict=True):
        length = len(payload)
        parts += (_ENTRY.pack(length, checksum ^ mask, start, durable), payload, _ZEROS[length % 8])
        start += padded(length)
    return b"".join(parts)


def unpack(data: bytes, start: int, name: str, base: int = 0) -> list[tuple[int, bytes]]:
    """The complete entries in `data`, which begins at position `start`, as (position, payload). Raises StorageFailed at damage,
    for which it takes the segment's name and base."""
    found: list[tuple[int, bytes]] = []
    at, size, head = 0, len(data), _ENTRY.unpack_from
    marked, mask = -1, 0
    while at + ENTRY_HEAD <= size:
        length, crc, place, durable = head(data, at)
        begin = at + ENTRY_HEAD
        end = begin + length
        if place != start + at or length > ENTRY_BYTES_MAX:
            raise damaged(name, start + at, base)
        if end > size:
            break
        payload = data[begin:end]
        if durable != marked:  # one mark is that of many entries in a row
            marked, mask = durable, ~(durable ^ durable >> 32) & 0xFFFFFFFF
        if crc32(payload) ^ crc != mask:
            raise damaged(name, start + at, base)
        at = end + -length % 8
        found.append((start + at, payload))
    return found


def entry_length(data: bytes) -> int:
    """Bytes in the file of the entry whose head `data` begins with."""
    return padded(_ENTRY.unpack_from(data)[0])


def damaged(name: str, position: int, base: int) -> StorageFailed:
    """The error for an entry that can't be read and may hold acknowledged data. base: of the segment."""
    return StorageFailed(
        f"{name} is damaged at byte {HEAD + position - base} (position {position} of the log): what was written there can't be "
        "read. Nothing is skipped or changed. While the log is open, puts are taken, and who has read on serves; nobody else "
        "can lease, ack or look, and after a restart of the machine it may not open. Put a good copy of the file in place"
    )


def cut_short(name: str, size: int, allocated: int) -> StorageFailed:
    """The error for a segment file that is shorter than it was made."""
    return StorageFailed(
        f"{name} was cut short: it has {size} bytes and was allocated with {allocated}, so acknowledged entries may be "
        "missing at its end. The log is not opened, nothing is changed. Put a good copy of the file in place"
    )


def scan(data: bytes, base: int, start: int) -> Scan:
    """Look at all the bytes of a segment file from position `start` on, after a crash."""
    end, proved, needed, intact = start, 0, 0, True
    at = HEAD + start - base
    dirty = len(data.rstrip(b"\0"))
    while at + ENTRY_HEAD <= dirty:
        length, crc, place, durable = _ENTRY.unpack_from(data, at)
        stop = at + ENTRY_HEAD + length
        if place == base + at - HEAD and length <= ENTRY_BYTES_MAX:
            needed = max(needed, stop)  # no tear: the file is as long as that, durably, before anything is written to it
        good = (
            place == base + at - HEAD
            and stop <= len(data)
            and crc ^ crc32(data[at + ENTRY_HEAD : stop]) == ~(durable ^ durable >> 32) & 0xFFFFFFFF
        )
        if good:
            at = stop + -length % 8
            proved = max(proved, durable)
            if intact:
                end = base + at - HEAD
        else:
            intact = False
            at += 8  # entries begin at multiples of 8
    return Scan(end, proved, dirty, needed)


def pack_snapshot(cookie: int, position: int, data: bytes) -> bytes:
    """A snapshot's file."""
    return _SNAPSHOT.pack(SNAPSHOT_MAGIC, VERSION, crc32(data), cookie, position) + data


def unpack_snapshot(content: bytes, cookie: int, position: int, name: str) -> bytes:
    """The data of the snapshot of this log and position. Raises StorageFailed (damaged), UnknownFormat."""
    if len(content) < _SNAPSHOT.size or content[:8] != SNAPSHOT_MAGIC:
        raise StorageFailed(f"{name} is not a snapshot, or its first bytes are damaged")
    _, version, crc, found_cookie, found_position = _SNAPSHOT.unpack_from(content)
    if version != VERSION:
        raise UnknownFormat(f"{name} has format {version}; this program reads format {VERSION}")
    data = content[_SNAPSHOT.size :]
    if crc != crc32(data) or (found_cookie, found_position) != (cookie, position):
        raise StorageFailed(f"{name} is damaged; put a good copy in place")
    return data
