"""Keys as bytes: their order is that of the values, whatever the type, the batch they come in and what stands beside them."""

from __future__ import annotations

import datetime as dt
import math
from decimal import Decimal
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from roq.errors import PayloadTooLarge, SchemaMismatch
from roq.shuffle.keys import KeyEncoder, Keys, is_sorted, order

DAY = dt.date(2026, 11, 21)
TEXTS = [
    "",
    "\0",
    "\0\0",
    "\0a",
    "\x01",
    "a",
    "a\0",
    "a\0\0",
    "a\0b",
    "a\x01",
    "aaaaaaaa",
    "aaaaaaaaa",
    "b",
    "\xff",
    "\U0001f600",
]
RAW = [
    b"",
    b"\0",
    b"\0\0",
    b"\0\xff",
    b"\x01",
    b"a",
    b"a\0",
    b"a\0\xff",
    b"aaaaaaaa",
    b"aaaaaaaab",
    b"\xfe",
    b"\xff",
    b"\xff\xff",
]
MOMENTS = [dt.datetime(1, 1, 1), dt.datetime(1969, 12, 31, 23), dt.datetime(1970, 1, 1), dt.datetime(2026, 1, 1, 0, 0, 0, 1)]
ASCENDING: list[tuple[pa.DataType, list[Any]]] = [
    (pa.bool_(), [False, True]),
    *((kind, [-(2 ** (bits - 1)), -1, 0, 1, 2 ** (bits - 1) - 1]) for kind, bits in (
        (pa.int8(), 8), (pa.int16(), 16), (pa.int32(), 32), (pa.int64(), 64))),
    *((kind, [0, 1, 2 ** (bits - 1), 2**bits - 1]) for kind, bits in (
        (pa.uint8(), 8), (pa.uint16(), 16), (pa.uint32(), 32), (pa.uint64(), 64))),
    (pa.float16(), [-math.inf, np.float16(-1), np.float16(0), np.float16(0.5), math.inf, math.nan]),
    *((kind, [-math.inf, -1e30, -1.5, -1e-40, 0.0, 1e-40, 1e30, math.inf, math.nan]) for kind in (pa.float32(), pa.float64())),
    *((kind, [Decimal("-9999.99"), Decimal("-0.01"), Decimal(0), Decimal("0.01"), Decimal("9999.99")]) for kind in (
        pa.decimal32(6, 2), pa.decimal64(6, 2), pa.decimal128(6, 2), pa.decimal128(38, 2), pa.decimal256(50, 2))),
    *((kind, TEXTS) for kind in (pa.string(), pa.large_string(), pa.string_view())),
    *((kind, RAW) for kind in (pa.binary(), pa.large_binary(), pa.binary_view())),
    (pa.binary(3), [b"\0\0\0", b"\0\0\1", b"abc", b"\xff\0\0"]),
    *((kind, [dt.date(1, 1, 1), dt.date(1969, 12, 31), DAY]) for kind in (pa.date32(), pa.date64())),
    *((pa.timestamp(unit), MOMENTS if unit == "us" else MOMENTS[1:3]) for unit in ("s", "ms", "us", "ns")),
    (pa.timestamp("us", "Europe/Brussels"), [each.replace(tzinfo=dt.UTC) for each in MOMENTS[1:]]),
    (pa.time32("s"), [dt.time(0), dt.time(23, 59, 59)]),
    (pa.time64("us"), [dt.time(0), dt.time(23, 59, 59, 1)]),
    (pa.duration("us"), [dt.timedelta(-1), dt.timedelta(0), dt.timedelta(1)]),
]  # fmt: skip


def encoded(arrays: dict[str, pa.Array], keys: list[str] | None = None) -> list[bytes]:
    batch = pa.record_batch(arrays)
    found = KeyEncoder(batch.schema, keys or list(arrays)).encode(batch)
    return [found[row] for row in range(len(found))]


@pytest.mark.parametrize(("kind", "values"), ASCENDING, ids=[str(kind) for kind, _ in ASCENDING])
@pytest.mark.parametrize("beside", ["alone", "before", "behind"])
def test_the_bytes_are_in_the_order_of_the_values(kind: pa.DataType, values: list[Any], beside: str) -> None:
    column = pa.array([None, *values], kind)
    arrays = {"k": column}
    if beside != "alone":
        arrays["other"] = pa.array(["x"] * len(column))
    found = encoded(arrays, ["k", "other"] if beside == "before" else ["other", "k"] if beside == "behind" else ["k"])
    assert all(one < other for one, other in pairwise(found)), found
    one_by_one = [
        encoded({name: each[row : row + 1] for name, each in arrays.items()}, list(arrays)) for row in range(len(column))
    ]
    together = encoded(arrays)
    assert [each[0] for each in one_by_one] == together, "a key does not depend on the batch it is in"
    assert together[2:5] == encoded({name: each[2:5] for name, each in arrays.items()}), "nor on where the array begins"


def test_equal_numbers_have_equal_keys() -> None:
    for size in (32, 64):
        bits = np.array([0x7FC00001, 0xFFC00000] if size == 32 else [0x7FF8000000000001, 0xFFF8000000000000], f"u{size // 8}")
        numbers = np.concatenate([bits.view(f"f{size // 8}"), np.array([math.nan, 0.0, -0.0], f"f{size // 8}")])
        keys = encoded({"k": pa.array(numbers)})
        assert keys[0] == keys[1] == keys[2]
        assert keys[3] == keys[4]


