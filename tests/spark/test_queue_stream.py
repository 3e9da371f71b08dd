"""format("roq") in a real Spark: batch writes and looks, streams with limits, failing tasks, restarts. Ids are counted.

Not covered: kill -9 (test_queue_crashes.py), bad input (test_queue_errors.py), clusters (test_queue_cluster.py).
"""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from pyspark import TaskContext
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming import DataStreamWriter, StreamingQuery

import roq.blocking

WAIT_SECONDS = 100

pytestmark = pytest.mark.timeout(200)


def numbers(spark: SparkSession, count: int, partitions: int = 3) -> DataFrame:
    return spark.range(0, count, 1, partitions).selectExpr("cast(id as string) as payload")


def put(address: str, first: int, last: int) -> None:
    with roq.blocking.open_queue(address) as queue:
        queue.put_many(b"%d" % number for number in range(first, last))


def seen_in(address: str) -> Counter[int]:
    with roq.blocking.open_queue(address) as queue:
        return Counter(int(task.payload) for task in queue.leases(wait_seconds=0, count=1000))


def to_queue(frame: DataFrame, address: str, checkpoint: Path) -> DataStreamWriter:
    writer = frame.select("payload").writeStream.format("roq").option("address", address)
    return writer.option("checkpointLocation", str(checkpoint))


def stream_of(spark: SparkSession, address: str, **options: str) -> DataFrame:
    return spark.readStream.format("roq").option("address", address).options(**options).load()


def finish(query: StreamingQuery) -> list[int]:
    """The rows of each batch."""
    assert query.awaitTermination(WAIT_SECONDS), "still running"
    return [progress["numInputRows"] for progress in query.recentProgress if progress["numInputRows"]]


@pytest.mark.parametrize("scheme", ["log", "file"])
def test_a_save_and_a_look(spark: SparkSession, tmp_path: Path, scheme: str) -> None:
    address = f"{scheme}://{tmp_path}/tasks"
    frame = spark.range(0, 60, 1, 3).selectExpr(
        "cast(id as string) as payload",
        "cast(id % 2 as int) as priority",
        "if(id < 10, 3600, 0) as delay_seconds",
        "concat('key', id % 50) as dedup_key",
    )
    frame.write.format("roq").option("address", address).mode("append").save()
    look = spark.read.format("roq").option("address", address).load()
    assert look.columns == ["id", "payload", "attempt", "priority", "inserted"]
    assert look.count() == 40, "10 of 60 repeat a key, 10 are delayed"
    rows = look.select("id", "priority", "attempt").collect()
    assert len({row.id for row in rows}) == 40, "looking takes nothing"
    assert [row.priority for row in rows] == [1] * 20 + [0] * 20
    assert {row.attempt for row in rows} == {0}
    delayed = spark.read.format("roq").option("address", address).option("state", "delayed").load()
    assert delayed.where("state = 'delayed' and due > current_timestamp()").count() == 10
    assert spark.read.format("roq").option("address", address).option("rows", 7).load().count() == 7
    with roq.blocking.open_queue(address) as queue:
        queue.reject(queue.lease()[0], "no such customer")
    dead = spark.read.format("roq").option("address", address).option("state", "dead").load().collect()
    assert [(row.error, row.attempt) for row in dead] == [("no such customer", 1)]


def test_a_named_publication_is_published_once(spark: SparkSession, tmp_path: Path) -> None:
    address = f"log://{tmp_path}/tasks"
    for _ in range(2):
        writer = numbers(spark, 30).write.format("roq").option("address", address)
        writer.option("publication", "2026-11-21").mode("append").save()
    assert seen_in(address) == Counter(range(30))


def test_a_stream_keeps_to_its_limit_and_acks_everything(spark: SparkSession, tmp_path: Path) -> None:
    source, target = f"log://{tmp_path}/in", f"log://{tmp_path}/out"
    put(source, 0, 2500)
    frame = stream_of(spark, source, maxRowsPerBatch="700")
    rows = finish(to_queue(frame, target, tmp_path / "c").trigger(availableNow=True).start())
    assert sum(rows) == 2500
    assert max(rows) <= 700
    assert seen_in(target) == Counter(range(2500))
    with roq.blocking.open_queue(source) as queue:
        assert (queue.status().ready, queue.status().leased, queue.status().completed) == (0, 0, 2500)


