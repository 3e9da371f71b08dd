"""One call that makes RoQ's formats known to a Spark session."""

from __future__ import annotations

from pyspark.sql import SparkSession

from roq.spark.queue_source import RoqDataSource
from roq.spark.shuffle_source import RoqShuffleDataSource


def register(spark: SparkSession) -> None:
    """Make format("roq") and format("roq-shuffle") known. The executors' Python needs RoQ too. Again: no harm."""
    for source in (RoqDataSource, RoqShuffleDataSource):
        spark.dataSource.register(source)
