"""What a store does by itself, in small steps, so that the loop goes on: gives space back, and checks what it holds.

Compaction: the oldest file's live records are written again, then the file is deleted. Always the oldest file: what it deletes
or fences of older ones is gone already, so nothing of that kind has to be carried.

Scrub: every entry and every blob is read again; what is damaged is put aside. A thread reads, a slice at a time. What was put
aside is missing in the inventory and answered UNKNOWN; the log's owner has it copied again from another store.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

from roq.log.store.blobs import BlobFolder
from roq.log.store.index import BAD, RecordKind, StoredSegment, encode_entry, encode_mark, place_entry, state_setter
from roq.log.store.storage import PENDING_BYTES_MAX, SegmentStorage
from roq.runtime.observe import Counters, logger
from roq.wire.store import Refusal

log = logger(__name__)
CARRY_BYTES = 1024 * 1024  # written again in one step
LOOK_COUNT = 20_000  # entries looked at in one step
SCRUB_FIRST_SECONDS = 60.0  # after the start
SCRUB_PAUSE_SECONDS = 3600.0  # between two rounds of the scrub
SCRUB_BYTES_PER_SECOND = 8 * 1024 * 1024
ENTRIES_AT_ONCE = 200  # looked up at once
SLICE_BYTES = 1024 * 1024  # read at once, unless a single entry is larger

Apply = Callable[[int, int], None]  # (file, offset of the record) when it is durable
Carried = tuple[bytes, Apply]


class Compaction:
    """Of one store's journal."""

    def __init__(self, storage: SegmentStorage) -> None:
        self._storage = storage
        self._records: Iterator[Carried | None] | None = None
        self._oldest = self._pending = 0

    def step(self) -> bool:
        """Write again about CARRY_BYTES, while less than half of the journal is live; True while there is more to do. On a full
        disk nothing is written, and deleted only what is dead."""
        storage = self._storage
        if storage.pending_bytes > PENDING_BYTES_MAX // 2:
            return True  # the disk is slow: what it gives back waits, too
        if self._records is None:
            self._oldest = storage.journal.numbers[0]
            if not self._worth():
                return False
            self._records = self._carried(self._oldest)
        size = 0
        for record in self._records:
            if record is not None:
                self._pending += 1
                storage.carry(record[0], self._one_done, record[1])
                size += len(record[0])
            if record is None or size >= CARRY_BYTES:
                return True
        if self._pending:
            return True
        storage.journal.remove(self._oldest)
        self._records = None
        return False

    def _worth(self) -> bool:
        journal, index = self._storage.journal, self._storage.index
        count = len(journal.numbers)
        if count < 2:
            return False
        if not index.live(self._oldest):
            return True
        return not self._storage.full and count > 2 and index.live_bytes() * 2 < count * journal.file_bytes

    def _one_done(self, refusal: Refusal | None) -> None:
        self._pending -= 1

    def _carried(self, oldest: int) -> Iterator[Carried | None]:
        """Live records of the file; None now and then, when many others were looked at."""
        if self._storage.index.damage_in == oldest:
            yield self._storage.index.damage_record(), self._storage.index.damage_recorded
        looked = 0
        for segment in list(self._storage.index.segments.values()):
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
        return self._storage.index.segments.get(segment.name) is not segment

    def _again(self, segment: StoredSegment, position: int, place: int) -> Carried:
        found = self._storage.entry(segment, position)
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


async def scrub(storage: SegmentStorage, blobs: BlobFolder, counters: Counters, kick: Callable[[], None]) -> None:
    """For ever. kick: there is something to write."""
    await asyncio.sleep(SCRUB_FIRST_SECONDS)
    while True:
        await scrub_entries(storage, counters, SCRUB_BYTES_PER_SECOND)
        kick()
        for blob in await asyncio.to_thread(blobs.names):
            size = blobs.size(blob)
            if not await asyncio.to_thread(blobs.check, blob):
                counters["scrub_bad_blobs"] += 1
                log.error("damaged blob quarantined: its owner has it copied again", extra={"fields": {"blob": blob}})
            await asyncio.sleep(size / SCRUB_BYTES_PER_SECOND)
        await asyncio.sleep(SCRUB_PAUSE_SECONDS)


async def scrub_entries(storage: SegmentStorage, counters: Counters, bytes_per_second: float) -> None:
    """One round over all entries."""
    for name in list(storage.index.segments):
        segment = storage.index.segments.get(name)
        if segment is None:
            continue
        first, last = segment.base, segment.end - 1
        while first <= last:
            until = min(first + ENTRIES_AT_ONCE - 1, last)
            held = storage.held(name, first, until)
            while held:
                count, size, bad = await asyncio.to_thread(storage.verify, name, held, SLICE_BYTES)
                for position, place in bad:
                    if storage.still_damaged(name, position, place):
                        storage.put_aside(name, position)
                        counters["scrub_bad_entries"] += 1
                        log.error(
                            "damaged entry quarantined: its owner has it copied again",
                            extra={"fields": {"segment": name, "position": position}},
                        )
                held = held[count:]
                await asyncio.sleep(size / bytes_per_second)
            first = until + 1
            await asyncio.sleep(0)
