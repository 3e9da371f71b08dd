"""Many sorted slices become one sorted stream, in bounded memory. What fits is loaded and sorted at once; more is merged block
by block; and with more slices than memory has room for blocks of each, memory-fulls are sorted into a temporary file first.

Order: slices come by (partition, run), and rows of the same key in the order of their slices, so rows leave by their Position.
A round of merging: of the slices that are not loaded to their end, one has the smallest last loaded row. Nothing before that
row is missing, so all up to it is put together, sorted (keys.py) and given out. Every round uses up what is loaded of at
least one slice. Not covered: where the slices come from (contract.SliceSource).
"""

from __future__ import annotations

import os
import sys
import tempfile
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import msgspec
import pyarrow as pa

from roq.errors import DataLost, InvalidAddress
from roq.runtime.files import storage_error
from roq.shuffle.blocks import SortedRun, decode_block
from roq.shuffle.contract import SliceSource
from roq.shuffle.keys import WORD, KeyEncoder, is_sorted, order
from roq.shuffle.writer import PLANNED, ROW_WORK_BYTES, release_unused
from roq.wire.shuffle import BLOCK_BYTES, BLOCK_ROWS, Block, RunSlice

OUT_ROWS = 65536  # of a batch that is given out
OUT_BYTES = 2 * 1024 * 1024  # of it, and at most this part of the memory:
OUT_PART = 16
OUT_COPIES = 5  # of such a batch: being made, at the reader's, let go of but kept by the allocator; two for indices of files
FAN_IN_MIN = 2
LOADED_BYTES_MAX = 2 * 1024 * 1024 * 1024  # twice what is put together at once: offsets of strings are 32-bit


