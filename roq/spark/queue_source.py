"""format("roq"): work queues and publish/subscribe queues as a source and a sink of Spark.

    spark.readStream.format("roq").option("address", "log:///data/tasks").load()
    df.write.format("roq").option("cluster", "zk1:2181,zk2:2181").mode("append").save("orders")

Spark builds a RoqDataSource anew wherever it needs one; nothing is opened here. What it promises: docs/spark.md.
"""

from __future__ import annotations

from pyspark.sql.datasource import DataSource
from pyspark.sql.types import StructType

from roq.errors import SchemaMismatch
from roq.spark.errors import option_error, spark_errors
from roq.spark.queue_manifest import SCHEMA, VIEW_SCHEMA
from roq.spark.queue_options import QueueOptions, TargetKind, queue_options
from roq.spark.queue_read import QueueBatchReader, QueueStreamReader
from roq.spark.queue_write import QueueBatchWriter, QueueStreamWriter, writer_of


class RoqDataSource(DataSource):
    """See the module. Register it with roq.spark.register."""

    @classmethod
    def name(cls) -> str:
        """The format's name."""
        return "roq"

    def schema(self) -> StructType:
        """Of tasks. A batch read that names a state shows what else there is to know of them."""
        return VIEW_SCHEMA if "state" in self.options else SCHEMA

    def reader(self, schema: StructType) -> QueueBatchReader:
        """A look at tasks."""
        return QueueBatchReader(self._readable(schema), schema.names)

    def streamReader(self, schema: StructType) -> QueueStreamReader:  # noqa: N802
        """Takes tasks."""
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
        mine = self.schema()
        if [(field.name, field.dataType) for field in schema] != [(field.name, field.dataType) for field in mine]:
            with spark_errors():
                raise SchemaMismatch(
                    f"the columns are {mine.simpleString()}, not {schema.simpleString()}: leave .schema(…) out"
                )
        options = queue_options(self.options)
        if options.kind is not TargetKind.WORK_QUEUE:
            raise option_error("kind", "a publish/subscribe queue keeps no messages that could be read again; read work queues")
        return options