def test_a_query_that_runs_once_takes_all_in_one_batch_and_acks_it_at_its_next_start(
    spark: SparkSession, tmp_path: Path
) -> None:
    source, target = f"log://{tmp_path}/in", f"log://{tmp_path}/out"

    def run(acked: int) -> tuple[list[int], int]:
        """The rows of its batches, which last until so many tasks are acked; how many are after it."""

        def wait(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            deadline = time.monotonic() + WAIT_SECONDS / 2
            with roq.blocking.open_queue(source) as queue:
                while queue.status().completed < acked and time.monotonic() < deadline:
                    time.sleep(0.05)
            yield from batches

        frame = stream_of(spark, source, maxRowsPerBatch="700").select("payload")
        frame = frame.mapInArrow(wait, frame.schema)
        rows = finish(to_queue(frame, target, tmp_path / "c").trigger(once=True).start())
        with roq.blocking.open_queue(source) as queue:
            return rows, queue.status().completed

    put(source, 0, 5000)
    assert run(0) == ([5000], 0), "Spark never asks what comes next"
    put(source, 5000, 5100)
    assert run(5000) == ([100], 5000)
    assert run(5100) == ([], 5100)
    assert seen_in(target) == Counter(range(5100))


@pytest.mark.parametrize("end", ["raises", "is killed"])
def test_tasks_that_fail_are_tried_again_and_rows_come_out_once(spark: SparkSession, tmp_path: Path, end: str) -> None:
    source, target = f"log://{tmp_path}/in", f"log://{tmp_path}/out"
    put(source, 0, 1500)

    def fails_at_first(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        task = TaskContext.get()
        assert task is not None
        yield from batches
        if task.attemptNumber() < 2 and end == "raises":
            raise RuntimeError("this task fails after all its rows")
        if task.attemptNumber() < 1 and end == "is killed":
            os.kill(os.getpid(), signal.SIGKILL)

    frame = stream_of(spark, source, maxRowsPerBatch="600").select("payload")
    frame = frame.mapInArrow(fails_at_first, frame.schema)
    finish(to_queue(frame, target, tmp_path / "c").trigger(availableNow=True).start())
    assert seen_in(target) == Counter(range(1500))


def test_a_stream_that_runs_on_takes_what_comes_and_acks_its_last_batch(spark: SparkSession, tmp_path: Path) -> None:
    source, target = f"log://{tmp_path}/in", f"log://{tmp_path}/out"
    put(source, 0, 100)
    query = to_queue(stream_of(spark, source), target, tmp_path / "c").start()
    try:
        with roq.blocking.open_queue(source) as queue:
            for last in (200, 300):
                put(source, last - 100, last)
                deadline = time.monotonic() + WAIT_SECONDS
                while queue.status().completed < last and time.monotonic() < deadline:
                    assert query.isActive, query.exception()
                    time.sleep(0.05)
                assert queue.status().completed == last, "acked though no further batch came"
    finally:
        query.stop()
    put(source, 300, 400)
    finish(to_queue(stream_of(spark, source), target, tmp_path / "c").trigger(availableNow=True).start())
    assert seen_in(target) == Counter(range(400))


@pytest.mark.quick
def test_a_query_that_fails_goes_on_from_its_checkpoint(spark: SparkSession, tmp_path: Path) -> None:
    source, target = f"log://{tmp_path}/in", f"log://{tmp_path}/out"
    put(source, 0, 300)
    broken = tmp_path / "broken"
    broken.touch()

    def fails_while_broken(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            if broken.exists() and any(int(value.as_py()) >= 100 for value in batch["payload"]):
                raise RuntimeError("broken")
            yield batch

    def started() -> StreamingQuery:
        frame = stream_of(spark, source, maxRowsPerBatch="100").select("payload")
        return (
            to_queue(frame.mapInArrow(fails_while_broken, frame.schema), target, tmp_path / "c")
            .trigger(availableNow=True)
            .start()
        )

    with pytest.raises(Exception, match="broken"):
        started().awaitTermination(WAIT_SECONDS)
    broken.unlink()
    finish(started())
    assert seen_in(target) == Counter(range(300))
    with roq.blocking.open_queue(source) as queue:
        assert (queue.status().ready, queue.status().leased) == (0, 0)


def test_two_streams_share_a_queue(spark: SparkSession, tmp_path: Path) -> None:
    source, target = f"log://{tmp_path}/in", f"log://{tmp_path}/out"
    put(source, 0, 2000)
    queries = [
        to_queue(stream_of(spark, source, maxRowsPerBatch="300", manifests=f"{tmp_path}/m{n}"), target, tmp_path / f"c{n}")
        .trigger(availableNow=True)
        .start()
        for n in range(2)
    ]
    assert sum(sum(finish(query)) for query in queries) == 2000
    assert seen_in(target) == Counter(range(2000))
