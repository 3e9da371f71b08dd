"""A driver of its own: a stream from one work queue to another, until what is available is through.

    python tests/spark/queue_driver.py IN OUT CHECKPOINT ROWS_PER_BATCH [CRASH …]

CRASH …: crash points (roq/spark/queue_crash.py). At each but the last, the Python process that comes to it is killed, and the
query is started again; at the last one everything stands still, for the test to kill. Prints the points it came to.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from pyspark.sql.streaming import StreamingQuery

import roq.spark
from roq.spark.queue_crash import VARIABLE

SETTINGS = {
    "spark.ui.enabled": "false",
    "spark.driver.memory": "512m",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.ui.showConsoleProgress": "false",
    "spark.python.worker.reuse": "true",
}


def started(spark: SparkSession, source: str, target: str, checkpoint: str, rows: str) -> StreamingQuery:
    stream = spark.readStream.format("roq").option("address", source).option("maxRowsPerBatch", rows).load()
    writer = stream.select("payload").writeStream.format("roq").option("address", target)
    return writer.option("checkpointLocation", checkpoint).trigger(availableNow=True).start()


def kill_at(query: StreamingQuery, reached: Path) -> None:
    """Kill the process that comes to the point, and see the query fail."""
    while not reached.exists() and query.isActive:
        time.sleep(0.02)
    if reached.exists():
        point, pid = reached.read_text().split()
        sys.stdout.write(f"{point}\n")
        sys.stdout.flush()
        os.kill(int(pid), signal.SIGKILL)
        reached.unlink()
        try:
            query.awaitTermination()
        except PySparkException:
            return
        raise AssertionError(f"the query outlived the death of its process at {point}")
    query.awaitTermination()
    raise AssertionError("the query came to its end without a crash")


def main(source: str, target: str, checkpoint: str, rows: str, *crashes: str) -> None:
    builder = SparkSession.builder.master("local[2]")
    for key, value in SETTINGS.items():
        builder = builder.config(key, value)
    spark = builder.getOrCreate()
    roq.spark.register(spark)
    wish = Path(os.environ[VARIABLE])
    for number, crash in enumerate(crashes, 1):
        wish.write_text(crash)
        query = started(spark, source, target, checkpoint, rows)
        if number == len(crashes):
            query.awaitTermination()
        kill_at(query, Path(f"{wish}.reached"))
    wish.unlink(missing_ok=True)
    started(spark, source, target, checkpoint, rows).awaitTermination()
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
