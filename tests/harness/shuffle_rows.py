"""Small runs of a shuffle for tests: rows (key, id) in blocks of a few rows, and what a plain sort makes of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from zlib import crc32

import pyarrow as pa

from roq.shuffle.blocks import decode_block, save_schema
from roq.shuffle.keys import KeyEncoder, Keys
from roq.wire.shuffle import Block, Piece, Position, RunSample, Spec

SCHEMA = pa.schema([("key", pa.int64()), ("id", pa.int64()), ("pad", pa.binary())])
SPEC = Spec(("key",), save_schema(SCHEMA), 2, 0)
ENCODER = KeyEncoder(SCHEMA, SPEC.keys)


def encode_block(batch: pa.RecordBatch, keys: Keys, first: int) -> Block:
    """All rows of a batch in key order as one block. first: number of its first row within the run."""
    data = batch.serialize().to_pybytes()
    return Block(first, batch.num_rows, keys[0], keys[len(keys) - 1], crc32(data), data)


def batch_of(keys: Sequence[int], ids: Sequence[int] | None = None, pad: int = 0) -> pa.RecordBatch:
    """Rows in the order given. ids: 0, 1, … unless given."""
    columns = [pa.array(keys, pa.int64()), pa.array(range(len(keys)) if ids is None else ids, pa.int64())]
    return pa.record_batch([*columns, pa.array([bytes(pad)] * len(keys), pa.binary())], schema=SCHEMA)


def key_of(number: int) -> bytes:
    """The encoded key."""
    return ENCODER.encode(batch_of([number]))[0]


def run_of(keys: Iterable[int], rows: int, ids: Sequence[int] | None = None, pad: int = 0) -> list[Block]:
    """A sorted run of these keys in blocks of so many rows."""
    batch = batch_of(sorted(keys), ids, pad)
    parts = [(first, batch.slice(first, rows)) for first in range(0, batch.num_rows, rows)]
    return [encode_block(part, ENCODER.encode(part), first) for first, part in parts]


def sample_of(partition: int, attempt: str, run: int, blocks: Sequence[Block]) -> RunSample:
    """The first key of every block."""
    return RunSample(
        partition,
        attempt,
        run,
        sum(block.rows for block in blocks),
        sum(len(block.data) for block in blocks),
        tuple(block.first_key for block in blocks),
        tuple(block.first for block in blocks),
        tuple(len(block.data) for block in blocks),
    )


def positions(partition: int, run: int, blocks: Iterable[Block]) -> list[Position]:
    """Of every row."""
    return [
        Position(keys[row], partition, run, block.first + row)
        for block in blocks
        for keys in [ENCODER.encode(decode_block(SCHEMA, block))]
        for row in range(block.rows)
    ]


def rows_in(blocks: Iterable[Block]) -> list[tuple[int, int]]:
    """(key, id) of every row."""
    found: list[tuple[int, int]] = []
    for block in blocks:
        batch = decode_block(SCHEMA, block)
        found += zip(batch.column(0).to_pylist(), batch.column(1).to_pylist(), strict=True)
    return found


def piece(partition: int, attempt: str, run: int, blocks: Sequence[Block]) -> Piece:
    """As it travels."""
    return Piece(partition, attempt, run, list(blocks))
