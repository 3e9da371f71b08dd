"""The job archive: every task once, whatever was repeated or killed in between; the queue is empty afterwards."""

from __future__ import annotations

from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, SparkSession

from roq.blocking import open_queue
from roq.spark.pipeline import archive
from roq.spark.pipeline.job import read_kept

ROOT = Path(__file__).parents[2]
NOW = datetime(2026, 5, 1, 23, 59, 59, tzinfo=UTC)


def run(spark: SparkSession, *given: str) -> archive.ArchiveResult:
    return archive.work(spark, archive.parser().parse_args(given))


def payloads(spark: SparkSession, folder: Path) -> Counter[bytes]:
    return Counter(bytes(row["payload"]) for row in read_kept(spark, str(folder), archive.ARCHIVE).collect())


def batch(spark: SparkSession, *tasks: tuple[str, int]) -> DataFrame:
    """Rows as the source gives them: (id, attempt)."""
    rows: list[tuple[Any, ...]] = [(id, id.encode(), attempt, 0, NOW) for id, attempt in tasks]
    return spark.createDataFrame(rows, "id string, payload binary, attempt int, priority int, inserted timestamp")


def test_every_task_is_archived_once_and_the_queue_is_empty(spark: SparkSession, tmp_path: Path) -> None:
    address, into = f"log://{tmp_path}/tasks", tmp_path / "archive"
    with open_queue(address) as tasks:
        tasks.put_many([f"task {number}".encode() for number in range(500)])
    first = run(spark, address, "--into", str(into), "--batch-rows", "200")
    assert (first.archived, first.repeated) == (500, 0)
    with open_queue(address) as tasks:
        assert (tasks.status().ready, tasks.status().leased, tasks.status().completed) == (0, 0, 500)
        tasks.put_many([f"more {number}".encode() for number in range(20)])
    assert run(spark, address, "--into", str(into)).archived == 20
    expected = [f"task {number}".encode() for number in range(500)] + [f"more {number}".encode() for number in range(20)]
    assert payloads(spark, into) == Counter(expected)


def test_a_batch_that_comes_again_is_completed_not_doubled(spark: SparkSession, tmp_path: Path) -> None:
    into = str(tmp_path / "archive")
    archive.add(batch(spark, ("a", 1), ("b", 1)), archive.ArchiveResult(into), everything=True)
    again = archive.ArchiveResult(into)
    archive.add(batch(spark, ("a", 1), ("b", 1), ("c", 1), ("c", 2)), again, everything=True)
    assert (again.archived, again.repeated) == (1, 3)
    archive.add(batch(spark, ("c", 3), ("d", 1), ("e", 2)), again, everything=False)
    assert (again.batches, again.archived, again.repeated) == (2, 3, 4)
    assert payloads(spark, Path(into)) == Counter([b"a", b"b", b"c", b"d", b"e"])
    assert [path.name for path in Path(into).glob("day=*")] == ["day=2026-05-01"]
