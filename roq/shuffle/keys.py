"""Keys as bytes: the key columns of a row become one byte string, and comparing these strings compares the rows as Spark does.

Ascending, nulls first; NaN is the greatest number and equal to itself, -0.0 equals 0.0; strings and binary by their bytes.
Per column, in order:

    00                                     null
    01  <value, big-endian>                numbers: the sign bit turned over (negative floats: every bit)
    01  <bytes>                            string or binary, the last column: nothing ends it
    01  <bytes, 00 written as 00 FF>  00   string or binary, before another column: what follows is 00 or 01, never FF

Decimals of one scale, dates, times and timestamps of one unit are numbers. Whole columns are encoded at once.

`order` sorts them: a stable sort of whole numbers, eight bytes of the keys at a time. What all keys have in common is skipped
first. Later bytes are looked at only where the earlier ones tie, so random keys are sorted by one pass (in C, vectorised), and
sorted or equal ones by none. Not covered: descending order, collations, and lists, maps and structs as keys.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from roq.errors import PayloadTooLarge, SchemaMismatch
from roq.wire.shuffle import KEY_BYTES_MAX

Bytes = NDArray[np.uint8]
Words = NDArray[np.uint64]
Rows = NDArray[np.int64]
WORD = 8  # bytes that are compared at once

IS_NULL, IS_VALUE, END = b"\x00", b"\x01", b"\x00"
BYTE_TYPES = (pa.types.is_string, pa.types.is_large_string, pa.types.is_binary, pa.types.is_large_binary)
VIEW_TYPES = (pa.types.is_string_view, pa.types.is_binary_view)
NUMBER_TYPES = (
    pa.types.is_integer,
    pa.types.is_date,
    pa.types.is_time,
    pa.types.is_timestamp,
    pa.types.is_duration,
)
ENDED_BYTES = 8 * WORD  # so often keys that have ended are left out: one long key must not make work for many short ones


class Keys:
    """Encoded keys of some rows. width: bytes of each of them; -1 if they differ: then key i is data[offsets[i]:offsets[i+1]].

    longest: bytes of the longest.
    """

    __slots__ = ("_offsets", "_rows", "data", "longest", "width")

    def __init__(self, data: Bytes, rows: int, width: int, offsets: Rows | None = None) -> None:
        self.data, self._rows, self.width, self._offsets = data, rows, width, offsets
        self.longest = width if offsets is None else int(np.diff(offsets).max(initial=0))

    def __len__(self) -> int:
        return self._rows

    def __getitem__(self, row: int) -> bytes:
        """The key of one row."""
        if not 0 <= row < self._rows:
            raise IndexError(row)
        if self._offsets is None:
            return self.data[row * self.width : (row + 1) * self.width].tobytes()
        return self.data[self._offsets[row] : self._offsets[row + 1]].tobytes()

    def lengths(self, rows: Rows) -> Words:
        """Bytes of the keys of these rows."""
        if self._offsets is None:
            return np.full(len(rows), self.width, np.uint64)
        return (self._offsets[rows + 1] - self._offsets[rows]).astype(np.uint64)

    def words(self, at: int, rows: Rows | None = None) -> Words:
        """Bytes at … at+7 of each key as a number, as if zeros followed its end. rows: of these rows only."""
        if self._offsets is None:
            return self._words_fixed(at, rows)
        starts = (self._offsets[:-1] if rows is None else self._offsets[rows]) + at
        left = (self._offsets[1:] if rows is None else self._offsets[rows + 1]) - starts
        data = self.data if len(self.data) >= WORD else np.concatenate([self.data, np.zeros(WORD, np.uint8)])
        inside = np.minimum(starts, len(data) - WORD)
        windows: NDArray[Any] = np.ndarray((len(data) - WORD + 1,), ">u8", data, strides=(1,))
        words = windows[inside].astype(np.uint64)
        words <<= np.clip((starts - inside) * 8, 0, 63).astype(np.uint64)  # the last few keys begin behind the last window
        unused = np.clip((WORD - left) * 8, 0, 63).astype(np.uint64)
        words >>= unused
        words <<= unused
        words[left <= 0] = 0
        return words

    def _words_fixed(self, at: int, rows: Rows | None) -> Words:
        width = self.width
        if self._rows == 0 or at >= width:
            return np.zeros(self._rows if rows is None else len(rows), np.uint64)
        if at + WORD <= width:
            column: NDArray[Any] = np.ndarray((self._rows,), ">u8", self.data, offset=at, strides=(width,))
            return (column if rows is None else column[rows]).astype(np.uint64)
        part = self.data.reshape(self._rows, width)[:, at:]
        padded = np.zeros((self._rows if rows is None else len(rows), WORD), np.uint8)
        padded[:, : width - at] = part if rows is None else part[rows]
        return padded.view(">u8").reshape(-1).astype(np.uint64)


class KeyEncoder:
    """Encodes the key columns of batches of one schema."""

    def __init__(self, schema: pa.Schema, keys: Sequence[str]) -> None:
        """Raises SchemaMismatch: no keys, a key twice, a column that is missing or ambiguous, a type that can't be a key."""
        if not keys:
            raise SchemaMismatch("a shuffle has at least one key column")
        if len(set(keys)) != len(keys):
            raise SchemaMismatch(f"a column is named twice among the keys {list(keys)}")
        self.schema = schema
        self._columns: list[int] = []
        self._encode: list[Callable[[pa.Array], Bytes | pa.Array]] = []
        for key in keys:
            found = schema.get_all_field_indices(key)
            if len(found) != 1:
                problem = "is not among" if not found else "is more than once among"
                raise SchemaMismatch(f"key column {key!r} {problem} the columns {schema.names}")
            self._columns.append(found[0])
            last = len(self._columns) == len(keys)
            self._encode.append(_encoding(schema.field(found[0]).type, key, last=last))

    def encode(self, batch: pa.RecordBatch) -> Keys:
        """The keys of its rows. Raises PayloadTooLarge (a key above KEY_BYTES_MAX)."""
        parts = [encode(batch.column(at)) for at, encode in zip(self._columns, self._encode, strict=True)]
        keys = _joined(parts, batch.num_rows)
        if keys.longest > KEY_BYTES_MAX:
            raise PayloadTooLarge(f"a key of {keys.longest} bytes: encoded, a key has at most {KEY_BYTES_MAX}")
        return keys


