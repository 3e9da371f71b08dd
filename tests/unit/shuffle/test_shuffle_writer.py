"""A writer's memory and messages: it keeps nothing of its caller's, and what it sends fits messages whatever the keys are."""

from __future__ import annotations

import random
from collections.abc import Sequence

import msgspec
import numpy as np
import pyarrow as pa

from roq.shuffle.keys import KeyEncoder
from roq.shuffle.sampling import Distribution
from roq.shuffle.writer import MEMORY_BYTES, MEMORY_BYTES_MIN, VIEW_SHARE_MAX, Writer
from roq.wire import shuffle as wire
from roq.wire.limits import CONTROL_BYTES_MAX
from roq.wire.shuffle import Block, Receipt, RunSample

MIB = 1 << 20


class Taking:
    """An AttemptSink that keeps what is small and measures the rest."""

    def __init__(self) -> None:
        self.samples: list[RunSample] = []
        self.rows = self.largest = 0

    def send(self, blocks: Sequence[Block]) -> None:
        self.rows += sum(block.rows for block in blocks)
        self._measure(wire.SendBlocks("s", 0, "a", 0, 0, list(blocks)))

    def end(self, sample: RunSample) -> None:
        self.samples.append(sample)
        self._measure(wire.EndRun("s", 0, sample))

    def finish(self, receipt: Receipt) -> None:
        pass

    def abandon(self) -> None:
        pass

    def _measure(self, message: msgspec.Struct) -> None:
        self.largest = max(self.largest, len(msgspec.msgpack.encode(message)))


def writer(schema: pa.Schema, memory: int) -> tuple[Writer, Taking]:
    sink = Taking()
    return Writer(sink, KeyEncoder(schema, ["k"]), 0, "a", 0, memory), sink


def held_bytes(one: Writer) -> int:
    """What would go if the writer did."""
    return sum(batch.get_total_buffer_size() for batch in one._held)


def test_a_writer_keeps_nothing_but_its_rows() -> None:
    """Ten rows of something large are ten rows."""
    schema = pa.schema([("k", pa.int64()), ("s", pa.string())])
    one, sink = writer(schema, MEMORY_BYTES_MIN)
    for _ in range(20):
        large = pa.record_batch([np.arange(MIB // 8), ["x" * 7] * (MIB // 8)], schema=schema)
        one.write(large.slice(1000, 10))
        one.write(pa.Table.from_batches([large]).slice(5, 7))
    assert held_bytes(one) <= VIEW_SHARE_MAX * 20 * 17 * 30
    one.finish()
    assert sink.rows == 20 * 17


def test_a_writer_keeps_nothing_of_a_large_batch_that_it_has_sent() -> None:
    schema = pa.schema([("k", pa.int64())])
    one, sink = writer(schema, MEMORY_BYTES_MIN)
    one.write(pa.record_batch([np.arange(3 * MIB)], schema=schema))
    assert sink.rows > MIB
    assert 0 < held_bytes(one) <= MEMORY_BYTES_MIN
    one.finish()
    assert sink.rows == 3 * MIB


def test_rows_with_keys_as_long_as_they_may_be_fit_messages() -> None:
    schema = pa.schema([("k", pa.string()), ("n", pa.int64())])
    for length, prefix in ((5_000, ""), (5_000, "y" * 4_900), (60_000, "")):
        draw = random.Random(length)
        one, sink = writer(schema, MEMORY_BYTES)
        for _ in range(24 * MIB // length // 50):
            keys = [prefix + draw.randbytes((length - len(prefix)) // 2).hex() for _ in range(50)]
            one.write(pa.record_batch([keys, range(50)], schema=schema))
        receipt = one.finish()
        assert sink.rows == receipt.rows
        assert sink.largest < CONTROL_BYTES_MAX / 2
        assert Distribution.of(sink.samples).total == receipt.size