Row = tuple[str | None, int | None, bytes | None]
small = st.tuples(
    st.none() | st.text("ab\0\x01\xff", max_size=3),
    st.none() | st.integers(-2, 2) | st.integers(-(2**31), 2**31 - 1),
    st.none() | st.binary(max_size=10),
)


def comparable(row: Row) -> tuple[tuple[bool, Any], ...]:
    plain = (row[0].encode() if row[0] is not None else None, row[1], row[2])
    return tuple((value is not None, value if value is not None else 0) for value in plain)


@given(st.lists(small, max_size=30))
def test_several_columns(rows: list[Row]) -> None:
    columns = list(zip(*rows, strict=True)) or [(), (), ()]
    arrays = {
        name: pa.array(column, kind)
        for name, column, kind in zip("sib", columns, (pa.string(), pa.int32(), pa.binary()), strict=True)
    }
    batch = pa.record_batch(arrays)
    keys = KeyEncoder(batch.schema, list("sib")).encode(batch)
    found = order(keys).tolist()
    assert found == sorted(range(len(rows)), key=lambda row: comparable(rows[row]))


@pytest.mark.parametrize(
    "kind",
    [pa.list_(pa.int64()), pa.struct([("a", pa.int64())]), pa.map_(pa.string(), pa.int64()), pa.month_day_nano_interval()],
    ids=str,
)
def test_types_that_have_no_order(kind: pa.DataType) -> None:
    with pytest.raises(SchemaMismatch, match="key column 'k' is of type"):
        KeyEncoder(pa.schema([("k", kind)]), ["k"])


@pytest.mark.parametrize(
    ("keys", "says"),
    [([], "at least one"), (["a", "a"], "twice"), (["x"], "'x' is not among"), (["b"], "'b' is more than once")],
)
def test_columns_that_can_not_be_meant(keys: list[str], says: str) -> None:
    schema = pa.schema([("a", pa.int64()), ("b", pa.int64()), ("b", pa.string())])
    with pytest.raises(SchemaMismatch, match=says):
        KeyEncoder(schema, keys)


def test_a_key_has_a_limit() -> None:
    with pytest.raises(PayloadTooLarge, match="65536"):
        encoded({"k": pa.array(["x" * 70_000])})


# --- sorting --------------------------------------------------------------------------------------------------------------


def check_order(values: pa.Array) -> None:
    batch = pa.record_batch({"k": values})
    keys = KeyEncoder(batch.schema, ["k"]).encode(batch)
    plain = [keys[row] for row in range(len(keys))]
    found = order(keys)
    assert found.tolist() == sorted(range(len(plain)), key=plain.__getitem__), "stable, too"
    assert is_sorted(found) == (plain == sorted(plain))


@pytest.mark.parametrize("rows", [0, 1, 2, 3, 17, 5000])
@pytest.mark.parametrize("shape", ["random", "few", "equal", "sorted", "reversed", "long ties", "prefixes", "numbers", "nulls"])
def test_sorting(rows: int, shape: str) -> None:
    draw = np.random.default_rng(rows)
    numbers = draw.integers(0, 50, rows).tolist()
    match shape:
        case "random":
            check_order(pa.array([draw.bytes(16) for _ in range(rows)], pa.binary()))
        case "few":
            check_order(pa.array([f"{each:03}" for each in numbers], pa.string()))
        case "equal":
            check_order(pa.array(["the same and longer than two words"] * rows, pa.string()))
        case "sorted":
            check_order(pa.array(range(rows), pa.int64()))
        case "reversed":
            check_order(pa.array(range(rows, 0, -1), pa.int64()))
        case "long ties":
            check_order(pa.array([f"{each % 3}{'x' * 40}{each % 5}{'y' * (each % 2)}{each}" for each in numbers], pa.string()))
        case "prefixes":
            check_order(pa.array([b"\0" * (each % 20) for each in numbers], pa.binary()))
        case "numbers":
            check_order(pa.array([each - 25 for each in numbers], pa.int64()))
        case "nulls":
            check_order(pa.array([None if each % 2 else each for each in numbers], pa.float64()))


@given(
    st.lists(st.binary(max_size=20) | st.sampled_from([b"", b"\0", b"\0" * 8, b"\0" * 9, b"x" * 16, b"x" * 17]), max_size=40)
)
def test_sorting_any_bytes(values: list[bytes]) -> None:
    check_order(pa.array(values, pa.binary()))


def test_words_are_the_bytes_of_the_keys() -> None:
    values = [b"", b"a", b"abcdefg", b"abcdefgh", b"abcdefghijklmnopq"]
    offsets = np.cumsum([0, *map(len, values)])
    keys = Keys(np.frombuffer(b"".join(values), np.uint8), len(values), -1, offsets)
    for at in (0, 3, 8, 16, 17, 40):
        expected = [int.from_bytes(value[at : at + 8].ljust(8, b"\0"), "big") for value in values]
        assert keys.words(at).tolist() == expected
        assert keys.words(at, np.array([4, 1])).tolist() == [expected[4], expected[1]]
