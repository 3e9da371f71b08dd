"""format("roq") with a real cluster: a stream from one work queue to another, and topics.

Not covered: what the work queue itself does in a fail-over (tests/integration, tests/failure).
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.errors import AnalysisException, PySparkException
from pyspark.sql import SparkSession
from pyspark.sql.types import BinaryType, StringType, StructType

import roq.blocking
from roq.spark.queue_options import queue_options
from roq.spark.queue_outlets import staged_schema
from roq.spark.queue_source import PEEK_MAX_CLUSTER
from roq.spark.queue_write import Publication, QueueStreamWriter, Staged, stage, writer_of
from tests.integration.running import RunningCluster

ROWS = 3000
WAIT_SECONDS = 100.0
START_SECONDS = 60.0

pytestmark = pytest.mark.timeout(200)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningCluster]:
    found = RunningCluster(tmp_path_factory.mktemp("cluster"), hosts=3)
    try:
        found.call(found.local.settled(START_SECONDS))
        yield found
    finally:
        left = found.stop()
    assert left == []


def seen_in(address: str) -> Counter[int]:
    with roq.blocking.open_queue(address) as queue:
        return Counter(int(task.payload) for task in queue.leases(wait_seconds=0, count=1000))


def test_a_stream_from_one_work_queue_to_another(spark: SparkSession, cluster: RunningCluster, tmp_path: Path) -> None:
    source, target = f"roq://{cluster.zookeeper}/in", f"roq://{cluster.zookeeper}/out"
    frame = spark.range(0, ROWS, 1, 3).selectExpr("cast(id as string) as payload")
    frame.write.format("roq").option("cluster", cluster.zookeeper).option("staging", str(tmp_path)).mode("append").save("in")
    assert spark.read.format("roq").option("cluster", cluster.zookeeper).load("in").count() == ROWS
    stream = spark.readStream.format("roq").option("address", source).option("manifests", f"{tmp_path}/m")
    frame = stream.option("maxRowsPerBatch", 1000).load().select("payload")
    writer = frame.writeStream.format("roq").option("staging", str(tmp_path)).option("checkpointLocation", f"{tmp_path}/c")
    query = writer.option("address", target).trigger(availableNow=True).start()
    assert query.awaitTermination(WAIT_SECONDS)
    assert seen_in(target) == Counter(range(ROWS))
    with roq.blocking.open_queue(source) as queue:
        assert (queue.status().ready, queue.status().leased, queue.status().completed) == (0, 0, ROWS)


def test_a_look_at_too_many_tasks_is_refused_while_planning(
    spark: SparkSession, cluster: RunningCluster, tmp_path: Path
) -> None:
    address = f"roq://{cluster.zookeeper}/many"
    with roq.blocking.open_queue(address) as queue:
        queue.put_many([b"x"] * (PEEK_MAX_CLUSTER + 1))
    look = spark.read.format("roq").option("address", address)
    with pytest.raises(AnalysisException, match=r"10001 tasks are ready, and a batch read of a cluster shows 10000 at most"):
        look.load().count()
    assert look.option("rows", 7).load().count() == 7


def test_rows_are_published_to_topics(spark: SparkSession, cluster: RunningCluster, tmp_path: Path) -> None:
    with roq.blocking.connect(cluster.zookeeper) as connected:
        connected.create_queue("news", replication=1)
        heard: Counter[tuple[str, bytes]] = Counter()
        ready, deadline = threading.Event(), time.monotonic() + WAIT_SECONDS

        def listen() -> None:
            with connected.subscriber("news", ">") as subscriber:
                ready.set()
                for message in subscriber:
                    heard[message.topic, message.payload] += 1
                    if sum(heard.values()) == 30:
                        return

        listener = threading.Thread(target=listen, daemon=True)
        listener.start()
        assert ready.wait(START_SECONDS)
        frame = spark.range(0, 30, 1, 2).selectExpr("concat('eu.', id % 3) as topic", "cast(id as string) as payload")
        writer = frame.write.format("roq").option("cluster", cluster.zookeeper).option("kind", "queue")
        writer.option("staging", str(tmp_path)).mode("append").save("news")
        listener.join(max(0.0, deadline - time.monotonic()))
        assert heard == Counter((f"eu.{number % 3}", b"%d" % number) for number in range(30))


@pytest.mark.parametrize("confirm", ["routed", "stored"])
def test_a_row_that_is_too_large_is_found_before_any_row_is_published(
    cluster: RunningCluster, tmp_path: Path, confirm: str
) -> None:
    """What tasks tell the driver, without Spark: rows are committed, refused for the last one; others come instead."""
    queue = f"small-{confirm}"
    options = queue_options(
        {"cluster": cluster.zookeeper, "queue": queue, "kind": "queue", "confirm": confirm, "staging": str(tmp_path)}
    )
    schema = StructType().add("topic", StringType()).add("payload", BinaryType())
    writer = writer_of(QueueStreamWriter, options, schema, False)

    def told(payloads: list[bytes], attempt: int) -> Staged:
        columns = staged_schema(["topic", "payload"])
        arrays = {"topic": ["t"] * len(payloads), "payload": payloads}
        rows = pa.RecordBatch.from_arrays([pa.array(arrays[field.name], field.type) for field in columns], schema=columns)
        folder = Publication(options.staging_folder(), "query", 3).folder
        files = stage(folder, f"0-{attempt}", [rows], columns)
        return Staged("query", 0, tuple(file.values() for file in files), max(map(len, payloads)))

    rows, others = [b"%d" % number for number in range(2_000)], [b"%d" % number for number in range(5_000, 7_000)]
    with roq.blocking.connect(cluster.zookeeper) as connected:
        connected.create_queue(queue, max_frame_bytes=2_048, record=roq.Record(days=1))
        large = told([*rows, b"x" * 2_000], 0)
        with pytest.raises(PySparkException, match=r"\[ROQ_PAYLOAD_TOO_LARGE\] a payload has at most 1536 bytes .* has 2000"):
            writer.commit([large], 3)
        writer.abort([large], 3)
        writer.commit([told(others, 1)], 3)
        # what is only routed is stored a little later
        with connected.subscriber(queue, start="earliest", follow="stored") as reader:
            assert [message.payload for message in islice(reader, len(others))] == others


def test_what_is_missing_is_asked_for(spark: SparkSession, cluster: RunningCluster, tmp_path: Path) -> None:
    with pytest.raises(PySparkException, match=r"\[ROQ_WORK_QUEUE_NOT_FOUND\]"):
        spark.read.format("roq").option("cluster", cluster.zookeeper).load("nowhere").count()
    writer = spark.range(3).selectExpr("'x' as payload").write.format("roq").option("cluster", cluster.zookeeper).mode("append")
    with pytest.raises(PySparkException, match=r'\.option\("staging", …\): is missing: name a folder'):
        writer.save("in")
    writer = (
        spark.range(3).selectExpr("'x' as payload", "'t' as topic").write.format("roq").option("cluster", cluster.zookeeper)
    )
    writer = writer.option("kind", "queue").option("staging", str(tmp_path)).mode("append")
    with pytest.raises(PySparkException, match=r"\[ROQ_QUEUE_NOT_FOUND\]"):
        writer.save("no-such-queue")
    stream = spark.readStream.format("roq").option("address", f"roq://{cluster.zookeeper}/in").load()
    query = stream.writeStream.format("noop").option("checkpointLocation", f"{tmp_path}/c2").start()
    with pytest.raises(PySparkException, match=r'\.option\("manifests", …\): is missing'):
        query.awaitTermination(WAIT_SECONDS)
