"""A driver of its own: a stream between two work queues; partition 0's first attempt hangs for longer than the test lasts.

    python tests/spark/queue_speculation.py MASTER IN OUT FOLDER

Prints how many attempts partition 0 had.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
from pyspark import TaskContext

from tests.spark.speculating import HANG_SECONDS, session

PARTITIONS = 4


def main(master: str, source: str, target: str, folder: str) -> None:
    spark = session(master)

    def run(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        task = TaskContext.get()
        assert task is not None
        Path(folder, f"attempt-{task.partitionId()}-{task.taskAttemptId()}").touch()
        yield from batches
        if task.partitionId() == 0 and task.attemptNumber() == 0:
            time.sleep(HANG_SECONDS)

    frame = spark.readStream.format("roq").option("address", source).load().select("payload").repartition(PARTITIONS)
    writer = frame.mapInArrow(run, frame.schema).writeStream.format("roq").option("address", target)
    writer.option("checkpointLocation", f"{folder}/checkpoint").trigger(availableNow=True).start().awaitTermination()
    sys.stdout.write(f"{len(list(Path(folder).glob('attempt-0-*')))}\n")
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
