"""The records inside a batch of the journal.

kind u8 · segment number u32 · position u64 · confirmed u64 · length u32 · crc u32 · payload

ENTRY   an entry of a log; crc: roq.wire.store.entry_crc
OPEN    segment `payload` (its name), fenced at epoch `position`; what is not held of it was never stored here
STATE   as OPEN, but nothing is known of what is not held
DELETE  the segment is gone
BAD     the entry at `position` is held no more because it was damaged
DAMAGE  these places of the journal are known to be damaged: msgpack list of (file, offset). Every OPEN before is void.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import IntEnum
from struct import Struct
from typing import NamedTuple
from zlib import crc32

import msgspec

_header = Struct("<BIQQII")
HEADER_BYTES = _header.size
_pack = _header.pack
_unpack_from = _header.unpack_from


class RecordKind(IntEnum):
    """What a record says."""

    ENTRY = 1
    OPEN = 2
    STATE = 3
    DELETE = 4
    BAD = 5
    DAMAGE = 6


class StoredRecord(NamedTuple):
    """One record. offset: where it begins, relative to what was parsed."""

    kind: int
    segment: int
    position: int
    confirmed: int
    length: int
    crc: int
    offset: int


def encode_entry(segment: int, position: int, confirmed: int, crc: int, entry: bytes) -> bytes:
    """An ENTRY."""
    return _pack(1, segment, position, confirmed, len(entry), crc) + entry


def encode_state(kind: RecordKind, segment: int, epoch: int, name: str) -> bytes:
    """An OPEN or a STATE."""
    payload = name.encode()
    return _pack(kind, segment, epoch, 0, len(payload), crc32(payload)) + payload


def encode_mark(kind: RecordKind, segment: int, position: int = 0) -> bytes:
    """A DELETE or a BAD."""
    return _pack(kind, segment, position, 0, 0, 0)


def encode_damage(places: list[tuple[int, int]]) -> bytes:
    """A DAMAGE."""
    payload = msgspec.msgpack.encode(places)
    return _pack(RecordKind.DAMAGE, 0, 0, 0, len(payload), crc32(payload)) + payload


def parse(body: bytes) -> Iterator[StoredRecord]:
    """The records of a batch, until one does not fit (only in a damaged batch); payloads are not checked."""
    offset, end = 0, len(body)
    while offset + HEADER_BYTES <= end:
        kind, segment, position, confirmed, length, crc = _unpack_from(body, offset)
        if not 1 <= kind <= 6 or offset + HEADER_BYTES + length > end:
            return
        yield StoredRecord(kind, segment, position, confirmed, length, crc, offset)
        offset += HEADER_BYTES + length


def payload_of(body: bytes, record: StoredRecord) -> bytes:
    """The payload of a record of this body."""
    begin = record.offset + HEADER_BYTES
    return body[begin : begin + record.length]
