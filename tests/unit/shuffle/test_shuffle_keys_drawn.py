"""Keys of every type, drawn at random, compare as their values do: beside an order told in plain Python, alone and together."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from decimal import Decimal
from itertools import pairwise
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roq.shuffle.keys import KeyEncoder, order


@dataclass(frozen=True)
class Kind:
    """A type of keys. values: what is drawn, as arrays of `stored` hold it, which are then viewed as arrays of `arrow`.

    rank: comparable as the values are, by definition.
    """

    arrow: pa.DataType
    stored: pa.DataType
    values: st.SearchStrategy[Any]
    rank: Callable[[Any], Any]

    def array(self, values: Iterable[Any]) -> pa.Array:
        return pa.array(values, self.stored).view(self.arrow)

    def ranked(self, value: Any) -> tuple[bool, Any]:
        """Nulls first."""
        return (False, 0) if value is None else (True, self.rank(value))


def same(value: Any) -> Any:
    return value


def number(arrow: pa.DataType, bits: int, *, signed: bool = True) -> Kind:
    least = -(1 << (bits - 1)) if signed else 0
    most = least + (1 << bits) - 1
    stored = getattr(pa, f"{'' if signed else 'u'}int{bits}")()
    edges = sorted({value for value in (least, least + 1, -256, -1, 0, 1, 255, 256, most - 1, most) if least <= value <= most})
    return Kind(arrow, stored, st.sampled_from(edges) | st.integers(least, most), same)


def floating(arrow: pa.DataType, bits: int, mantissa: int, code: str) -> Kind:
    """Given as bits, so that NaNs of all payloads are among them."""
    infinity = (1 << (bits - 1)) - (1 << mantissa)
    edges = [0, 1, (1 << mantissa) - 1, 1 << mantissa, infinity - 1, infinity, infinity + 1, (1 << (bits - 1)) - 1]
    values = st.sampled_from(edges + [value | 1 << (bits - 1) for value in edges]) | st.integers(0, (1 << bits) - 1)

    def rank(value: int) -> tuple[bool, float]:
        (real,) = struct.unpack(f"<{code}", value.to_bytes(bits // 8, "little"))
        return (True, 0.0) if math.isnan(real) else (False, real)  # tuples compare -0.0 and 0.0 as equal

    return Kind(arrow, getattr(pa, f"uint{bits}")(), values, rank)


def decimal(arrow: pa.DataType) -> Kind:
    most = 10**arrow.precision - 1

    def of(unscaled: int) -> Decimal:
        return Decimal((int(unscaled < 0), tuple(map(int, str(abs(unscaled)))), -arrow.scale))

    return Kind(arrow, arrow, (st.sampled_from([-most, -1, 0, 1, most]) | st.integers(-most, most)).map(of), same)


def raw(arrow: pa.DataType, size: int | None = None) -> Kind:
    """Few different bytes: long common beginnings, and all of what the encoding gives a meaning."""
    some = st.lists(st.sampled_from([0, 1, 0x61, 0x80, 0xFF]), min_size=size or 0, max_size=20 if size is None else size)
    return Kind(arrow, arrow, some.map(bytes), same)


def text(arrow: pa.DataType) -> Kind:
    """With the ends of UTF-8's lengths, and of what UTF-16 writes as surrogates."""
    edges = st.sampled_from("\0\x01a\x7f\x80\u07ff\u0800\ud7ff\ue000\uffff\U00010000\U0010ffff")
    return Kind(arrow, arrow, st.text(edges | st.characters(codec="utf-8"), max_size=12), str.encode)


