"""Blocks of sorted runs: their limits, where a position cuts them, regular samples, and what damage does."""

from __future__ import annotations

from zlib import crc32

import msgspec
import numpy as np
import pyarrow as pa
import pytest

from roq.errors import DataLost, PayloadTooLarge, SchemaMismatch
from roq.shuffle.blocks import (
    SortedRun,
    decode_block,
    decode_foreign,
    load_schema,
    part,
    save_schema,
)
from roq.shuffle.keys import KeyEncoder, order
from roq.shuffle.ranges import rows_before
from roq.wire.shuffle import BLOCK_BYTES, BLOCK_ROWS, ROW_BYTES_MAX, SAMPLE_BYTES_MAX, Block, Position, Spec

SCHEMA = pa.schema([("k", pa.string()), ("n", pa.int64()), ("v", pa.binary())])
ENCODER = KeyEncoder(SCHEMA, ["k"])
SPEC = Spec(("k",), save_schema(SCHEMA))


def run_of(keys: list[str], sizes: list[int]) -> SortedRun:
    """Rows numbered in the order they have before they are sorted."""
    arrays = [pa.array(keys, pa.string()), pa.array(range(len(keys)), pa.int64()), pa.array([b"v" * size for size in sizes])]
    batch = pa.RecordBatch.from_arrays(arrays, schema=SCHEMA)
    found = ENCODER.encode(batch)
    return SortedRun(batch, found, order(found))


@pytest.mark.parametrize("shape", ["narrow", "wide", "uneven", "one huge", "equal", "none"])
def test_blocks_are_the_run_in_order_within_their_limits(shape: str) -> None:
    draw = np.random.default_rng(1)
    count, sizes = {
        "narrow": (20_000, [0] * 20_000),
        "wide": (3000, [1000] * 3000),
        "uneven": (3000, draw.integers(0, 3000, 3000).tolist()),
        "one huge": (3, [10, 3 * BLOCK_BYTES, 10]),
        "equal": (20_000, [5] * 20_000),
        "none": (0, []),
    }[shape]
    keys = ["same"] * count if shape == "equal" else [f"{number % 1000:04}" for number in draw.permutation(count)]
    run = run_of(keys, sizes)
    blocks = list(run.blocks())
    batches = [decode_block(SCHEMA, block) for block in blocks]
    assert [row for batch in batches for row in batch["n"].to_pylist()] == sorted(range(count), key=keys.__getitem__)
    assert [block.first for block in blocks] == np.cumsum([0, *[block.rows for block in blocks]])[:-1].tolist()
    for block, batch in zip(blocks, batches, strict=True):
        found = ENCODER.encode(batch)
        assert (block.first_key, block.last_key) == (found[0], found[block.rows - 1])
        assert block.rows <= BLOCK_ROWS
        assert len(block.data) < 1.1 * BLOCK_BYTES or block.rows == 1
    assert len(blocks) < 2 * sum(len(block.data) for block in blocks) / BLOCK_BYTES + count / BLOCK_ROWS + 2, (
        "nor are they tiny"
    )
    sample = run.sample(3, "a", 2, size := sum(len(block.data) for block in blocks), 50)
    assert (sample.rows, sample.size, sum(sample.weights)) == (count, size, size)
    assert list(sample.rows_at) == sorted(set(sample.rows_at))
    assert sample.rows_at[:1] == (0,) * bool(count)
    assert list(sample.keys) == sorted(sample.keys)
    if shape in ("narrow", "wide", "uneven", "equal"):
        assert max(sample.weights) < 1.5 * size / 50, "a regular sample"
        assert len(sample.keys) > 45


def test_a_position_cuts_a_block_where_it_says() -> None:
    run = run_of(sorted("aabbbbcdddde" * 3), [1] * 36)
    (block,) = run.blocks(first=100)
    keys = ENCODER.encode(decode_block(SCHEMA, block))
    places = [Position(keys[row], 5, 1, 100 + row) for row in range(36)]
    for key in {*(place.key for place in places), b"", b"\x01bb", b"\xff"}:
        for partition, run_number, row in [
            (4, 9, 0),
            (5, 0, 999),
            (5, 1, 0),
            (5, 1, 110),
            (5, 1, 120),
            (5, 1, 999),
            (5, 2, 0),
            (6, 0, 0),
        ]:
            position = Position(key, partition, run_number, row)
            expected = sum(place < position for place in places)
            assert rows_before(keys, 100, (5, 1), position) == expected
            if 0 < expected < 36:
                head, tail = part(SPEC, block, 100, 100 + expected), part(SPEC, block, 100 + expected, 136)
                assert (head.first, head.rows, tail.first, tail.rows) == (100, expected, 100 + expected, 36 - expected)
                assert (head.last_key, tail.first_key) == (keys[expected - 1], keys[expected])
                together = pa.Table.from_batches([decode_block(SCHEMA, head), decode_block(SCHEMA, tail)])
                assert together.equals(pa.Table.from_batches([decode_block(SCHEMA, block)]))


def test_a_small_run_is_one_block() -> None:
    batch = pa.RecordBatch.from_arrays([pa.array(["a", "b"]), pa.array([1, 2]), pa.array([b"", None])], schema=SCHEMA)
    (block,) = SortedRun(batch, ENCODER.encode(batch), None).blocks(7)
    assert (block.first, block.rows, block.first_key, block.last_key) == (7, 2, b"\x01a", b"\x01b")
    assert decode_block(SCHEMA, block).equals(batch)


