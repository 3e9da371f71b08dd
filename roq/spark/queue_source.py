"""format("roq"): work queues and publish/subscribe queues as a source and a sink of Spark. Recorded ones: tape_source.py.

    spark.readStream.format("roq").option("address", "log:///data/tasks").load()
    df.write.format("roq").option("cluster", "zk1:2181,zk2:2181").mode("append").save("orders")

Spark builds a RoqDataSource anew wherever it needs one; it opens nothing. Its readers are here: the stream, which takes
tasks, and the batch read, which only looks. Writers: queue_write.py. What is promised: docs/spark.md.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow
from pyspark.sql.types import StructType

from roq.errors import SchemaMismatch
from roq.spark.errors import option_error, spark_errors
from roq.spark.queue_feed import Feed, LeaseFeed, Offset
from roq.spark.queue_files import SCHEMA, VIEW_SCHEMA, ManifestPartition, views
from roq.spark.queue_options import QueueOptions, queue_options
from roq.spark.queue_write import QueueBatchWriter, QueueStreamWriter, writer_of
from roq.spark.tape_options import EARLIEST, LATEST, is_recorded, tape_options
from roq.spark.tape_reading import SCHEMA as TAPE_SCHEMA
from roq.spark.tape_source import TapeBatchReader, TapeStreamReader
from roq.wire.task import TaskView
from roq.workqueue.address import open_backend
from roq.workqueue.contract import Backend

PEEK_MAX_CLUSTER = 10_000  # tasks a master shows
GC_THRESHOLDS = (100_000, 50, 50)  # of the process that runs a stream: it makes many objects and no cycles
PEEK_CHUNK = 10_000  # rows of one record batch


class QueueStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """A stream over a Feed, which is opened at the first question, in the one process on the driver that is asked. What is
    pickled and sent to tasks is the options alone."""

    def __init__(self, options: QueueOptions) -> None:
        self._options = options
        self._feed: Feed | None = None

    def __getstate__(self) -> Mapping[str, object]:
        return {"_options": self._options, "_feed": None}

    def _opened(self) -> Feed:
        if self._feed is None:
            self._options.check_exists()
            gc.freeze()
            gc.set_threshold(*GC_THRESHOLDS)
            self._feed = LeaseFeed(self._options)
        return self._feed

    def initialOffset(self) -> Offset:  # noqa: N802
        """See DataSourceStreamReader."""
        with spark_errors(address=self._options.address):
            return self._opened().first()

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        """Admission control: maxRowsPerBatch."""
        return ReadMaxRows(self._options.batch_rows)

    def latestOffset(self, start: Offset, limit: ReadLimit) -> Offset:  # noqa: N802
        """See DataSourceStreamReader."""
        with spark_errors(address=self._options.address):
            return self._opened().plan(start, limit)

    def partitions(self, start: Offset, end: Offset) -> Sequence[InputPartition]:
        """See DataSourceStreamReader."""
        if start == end:
            return []
        with spark_errors(address=self._options.address):
            return self._opened().parts(start, end)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """In a task: from the manifest's file only."""
        assert isinstance(partition, ManifestPartition)
        with spark_errors(address=self._options.address):
            yield from partition.rows()

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        """See SupportsTriggerAvailableNow."""
        with spark_errors(address=self._options.address):
            self._opened().freeze()

    def commit(self, end: Offset) -> None:
        """See DataSourceStreamReader."""
        with spark_errors(address=self._options.address):
            self._opened().done(end)

    def stop(self) -> None:
        """See DataSourceStreamReader. Spark may not call it."""
        if self._feed is not None:
            self._feed.close()
            self._feed = None


class QueueBatchReader(DataSourceReader):
    """A look at the tasks of one state. One Spark task, which holds all that it shows: the order is the queue's."""

    def __init__(self, options: QueueOptions, columns: list[str]) -> None:
        self._options, self._columns = options, columns

    def partitions(self) -> list[InputPartition]:
        """Also the moment to find out that there is no such queue, or too much in it: on the driver, before a task runs."""
        self._options.check_exists()
        if self._options.place.scheme == "roq":
            with spark_errors(address=self._options.address), closing(open_backend(self._options.address, None)) as backend:
                self._count(backend)
        return [InputPartition(0)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """In a task."""
        with spark_errors(address=self._options.address):
            seen = self._seen()
        for start in range(0, len(seen), PEEK_CHUNK):
            yield views(seen[start : start + PEEK_CHUNK]).select(self._columns)

    def _seen(self) -> list[TaskView]:
        with closing(open_backend(self._options.address, None)) as backend:
            count = self._count(backend)
            return backend.peek(self._options.state, count) if count else []

    def _count(self, backend: Backend) -> int:
        """How many to show. Raises Spark's error if they are too many."""
        options = self._options
        there = int(getattr(backend.status(), options.state))
        count = there if options.rows is None else min(options.rows, there)
        if options.place.scheme == "roq" and count > PEEK_MAX_CLUSTER:
            raise option_error(
                "rows",
                f"{there} tasks are {options.state}, and a batch read of a cluster shows {PEEK_MAX_CLUSTER} at most: name "
                "fewer rows, or read a stream with trigger(availableNow=True)",
            )
        return count


class RoqDataSource(DataSource):
    """See the module. Register it with roq.spark.register."""

    @classmethod
    def name(cls) -> str:
        """The format's name."""
        return "roq"

    def schema(self) -> StructType:
        """Of messages of a recorded queue, or of tasks. A batch read that names a state shows what else there is to know of
        tasks."""
        if is_recorded(self.options):
            return TAPE_SCHEMA
        return VIEW_SCHEMA if "state" in self.options else SCHEMA

    def reader(self, schema: StructType) -> DataSourceReader:
        """A look at tasks, or what a recorded queue keeps."""
        if is_recorded(self.options):
            self._check_columns(schema)
            return TapeBatchReader(tape_options(self.options, EARLIEST))
        return QueueBatchReader(self._readable(schema), schema.names)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802
        """Takes tasks, or reads a recorded queue."""
        if is_recorded(self.options):
            self._check_columns(schema)
            if "endingPosition" in self.options:
                raise option_error("endingPosition", "is for batch reads; a stream goes on, or ends by its trigger")
            return TapeStreamReader(tape_options(self.options, LATEST))
        if "state" in self.options:
            raise option_error("state", "is for batch reads, which look; a stream takes tasks that are ready")
        return QueueStreamReader(self._readable(schema))

    def writer(self, schema: StructType, overwrite: bool) -> QueueBatchWriter:
        """Puts tasks, or publishes."""
        return writer_of(QueueBatchWriter, queue_options(self.options), schema, overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> QueueStreamWriter:  # noqa: N802
        """The same, each batch once."""
        return writer_of(QueueStreamWriter, queue_options(self.options), schema, overwrite)

    def _readable(self, schema: StructType) -> QueueOptions:
        self._check_columns(schema)
        return queue_options(self.options)

    def _check_columns(self, schema: StructType) -> None:
        mine = self.schema()
        if [(field.name, field.dataType) for field in schema] != [(field.name, field.dataType) for field in mine]:
            with spark_errors():
                raise SchemaMismatch(
                    f"the columns are {mine.simpleString()}, not {schema.simpleString()}: leave .schema(…) out"
                )