def merged(source: SliceSource, encoder: KeyEncoder, memory_bytes: int) -> Iterator[pa.RecordBatch]:
    """All rows of the source's slices in order, in batches of at most OUT_ROWS rows. Raises DataLost, StorageFull (the folder
    for temporary files) and what the source raises."""
    out = min(OUT_BYTES, memory_bytes // OUT_PART)
    room = _Room(min(int(memory_bytes * PLANNED) - OUT_COPIES * out, LOADED_BYTES_MAX), out)
    cursors = _cursors(source, encoder)
    if not cursors:
        return
    part = cursors[0].load()
    everything = part.cost * sum(cursor.rows for cursor in cursors) // part.batch.num_rows
    try:
        by_block = everything > room.loaded and len(cursors) <= _fan_in(part, room)
        if by_block and not _begin_fits(cursors, room):
            by_block, cursors = False, _cursors(source, encoder)
        if by_block:
            yield from _merge(cursors, encoder, room)
        else:
            yield from _gather(cursors, encoder, room)
    finally:
        release_unused()


class _Room(NamedTuple):
    """Memory, bytes. loaded: for rows of slices and the sorting of them. out: for a batch that is given out."""

    loaded: int
    out: int


class _Part(NamedTuple):
    """Loaded rows of a slice. No row is before first_key or behind last_key. size: bytes of them. cost: memory to hold, gather
    and sort them."""

    batch: pa.RecordBatch
    first_key: bytes
    last_key: bytes  # that of the last row, unless the slice ends here
    size: int
    cost: int


class _Cursor:
    """A slice that is read from its begin to its end."""

    def __init__(self, source: SliceSource, piece: RunSlice, encoder: KeyEncoder) -> None:
        self.rows = piece.rows
        self.parts: deque[_Part] = deque()  # loaded and not used yet
        self._blocks, self._encoder = source.blocks(piece), encoder
        self._next, self._end = piece.first, piece.first + piece.rows
        self._cost = 0

    @property
    def at_end(self) -> bool:
        """Whether all of it has been loaded."""
        return self._next == self._end

    def load(self) -> _Part:
        """Load one more block. Raises DataLost."""
        block = next(self._blocks, None)
        if block is None or block.first > self._next or block.first + block.rows <= self._next:
            raise DataLost(f"rows are missing: row {self._next} of a run should have come")
        batch = decode_block(self._encoder.schema, block)
        size = len(block.data)
        begin, end = self._next - block.first, min(block.rows, self._end - block.first)
        if end - begin < block.rows:
            batch = pa.concat_batches([batch.slice(begin, end - begin)])  # a copy: the rest of the block may go
            size = size * (end - begin) // block.rows
        self._next += end - begin
        if self.at_end:
            self._blocks = iter(())  # the source lets go of what it holds for it
        rows = end - begin
        keys = min(rows * len(block.last_key), size + rows * WORD)  # the last one may be the only long one
        cost = 2 * size + rows * ROW_WORK_BYTES + keys
        self.parts.append(_Part(batch, block.first_key, block.last_key, size, cost))
        self._cost += cost
        return self.parts[-1]

    def fill(self, quota: int) -> None:
        """Load as much as the quota has room for, at least one block."""
        while not self.at_end and (not self.parts or self._cost + self.parts[-1].cost <= quota):
            self.load()

    def take(self) -> list[pa.RecordBatch]:
        """All loaded rows; they are forgotten here."""
        batches = [part.batch for part in self.parts]
        self.parts.clear()
        self._cost = 0
        return batches

    def take_until(self, key: bytes, *, inclusive: bool) -> list[pa.RecordBatch]:
        """The loaded rows before this key, or up to it; they are forgotten here."""
        batches = []
        while self.parts:
            if self.parts[0].first_key > key or (self.parts[0].first_key == key and not inclusive):
                break
            part = self.parts.popleft()
            self._cost -= part.cost
            if part.last_key < key or (inclusive and part.last_key == key):
                batches.append(part.batch)
                continue
            keys = self._encoder.encode(part.batch)
            rows = bisect_right(keys, key) if inclusive else bisect_left(keys, key)
            if rows:
                batches.append(part.batch.slice(0, rows))
            if rows < len(keys):
                self.parts.appendleft(part._replace(batch=part.batch.slice(rows), first_key=key))
                self._cost += part.cost  # its block stays in memory as a whole
                break
        return batches


def _cursors(source: SliceSource, encoder: KeyEncoder) -> list[_Cursor]:
    slices = sorted((each for each in source.slices if each.rows), key=lambda each: (each.partition, each.run, each.first))
    return [_Cursor(source, each, encoder) for each in slices]


def _fan_in(part: _Part, room: _Room) -> int:
    """How many slices can be merged at once, with two blocks of each in memory. part: rows like those of the slices."""
    rows: int = part.batch.num_rows
    block = part.cost // rows * min(BLOCK_ROWS, BLOCK_BYTES // max(1, part.size // rows) + 1)
    return max(FAN_IN_MIN, room.loaded // (2 * block))


def _begin_fits(cursors: list[_Cursor], room: _Room) -> bool:
    """Load the first block of each; whether there is room for two such blocks of each. The first slice may have had the
    smallest rows. If not, what was loaded is of no use."""
    cost = 0
    for cursor in cursors:
        cost += (cursor.parts[0] if cursor.parts else cursor.load()).cost
        if 2 * cost > room.loaded:
            return False
    return True


def _sorted(batches: list[pa.RecordBatch], encoder: KeyEncoder) -> SortedRun:
    """These rows in order. The list is emptied, so that its memory can go."""
    batch = pa.concat_batches(batches) if len(batches) > 1 else batches[0]
    batches.clear()
    release_unused()
    keys = encoder.encode(batch)
    by = order(keys)
    return SortedRun(batch, keys, None if is_sorted(by) else by)


def _merge(cursors: list[_Cursor], encoder: KeyEncoder, room: _Room) -> Iterator[pa.RecordBatch]:
    while cursors:
        quota = room.loaded // len(cursors)
        for cursor in cursors:
            cursor.fill(quota)
        ends = [(cursor.parts[-1].last_key, number) for number, cursor in enumerate(cursors) if not cursor.at_end]
        if ends:
            key, last = min(ends)
            batches = [
                batch for number, cursor in enumerate(cursors) for batch in cursor.take_until(key, inclusive=number <= last)
            ]
        else:
            batches = [batch for cursor in cursors for batch in cursor.take()]
        yield from _sorted(batches, encoder).batches(room.out, OUT_ROWS)
        release_unused()
        cursors = [cursor for cursor in cursors if cursor.parts or not cursor.at_end]


def _gather(cursors: list[_Cursor], encoder: KeyEncoder, room: _Room) -> Iterator[pa.RecordBatch]:
    """Load one slice after the other. Sorted at once if all fits, else in memory-fulls through a temporary file."""
    spill: _Spill | None = None
    held: list[pa.RecordBatch] = []
    cost = 0
    fan_in = sys.maxsize
    try:
        for cursor in cursors:
            while cursor.parts or not cursor.at_end:
                part = cursor.parts[0] if cursor.parts else cursor.load()
                if held and cost + part.cost > room.loaded:
                    spill = spill or _Spill()
                    spill.add(_sorted(held, encoder).blocks())
                    release_unused()
                    cost = 0
                held += cursor.take()
                cost += part.cost
                fan_in = min(fan_in, _fan_in(part, room))  # a spilled run may hold the largest rows of all
        run = _sorted(held, encoder)
        if spill is None:
            yield from run.batches(room.out, OUT_ROWS)
            return
        spill.add(run.blocks())
        del run
        release_unused()
        while len(spill.slices) > fan_in:
            spill = _merged_once(spill, encoder, room, fan_in)
        yield from _merge(_cursors(spill, encoder), encoder, room)
    finally:
        if spill is not None:
            spill.close()


def _merged_once(spill: _Spill, encoder: KeyEncoder, room: _Room, fan_in: int) -> _Spill:
    """Neighbouring runs merged into longer ones."""
    longer = _Spill()
    for begin in range(0, len(spill.slices), fan_in):
        cursors = _cursors(spill, encoder)[begin : begin + fan_in]
        longer.add(_blocks(_merge(cursors, encoder, room), encoder))
    spill.close()
    return longer


def _blocks(batches: Iterable[pa.RecordBatch], encoder: KeyEncoder) -> Iterator[Block]:
    first = 0
    for batch in batches:
        yield from SortedRun(batch, encoder.encode(batch), None).blocks(first)
        first += batch.num_rows


class _Spill:
    """Sorted runs in a temporary file that has no name, so that it is gone with the process. A SliceSource."""

    def __init__(self) -> None:
        self.slices: Sequence[RunSlice] = ()
        self._runs: list[list[tuple[Block, int, int]]] = []  # each block without its data; where that is, and its length
        with self._failing():
            self._file = tempfile.TemporaryFile(prefix="roq-shuffle-")  # noqa: SIM115 (closed by close)

    def add(self, blocks: Iterable[Block]) -> None:
        """Write one run. Raises StorageFull, StorageFailed."""
        places = []
        rows = 0
        for block in blocks:
            with self._failing():
                places.append((msgspec.structs.replace(block, data=b""), self._file.tell(), len(block.data)))
                self._file.write(block.data)
            rows += block.rows
        with self._failing():
            self._file.flush()
        self.slices = (*self.slices, RunSlice(0, "", len(self._runs), 0, rows))
        self._runs.append(places)

    def blocks(self, piece: RunSlice) -> Iterator[Block]:
        """All blocks of a run."""
        for block, offset, length in self._runs[piece.run]:
            yield msgspec.structs.replace(block, data=os.pread(self._file.fileno(), length, offset))

    def close(self) -> None:
        """Give the space back."""
        self._file.close()

    @contextmanager
    def _failing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise storage_error(error, f"a temporary file in {tempfile.gettempdir()}", InvalidAddress) from error
