"""One call that makes RoQ's formats known to a Spark session."""

from __future__ import annotations

from pyspark.sql import SparkSession

from roq.spark.queue_source import RoqDataSource
from roq.spark.shuffle_source import RoqShuffleDataSource
from roq.spark.worker_python import check_worker_python


def register(spark: SparkSession) -> None:
    """Make format("roq") and format("roq-shuffle") known. Again: no harm. Raises PySparkValueError
    (ROQ_INVALID_CONFIGURATION): the Python that Spark's workers run lacks RoQ, or is of another version than this one."""
    check_worker_python(spark)
    for source in (RoqDataSource, RoqShuffleDataSource):
        spark.dataSource.register(source)
