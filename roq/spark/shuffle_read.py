"""Reading a sealed shuffle: one Spark partition per range, in key order; its rows merged, in Arrow batches.

Which replica is asked, and what happens when it does not answer, is roq.shuffle's. Spark learns nothing of the order (a Python
source can't tell), so ORDER BY sorts again: use mapInArrow, mapInPandas or foreachPartition, which see each range in order.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import msgspec
import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, InputPartition

import roq.shuffle
from roq.errors import ShuffleConflict
from roq.shuffle.blocks import load_schema
from roq.spark.errors import spark_errors
from roq.spark.schema import exact
from roq.spark.workers import settle
from roq.wire.shuffle import Description, Range

CHANGED = (
    "the shuffle was made or cut anew since this was planned: load it again. A query that overwrites the shuffle it reads"
    " destroys it: save under another name, then remove this one"
)


@dataclass(frozen=True)
class RangePartition(InputPartition):
    """A range of the table the job was planned with. interval: encoded."""

    number: int
    interval: bytes


@dataclass(frozen=True)
class ShuffleReader(DataSourceReader):
    """Of one load. shuffle: id of the shuffle when it was planned. schema: serialized."""

    address: str
    name: str
    shuffle: str
    schema: bytes
    memory_bytes: int

    def partitions(self) -> list[InputPartition]:
        """One per range, in key order."""
        with spark_errors(shuffle=self.name), roq.shuffle.open(self.address) as shuffles:
            return [RangePartition(one.number, _encoded(one)) for one in self._same(shuffles.describe(self.name)).ranges]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """In a task: the rows of one range in order."""
        if not isinstance(partition, RangePartition):  # what Spark makes of no partitions at all
            return
        settle()
        schema = load_schema(self.schema)
        with spark_errors(shuffle=self.name), roq.shuffle.open(self.address) as shuffles:
            self._check(shuffles.describe(self.name), partition)
            batches = iter(shuffles.read(self.name, partition.number, self.memory_bytes))
            first = next(batches, None)
            self._check(shuffles.describe(self.name), partition)  # the range is open: what is so now was so when it was opened
            if first is not None:
                yield exact(first, schema)
                for batch in batches:
                    yield exact(batch, schema)

    def _check(self, now: Description, partition: RangePartition) -> None:
        """Is this number still the range the job was planned with?"""
        if [_encoded(one) for one in self._same(now).ranges if one.number == partition.number] != [partition.interval]:
            raise ShuffleConflict(CHANGED)

    def _same(self, now: Description) -> Description:
        if now.id != self.shuffle:
            raise ShuffleConflict(CHANGED)
        return now


def _encoded(one: Range) -> bytes:
    """What the range is made of, wherever it lies."""
    return msgspec.msgpack.encode(one.interval)