def _encoding(kind: pa.DataType, name: str, *, last: bool) -> Callable[[pa.Array], Bytes | pa.Array]:
    """How a column of this type is encoded: a table of one row of bytes per row, or an array of large_binary."""
    if pa.types.is_null(kind):
        return lambda column: np.zeros((len(column), 1), np.uint8)
    if pa.types.is_boolean(kind):
        return lambda column: _flagged(column, _bytes_of(pc.cast(column, pa.uint8()), "u1").reshape(-1, 1))
    if pa.types.is_unsigned_integer(kind):
        return lambda column: _flagged(column, _big_endian(_bytes_of(column, f"<u{kind.byte_width}")))
    if any(is_kind(kind) for is_kind in NUMBER_TYPES):
        return lambda column: _flagged(column, _signed(_bytes_of(column, f"<u{kind.byte_width}")))
    if pa.types.is_floating(kind):
        return lambda column: _flagged(column, _floats(_bytes_of(column, f"<f{kind.byte_width}")))
    if pa.types.is_decimal(kind):
        return lambda column: _flagged(column, _decimals(column, kind.byte_width))
    if pa.types.is_fixed_size_binary(kind):
        return lambda column: _flagged(column, _table(column, kind.byte_width))
    if any(is_kind(kind) for is_kind in BYTE_TYPES + VIEW_TYPES):
        return _last_bytes if last else _inner_bytes
    raise SchemaMismatch(f"key column {name!r} is of type {kind}, which has no order here")


# --- columns of one width ----------------------------------------------------------------------------------------------


def _bytes_of(column: pa.Array, kind: str) -> NDArray[Any]:
    dtype = np.dtype(kind)
    buffer = column.buffers()[1]
    if buffer is None or not len(column):
        return np.zeros(len(column), dtype)
    return np.frombuffer(buffer, dtype, len(column), column.offset * dtype.itemsize)


def _table(column: pa.Array, width: int) -> Bytes:
    buffer = column.buffers()[1]
    if buffer is None or not len(column) or not width:
        return np.zeros((len(column), width), np.uint8)
    return np.frombuffer(buffer, np.uint8, len(column) * width, column.offset * width).reshape(-1, width)


