"""What the jobs share: their arguments, their Spark session, what they print, and how they end (0 done, 1 refused, 2 usage)."""

from __future__ import annotations

import argparse
import math
import os
import re
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
from py4j.protocol import Py4JError  # type: ignore[import-untyped]
from pyspark.errors import AnalysisException, PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import StructType

from roq.errors import CallError, RoqError
from roq.spark.register import register

PARTITIONS = "spark.sql.shuffle.partitions"
LOCAL_PARTITIONS = 8  # of Spark's own shuffles on one machine; Spark's default of 200 suits clusters
NAMED_ERROR = re.compile(r"(?:[a-z_][\w.]*\.)?[A-Z]\w*(?:Error|Exception): \S")  # a line that ends a Python stack trace
CAUSE = re.compile(r"Caused by: \S")  # in a Java stack trace; the last one is the innermost
JAVA_ERROR = re.compile(r": \S")  # how py4j begins the Java error, after a line with the call
GATEWAY = "PYSPARK_GATEWAY_PORT"  # set by spark-submit: then it has chosen master and Python


def arguments(name: str, about: str) -> argparse.ArgumentParser:
    """A parser with what every job takes. about: the module's docstring."""
    parser = argparse.ArgumentParser(
        prog=f"roq pipeline run {name}", description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    spark = parser.add_argument_group("Spark")
    spark.add_argument("--master", help="where to run; default: what spark-submit says, else local[*]")
    spark.add_argument("--conf", action="append", default=[], metavar="KEY=VALUE", help="a Spark setting; may be repeated")
    return parser


def whole(least: int) -> Callable[[str], int]:
    """Type of an argument: a whole number, at least this much."""

    def number(text: str) -> int:
        value = int(text)
        if value < least:
            raise argparse.ArgumentTypeError(f"at least {least}, got {value}")
        return value

    return number


def seconds(text: str) -> float:
    """Type of an argument: seconds, 0 or more."""
    value = float(text)
    if not (math.isfinite(value) and value >= 0):
        raise argparse.ArgumentTypeError(f"seconds, 0 or more, got {text}")
    return value


def names(text: str) -> list[str]:
    """Type of an argument: names with commas between them."""
    found = [name.strip() for name in text.split(",")]
    if not all(found) or len(set(found)) != len(found):
        raise argparse.ArgumentTypeError(f"different names with commas between them, got {text!r}")
    return found


def open_session(name: str, given: argparse.Namespace) -> SparkSession:
    """The Spark session of a job, with RoQ's formats, in UTC. Raises CallError."""
    builder = SparkSession.Builder().appName(f"roq {name}").config("spark.sql.session.timeZone", "UTC")
    master = given.master
    if GATEWAY not in os.environ:
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
        master = master or "local[*]"
        builder = builder.config("spark.ui.showConsoleProgress", str(sys.stderr.isatty()).lower())
        builder = builder.config("spark.log.level", "ERROR")
    if master:
        builder = builder.master(master)
    for setting in given.conf:
        key, equals, value = setting.partition("=")
        if not equals:
            raise CallError(f"--conf takes KEY=VALUE, got {setting!r}")
        builder = builder.config(key, value)
    spark = builder.getOrCreate()
    few_partitions(spark)
    register(spark)
    return spark


def few_partitions(spark: SparkSession) -> None:
    """On one machine, whoever chose that, LOCAL_PARTITIONS, unless the setting was made."""
    if spark.sparkContext.master.startswith("local") and spark.conf.get(PARTITIONS, None) is None:
        spark.conf.set(PARTITIONS, str(LOCAL_PARTITIONS))


def run_job(name: str, parser: argparse.ArgumentParser, work: Callable[[SparkSession, argparse.Namespace], Any]) -> None:
    """Parse, run `work`, print its result, end the process."""
    sys.exit(finish(name, parser, work, sys.argv[1:]))


def finish(
    name: str,
    parser: argparse.ArgumentParser,
    work: Callable[[SparkSession, argparse.Namespace], Any],
    given: Sequence[str],
) -> int:
    """The exit code; errors that people can mend are one line."""
    options = parser.parse_args(given)
    try:
        spark = open_session(name, options)
        try:
            result = work(spark, options)
        finally:
            with suppress(ConnectionError):  # the signal that ended this job has ended Spark's JVM already
                spark.stop()
    except (RoqError, PySparkException, Py4JError, OSError) as error:
        say(f"roq pipeline {name}: {type(error).__name__}: {told(error)}")
        return 1
    sys.stdout.write(msgspec.json.encode(result).decode() + "\n")
    return 0


def read_kept(spark: SparkSession, folder: str, schema: StructType) -> DataFrame:
    """What a job has written so far in Parquet; no rows if it has not begun."""
    try:
        return spark.read.schema(schema).parquet(folder)
    except AnalysisException as error:
        if error.getCondition() != "PATH_NOT_FOUND":
            raise
        return spark.createDataFrame([], schema)


def told(error: Exception) -> str:
    """What a person needs of an error. Spark's carry whole stack traces: of these what our own code said last, else the
    innermost cause in Java, else what Spark said first."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not isinstance(error, (PySparkException, Py4JError)):
        return " ".join(lines) or "no more is known"
    for marks in (NAMED_ERROR, CAUSE, JAVA_ERROR):
        found = [match for line in lines if (match := marks.match(line))]
        if found:
            return found[-1].string.removeprefix("Caused by:").lstrip(": ")
    return lines[0] if lines else "no more is known"


def say(text: str) -> None:
    """A line for people."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def write_whole(path: Path, text: str) -> None:
    """A file that is either as before or new as a whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    beside.write_text(text)
    beside.replace(path)


def moment(seconds: float) -> str:
    """Unix seconds as 2026-01-02T03:04:05Z."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
