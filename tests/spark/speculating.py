"""How drivers begin that let Spark speculate: a session with RoQ's formats, where an attempt that hangs soon gets a second one.

Not covered: what they run; functions that go to executors stay in the driver's own file, which is all that travels there.
"""

from __future__ import annotations

from pyspark.sql import SparkSession

import roq.spark

HANG_SECONDS = 120  # of an attempt that shall be overtaken: longer than the test lasts
SETTINGS = {
    "spark.ui.enabled": "false",
    "spark.driver.memory": "512m",
    "spark.executor.memory": "512m",
    "spark.executor.cores": "2",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.ui.showConsoleProgress": "false",
    "spark.speculation": "true",
    "spark.speculation.interval": "100ms",
    "spark.speculation.quantile": "0.5",
    "spark.speculation.multiplier": "1.2",
    "spark.speculation.minTaskRuntime": "500ms",
    "spark.sql.execution.arrow.maxRecordsPerBatch": "500",
}


def session(master: str) -> SparkSession:
    """A new session of this cluster."""
    builder = SparkSession.builder.master(master)
    for key, value in SETTINGS.items():
        builder = builder.config(key, value)
    spark = builder.getOrCreate()
    roq.spark.register(spark)
    return spark
