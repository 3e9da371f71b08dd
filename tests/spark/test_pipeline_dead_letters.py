"""The job dead_letters on real queues: what it counts, what it shows, and that the queue is as before."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from pyspark.sql import SparkSession

from roq.blocking import open_queue
from roq.errors import CallError
from roq.spark.pipeline import dead_letters

ERRORS = (
    [f"ValueError: row {number} is bad" for number in range(30)]
    + [f"OSError: /data/{number}.csv: no space\n\nTraceback …" for number in range(10)]
    + ["the disk is full"] * 5
)


@pytest.fixture
def queue(tmp_path: Path) -> str:
    """A work queue with 45 dead letters and 3 ready tasks."""
    address = f"log://{tmp_path}/tasks"
    with open_queue(address, max_attempts=3) as tasks:
        tasks.put_many([b"x" * (10 + number) for number in range(len(ERRORS))])
        for task, error in zip(tasks.lease(60, len(ERRORS)), ERRORS, strict=True):
            task.reject(error)
        tasks.put_many([b"ready"] * 3)
    return address


def run(spark: SparkSession, *given: str) -> dead_letters.DeadLettersResult:
    return dead_letters.work(spark, dead_letters.parser().parse_args(given))


def counts(queue: str) -> tuple[int, ...]:
    with open_queue(queue) as tasks:
        now = tasks.status()
    return now.ready, now.delayed, now.leased, now.dead, now.completed, now.inserted


def test_groups_examples_and_letters(spark: SparkSession, queue: str, tmp_path: Path) -> None:
    result = run(spark, queue, "--out", f"{tmp_path}/out", "--top", "2", "--examples", "4")
    assert (result.dead, result.analysed, result.patterns) == (45, 45, 3)
    report = msgspec.json.decode(Path(result.report).read_bytes(), type=dead_letters.Report)
    assert report.classes == {"ValueError": 30, "OSError": 10, "(other)": 5}
    assert [(group.pattern, group.count, group.share) for group in report.groups] == [
        ("ValueError: row # is bad", 30, 0.6667),
        ("OSError: <path>: no space", 10, 0.2222),
    ]
    first = report.groups[0]
    assert len({example.id for example in first.examples}) == 4
    for example in first.examples:
        assert example.payload == "x" * (10 + ERRORS.index(example.error))
    assert first.payload_bytes is not None
    assert (first.payload_bytes.least, first.payload_bytes.most) == (10, 39)
    assert report.attempts_counts == {1: 45}
    letters = spark.read.parquet(result.letters)
    assert letters.count() == 45
    assert {row["error"] for row in letters.select("error").collect()} == set(ERRORS)
    assert all(0 <= row[0] < 600 for row in letters.select("age_seconds").collect())


def test_the_queue_is_as_before_and_a_bound_is_told(
    spark: SparkSession, queue: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = counts(queue)
    result = run(spark, queue, "--out", f"{tmp_path}/out", "--count", "7")
    assert (result.dead, result.analysed) == (45, 7)
    assert "this is about 7 of them" in capsys.readouterr().err
    assert counts(queue) == before
    again = run(spark, queue, "--out", f"file://{tmp_path}/out")
    assert again.report == f"{tmp_path}/out/dead_letters.json"
    assert json.loads((tmp_path / "out" / "dead_letters.json").read_text())["analysed"] == 45
    assert spark.read.parquet(f"{tmp_path}/out/letters").count() == 45


def test_no_dead_letters_is_a_report_too(spark: SparkSession, tmp_path: Path) -> None:
    address = f"file://{tmp_path}/tasks"
    with open_queue(address) as tasks:
        tasks.put(b"ready")
    result = run(spark, address, "--out", f"{tmp_path}/out")
    report = json.loads(Path(result.report).read_text())
    assert (report["dead"], report["analysed"], report["groups"], report["attempts"]) == (0, 0, [], None)


def test_payloads_that_are_no_text_and_errors_left_out(spark: SparkSession, tmp_path: Path) -> None:
    address = f"log://{tmp_path}/tasks"
    with open_queue(address, max_attempts=1) as tasks:
        tasks.put(b"\xff\x00" * 1000)
        tasks.lease(0.2, 1)
        assert tasks.lease(60, 1, wait_seconds=2.0) == []
    result = run(spark, address, "--out", f"{tmp_path}/out")
    report = msgspec.json.decode(Path(result.report).read_bytes(), type=dead_letters.Report)
    assert len(report.groups[0].examples[0].payload) == dead_letters.PAYLOAD_SHOWN
    assert report.groups[0].count == 1


def test_wrong_calls(spark: SparkSession, tmp_path: Path) -> None:
    with pytest.raises(CallError, match="memory:"):
        run(spark, "memory:a", "--out", f"{tmp_path}/out")
    with pytest.raises(Exception, match="there is no work queue"):
        run(spark, f"log://{tmp_path}/nowhere", "--out", f"{tmp_path}/out")
    assert not Path(f"{tmp_path}/nowhere").exists()
    with pytest.raises(CallError, match="--out has to be a folder of this machine"):
        run(spark, "log:///nowhere", "--out", "s3a://bucket/out")
