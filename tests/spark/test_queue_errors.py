"""Bad input to format("roq"): each a PySpark error whose text names its condition and says what to do."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

import roq.blocking
from roq.wire.task import NewTask

WAIT_SECONDS = 60

pytestmark = pytest.mark.timeout(120)


def test_options_and_queues_that_can_not_be(spark: SparkSession, tmp_path: Path) -> None:
    there = f"log://{tmp_path}/there"
    with roq.blocking.open_queue(there):
        pass
    for options, told in (
        ({}, r'\[ROQ_INVALID_CONFIGURATION\] \.option\("address", …\): is missing'),
        ({"address": "/data/tasks"}, "is file:///data/tasks meant"),
        ({"address": "memory:x"}, "memory: is a queue of one process"),
        ({"address": there, "maxRowPerBatch": "5"}, "maxrowperbatch.*unknown; there are .*maxRowsPerBatch"),
        ({"address": there, "maxRowsPerBatch": "many"}, "'many' is not a whole number"),
        ({"address": there, "state": "lost"}, "'lost' is none of ready, delayed, leased, dead"),
        ({"address": there, "kind": "queue"}, "names no cluster"),
        ({"cluster": "zk:2181"}, r"name the queue in \.load"),
        ({"address": f"log://{tmp_path}/nowhere"}, r"\[ROQ_WORK_QUEUE_NOT_FOUND\] there is no work queue at log://"),
    ):
        with pytest.raises(PySparkException, match=told):
            spark.read.format("roq").options(**options).load().collect()
    assert not (tmp_path / "nowhere").exists(), "asking makes no queue"
    with pytest.raises(PySparkException, match=r"\[ROQ_SCHEMA_MISMATCH\].*leave .schema"):
        spark.read.format("roq").option("address", there).schema("id int").load().collect()


def test_columns_and_values_that_can_not_be_put(spark: SparkSession, tmp_path: Path) -> None:
    address = f"log://{tmp_path}/tasks"
    with roq.blocking.open_queue(address, payload_bytes_max=100):
        pass
    for columns, told in (
        ("id", r"\[ROQ_SCHEMA_MISMATCH\] a work queue is written from a column 'payload'; there are id"),
        ("id as payload", "column 'payload' is bigint, not binary or string"),
        ("'x' as payload; id", "column 'id' has no meaning for a work queue"),
        ("'x' as payload; 'high' as priority", "column 'priority' is string, not tinyint or smallint"),
        ("if(id = 3, null, 'x') as payload", "column 'payload' is null in 1 rows"),
        ("'x' as payload; 500 as priority", "a priority is -128 to 127"),
        ("'x' as payload; -1 as delay_seconds", "delay_seconds is 0 to"),
        ("'x' as payload; repeat('k', 300) as dedup_key", "a dedup_key has at most 256 bytes"),
        ("repeat('x', 101) as payload", r"\[ROQ_PAYLOAD_TOO_LARGE\] a payload has at most 100 bytes"),
    ):
        frame = spark.range(0, 5, 1, 1).selectExpr(*columns.split("; "))
        with pytest.raises(PySparkException, match=told):
            frame.write.format("roq").option("address", address).mode("append").save()
    with pytest.raises(PySparkException, match="a queue can be added to only"):
        spark.range(3).selectExpr("'x' as payload").write.format("roq").option("address", address).mode("overwrite").save()
    with roq.blocking.open_queue(address) as queue:
        assert queue.status().inserted == 0, "all or nothing"


def test_a_checkpoint_whose_manifests_are_gone(spark: SparkSession, tmp_path: Path) -> None:
    source = f"log://{tmp_path}/in"

    def run() -> None:
        stream = spark.readStream.format("roq").option("address", source).load()
        writer = stream.writeStream.format("noop").option("checkpointLocation", f"{tmp_path}/c")
        assert writer.trigger(availableNow=True).start().awaitTermination(WAIT_SECONDS)

    for _ in range(2):
        with roq.blocking.open_queue(source) as queue:
            queue.put_many([NewTask(b"x")] * 10)
        run()
    (tmp_path / "c/commits/1").unlink()  # Spark will run its last batch again, which was acked long ago
    (tmp_path / "c/commits/.1.crc").unlink(missing_ok=True)
    with pytest.raises(PySparkException, match=r"\[ROQ_MANIFEST_GONE\] manifest 2 .*begin with a new checkpoint"):
        run()
    shutil.rmtree(tmp_path / "in/spark")
    with pytest.raises(PySparkException, match=r"\[ROQ_MANIFEST_GONE\] Spark's checkpoint belongs to manifests of stream"):
        run()
