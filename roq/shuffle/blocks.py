"""Blocks: stretches of a sorted run as Arrow IPC messages, with their first and last key and a CRC. Pure functions: rows become
blocks, blocks become rows, and a block is split exactly at positions. Buffers, storage, files and readers all use these.

Not covered: sorting (keys.py), files (attempt_file.py), the wire (roq/wire/shuffle.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import pairwise
from zlib import crc32

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from roq.errors import DataLost, PayloadTooLarge, SchemaMismatch
from roq.shuffle.keys import BYTE_TYPES, WORD, KeyEncoder, Keys, Rows
from roq.shuffle.ranges import rows_before
from roq.shuffle.sampling import coarser
from roq.wire.shuffle import BLOCK_BYTES, BLOCK_ROWS, ROW_BYTES_MAX, SAMPLE_BYTES_MAX, Block, Position, RunSample, Spec

OURS = b"roq."  # schema metadata of this name and on is kept

UNREADABLE = (pa.ArrowException, OSError, EOFError)  # what Arrow raises for bytes it can not make sense of
SCHEMAS_MAX = 256  # in use at the same time

# --- schemas ----------------------------------------------------------------------------------------------------------


def save_schema(schema: pa.Schema) -> bytes:
    """A schema as Spec.schema, without what programs noted in it, except for RoQ's own. Raises SchemaMismatch (no columns,
    dictionaries)."""
    if not isinstance(schema, pa.Schema):
        raise SchemaMismatch(f"a schema is a pyarrow.Schema, got {type(schema).__name__}")
    if not len(schema):
        raise SchemaMismatch("a shuffle has at least one column")
    for field in schema:
        if _has_dictionary(field.type):
            raise SchemaMismatch(f"column {field.name!r} is dictionary-encoded ({field.type}): cast it to its values' type")
    ours = {
        key: value for key, value in (schema.metadata or {}).items() if key.startswith(OURS)
    }  # Spark's types, see roq.spark
    plain: bytes = pa.schema([field.remove_metadata() for field in schema], ours or None).serialize().to_pybytes()
    return plain


def load_schema(data: bytes) -> pa.Schema:
    """The schema of a Spec. Raises SchemaMismatch."""
    try:
        return pa.ipc.read_schema(pa.py_buffer(data))
    except UNREADABLE as error:
        raise SchemaMismatch(f"this is no serialized pyarrow.Schema: {error}") from error


def _has_dictionary(kind: pa.DataType) -> bool:
    inner = (kind.field(at).type for at in range(kind.num_fields))
    return pa.types.is_dictionary(kind) or any(_has_dictionary(each) for each in inner)


# --- one block ----------------------------------------------------------------------------------------------------------


def decode_block(schema: pa.Schema, block: Block) -> pa.RecordBatch:
    """The rows of a block; they share its memory. Raises DataLost when it is damaged. Not for a block from a stranger: a CRC
    tells damage, not lies, and Arrow follows offsets wherever they point."""
    if crc32(block.data) != block.crc:
        raise DataLost(f"a block of {block.rows} rows is damaged: its CRC-32 does not match")
    try:
        batch = pa.ipc.read_record_batch(pa.py_buffer(block.data), schema)
    except UNREADABLE as error:
        raise DataLost(f"a block of {block.rows} rows does not fit the schema: {error}") from error
    if batch.num_rows != block.rows:
        raise DataLost(f"a block should have {block.rows} rows and has {batch.num_rows}")
    return batch


def decode_foreign(schema: pa.Schema, block: Block) -> pa.RecordBatch:
    """The same, of a block that anybody may have made: nothing in it points outside of it. Looking at every offset costs a
    reader 3 to 8 %, so only those do who serve many. Raises DataLost."""
    batch = decode_block(schema, block)
    try:
        pa.ipc.read_record_batch(pa.py_buffer(block.data), _as_bytes(schema)).validate(full=True)
    except UNREADABLE as error:
        raise DataLost(f"a block of {block.rows} rows is no sound Arrow data: {error}") from error
    return batch


@lru_cache(SCHEMAS_MAX)
def _as_bytes(schema: pa.Schema) -> pa.Schema:
    """With strings as plain bytes: as Arrow has it strings are valid UTF-8, and those of Spark need not be."""
    return pa.schema([field.with_type(_bytes_type(field.type)) for field in schema])


def _bytes_type(kind: pa.DataType) -> pa.DataType:
    fields = [kind.field(at).with_type(_bytes_type(kind.field(at).type)) for at in range(kind.num_fields)]
    if pa.types.is_string(kind):
        return pa.binary()
    if pa.types.is_large_string(kind):
        return pa.large_binary()
    if pa.types.is_string_view(kind):
        return pa.binary_view()
    if pa.types.is_struct(kind):
        return pa.struct(fields)
    if pa.types.is_fixed_size_list(kind):
        return pa.list_(fields[0], kind.list_size)
    if pa.types.is_list(kind):
        return pa.list_(fields[0])
    if pa.types.is_large_list(kind):
        return pa.large_list(fields[0])
    if pa.types.is_map(kind):
        return pa.map_(_bytes_type(kind.key_type), kind.item_field.with_type(_bytes_type(kind.item_type)))
    return kind


def keys_of(spec: Spec, block: Block) -> Keys:
    """The encoded keys of its rows, in order. Raises DataLost."""
    encoder = _encoder(spec.schema, spec.keys)
    return encoder.encode(decode_foreign(encoder.schema, block))


def part(spec: Spec, block: Block, first: int, end: int) -> Block:
    """Its rows numbered first … end-1 as a block of their own. Raises DataLost."""
    encoder = _encoder(spec.schema, spec.keys)
    batch = decode_foreign(encoder.schema, block).slice(first - block.first, end - first)
    first_key, last_key = (encoder.encode(batch.slice(row, 1))[0] for row in (0, end - first - 1))
    return _block(batch, first, first_key, last_key)


def divide(spec: Spec, block: Block, place: tuple[int, int], borders: Sequence[Position]) -> list[tuple[int, Block]]:
    """(number of borders before it, block): the block of this run, (partition, run), split at the borders. Raises DataLost."""
    encoder = _encoder(spec.schema, spec.keys)
    batch = decode_foreign(encoder.schema, block)
    keys = encoder.encode(batch)
    ends = [0, *(rows_before(keys, block.first, place, border) for border in borders), block.rows]
    return [
        (number, _block(batch.slice(begin, end - begin), block.first + begin, keys[begin], keys[end - 1]))
        for number, (begin, end) in enumerate(pairwise(ends))
        if begin < end
    ]


@lru_cache(SCHEMAS_MAX)
def _encoder(schema: bytes, keys: tuple[str, ...]) -> KeyEncoder:
    return KeyEncoder(load_schema(schema), keys)


def _block(batch: pa.RecordBatch, first: int, first_key: bytes, last_key: bytes) -> Block:
    data: bytes = batch.serialize().to_pybytes()
    return Block(first, batch.num_rows, first_key, last_key, crc32(data), data)


# --- a run --------------------------------------------------------------------------------------------------------------


class SortedRun:
    """Rows with their keys and order, about to leave as blocks, batches and a sample."""

    def __init__(self, batch: pa.RecordBatch, keys: Keys, order: Rows | None) -> None:
        """order: row numbers in key order; None if they are in order. Raises PayloadTooLarge (a row above ROW_BYTES_MAX)."""
        self._batch, self._keys, self._order = batch, keys, order
        self.rows: int = batch.num_rows
        self._width, sizes = row_bytes(batch)
        self._ends = None if sizes is None else np.cumsum(sizes if order is None else sizes[order])
        largest = self._width if sizes is None else int(sizes.max())
        if largest > ROW_BYTES_MAX:
            raise PayloadTooLarge(f"a row of {largest} bytes: a row has at most {ROW_BYTES_MAX}")

    def blocks(self, first: int = 0) -> Iterator[Block]:
        """All rows in order. first: number of the first one."""
        begin = 0
        while begin < self.rows:
            end = self._end(begin, BLOCK_BYTES, BLOCK_ROWS)
            yield _block(self._take(begin, end), first + begin, self._key(begin), self._key(end - 1))
            begin = end

    def batches(self, size: int, rows: int) -> Iterator[pa.RecordBatch]:
        """All rows in order, so many bytes and rows at a time."""
        begin = 0
        while begin < self.rows:
            end = self._end(begin, size, rows)
            yield self._take(begin, end)
            begin = end

    def sample(self, partition: int, attempt: str, run: int, size: int, count: int) -> RunSample:
        """A regular sample of about `count` rows, fewer if their keys are too long for that (SAMPLE_BYTES_MAX). size: bytes of
        the blocks, of which each row is taken to have its share."""
        if not self.rows:
            return RunSample(partition, attempt, run, 0, size, (), (), ())
        total = int(self._before(np.array([self.rows]))[0])
        targets = np.arange(count, dtype=np.int64) * total // count
        inner = targets // self._width if self._ends is None else np.searchsorted(self._ends, targets, "right")
        at = np.unique(inner)
        shares = self._before(at).astype(np.float64) * (size / total)
        weights = np.diff(shares.astype(np.int64), append=size)
        rows = at.tolist()
        lengths = self._keys.lengths(at if self._order is None else self._order[at])
        tell = self._key if int(lengths.sum()) <= SAMPLE_BYTES_MAX else self._separator
        keys = tuple(tell(row) for row in rows)
        return bounded(RunSample(partition, attempt, run, self.rows, size, keys, tuple(rows), tuple(weights.tolist())))

    def _separator(self, row: int) -> bytes:
        """A short key that no row before has reached and this one has: as good a border as the key itself, and near to it.
        (Prefix B-trees cut the keys of their inner nodes so.)"""
        key = self._key(row)
        if not row:
            return key
        before = self._key(row - 1)
        if before == key:
            return key  # what cuts equal keys is the number of the row
        both = min(len(before), len(key))
        differing = np.flatnonzero(np.frombuffer(before, np.uint8, both) != np.frombuffer(key, np.uint8, both))
        return key[: (int(differing[0]) if len(differing) else both) + WORD]

    def _before(self, rows: Rows) -> Rows:
        """Bytes before these rows."""
        return rows * self._width if self._ends is None else np.concatenate([[0], self._ends])[rows]

    def _end(self, begin: int, size: int, rows: int) -> int:
        """How far one gets from row `begin` on with so many bytes and rows; at least one row."""
        if self._ends is None:
            end = begin + size // self._width
        else:
            before = int(self._ends[begin - 1]) if begin else 0
            end = int(np.searchsorted(self._ends, before + size, "right"))
        return min(max(end, begin + 1), begin + rows, self.rows)

    def _take(self, begin: int, end: int) -> pa.RecordBatch:
        if self._order is None:
            return self._batch.slice(begin, end - begin)
        return self._batch.take(pa.array(self._order[begin:end]))

    def _key(self, row: int) -> bytes:
        return self._keys[row if self._order is None else int(self._order[row])]


def bounded(sample: RunSample) -> RunSample:
    """The sample, so coarse that its keys have SAMPLE_BYTES_MAX bytes together. One key alone has less (KEY_BYTES_MAX)."""
    while (size := sum(map(len, sample.keys))) > SAMPLE_BYTES_MAX and len(sample.keys) > 1:
        sample = coarser(sample, max(2, -(-size // SAMPLE_BYTES_MAX)))
    return sample


def row_bytes(batch: pa.RecordBatch) -> tuple[int, Rows | None]:
    """Bytes of a row where all are alike, or (0, bytes of each row). Nested values are taken to be alike."""
    width = 1
    sizes: Rows | None = None
    for column in batch.columns:
        if any(is_kind(column.type) for is_kind in BYTE_TYPES) and len(column):
            width += 4
            lengths = pc.fill_null(pc.binary_length(column), 0).to_numpy()
            if int(lengths.min()) == int(lengths.max()):
                width += int(lengths[0])
            else:
                sizes = lengths.astype(np.int64) if sizes is None else sizes + lengths
        else:
            width += -(-column.nbytes // max(1, len(column)))
    return (width, None) if sizes is None else (0, sizes + width)
