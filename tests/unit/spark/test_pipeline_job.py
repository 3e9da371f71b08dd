"""What the jobs share: places as Spark writes them, which of them lie in each other, and the reason in an error."""

from __future__ import annotations

from pathlib import Path

import pytest
from py4j.protocol import Py4JError  # type: ignore[import-untyped]
from pyspark.errors import PySparkValueError

from roq.errors import CallError
from roq.spark.pipeline.job import is_local, local_path, overlapping, reason

JAVA = """An error occurred while calling o74.parquet.
: org.apache.spark.SparkException: Job aborted due to stage failure
\tat org.apache.spark.Job.run(Job.scala:1)
Caused by: org.apache.spark.SparkException: [TASK_WRITE_FAILED] Task failed while writing rows
\t... 12 more
Caused by: java.lang.IllegalArgumentException: No enum constant bogus
\tat java.base/java.lang.Enum.valueOf(Enum.java:1)
"""


@pytest.mark.parametrize(
    ("place", "path"),
    [
        ("data/out", "data/out"),
        ("/data/100% out", "/data/100% out"),
        ("file:/data/out", "/data/out"),
        ("file:///data/a%20b", "/data/a%20b"),
        ("FILE:///data", "/data"),
        ("/data/at-12:30", "/data/at-12:30"),
    ],
)
def test_paths_of_this_machine(place: str, path: str) -> None:
    assert is_local(place)
    assert local_path(place, "--out") == Path(path)


@pytest.mark.parametrize("place", ["s3a://bucket/out", "hdfs:/out", "file://elsewhere/out"])
def test_places_that_are_none(place: str) -> None:
    with pytest.raises(CallError, match="--out has to be a folder of this machine"):
        local_path(place, "--out")


@pytest.mark.parametrize(
    ("out", "data", "overlap"),
    [
        ("s3a://b/in", "s3a://b/in/", True),
        ("s3a://b/in/sorted", "s3a://b/in", True),
        ("s3a://b", "S3A://b/in", True),
        ("s3a://b/in", "s3a://b/in/*.csv", True),
        ("s3a://b/inner", "s3a://b/in", False),
        ("s3a://b/out", "s3a://b/in/*.csv", False),
        ("s3a://c/in", "s3a://b/in", False),
        ("/b/in", "s3a://b/in", False),
        ("/nowhere/out", "/nowhere/{a,b}/x", True),
        ("/nowhere/out", "/nowhere/in", False),
    ],
)
def test_places_in_each_other(out: str, data: str, overlap: bool) -> None:
    assert (overlapping(out, ["/somewhere", data]) is not None) is overlap


def test_of_a_stack_trace_the_innermost_cause_is_told() -> None:
    assert reason(Py4JError(JAVA)) == "java.lang.IllegalArgumentException: No enum constant bogus"
    assert (
        reason(Py4JError(JAVA.partition("Caused by")[0])) == "org.apache.spark.SparkException: Job aborted due to stage failure"
    )
    assert reason(Py4JError(JAVA + "roq.errors.DataLost: no\n  File x\nroq.errors.StorageError: the disk is full\n")) == (
        "roq.errors.StorageError: the disk is full"
    )
    assert reason(PySparkValueError("all of it")) == "all of it"
    assert reason(Py4JError("")) == "no more is known"
    assert reason(OSError("one\ntwo")) == "one two"
