"""A Spark driver of its own, with two tasks at a time: commands in as lines of JSON, one line of JSON out for each.

    python tests/harness/spark_driver.py FOLDER ROWS_PER_BATCH

    save    address name folder ranges   writes ROWS rows; the later tasks stop in the middle until FOLDER/written is there
    read    address name folder ranges   reads them, beside Spark's own sort; tasks stop in the middle until FOLDER/read is
    stream  source target folder         begins a stream between two work queues
    how                                  rows of its batches so far, and what it failed of: then it is started again
    stop                                 the stream

Not covered: who hurts the cluster meanwhile (tests/failure/test_shuffle_spark.py).
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark import TaskContext
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming import StreamingQuery

import roq.spark
from tests.spark.comparing import sizes

ROWS, PARTITIONS = 20_000, 4
GATE_SECONDS, LOOK_SECONDS = 90.0, 0.02
RESTARTS_MAX = 20
LEASE_SECONDS = 5
SETTINGS = {
    "spark.ui.enabled": "false",
    "spark.driver.memory": "1g",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.ui.showConsoleProgress": "false",
    "spark.sql.shuffle.partitions": "4",
    "spark.sql.adaptive.coalescePartitions.enabled": "false",
    "spark.sql.execution.arrow.maxRecordsPerBatch": "500",
}


def held(frame: DataFrame, folder: str, gate: str, first: int) -> DataFrame:
    """The same rows; tasks from number `first` on leave a file GATE.TASK after their first batch, and wait for GATE."""

    def run(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        task = TaskContext.get()
        assert task is not None
        for number, batch in enumerate(batches):
            yield batch
            if number == 0 and task.partitionId() >= first:
                Path(folder, f"{gate}.{task.partitionId()}").touch()
                end = time.monotonic() + GATE_SECONDS
                while not Path(folder, gate).exists():
                    if time.monotonic() > end:
                        raise TimeoutError("nobody opened the gate")
                    time.sleep(LOOK_SECONDS)

    return frame.mapInArrow(run, frame.schema)


class Driver:
    """One Spark session, and at most one stream."""

    def __init__(self, folder: str, rows_per_batch: str) -> None:
        builder = SparkSession.builder.master("local[2,4]").appName("tests")
        quiet = Path(__file__).parents[1] / "spark" / "log4j2.properties"
        java = f"-Dlog4j2.configurationFile={quiet} -Dderby.system.home={folder}"
        own = {
            "spark.driver.extraJavaOptions": java,
            "spark.local.dir": folder,
            "spark.sql.warehouse.dir": f"{folder}/warehouse",
        }
        for key, value in {**SETTINGS, **own}.items():
            builder = builder.config(key, value)
        self.spark = builder.getOrCreate()
        roq.spark.register(self.spark)
        self._rows_per_batch = rows_per_batch
        self._wanted: dict[str, str] = {}
        self._query: StreamingQuery | None = None
        self._failures: list[str] = []
        self._batches: dict[tuple[str, int], int] = {}  # rows, by run and number

    def frame(self) -> DataFrame:
        """Three in ten rows have one key, and some have none."""
        keys = "case when id % 10 < 3 then 7 when id % 97 = 0 then null else xxhash64(id) end as k"
        return self.spark.range(0, ROWS, 1, PARTITIONS).selectExpr(keys, "id", "repeat('v', 1000) as text")

    def save(self, address: str, name: str, folder: str, ranges: int) -> dict[str, Any]:
        """See the module."""
        frame = held(self.frame(), folder, "written", PARTITIONS // 2)
        writer = frame.write.format("roq-shuffle").option("address", address).option("keys", "k").option("ranges", ranges)
        writer.mode("append").save(name)
        return {}

    def read(self, address: str, name: str, folder: str, ranges: int) -> dict[str, Any]:
        """Counts of what is wrong."""
        reader = self.spark.read.format("roq-shuffle").option("address", address).option("memoryMiB", 8)
        found = held(reader.load(name), folder, "read", 0).select("k", "id").toArrow()
        own = self.frame().repartitionByRange(ranges, "k").sortWithinPartitions("k").select("k", "id").toArrow()
        ours, theirs = (list(zip(*(table[n].to_pylist() for n in ("k", "id")), strict=True)) for table in (found, own))
        more, less = Counter(ours) - Counter(theirs), Counter(theirs) - Counter(ours)
        wrong = sum(mine[0] != other[0] for mine, other in zip(ours, theirs, strict=False))
        counts = sizes(reader.load(name))
        return {"rows": len(ours), "more": more.total(), "less": less.total(), "disordered": wrong, "ranges": counts}

    # --- the stream -------------------------------------------------------------------------------------------------------

    def stream(self, source: str, target: str, folder: str) -> dict[str, Any]:
        """See the module."""
        self._wanted = {"source": source, "target": target, "folder": folder}
        self._start()
        return {}

    def _start(self) -> None:
        folder = self._wanted["folder"]
        stream = self.spark.readStream.format("roq").option("address", self._wanted["source"])
        stream = stream.option("manifests", f"{folder}/manifests").option("leaseSeconds", LEASE_SECONDS)
        frame = stream.option("maxRowsPerBatch", self._rows_per_batch).load()
        frame = frame.selectExpr("concat(cast(payload as string), ' ', cast(attempt as string)) as payload")
        writer = frame.writeStream.format("roq").option("address", self._wanted["target"])
        writer = writer.option("staging", f"{folder}/staging").option("checkpointLocation", f"{folder}/checkpoint")
        self._query = writer.start()

    def how(self) -> dict[str, Any]:
        """As an operator would: a query that has failed is started again from its checkpoint."""
        assert self._query is not None
        for progress in self._query.recentProgress:
            self._batches[str(self._query.runId), progress["batchId"]] = progress["numInputRows"]
        if not self._query.isActive:
            self._failures.append(str(self._query.exception()).strip().splitlines()[-1])
            if len(self._failures) > RESTARTS_MAX:
                raise RuntimeError(f"the stream fails again and again: {self._failures}")
            self._start()
        return {"rows": sum(self._batches.values()), "failures": self._failures}

    def stop(self) -> dict[str, Any]:
        """See the module."""
        assert self._query is not None
        self._query.stop()
        return {}


def main(folder: str, rows_per_batch: str) -> None:
    """Until the end of the input."""
    driver = Driver(folder, rows_per_batch)
    sys.stdout.write("{}\n")
    sys.stdout.flush()
    for line in sys.stdin:
        command = json.loads(line)
        try:
            answer = getattr(driver, command.pop("do"))(**command)
        except PySparkException as error:
            answer = {"error": str(error)[-3000:]}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()
    driver.spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
