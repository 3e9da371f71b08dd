"""A driver of its own: saves 20,000 rows as "visits", and prints the attempts each partition had as JSON.

    python tests/spark/driver.py MASTER ADDRESS FOLDER hang|slow

hang: partition 0's first attempt stops in the middle, for longer than the test lasts. slow: every batch takes a while.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql import SparkSession

import roq.spark

ROWS, PARTITIONS = 20_000, 4
HANG_SECONDS = 120
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


def main(master: str, address: str, folder: str, trouble: str) -> None:
    builder = SparkSession.builder.master(master)
    for key, value in SETTINGS.items():
        builder = builder.config(key, value)
    spark = builder.getOrCreate()
    roq.spark.register(spark)

    def run(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        task = TaskContext.get()
        assert task is not None
        Path(folder, f"{task.partitionId()}-{task.taskAttemptId()}").touch()
        for number, batch in enumerate(batches):
            if trouble == "slow":
                time.sleep(0.1 + 0.1 * task.partitionId())
            elif number == 3 and task.partitionId() == 0 and task.attemptNumber() == 0:
                time.sleep(HANG_SECONDS)
            yield batch

    frame = spark.range(0, ROWS, 1, PARTITIONS).selectExpr(
        "if(id % 10 < 3, 7, xxhash64(id)) as k", "id", "repeat('v', 50) as text"
    )
    writer = frame.mapInArrow(run, frame.schema).write.format("roq-shuffle").option("address", address)
    writer.option("keys", "k").option("ranges", PARTITIONS).mode("append").save("visits")
    attempts = [sorted(path.name for path in Path(folder).glob(f"{number}-*")) for number in range(PARTITIONS)]
    sys.stdout.write(json.dumps(attempts) + "\n")
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
