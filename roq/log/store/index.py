"""What the store holds, in memory: segments, where each entry is in the journal, what is fenced; and the records of the journal
from which that comes.

    record  kind u8 · segment number u32 · position u64 · confirmed u64 · length u32 · crc u32 · payload

ENTRY   an entry of a log; crc: roq.wire.store.entry_crc
OPEN    segment `payload` (its name), fenced at epoch `position`; what is not held of it was never stored here
STATE   as OPEN, but nothing is known of what is not held
DELETE  the segment is gone
BAD     the entry at `position` is held no more because it was damaged
DAMAGE  these places of the journal are known to be damaged: msgpack list of (file, offset). Every OPEN before is void.

A store says NO_SUCH only of a segment whose opening it saw (OPEN), and only while none of its journal was damaged since.
Otherwise absence is UNKNOWN: an empty disk under the name of a lost one, or a journal with a hole, never truncates a log.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from enum import IntEnum
from struct import Struct
from typing import NamedTuple
from zlib import crc32

import msgspec

from roq.log.store.journal import Damage, JournalBatch
from roq.wire.store import entry_crc, log_of

SPAN_MAX = 1 << 24  # positions between the first and the last entry of one segment: a wild position must not eat the memory
ABSENT = 0
BAD = 1  # was held, is damaged
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


class StoredSegment:
    """One segment on this store. places: file number << 32 | offset of the record, or ABSENT, or BAD; from position `base`.

    pending: CRCs of entries on their way to the disk.
    """

    __slots__ = (
        "base",
        "bytes_in",
        "confirmed",
        "fenced",
        "fenced_durably",
        "gaps",
        "name",
        "number",
        "opened",
        "pending",
        "places",
        "state_in",
    )

    def __init__(self, name: str, number: int) -> None:
        self.name, self.number = name, number
        self.fenced = 0
        self.fenced_durably = 0  # not above `fenced`
        self.opened = False
        self.confirmed = 0
        self.base = 0
        self.places = array("Q")
        self.gaps = 0  # of `places`: ABSENT or BAD
        self.pending: dict[int, int] = {}  # positions on their way: their places are not held yet
        self.bytes_in: dict[int, int] = {}  # journal file -> bytes of live records there; every file that a place names
        self.state_in = 0  # journal file of the newest OPEN or STATE

    @property
    def end(self) -> int:
        """One past the highest position held."""
        return self.base + len(self.places)

    def place(self, position: int) -> int:
        """Where the entry is."""
        index = position - self.base
        return self.places[index] if 0 <= index < len(self.places) else ABSENT

    def fits(self, first: int, count: int) -> bool:
        """Are these positions near enough to what is held?"""
        return not self.places or (first + count - self.base <= SPAN_MAX and self.end - first <= SPAN_MAX)

    def put(self, position: int, place: int) -> None:
        """Remember where the entry is."""
        if not self.places:
            self.base = position
        if position == self.base + len(self.places):  # nearly always
            self.places.append(place)
            self.gaps += place <= BAD
            return
        if position < self.base:
            self.gaps += self.base - position
            self.places = array("Q", bytes(8 * (self.base - position))) + self.places
            self.base = position
        if position >= self.end:
            self.gaps += position - self.end + 1
            self.places.frombytes(bytes(8 * (position - self.end + 1)))
        index = position - self.base
        self.gaps += (place <= BAD) - (self.places[index] <= BAD)
        self.places[index] = place

    def holds(self, first: int, last: int) -> bool:
        """Every position from first to last? In no time unless there are gaps somewhere."""
        if first > last:
            return True
        if first < self.base or last >= self.end:
            return False
        return not self.gaps or all(place > BAD for place in self.places[first - self.base : last + 1 - self.base])

    def held(self) -> Iterator[tuple[int, int]]:
        """(position, place) of every entry held."""
        base = self.base
        for index, place in enumerate(self.places):
            if place > BAD:
                yield base + index, place

    def check(self) -> None:
        """Its invariants."""
        assert self.fenced_durably <= self.fenced
        assert self.gaps == sum(place <= BAD for place in self.places)
        assert self.bytes_in.keys() >= {place >> 32 for _, place in self.held()}
        assert all(size >= 0 for size in self.bytes_in.values())
        assert all(self.place(position) <= BAD for position in self.pending), "what is held is not on its way"

    def state(self, kind: RecordKind) -> bytes:
        """The record of what is known of it besides its entries."""
        return encode_state(kind, self.number, self.fenced, self.name)


class SegmentIndex:
    """All segments, and how they come out of the journal."""

    def __init__(self) -> None:
        self.segments: dict[str, StoredSegment] = {}
        self._by_number: dict[int, StoredSegment] = {}
        self._next_number = 1
        self._early: dict[
            int, list[tuple[int, StoredRecord]]
        ] = {}  # records of segments whose OPEN or STATE was carried behind them
        self._found: list[Damage] = []
        self.known: set[tuple[int, int]] = set()  # damages on record
        self.damage_in = 0  # journal file of the newest DAMAGE record

    def segment(self, name: str) -> StoredSegment:
        """The segment; made if it is new."""
        found = self.segments.get(name)
        if found is None:
            found = self.segments[name] = self._by_number[self._next_number] = StoredSegment(name, self._next_number)
            self._next_number += 1
        return found

    def lacking(self, asked: Sequence[tuple[str, int, int]], *, opened: bool = False) -> list[int]:
        """Which of these (segment, first, last) are not held in full, or, if that is asked for, without their opening."""
        found = enumerate((self.segments.get(name), first, last) for name, first, last in asked)
        return [
            place
            for place, (segment, first, last) in found
            if segment is None or not segment.holds(first, last) or (opened and not segment.opened)
        ]

    def forget(self, segment: StoredSegment) -> None:
        """Drop it."""
        self.segments.pop(segment.name, None)
        self._by_number.pop(segment.number, None)

    def live(self, number: int) -> int:
        """Bytes of live entries in one journal file."""
        return sum(segment.bytes_in.get(number, 0) for segment in self.segments.values())

    def live_bytes(self) -> int:
        """Bytes of all live entries."""
        return sum(sum(segment.bytes_in.values()) for segment in self.segments.values())

    def logs(self) -> int:
        """How many logs have a segment here."""
        return len({log_of(name) for name in self.segments})

    def damage_recorded(self, number: int, offset: int) -> None:
        """A DAMAGE record is durable."""
        self.damage_in = number

    # --- out of the journal -------------------------------------------------------------------------------------------

    def load(self, item: JournalBatch | Damage) -> None:
        """One item of the journal's scan."""
        if isinstance(item, Damage):
            self._found.append(item)
            return
        for record in parse(item.body):
            if item.intact:
                self._load(item, record)
            elif self._intact(item.body, record):
                self._load(item, _proved(record))

    def loaded(self) -> bytes:
        """End of the scan. The DAMAGE record to write if there is damage not on record yet, else b""."""
        self._early.clear()
        fresh = [place for place in self._found if (place.number, place.offset) not in self.known]
        if not fresh:
            return b""
        self.void_openings()
        self.known |= {(place.number, place.offset) for place in self._found}
        return self.damage_record()

    def void_openings(self) -> None:
        """Something was lost: of no segment it is sure any more what was never stored."""
        for segment in self.segments.values():
            segment.opened = False

    def went_back(self, sequence: int) -> bytes:
        """The journal had a batch `sequence` once. The DAMAGE record to write; no file has the number 0."""
        self.void_openings()
        self.known.add((0, sequence))
        return self.damage_record()

    def damage_record(self) -> bytes:
        """All damages known, as a record."""
        return encode_damage(sorted(self.known))

    def _intact(self, body: bytes, record: StoredRecord) -> bool:
        payload = payload_of(body, record)
        if record.kind != RecordKind.ENTRY:
            return record.kind in (RecordKind.OPEN, RecordKind.STATE) and crc32(payload) == record.crc
        segment = self._by_number.get(record.segment)
        return segment is not None and entry_crc(segment.name, record.position, payload) == record.crc

    def _load(self, batch: JournalBatch, record: StoredRecord) -> None:
        if record.kind == RecordKind.DAMAGE:
            self.known |= set(msgspec.msgpack.decode(payload_of(batch.body, record), type=list[tuple[int, int]]))
            self.damage_in = batch.number
            self.void_openings()
            return
        if record.kind in (RecordKind.OPEN, RecordKind.STATE):
            self._load_state(batch, record)
            return
        self._next_number = max(self._next_number, record.segment + 1)
        found = self._by_number.get(record.segment)
        if record.kind == RecordKind.DELETE:
            self._early.pop(record.segment, None)
            if found is not None:
                self.forget(found)
            return
        place = batch.number << 32 | (batch.offset + record.offset)
        if found is None:  # its OPEN or STATE follows, or is damaged
            self._early.setdefault(record.segment, []).append((place, record))
        else:
            self._load_entry(found, place, record)

    def _load_entry(self, segment: StoredSegment, place: int, record: StoredRecord) -> None:
        if record.kind == RecordKind.BAD:
            segment.put(record.position, BAD)
            return
        if segment.fits(record.position, 1):
            place_entry(segment, record.position, place, record.length)
        segment.confirmed = max(segment.confirmed, record.confirmed)

    def _load_state(self, batch: JournalBatch, record: StoredRecord) -> None:
        name = payload_of(batch.body, record).decode()
        segment = self._by_number.get(record.segment)
        if segment is None:
            segment = self.segments[name] = self._by_number[record.segment] = StoredSegment(name, record.segment)
            self._next_number = max(self._next_number, record.segment + 1)
            for place, early in self._early.pop(record.segment, ()):
                self._load_entry(segment, place, early)
        segment.fenced = segment.fenced_durably = max(segment.fenced, record.position)
        segment.state_in = batch.number
        if record.kind == RecordKind.OPEN:
            segment.opened = True


def _proved(record: StoredRecord) -> StoredRecord:
    """What an intact record of a damaged batch proves: its own checksum covers neither what was confirmed nor an epoch. What it
    lacks is safe: others know what was confirmed, and without an opening nobody's entries are taken."""
    return record._replace(confirmed=0) if record.kind == RecordKind.ENTRY else record._replace(position=0)


def place_entry(segment: StoredSegment, position: int, place: int, length: int) -> None:
    """An entry is durable at `place`. It may have been elsewhere before, with the same length."""
    size = HEADER_BYTES + length
    before = segment.place(position)
    if before > BAD:
        segment.bytes_in[before >> 32] -= size
    segment.put(position, place)
    segment.bytes_in[place >> 32] = segment.bytes_in.get(place >> 32, 0) + size


def state_setter(segment: StoredSegment) -> Callable[[int, int], None]:
    """To be called with the place of an OPEN or STATE when it is durable."""

    def durable(number: int, offset: int) -> None:
        segment.state_in = max(segment.state_in, number)

    return durable
