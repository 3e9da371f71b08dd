"""One row of each key, of rows in key order: the last one. Runs in Spark's tasks, one range of a shuffle in each.

A key may be cut by the border of two ranges. Its last row then lies in the later one, so a task that is through with its range
looks whether the next one goes on with the same key; it reads the beginning of that range for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import pyarrow as pa
import pyarrow.compute as pc
from pyspark import TaskContext

import roq.shuffle


def last_of_each(
    batches: Iterable[pa.RecordBatch], address: str, name: str, keys: Sequence[str], columns: Sequence[str]
) -> Iterator[pa.RecordBatch]:
    """For mapInArrow over a loaded shuffle: these columns of the last row of each key."""
    context = TaskContext.get()
    assert context is not None  # in a task
    kept: pa.RecordBatch | None = None  # the last row so far; whether it stays is known with the next one
    for batch in batches:
        if not batch.num_rows:
            continue
        if kept is not None and differs(kept, batch.slice(0, 1), keys)[0].as_py():
            yield kept.select(columns)
        head, kept = batch.slice(0, batch.num_rows - 1), batch.slice(batch.num_rows - 1)
        yield head.filter(differs(head, batch.slice(1), keys)).select(columns)
    if kept is not None and not _goes_on(kept, address, name, context.partitionId() + 1, keys):
        yield kept.select(columns)


def differs(left: pa.RecordBatch, right: pa.RecordBatch, keys: Sequence[str]) -> pa.BooleanArray:
    """Row by row, whether the keys are different ones, as the shuffle orders them: nulls are alike, and so are NaNs."""
    found = pa.array([False] * left.num_rows, pa.bool_())
    for key in keys:
        one, other = left.column(key), right.column(key)
        alike = pc.and_(one.is_null(nan_is_null=True), other.is_null(nan_is_null=True))
        if pa.types.is_floating(one.type):  # NaN and null are two keys
            alike = pc.and_(alike, pc.equal(one.is_null(), other.is_null()))
        same = pc.or_(pc.fill_null(pc.equal(one, other), fill_value=False), alike)
        found = pc.or_(found, pc.invert(same))
    return found


def _goes_on(last: pa.RecordBatch, address: str, name: str, number: int, keys: Sequence[str]) -> bool:
    """Does range `number`, or the first one after it that has rows, begin with the same key?"""
    with roq.shuffle.open(address) as shuffles:
        planned = shuffles.describe(name)
        for each in planned.ranges[number:]:
            for batch in shuffles.read(name, each.number, planned=planned):
                if batch.num_rows:
                    return not differs(last, batch.slice(0, 1), keys)[0].as_py()
    return False