def test_damage_is_told() -> None:
    (block,) = run_of(["a", "b"], [5, 5]).blocks()
    for damaged in (
        msgspec.structs.replace(block, data=block.data[:-1]),
        msgspec.structs.replace(block, data=b"x" + block.data[1:]),
        msgspec.structs.replace(block, rows=3),
        Block(0, 1, b"", b"", 0, b""),
    ):
        with pytest.raises(DataLost):
            decode_block(SCHEMA, damaged)


def lying(batch: pa.RecordBatch, offsets: pa.Array, lies: list[int]) -> Block:
    """The batch as a block with these offsets instead, and the CRC that goes with them."""
    data = bytearray(batch.serialize().to_pybytes())
    true = offsets.buffers()[1].to_pybytes()[: 4 * (len(offsets) + 1)]
    at = data.find(true)
    assert at > 0
    data[at : at + len(true)] = np.array(lies, np.int32).tobytes()
    return Block(0, batch.num_rows, b"", b"", crc32(data), bytes(data))


def test_offsets_that_point_outside_are_told_to_whoever_takes_blocks_of_strangers() -> None:
    """Following them would end the process."""
    strings, lists = pa.array(["aa", "bb", "cc"]), pa.array([["a"], ["b"], ["c"]])
    for column, lies in ((strings, [0, 1 << 30, 2, 6]), (strings, [0, 2, 4, 1 << 30]), (lists, [0, 1, 1 << 30, 3])):
        batch = pa.record_batch([column], names=["k"])
        block = lying(batch, column, lies)
        with pytest.raises(DataLost, match="no sound Arrow data"):
            decode_foreign(batch.schema, block)
        if column is strings:
            spec = Spec(("k",), save_schema(batch.schema))
            with pytest.raises(DataLost, match="no sound Arrow data"):
                part(spec, block, 0, 1)


def test_strings_need_not_be_utf_8() -> None:
    """Those of Spark may be any bytes."""
    plain = pa.array([b"\xff\xfe", b"", None], pa.binary())
    lists = pa.ListArray.from_arrays([0, 1, 2, 3], plain.view(pa.string()))
    fixed = pa.FixedSizeListArray.from_arrays(plain.view(pa.string()), 1)
    pairs = pa.MapArray.from_arrays([0, 1, 2, 2], plain[:2].view(pa.string()), plain[:2].view(pa.string()))
    columns = {
        "s": plain.view(pa.string()),
        "l": plain.cast(pa.large_binary()).view(pa.large_string()),
        "list": lists,
        "large": lists.cast(pa.large_list(pa.string())),
        "fixed": fixed,
        "map": pairs,
        "struct": pa.StructArray.from_arrays([plain.view(pa.string()), pa.array([1, 2, 3])], ["a", "b"]),
        "n": pa.nulls(3),
        "d": pa.array([1, None, 2], pa.decimal128(5, 2)),
    }
    batch = pa.record_batch(list(columns.values()), names=list(columns))
    data = batch.serialize().to_pybytes()
    assert decode_foreign(batch.schema, Block(0, 3, b"", b"", crc32(data), data)).equals(batch)


# --- long keys ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("length", "shared", "least"), [(5000, 0, 2000), (5000, 4990, 50), (60_000, 0, 250), (300, 290, 1000)])
def test_a_sample_has_a_bound_in_bytes(length: int, shared: int, least: int) -> None:
    draw = np.random.default_rng(2)
    keys = ["x" * shared + draw.bytes((length - shared) // 2).hex() for _ in range(min(2000, 15_000_000 // length))]
    run = run_of(keys, [0] * len(keys))
    blocks = list(run.blocks())
    size = sum(len(block.data) for block in blocks)
    sample = run.sample(3, "a", 2, size, 2048)
    assert sum(map(len, sample.keys)) <= SAMPLE_BYTES_MAX
    assert len(sample.keys) >= min(least, len(keys)), "no coarser than it must be"
    assert (len(sample.rows_at), len(sample.weights), sum(sample.weights)) == (len(sample.keys), len(sample.keys), size)
    assert sample.rows_at[0] == 0
    encoded = [b"\x01" + key.encode() for key in sorted(keys)]
    for key, row in zip(sample.keys, sample.rows_at, strict=True):
        place = Position(key, 3, 2, row)
        assert place <= Position(encoded[row], 3, 2, row)
        assert not row or Position(encoded[row - 1], 3, 2, row - 1) < place
        assert rows_before(encoded, 0, (3, 2), place) == row, "cutting there cuts before that very row"


def test_a_sample_of_equal_long_keys_has_a_bound_in_bytes() -> None:
    run = run_of(["y" * 60_000] * 300, [0] * 300)
    sample = run.sample(0, "a", 0, 300 * 60_000, 300)
    assert sum(map(len, sample.keys)) <= SAMPLE_BYTES_MAX
    assert set(sample.keys) == {b"\x01" + b"y" * 60_000}, "what cuts them is the row"
    assert len(sample.keys) >= 4


def test_a_row_has_a_limit() -> None:
    with pytest.raises(PayloadTooLarge, match="a row of"):
        run_of(["a", "b"], [1, ROW_BYTES_MAX])


def test_schemas() -> None:
    noted = SCHEMA.with_metadata({"pandas": "much"})
    assert save_schema(noted) == save_schema(SCHEMA)
    assert load_schema(save_schema(noted)).equals(SCHEMA)
    for bad, says in (
        (pa.schema([]), "at least one column"),
        (pa.schema([("a", pa.list_(pa.dictionary(pa.int32(), pa.string())))]), "'a' is dictionary-encoded"),
        ("a", "got str"),
    ):
        with pytest.raises(SchemaMismatch, match=says):
            save_schema(bad)
    with pytest.raises(SchemaMismatch, match="no serialized"):
        load_schema(b"nonsense")
