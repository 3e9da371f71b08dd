"""Blocks of sorted runs: their limits, where a position cuts them, regular samples, and what damage does."""

from __future__ import annotations

import msgspec
import numpy as np
import pyarrow as pa
import pytest

from roq.errors import DataLost, PayloadTooLarge, SchemaMismatch
from roq.shuffle.blocks import (
    SortedRun,
    decode_block,
    encode_block,
    load_schema,
    rows_before,
    save_schema,
    split,
)
from roq.shuffle.keys import KeyEncoder
from roq.shuffle.sorting import order
from roq.wire.shuffle import BLOCK_BYTES, BLOCK_ROWS, ROW_BYTES_MAX, Block, Position

SCHEMA = pa.schema([("k", pa.string()), ("n", pa.int64()), ("v", pa.binary())])
ENCODER = KeyEncoder(SCHEMA, ["k"])


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
        assert (block.first_key, block.last_key) == (found.at(0), found.at(block.rows - 1))
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
    places = [Position(keys.at(row), 5, 1, 100 + row) for row in range(36)]
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
            assert rows_before(block, position, 5, 1, ENCODER) == expected
            if 0 < expected < 36:
                head, tail = split(block, expected, ENCODER)
                assert (head.first, head.rows, tail.first, tail.rows) == (100, expected, 100 + expected, 36 - expected)
                assert (head.last_key, tail.first_key) == (keys.at(expected - 1), keys.at(expected))
                together = pa.Table.from_batches([decode_block(SCHEMA, head), decode_block(SCHEMA, tail)])
                assert together.equals(pa.Table.from_batches([decode_block(SCHEMA, block)]))


def test_encoding_a_batch_as_one_block() -> None:
    batch = pa.RecordBatch.from_arrays([pa.array(["a", "b"]), pa.array([1, 2]), pa.array([b"", None])], schema=SCHEMA)
    block = encode_block(batch, ENCODER.encode(batch), 7)
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
