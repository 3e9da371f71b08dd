"""Writing a DataFrame into a shuffle: each task is one attempt at one partition; the driver's commit names those that count.

Attempts are named after the save and Spark's task attempt: no two runs of tasks ever share one, whether they were retried,
speculated, or of a driver that came before. What is pickled is plain values; connections are made where they are used.
A task that is killed leaves an attempt that nobody names: it is not read, and goes when the shuffle is sealed or removed.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, WriterCommitMessage

import roq.shuffle
from roq.errors import RoqError, ShuffleConflict, ShuffleNotFound
from roq.shuffle.blocks import load_schema
from roq.spark.errors import spark_errors
from roq.spark.schema import exact
from roq.spark.workers import settle
from roq.wire.shuffle import Receipt, ShuffleState

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class PartitionWritten(WriterCommitMessage):
    """What a task tells the driver: a Receipt in plain values."""

    partition: int
    attempt: str
    rows: int
    size: int
    runs: int


@dataclass(frozen=True)
class ShuffleWriter(DataSourceArrowWriter):
    """Of one save. shuffle: id of the shuffle called `name`; created: by this save. schema: serialized. save: unique."""

    address: str
    name: str
    shuffle: str
    created: bool
    schema: bytes
    save: str
    memory_bytes: int

    def write(self, iterator: Iterator[pa.RecordBatch]) -> PartitionWritten:
        """In a task: returns when the rows are stored, as often as replicas say."""
        task = TaskContext.get()
        if task is None:
            raise RuntimeError("this runs in a Spark task")
        settle()
        schema, attempt = load_schema(self.schema), f"{self.save}-{task.taskAttemptId()}"
        with (
            spark_errors(shuffle=self.name),
            roq.shuffle.open(self.address) as shuffles,
            shuffles.writer(self.name, task.partitionId(), attempt, self.memory_bytes) as writer,
        ):
            for batch in iterator:
                writer.write(exact(batch, schema))
            receipt = writer.finish()
        return PartitionWritten(receipt.partition, receipt.attempt, receipt.rows, receipt.size, receipt.runs)

    def commit(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """On the driver: name the winners and seal. Returns when readers may read."""
        receipts = [
            Receipt(m.partition, m.attempt, m.rows, m.size, m.runs) for m in messages if isinstance(m, PartitionWritten)
        ]
        with spark_errors(shuffle=self.name), roq.shuffle.open(self.address) as shuffles:
            if shuffles.describe(self.name).id != self.shuffle:
                raise ShuffleConflict(f"shuffle {self.name!r} was removed and made anew while this was written")
            shuffles.commit(self.name, receipts)

    def abort(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """On the driver, also after a commit that failed: a shuffle this save has made goes, unless its winners are named."""
        try:
            with roq.shuffle.open(self.address) as shuffles:
                now = shuffles.describe(self.name)
                if self.created and now.id == self.shuffle and now.state is ShuffleState.FILLING:
                    shuffles.remove(self.name)
        except ShuffleNotFound:
            pass
        except RoqError as error:  # Spark shows why the save failed, not what its abort says
            log.warning("shuffle %s: what the failed save wrote could not be removed: %s", self.name, error)
