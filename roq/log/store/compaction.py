"""Giving the journal's space back: the oldest file's live records are written again, then the file is deleted.

Always the oldest file: what it deletes or fences of older ones is gone already, so nothing of that kind has to be carried.
In small steps, so that the loop goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from roq.log.store.journal import Journal
from roq.log.store.records import RecordKind, encode_entry, encode_mark
from roq.log.store.shelf import BAD, Shelf, StoredSegment, place_entry, state_setter
from roq.wire.store import Refusal

CARRY_BYTES = 1024 * 1024  # written again in one step
LOOK_COUNT = 20_000  # entries looked at in one step

Apply = Callable[[int, int], None]  # (file, offset of the record) when it is durable
Carried = tuple[bytes, Apply]
Push = Callable[[bytes, Callable[[Refusal | None], None], Apply], None]


class Compaction:
    """Of one journal. entry: (crc, entry) of a position, None if it can't be read; push: writes a record."""

    def __init__(
        self, journal: Journal, shelf: Shelf, entry: Callable[[StoredSegment, int], tuple[int, bytes] | None], push: Push
    ) -> None:
        self._journal, self._shelf, self._entry, self._push = journal, shelf, entry, push
        self._records: Iterator[Carried | None] | None = None
        self._oldest = self._pending = 0

    def step(self, full: bool) -> bool:
        """About CARRY_BYTES, while less than half of the journal is live. full: write nothing, delete only what is dead."""
        if self._records is None:
            self._oldest = self._journal.numbers[0]
            if not self._worth(full):
                return False
            self._records = self._carried(self._oldest)
        size = 0
        for record in self._records:
            if record is not None:
                self._pending += 1
                self._push(record[0], self._one_done, record[1])
                size += len(record[0])
            if record is None or size >= CARRY_BYTES:
                return True
        if self._pending:
            return True
        self._journal.remove(self._oldest)
        self._records = None
        return False

    def _worth(self, full: bool) -> bool:
        count = len(self._journal.numbers)
        if count < 2:
            return False
        if not self._shelf.live(self._oldest):
            return True
        return not full and count > 2 and self._shelf.live_bytes() * 2 < count * self._journal.file_bytes

    def _one_done(self, refusal: Refusal | None) -> None:
        self._pending -= 1

    def _carried(self, oldest: int) -> Iterator[Carried | None]:
        """Live records of the file; None now and then, when many others were looked at."""
        if self._shelf.damage_in == oldest:
            yield self._shelf.damage_record(), self._shelf.damage_recorded
        looked = 0
        for segment in list(self._shelf.segments.values()):
            if self._deleted(segment):
                continue
            if segment.state_in <= oldest:
                yield segment.state(RecordKind.OPEN if segment.opened else RecordKind.STATE), state_setter(segment)
            if segment.places.count(BAD):  # the marks may be in this file; they are few
                for position in [one for one in range(segment.base, segment.end) if segment.place(one) == BAD]:
                    yield encode_mark(RecordKind.BAD, segment.number, position), _nothing
            if not segment.bytes_in.get(oldest):
                continue
            for position in range(segment.base, segment.end):
                looked += 1
                place = segment.place(position)
                if place >> 32 == oldest and not self._deleted(segment):
                    yield self._again(segment, position, place)
                elif not looked % LOOK_COUNT:
                    yield None

    def _deleted(self, segment: StoredSegment) -> bool:
        return self._shelf.segments.get(segment.name) is not segment

    def _again(self, segment: StoredSegment, position: int, place: int) -> Carried:
        found = self._entry(segment, position)
        if found is None:
            segment.put(position, BAD)
            return encode_mark(RecordKind.BAD, segment.number, position), _nothing
        crc, entry = found

        def apply(number: int, offset: int) -> None:
            if segment.place(position) == place:
                place_entry(segment, position, number << 32 | offset, len(entry))

        return encode_entry(segment.number, position, segment.confirmed, crc, entry), apply


def _nothing(number: int, offset: int) -> None:
    """A mark is in no place."""
