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

from tests.spark.speculating import HANG_SECONDS, session

ROWS, PARTITIONS = 20_000, 4


def main(master: str, address: str, folder: str, trouble: str) -> None:
    spark = session(master)

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
