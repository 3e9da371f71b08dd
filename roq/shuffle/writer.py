"""One attempt of a partition: takes Arrow data, sorts it as often as its memory is full, and sends each sorted run on.

Where the runs go is the sink's business (contract.py). Not thread-safe: one thread per writer.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import Self

import pyarrow as pa

from roq.errors import CallError, Closed, PayloadTooLarge, SchemaMismatch
from roq.shuffle.blocks import SortedRun
from roq.shuffle.contract import AttemptSink
from roq.shuffle.keys import KeyEncoder, is_sorted, order
from roq.shuffle.sampling import samples_wanted
from roq.wire.shuffle import BLOCKS_BYTES_MAX, ROW_BYTES_MAX, Block, Receipt

MEMORY_BYTES = 64 * 1024 * 1024  # of a writer or reader, unless told otherwise
MEMORY_BYTES_MIN = 8 * 1024 * 1024
PLANNED = 0.75  # of a budget is what we count on; allocators round up and keep some
ROW_WORK_BYTES = 72  # per row while it is sorted: order, words, sizes, ties
RUN_BYTES_MAX = 512 * 1024 * 1024  # offsets of strings are 32-bit; larger runs would not be faster either
RUN_ROWS_MAX = 1 << 28
SAMPLE_ROW_BYTES = 64  # of a run, for each key of its sample at least: small runs need no large samples
VIEW_SHARE_MAX = 1.25  # what held rows keep in memory, to their bytes: what keeps more is copied
AUTOMATIC_RANGES = 128  # to sample for when nobody has said how many ranges there will be


def check_memory(memory_bytes: int) -> int:
    """The budget itself. Raises CallError."""
    if memory_bytes < MEMORY_BYTES_MIN:
        raise CallError(f"memory_bytes is {memory_bytes}: at least {MEMORY_BYTES_MIN} are needed")
    return memory_bytes


def sorting_bytes(size: int, rows: int, key_bytes: int) -> int:
    """Memory to gather and sort rows of so many bytes: twice the data while it is put together, then the data, the keys and
    what sorting needs, and a few blocks on their way."""
    return max(2 * size, size + key_bytes + rows * ROW_WORK_BYTES) + 2 * BLOCKS_BYTES_MAX


def release_unused() -> None:
    """Have Arrow's allocator give back what is free; by itself it keeps up to half as much again as is in use."""
    pa.default_memory_pool().release_unused()