def _flagged(column: pa.Array, values: Bytes) -> Bytes:
    """The values behind the byte that tells nulls, whose values become zeros."""
    flagged = np.empty((len(column), values.shape[1] + 1), np.uint8)
    flagged[:, 0] = IS_VALUE[0]
    flagged[:, 1:] = values
    if column.null_count:
        flagged[column.is_null().to_numpy(zero_copy_only=False)] = 0
    return flagged


def _big_endian(numbers: NDArray[Any]) -> Bytes:
    return numbers.astype(numbers.dtype.newbyteorder(">")).view(np.uint8).reshape(len(numbers), numbers.dtype.itemsize)


def _signed(numbers: NDArray[Any]) -> Bytes:
    return _big_endian(numbers ^ numbers.dtype.type(1 << (numbers.dtype.itemsize * 8 - 1)))


def _floats(numbers: NDArray[Any]) -> Bytes:
    """No arithmetic: it would warn of signalling NaNs, and where subnormals are flushed to zero they'd become one key."""
    size = numbers.dtype.itemsize
    bits = numbers.view(f"<u{size}").copy()
    sign = bits.dtype.type(1 << (size * 8 - 1))
    bits[np.isnan(numbers)] = np.array(np.nan, numbers.dtype).view(bits.dtype)  # the positive one, whatever it was
    bits[bits == sign] = 0  # -0.0
    return _big_endian(np.where(bits & sign, ~bits, bits | sign))


def _decimals(column: pa.Array, width: int) -> Bytes:
    table = _table(column, width)[:, ::-1].copy()
    table[:, 0] ^= 0x80
    return table


# --- columns of bytes -----------------------------------------------------------------------------------------------------


def _large(column: pa.Array) -> pa.Array:
    if any(is_kind(column.type) for is_kind in VIEW_TYPES):
        column = column.cast(pa.large_string() if pa.types.is_string_view(column.type) else pa.large_binary())
    return column.cast(pa.large_binary())


def _last_bytes(column: pa.Array) -> Bytes | pa.Array:
    large = _large(column)
    table = None if column.null_count else _even(large)
    if table is not None:
        return _flagged(column, table)
    return pc.fill_null(_join(pa.scalar(IS_VALUE, pa.large_binary()), large), pa.scalar(IS_NULL, pa.large_binary()))


def _inner_bytes(column: pa.Array) -> pa.Array:
    escaped = pc.replace_substring(_large(column), pattern=b"\x00", replacement=b"\x00\xff")
    whole = _join(pa.scalar(IS_VALUE, pa.large_binary()), escaped, pa.scalar(END, pa.large_binary()))
    return pc.fill_null(whole, pa.scalar(IS_NULL, pa.large_binary()))


def _join(*parts: pa.Array | pa.Scalar) -> pa.Array:
    return pc.binary_join_element_wise(*parts, pa.scalar(b"", pa.large_binary()), null_handling="emit_null")


def _offsets(large: pa.Array) -> Rows:
    buffer = large.buffers()[1]
    if buffer is None:
        return np.zeros(len(large) + 1, np.int64)
    return np.frombuffer(buffer, np.int64, len(large) + 1, large.offset * 8)


def _data(large: pa.Array) -> Bytes:
    buffer = large.buffers()[2]
    return np.zeros(0, np.uint8) if buffer is None else np.frombuffer(buffer, np.uint8)


def _even(large: pa.Array) -> Bytes | None:
    """The values as a table if all are of one length."""
    if not len(large):
        return np.zeros((0, 0), np.uint8)
    offsets = _offsets(large)
    lengths = np.diff(offsets)
    width = int(lengths[0])
    if (lengths != width).any():
        return None
    return _data(large)[offsets[0] : offsets[-1]].reshape(len(large), width)


# --- whole keys -----------------------------------------------------------------------------------------------------------


def _joined(parts: list[Bytes | pa.Array], rows: int) -> Keys:
    tables = [part for part in parts if isinstance(part, np.ndarray)]
    if len(tables) == len(parts):
        table = tables[0] if len(tables) == 1 else np.concatenate(tables, axis=1)
        return Keys(np.ascontiguousarray(table).reshape(-1), rows, table.shape[1])
    arrays = [_array(part) if isinstance(part, np.ndarray) else part for part in parts]
    whole = arrays[0] if len(arrays) == 1 else _join(*arrays)
    if isinstance(whole, pa.ChunkedArray):
        whole = whole.combine_chunks()
    return Keys(_data(whole), rows, -1, _offsets(whole))


