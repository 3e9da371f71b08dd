"""The segment store on one disk: decides what is taken, collects what is to be written, answers when it is durable.

Nothing waits here and no thread is started: `stage` hands out one Write, the caller performs it, `committed` answers. At
most one Write is on its way, so everything in it, and all before it, is durable when `committed` is called. Effects are seen
(`read`, `recover`) only from then on; a fence refuses from the moment it is asked for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from roq.log.store.index import (
    BAD,
    HEADER_BYTES,
    RecordKind,
    SegmentIndex,
    StoredSegment,
    encode_entry,
    encode_mark,
    place_entry,
    state_setter,
)
from roq.log.store.journal import FILE_BYTES, Journal, JournalWrite
from roq.runtime.files import Disk
from roq.runtime.observe import logger
from roq.wire.store import FRAME_BYTES, Add, Found, Refusal, SegmentView, entry_crc

log = logger(__name__)
RESERVE_BYTES = 256 * 1024  # of the last file on a full disk, kept for fences and deletes
BATCH_BYTES = 4 * 1024 * 1024  # written and synced at once, unless a single frame is larger
PENDING_BYTES_MAX = 64 * 1024 * 1024  # waiting for the disk: what one writer may have on its way, sixteen batches
ENTRY_PENDING_BYTES = 512  # what an entry costs in memory besides its bytes, while it waits
GUESS_BYTES = 2048  # read at once in the hope that it holds header and entry
COPY_EPOCH = 1 << 62  # copies of closed segments come after every fence, and need no opening

Answer = Callable[[Refusal | None], None]


@dataclass(slots=True)
class _Item:
    """Records to write together. control: may use the reserve. apply: called with (file, offset) when durable."""

    body: bytes
    control: bool
    done: Answer
    apply: Callable[[int, int], None] | None = None
    count: int = 1  # records


class SegmentStorage:
    """One open store directory. Raises UnknownFormat, OSError when opened."""

    def __init__(self, disk: Disk, directory: Path, file_bytes: int = FILE_BYTES) -> None:
        self.journal = Journal(disk, directory, file_bytes)
        self.index = SegmentIndex()
        for item in self.journal.scan():
            self.index.load(item)
        damage = self.index.loaded()
        self.journal.ready()
        self.damaged = len(self.index.known)
        self.synced = self._found = self.journal.sequence  # the last batch that is durable; … that was when this was opened
        # proved: the disk did not go back in time, as far as is known; else it is sure of nothing's absence. Invariant: a
        # proved disk takes entries; one that is not proved takes them, or has them sent again later.
        self.proved = self._takes_entries = True
        self.full = False  # the disk has no room for another journal file
        self._pending: deque[_Item] = deque()
        self._pending_bytes = self._pending_count = 0
        self._staged: list[_Item] = []
        self._staged_at: list[int] = []
        self._reserve = min(RESERVE_BYTES, file_bytes // 8)
        if damage:
            self._push(_Item(damage, True, _nobody, self.index.damage_recorded))

    # --- the verbs ----------------------------------------------------------------------------------------------------

    def add(self, request: Add, done: Answer) -> None:
        """Take entries. `done(None)` when they are durable."""
        segment = self.index.segments.get(request.segment)
        if segment is not None and request.epoch < segment.fenced:
            done(Refusal.FENCED)
            return
        count = len(request.entries)
        if count and request.epoch != COPY_EPOCH and (segment is None or not segment.opened):
            done(Refusal.NOT_OPEN)
            return
        if segment is not None and not segment.fits(request.first, count):
            done(Refusal.DIVERGED)
            return
        if not count:
            if segment is not None:
                segment.confirmed = max(segment.confirmed, request.confirmed)
            done(None)
            return
        size = sum(map(len, request.entries)) + count * HEADER_BYTES
        if size > self.journal.file_bytes // 2 or self._no_room(size):
            done(Refusal.FULL)
            return
        too_much = self.pending_bytes > PENDING_BYTES_MAX or not self._takes_entries
        if too_much and request.epoch != COPY_EPOCH:  # who copies waits for each frame
            done(Refusal.OVERLOADED)
            return
        segment = segment or self._new_segment(request.segment)
        self._take(segment, request, done)

    def _take(self, segment: StoredSegment, request: Add, done: Answer) -> None:
        name, position, offset, waiting = segment.name, request.first, 0, False
        parts: list[bytes] = []
        fresh: list[tuple[int, int, int]] = []  # position, offset among the parts, length
        crcs: dict[int, int] = {}
        for crc, entry in zip(request.crcs, request.entries, strict=True):
            if entry_crc(name, position, entry) != crc:
                done(Refusal.DAMAGED)
                return
            known = segment.pending.get(position)
            waiting = waiting or known is not None
            if known is None and segment.place(position) > BAD:
                known = self._stored_crc(segment, position)
            if known is None:
                record = encode_entry(segment.number, position, request.confirmed, crc, entry)
                parts.append(record)
                fresh.append((position, offset, len(entry)))
                offset += len(record)
                crcs[position] = crc
            elif known != crc:
                done(Refusal.DIVERGED)
                return
            position += 1
        segment.confirmed = max(segment.confirmed, request.confirmed)
        if not fresh and not waiting:
            done(None)
            return
        segment.pending.update(crcs)
        end = position

        def finish(refusal: Refusal | None) -> None:
            if refusal is not None:
                for position in crcs:
                    segment.pending.pop(position, None)
            elif waiting and any(segment.place(one) <= BAD for one in range(request.first, end)):
                refusal = Refusal.FULL  # the one that brought them was refused
            done(refusal)

        def apply(number: int, at: int) -> None:
            for position, offset, length in fresh:
                place_entry(segment, position, number << 32 | (at + offset), length)
                segment.pending.pop(position, None)

        self._push(_Item(b"".join(parts), False, finish, apply, len(request.entries)))

    def open_segment(self, name: str, epoch: int, done: Answer) -> None:
        """From now on, what is not held of this segment was never stored here."""
        self._set_state(self._segment(name), epoch, RecordKind.OPEN, done)

    def fence(self, name: str, epoch: int, done: Answer) -> None:
        """Refuse lower epochs, from now on and after every restart."""
        segment = self._segment(name)
        if epoch == segment.fenced == segment.fenced_durably:
            done(None)
            return
        self._set_state(segment, epoch, RecordKind.STATE, done)

    def _set_state(self, segment: StoredSegment, epoch: int, kind: RecordKind, done: Answer) -> None:
        if epoch < segment.fenced:
            done(Refusal.FENCED)
            return
        segment.fenced = epoch

        def apply(number: int, offset: int) -> None:
            segment.state_in = max(segment.state_in, number)
            segment.fenced_durably = max(segment.fenced_durably, epoch)
            segment.opened = segment.opened or kind is RecordKind.OPEN

        self._push(_Item(segment.state(kind), True, done, apply))

    def delete(self, name: str, epoch: int, done: Answer) -> None:
        """Forget a segment, unless a later epoch fenced it."""
        segment = self.index.segments.get(name)
        if segment is not None and epoch < segment.fenced:
            done(Refusal.FENCED)
            return
        if segment is None:
            done(None)
            return
        self.index.forget(segment)
        self._push(_Item(encode_mark(RecordKind.DELETE, segment.number), True, done))

    # --- reading ------------------------------------------------------------------------------------------------------

    def look(self, name: str, position: int) -> tuple[Found, int, bytes]:
        """What is known of one position: (Found, crc, entry)."""
        segment = self.index.segments.get(name)
        if segment is None:
            return Found.UNKNOWN, 0, b""
        if segment.place(position) <= BAD:
            sure = self.proved and segment.opened and segment.place(position) != BAD
            return (Found.NO_SUCH if sure else Found.UNKNOWN), 0, b""
        entry = self.entry(segment, position)
        return (Found.UNKNOWN, 0, b"") if entry is None else (Found.ENTRY, *entry)

    def read(self, name: str, first: int, last: int) -> tuple[list[int], list[bytes], bool]:
        """(crcs, entries, is the next one missing) from `first` on, at most about FRAME_BYTES."""
        crcs: list[int] = []
        entries: list[bytes] = []
        segment, size, position = self.index.segments.get(name), 0, first
        while position <= last and size < FRAME_BYTES:
            found = self.entry(segment, position) if segment is not None and segment.place(position) > BAD else None
            if found is None:
                return crcs, entries, True
            crcs.append(found[0])
            entries.append(found[1])
            size += len(found[1])
            position += 1
        return crcs, entries, False

    def missing(self, name: str, first: int, last: int) -> list[tuple[int, int]]:
        """Runs of positions that are not held."""
        segment = self.index.segments.get(name)
        if segment is None:
            return [(first, last)]
        runs: list[tuple[int, int]] = []
        for position in range(first, last + 1):
            if segment.place(position) <= BAD:
                runs[-1:] = (
                    [(runs[-1][0], position)] if runs and runs[-1][1] == position - 1 else [*runs[-1:], (position, position)]
                )
        return runs

    def held(self, name: str, first: int, last: int) -> list[tuple[int, int]]:
        """(position, place) of what is held."""
        segment = self.index.segments.get(name)
        places = ((position, segment.place(position)) for position in range(first, last + 1)) if segment is not None else ()
        return [one for one in places if one[1] > BAD]

    def verify(self, name: str, held: list[tuple[int, int]], bytes_max: int) -> tuple[int, int, list[tuple[int, int]]]:
        """Read entries until `bytes_max` were read: (how many, bytes, those that seem damaged). In any thread: one that was
        moved or deleted meanwhile seems damaged, too."""
        size, count, bad = 0, 0, []
        for position, place in held:
            found = self._entry_at(name, position, place)
            size += HEADER_BYTES + (len(found[1]) if found is not None else 0)
            count += 1
            if found is None:
                bad.append((position, place))
            if size >= bytes_max:
                break
        return count, size, bad

    def still_damaged(self, name: str, position: int, place: int) -> bool:
        """Is the entry still there, and damaged?"""
        segment = self.index.segments.get(name)
        return segment is not None and segment.place(position) == place and self.entry(segment, position) is None

    def confirmed(self, name: str) -> int:
        """The highest confirmed position that reached this store."""
        segment = self.index.segments.get(name)
        return segment.confirmed if segment is not None else 0

    def views(self, prefix: str, after: str, count: int) -> list[SegmentView]:
        """Inventory."""
        names = sorted(name for name in self.index.segments if name.startswith(prefix) and name > after)[:count]
        found = [self.index.segments[name] for name in names]
        return [SegmentView(one.name, one.base, one.end - 1, sum(one.bytes_in.values())) for one in found]

    def entry(self, segment: StoredSegment, position: int) -> tuple[int, bytes] | None:
        """(crc, entry) from the disk, None if it can't be read or fails its check."""
        return self._entry_at(segment.name, position, segment.place(position))

    def _entry_at(self, name: str, position: int, place: int) -> tuple[int, bytes] | None:
        try:
            data = self.journal.read(place >> 32, place & 0xFFFF_FFFF, GUESS_BYTES)
            length = int.from_bytes(data[21:25], "little")
            missing = HEADER_BYTES + length - len(data)
            if 0 < missing <= self.journal.file_bytes:
                data += self.journal.read(place >> 32, (place & 0xFFFF_FFFF) + len(data), missing)
        except (OSError, KeyError):
            return None
        crc, entry = int.from_bytes(data[25:29], "little"), data[HEADER_BYTES : HEADER_BYTES + length]
        return (crc, entry) if len(entry) == length and entry_crc(name, position, entry) == crc else None

    def _stored_crc(self, segment: StoredSegment, position: int) -> int | None:
        found = self.entry(segment, position)
        return None if found is None else found[0]

    # --- writing ------------------------------------------------------------------------------------------------------

    def _segment(self, name: str) -> StoredSegment:
        return self.index.segments.get(name) or self._new_segment(name)

    def _new_segment(self, name: str) -> StoredSegment:
        segment = self.index.segment(name)
        self._push(_Item(segment.state(RecordKind.STATE), True, _nobody, state_setter(segment)))
        return segment

    def _push(self, item: _Item) -> None:
        self._pending.append(item)
        self._pending_bytes += len(item.body)
        self._pending_count += item.count

    def _pop(self) -> _Item:
        item = self._pending.popleft()
        self._pending_bytes -= len(item.body)
        self._pending_count -= item.count
        return item

    @property
    def pending_bytes(self) -> int:
        """About how much memory is held by what waits for the disk."""
        return self._pending_bytes + self._pending_count * ENTRY_PENDING_BYTES

    def _no_room(self, size: int) -> bool:
        if self.journal.has_prepared or not self.full:
            return False
        return self.journal.room - self._pending_bytes - size < self._reserve

    @property
    def wants_file(self) -> bool:
        """Is it time to make the next journal file?"""
        return not self.journal.has_prepared and self.journal.room - self._pending_bytes < self.journal.file_bytes // 2

    @property
    def has_pending(self) -> bool:
        """Is there something to write?"""
        return bool(self._pending)

    def stage(self) -> JournalWrite | None:
        """The next batch; None if there is nothing to write, or no room for it before the next file is made."""
        assert not self._staged
        parts: list[bytes] = []
        offset = 0
        while self._pending and offset < BATCH_BYTES:
            item = self._pending[0]
            keep = 0 if item.control or self.journal.has_prepared or not self.full else self._reserve
            if offset + len(item.body) > self.journal.room - keep:
                if parts:
                    break
                if self.journal.has_prepared:
                    self.journal.switch()
                    continue
                if self.full and not item.control:
                    self._pop().done(Refusal.FULL)
                    continue
                break
            self._staged.append(self._pop())
            self._staged_at.append(offset)
            parts.append(item.body)
            offset += len(item.body)
        return self.journal.stage(b"".join(parts)) if self._staged else None

    def committed(self, write: JournalWrite) -> None:
        """The write is durable."""
        self.synced = self.journal.sequence  # nothing is staged while a write is on its way
        staged, places = self._staged, self._staged_at
        self._staged, self._staged_at = [], []
        for item, offset in zip(staged, places, strict=True):
            if item.apply is not None:
                item.apply(write.number, write.body + offset)
        for item in staged:
            item.done(None)

    def marker(self) -> JournalWrite | None:
        """An empty batch: proves that all before it was durable. None while something is pending, or without room."""
        if self._pending or self._staged or self.journal.room < self._reserve // 2:
            return None
        return self.journal.stage(b"")

    # --- a disk that went back in time --------------------------------------------------------------------------------

    def doubt(self, *, takes_entries: bool) -> None:
        """Until `prove`, absence is not sure. takes_entries: until then, too; else they are to be sent again later."""
        self.proved, self._takes_entries = False, takes_entries

    def prove(self, synced: int) -> bool:
        """This batch was durable on this disk once. False if it was not there when this was opened: the disk went back in time,
        openings and fences may be missing, and so none of the openings counts, now and after every restart."""
        fresh, self.proved, self._takes_entries = not self.proved, True, True
        if not fresh or synced <= self._found:
            return True
        fields = {"known": synced, "found": self._found}
        log.error("disk is older than what it had acknowledged: missing entries count as unknown", extra={"fields": fields})
        self.journal.skip(synced)
        self.synced = max(self.synced, synced)
        record = self.index.went_back(synced)
        self.damaged = len(self.index.known)

        def apply(number: int, offset: int) -> None:
            self.index.void_openings()  # those that were on their way
            self.index.damage_recorded(number, offset)

        self._push(_Item(record, True, _nobody, apply))
        return False

    # --- looking after the journal ------------------------------------------------------------------------------------

    def put_aside(self, name: str, position: int) -> None:
        """The entry is damaged: remember it, also after a restart, until it is written again."""
        segment = self.index.segments.get(name)
        if segment is not None and segment.place(position) > BAD:
            segment.put(position, BAD)
            self._push(_Item(encode_mark(RecordKind.BAD, segment.number, position), True, _nobody))

    def carry(self, body: bytes, done: Answer, apply: Callable[[int, int], None]) -> None:
        """Write a record again; `apply` is called with its place when it is durable."""
        self._push(_Item(body, True, done, apply))


def _nobody(refusal: Refusal | None) -> None:
    """For what nobody waits for."""
