"""Writing a DataFrame to a queue: tasks stage their rows, the driver's commit publishes them, each batch of a query once.

Spark builds a writer anew for planning, for each commit and each abort, so all a writer knows is its options; which query and
batch a task works for stands in Spark's local properties, and travels to the commit in the task's message.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar
from uuid import uuid4

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from roq.errors import PayloadTooLarge, RoqError
from roq.ids import check_name
from roq.spark.errors import option_error, spark_errors
from roq.spark.queue_columns import check_columns, largest_payload, staged, staged_schema
from roq.spark.queue_crash import crash_point
from roq.spark.queue_files import ArrowFile, Values
from roq.spark.queue_options import QueueOptions
from roq.spark.queue_outlets import SAVE, opened
from roq.spark.queue_staging import Publication, stage

QUERY_PROPERTY, BATCH_PROPERTY = "sql.streaming.queryId", "streaming.sql.batchId"  # Spark's names; a test pins them
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Staged(WriterCommitMessage):
    """What a task tells the driver. files: ArrowFile in plain values. largest: bytes of the largest payload."""

    job: str
    partition: int
    files: tuple[Values, ...]
    largest: int


@dataclass(frozen=True)
class _Writer:
    options: QueueOptions
    columns: tuple[str, ...]
    job: str  # of a save

    def stage(self, iterator: Iterator[pa.RecordBatch], job: str, batch: int, task: TaskContext) -> Staged:
        """In a task: one attempt at one partition."""
        schema, largest = staged_schema(list(self.columns)), 0

        def checked() -> Iterator[pa.RecordBatch]:
            nonlocal largest
            for rows in iterator:
                if rows.num_rows:
                    made = staged(rows, schema)
                    largest = max(largest, largest_payload(made))
                    yield made

        with spark_errors(address=self.options.address):
            folder = Publication(self.options.staging_folder(), job, batch).folder
            files = stage(folder, f"{task.partitionId()}-{task.taskAttemptId()}", checked(), schema)
        crash_point("sink.staged")
        return Staged(job, task.partitionId(), tuple(file.values() for file in files), largest)

    def publish(self, messages: Sequence[WriterCommitMessage | None], batch: int, *, once: bool) -> None:
        """On the driver. once: the same batch may come again, and its note is kept. A batch that has no rows this time is
        published too if it had some when it was planned: a part of them may be public."""
        done = sorted((m for m in messages if isinstance(m, Staged)), key=lambda message: message.partition)
        if not done:
            return
        files = _files(done)
        with spark_errors(address=self.options.address):
            publication = Publication(self.options.staging_folder(), done[0].job, batch)
            if not publication.done and (files or publication.planned):
                largest = max(message.largest for message in done)
                plan, new = publication.decide(files)
                try:
                    with opened(self.options, done[0].job, plan.decided, largest) as outlet:
                        publication.publish(plan, outlet)
                        publication.note()
                        outlet.end()
                except PayloadTooLarge:  # found before anything is published; a stream may leave the row out next time
                    if new:
                        publication.undecide()
                    raise
            publication.clear() if once else publication.forget()
            publication.sweep()

    def abandon(self, messages: Sequence[WriterCommitMessage | None], batch: int) -> None:
        """On the driver, perhaps after a commit that did its work and failed then."""
        staged = [m for m in messages if isinstance(m, Staged)]
        try:
            if staged:
                Publication(self.options.staging_folder(), staged[0].job, batch).abandon(_files(staged))
        except (RoqError, OSError) as error:  # Spark shows why the batch failed, not what its abort says
            log.warning("what a failed batch staged could not be removed: %s", error)


class QueueBatchWriter(_Writer, DataSourceArrowWriter):
    """Of one save: all rows or none are published, and once if it has a .option("publication", name)."""

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Staged:
        """In a task."""
        return self.stage(iterator, self.job, 0, _task())

    def commit(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """On the driver: publish."""
        self.publish(messages, 0, once=bool(self.options.publication))

    def abort(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """On the driver."""
        self.abandon(messages, 0)


class QueueStreamWriter(_Writer, DataSourceStreamArrowWriter):
    """Of a streaming query: each batch is published once, however often Spark runs it."""

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Staged:
        """In a task."""
        task = _task()
        query, batch = task.getLocalProperty(QUERY_PROPERTY), task.getLocalProperty(BATCH_PROPERTY)
        if not query or not batch:
            raise RuntimeError(f"Spark does not say which query's batch this is ({QUERY_PROPERTY}, {BATCH_PROPERTY})")
        return self.stage(iterator, query, int(batch), task)

    def commit(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        """On the driver: publish."""
        self.publish(messages, batchId, once=True)

    def abort(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        """On the driver."""
        self.abandon(messages, batchId)


W = TypeVar("W", QueueBatchWriter, QueueStreamWriter)


def writer_of(kind: type[W], options: QueueOptions, schema: StructType, overwrite: bool) -> W:
    """A writer, after a look at the columns. Raises errors in Spark's style."""
    if overwrite:
        raise option_error("mode", 'a queue can be added to only: .mode("append"), or outputMode("append" or "update")')
    with spark_errors(address=options.address):
        check_columns(schema, options.kind)
        named = f"publication-{check_name(options.publication, 'publication')}" if options.publication else ""
    options.staging_folder()
    options.make_folder()
    return kind(options, tuple(schema.names), named or f"{SAVE}{uuid4().hex}")


def _task() -> TaskContext:
    task = TaskContext.get()
    if task is None:
        raise RuntimeError("this runs in a Spark task")
    return task


def _files(messages: Iterable[Staged]) -> list[ArrowFile]:
    return [ArrowFile(*values) for message in messages for values in message.files]