def _array(table: Bytes) -> pa.Array:
    rows, width = table.shape
    offsets = np.arange(0, rows * width + 1, width, dtype=np.int64)
    data = pa.py_buffer(np.ascontiguousarray(table))
    return pa.Array.from_buffers(pa.large_binary(), rows, [None, pa.py_buffer(offsets), data])


def order(keys: Keys) -> Rows:
    """The rows in key order; those with the same key stay as they were."""
    rows: Rows = np.arange(len(keys), dtype=np.int64)
    if len(keys) < 2:
        return rows
    at, words = _first_difference(keys)
    if at >= keys.longest:
        return _by_length(keys, rows) if keys.width < 0 else rows
    if not (words[1:] >= words[:-1]).all():
        rows = np.argsort(words)  # not stable: _Ties puts that right
        words = words[rows]
    ties = _Ties(words)
    ties.settle(rows)
    for offset in range(at + WORD, keys.longest, WORD):
        if not ties.positions.size:
            return rows
        ties.refine(rows, keys.words(offset, rows[ties.positions]))
        if keys.width < 0 and (offset - at) % ENDED_BYTES == 0:
            ties.drop_ended(rows, keys, offset + WORD)
    if keys.width < 0 and ties.positions.size:  # "a" and "a\0" have the same words
        ties.refine(rows, keys.lengths(rows[ties.positions]))
    return rows


def is_sorted(rows: Rows) -> bool:
    """Whether an order leaves everything as it is."""
    return bool((rows[1:] > rows[:-1]).all())


def _first_difference(keys: Keys) -> tuple[int, Words]:
    """The number of leading bytes that all keys share, and the words from there on."""
    for offset in range(0, max(1, keys.longest), WORD):
        words = keys.words(offset)
        differing = int(words.min()) ^ int(words.max())
        if differing:
            shared = WORD - (differing.bit_length() + 7) // 8
            return offset + shared, words if shared == 0 else keys.words(offset + shared)
    return keys.longest, words


def _by_length(keys: Keys, rows: Rows) -> Rows:
    return rows[np.argsort(keys.lengths(rows), kind="stable")]


class _Ties:
    """Where neighbours in the order so far are not told apart yet. positions: all such places, in order; groups: which of them
    tie with each other."""

    def __init__(self, words: Words) -> None:
        same = np.zeros(len(words) + 1, bool)
        np.equal(words[1:], words[:-1], out=same[1:-1])
        self.positions: Rows = np.flatnonzero(same[1:] | same[:-1])
        self._groups: Rows = np.cumsum(~same[:-1][self.positions])

    def settle(self, rows: Rows) -> None:
        """Put the rows of each group in their original order."""
        tied = rows[self.positions]
        if not ((tied[1:] > tied[:-1]) | (self._groups[1:] != self._groups[:-1])).all():
            both = np.sort((self._groups.astype(np.uint64) << np.uint64(32)) | tied.astype(np.uint64))
            rows[self.positions] = (both & np.uint64(0xFFFFFFFF)).astype(np.int64)

    def drop_ended(self, rows: Rows, keys: Keys, offset: int) -> None:
        """Settle ties between keys of which no more than `offset` bytes, all compared, are left: the shorter one is a prefix of
        the other, and those of one length are equal."""
        if self.positions.size:
            self.refine(rows, np.minimum(keys.lengths(rows[self.positions]), np.uint64(offset + 1)))
            going_on = keys.lengths(rows[self.positions]) > offset
            self.positions, self._groups = self.positions[going_on], self._groups[going_on]

    def refine(self, rows: Rows, words: Words) -> None:
        """Sort within the groups by these words of the tied rows, stably, and keep what still ties."""
        groups = self._groups
        if not ((words[1:] >= words[:-1]) | (groups[1:] != groups[:-1])).all():
            by = np.lexsort((words, groups))
            rows[self.positions] = rows[self.positions][by]
            words = words[by]
        same = np.zeros(len(words) + 1, bool)
        same[1:-1] = (words[1:] == words[:-1]) & (groups[1:] == groups[:-1])
        still = same[1:] | same[:-1]
        self._groups = np.cumsum(~same[:-1])[still]
        self.positions = self.positions[still]