class Writer:
    """Writes one attempt. A context manager: leaving it without `finish()`, or by an exception, abandons the attempt."""

    def __init__(
        self, sink: AttemptSink, encoder: KeyEncoder, partition: int, attempt: str, ranges: int, memory_bytes: int
    ) -> None:
        """Use `Shuffles.writer`. ranges: to sample for, 0: not known."""
        self.partition, self.attempt = partition, attempt
        self._sink, self._encoder, self._schema = sink, encoder, encoder.schema
        self._memory_bytes = check_memory(memory_bytes)
        self._samples = samples_wanted(ranges or AUTOMATIC_RANGES)
        self._held: list[pa.RecordBatch] = []
        self._held_bytes = self._held_rows = 0
        self._key_bytes_per_row = 16.0
        self._rows = self._size = self._runs = 0
        self._receipt: Receipt | None = None
        self._open = True

    def write(self, data: pa.Table | pa.RecordBatch) -> None:
        """Take rows with the shuffle's columns. May sort and send; waits while the other side has no room.

        Raises SchemaMismatch and Closed; PayloadTooLarge and what sending raises (Unavailable, StorageFull, AttemptLost): then
        the attempt is abandoned, so that it can't be finished without these rows.
        """
        self._check_open()
        if isinstance(data, pa.Table):
            batches = data.to_batches()
        elif isinstance(data, pa.RecordBatch):
            batches = [data]
        else:
            raise SchemaMismatch(f"write() takes a pyarrow.Table or RecordBatch, got {type(data).__name__}")
        columns = self._matching(data.schema)
        for batch in batches:
            plain = pa.RecordBatch.from_arrays([batch.column(at) for at in columns], schema=self._schema)
            self._or_abandon(partial(self._take_and_own, plain))

    def finish(self) -> Receipt:
        """Returns when every row is on stable storage. The receipt is for commit(). Again: the same, or another try. Raises as
        write; TemporaryError of the last step: try again."""
        if self._receipt is not None:
            return self._receipt
        self._check_open()
        self._or_abandon(self._send_run)
        receipt = Receipt(self.partition, self.attempt, self._rows, self._size, self._runs)
        self._sink.finish(receipt)
        self._open, self._receipt = False, receipt
        return receipt

    def abandon(self) -> None:
        """Forget the attempt, unless it is finished."""
        if self._open:
            self._open = False
            self._held.clear()
            self._sink.abandon()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.abandon()

    def _or_abandon(self, act: Callable[[], None]) -> None:
        try:
            act()
        except BaseException:
            self.abandon()
            raise

    def _check_open(self) -> None:
        if not self._open:
            raise Closed(f"this writer of partition {self.partition} was {'finished' if self._receipt else 'abandoned'}")

    def _matching(self, schema: pa.Schema) -> list[int]:
        """Where in the data each of the shuffle's columns is. Raises SchemaMismatch."""
        if len(schema) != len(self._schema):
            raise SchemaMismatch(f"the columns are {schema.names}, the shuffle's are {self._schema.names}")
        columns = []
        for field in self._schema:
            found = schema.get_all_field_indices(field.name)
            if len(found) != 1:
                raise SchemaMismatch(f"the columns are {schema.names}, the shuffle's are {self._schema.names}")
            if schema.field(found[0]).type != field.type:
                kind = schema.field(found[0]).type
                raise SchemaMismatch(f"column {field.name!r} is of type {kind}, the shuffle's is of type {field.type}")
            columns += found
        return columns

    def _take_and_own(self, batch: pa.RecordBatch) -> None:
        """Take it; what is held of it then keeps nothing else in memory: as long as `write` lasts its caller has it anyway."""
        held = len(self._held)
        runs = self._runs
        self._take(batch)
        for at in range(held if runs == self._runs else 0, len(self._held)):
            view = self._held[at]
            if view.get_total_buffer_size() > VIEW_SHARE_MAX * view.nbytes:
                self._held[at] = pa.concat_batches([view])  # a copy

    def _take(self, batch: pa.RecordBatch) -> None:
        rows, size = batch.num_rows, batch.nbytes
        if not rows:
            return
        if self._too_much(size, rows) and rows > 1:
            self._take(batch.slice(0, rows // 2))
            self._take(batch.slice(rows // 2))
            return
        if size > ROW_BYTES_MAX and rows == 1:
            raise PayloadTooLarge(f"a row of {size} bytes: a row has at most {ROW_BYTES_MAX}")
        if self._held and self._too_much(self._held_bytes + size, self._held_rows + rows):
            self._send_run()
        self._held.append(batch)
        self._held_bytes += size
        self._held_rows += rows

    def _too_much(self, size: int, rows: int) -> bool:
        needed = sorting_bytes(size, rows, int(rows * self._key_bytes_per_row))
        return needed > self._memory_bytes * PLANNED or size > RUN_BYTES_MAX or rows > RUN_ROWS_MAX

    def _send_run(self) -> None:
        """Sort what is held and send it as one run."""
        if not self._held:
            return
        batch = self._held[0] if len(self._held) == 1 else pa.concat_batches(self._held)
        self._held.clear()
        self._held_bytes = self._held_rows = 0
        release_unused()
        keys = self._encoder.encode(batch)
        self._key_bytes_per_row = len(keys.data) / len(keys)
        by = order(keys)
        run = SortedRun(batch, keys, None if is_sorted(by) else by)
        number, size = self._runs, 0
        group: list[Block] = []
        group_bytes = 0
        for block in run.blocks():
            if group and group_bytes + len(block.data) > BLOCKS_BYTES_MAX:
                self._sink.send(group)
                group, group_bytes = [], 0
            group.append(block)
            group_bytes += len(block.data)
            size += len(block.data)
        self._sink.send(group)
        count = min(self._samples, size // SAMPLE_ROW_BYTES + 1)
        self._sink.end(run.sample(self.partition, self.attempt, number, size, count))
        release_unused()
        self._rows, self._size, self._runs = self._rows + run.rows, self._size + size, number + 1