KINDS = [
    Kind(pa.null(), pa.null(), st.none(), same),
    Kind(pa.bool_(), pa.bool_(), st.booleans(), same),
    *(number(getattr(pa, f"int{bits}")(), bits) for bits in (8, 16, 32, 64)),
    *(number(getattr(pa, f"uint{bits}")(), bits, signed=False) for bits in (8, 16, 32, 64)),
    floating(pa.float16(), 16, 10, "e"),
    floating(pa.float32(), 32, 23, "f"),
    floating(pa.float64(), 64, 52, "d"),
    *map(
        decimal, (pa.decimal32(9, 0), pa.decimal64(18, 18), pa.decimal128(5, 2), pa.decimal128(38, 10), pa.decimal256(76, 40))
    ),
    *map(text, (pa.string(), pa.large_string(), pa.string_view())),
    *map(raw, (pa.binary(), pa.large_binary(), pa.binary_view())),
    raw(pa.binary(3), 3),
    number(pa.date32(), 32),
    number(pa.date64(), 64),
    number(pa.time32("s"), 32),
    number(pa.time64("us"), 64),
    *(number(pa.timestamp(unit), 64) for unit in ("s", "ms", "us", "ns")),
    number(pa.timestamp("us", "Europe/Brussels"), 64),
    *(number(pa.duration(unit), 64) for unit in ("s", "ms", "us", "ns")),
]


def check(kinds: list[Kind], rows: list[tuple[Any, ...]], cut: int) -> None:
    """Keys compare as the rows do, equal ones as equal; the sort is that of Python; a batch cut in two has the same keys."""
    columns: Any = zip(*rows, strict=True) if rows else [()] * len(kinds)
    batch = pa.record_batch({str(at): kind.array(column) for at, (kind, column) in enumerate(zip(kinds, columns, strict=True))})
    encoder = KeyEncoder(batch.schema, batch.schema.names)
    keys = encoder.encode(batch)
    ranks = [tuple(kind.ranked(value) for kind, value in zip(kinds, row, strict=True)) for row in rows]
    by_rank = sorted(range(len(rows)), key=ranks.__getitem__)
    assert order(keys).tolist() == by_rank
    found = [keys[row] for row in range(len(keys))]
    for one, other in pairwise(by_rank):
        assert (found[one] < found[other]) == (ranks[one] < ranks[other])
        assert (found[one] == found[other]) == (ranks[one] == ranks[other])
    parts = [encoder.encode(part) for part in (batch.slice(0, cut), batch.slice(cut))]
    assert [part[row] for part in parts for row in range(len(part))] == found


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: str(kind.arrow))
@settings(max_examples=30)
@given(data=st.data())
def test_keys_of_one_column(kind: Kind, data: st.DataObject) -> None:
    rows = data.draw(st.lists(st.tuples(st.none() | kind.values), max_size=30))
    check([kind], rows, data.draw(st.integers(0, len(rows))))


@given(data=st.data())
def test_keys_of_several_columns(data: st.DataObject) -> None:
    """Of any types; each column has few values, so that the next one decides."""
    kinds = data.draw(st.lists(st.sampled_from(KINDS), min_size=2, max_size=4))
    pools = [data.draw(st.lists(st.none() | kind.values, min_size=1, max_size=3)) for kind in kinds]
    rows = data.draw(st.lists(st.tuples(*map(st.sampled_from, pools)), max_size=20))
    check(kinds, rows, data.draw(st.integers(0, len(rows))))


few_bytes = st.lists(st.sampled_from([0, 1, 0xFF]), max_size=3).map(bytes)
FEW = Kind(pa.binary(), pa.binary(), few_bytes, same)


@given(rows=st.lists(st.tuples(st.none() | few_bytes, st.none() | few_bytes, st.integers(-1, 1)), max_size=20))
def test_bytes_before_other_columns(rows: list[tuple[bytes | None, bytes | None, int]]) -> None:
    """One value is the beginning of another, and what follows looks as if it went on."""
    check([FEW, FEW, number(pa.int8(), 8)], rows, len(rows) // 2)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if pa.types.is_integer(kind.stored)], ids=lambda kind: str(kind.arrow))
def test_what_lies_under_a_null_is_no_part_of_the_key(kind: Kind) -> None:
    """Other programs leave there what was in their memory."""
    clean = kind.array([None, None])
    data = kind.array([0, 1]).buffers()[1]
    dirty = pa.Array.from_buffers(kind.arrow, 2, [clean.buffers()[0], data])
    assert dirty.null_count == 2
    keys = KeyEncoder(pa.schema([("k", kind.arrow)]), ["k"]).encode(pa.record_batch({"k": dirty}))
    assert keys[0] == keys[1]
