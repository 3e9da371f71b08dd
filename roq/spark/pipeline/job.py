"""What the jobs share: their arguments, their Spark session, what they print, how they end (0 done, 1 refused, 2 usage), and
where their data lies: paths of this machine and URLs, which of them lie in each other, and a folder replaced as a whole.

A place is written as for Spark: a path, file:/path, file:///path, or a URL of what Hadoop has a file system for (s3a://…,
hdfs://…). Nothing in it is percent-encoded, which is how Spark reads it too.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import secrets
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from glob import glob
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
SCHEME = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*):(?P<rest>.*)", re.DOTALL)
NAMES_MAX = 1000  # of a folder's files that are looked at
PATTERN = re.compile(r"[*?\[{]")  # Hadoop's patterns of names begin so


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
    """The exit code; errors that people can correct are one line."""
    options = parser.parse_args(given)
    try:
        spark = open_session(name, options)
        try:
            result = work(spark, options)
        finally:
            with suppress(ConnectionError):  # the signal that ended this job has ended Spark's JVM already
                spark.stop()
    except (RoqError, PySparkException, Py4JError, OSError) as error:
        say(f"roq pipeline {name}: {type(error).__name__}: {reason(error)}")
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


def reason(error: Exception) -> str:
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


def write_atomically(path: Path, text: str) -> None:
    """A file that is either as before or completely new."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    beside.write_text(text)
    beside.replace(path)


def moment(seconds: float) -> str:
    """Unix seconds as 2026-01-02T03:04:05Z."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def is_local(place: str) -> bool:
    """Is it a path of this machine, however it is written?"""
    found = SCHEME.fullmatch(place)
    return found is None or found["scheme"].lower() == "file"


def local_path(place: str, what: str) -> Path:
    """The path. what: the argument, for the error. Raises CallError: it is somewhere else."""
    found = SCHEME.fullmatch(place)
    if found is None:
        return Path(place)
    rest = found["rest"]
    if found["scheme"].lower() != "file" or (rest.startswith("//") and not rest.startswith("///")):
        raise CallError(f"{what} has to be a folder of this machine (a path or file:///path), not {place}")
    return Path("/" + rest.lstrip("/")) if rest.startswith("/") else Path(rest)


def overlapping(out: str, places: Iterable[str]) -> str | None:
    """The first place that is `out`, lies in it, or has it inside; links and patterns of this machine are followed."""
    target = _parts(out)
    for place in places:
        for each in _spread_out(place):
            parts = _parts(each)
            shorter = min(len(parts), len(target))
            if parts[:shorter] == target[:shorter]:
                return each
    return None


def _spread_out(place: str) -> Iterator[str]:
    """Files that a pattern stands for; elsewhere, where the lookup is Spark's, the folder that it begins in."""
    pattern = PATTERN.search(place)
    if pattern is None:
        yield place
    elif is_local(place) and "{" not in place:
        yield from glob(str(local_path(place, "data")))
    else:
        yield place[: place.rfind("/", 0, pattern.start()) + 1]


def _parts(place: str) -> tuple[str, ...]:
    """From the root downwards, so that a folder's are the beginning of what is in it."""
    if is_local(place):
        return "file:", *local_path(place, "data").resolve().parts
    scheme, _, rest = place.partition(":")
    return f"{scheme.lower()}:", *(part for part in rest.split("/") if part not in ("", "."))


@contextmanager
def written_atomically(spark: SparkSession, out: str) -> Iterator[str]:
    """A folder beside `out` to write into; it becomes `out` when the block ends well, in place of what was there. When it
    fails, what was there stays as it was. Only between two renames there is no `out`: then OUT.old-… has the former rows."""
    token = secrets.token_hex(4)
    files, paths = _file_system(spark, out)
    final, new, old = (paths(f"{out.rstrip('/')}{end}") for end in ("", f".new-{token}", f".old-{token}"))
    try:
        yield str(new)
        former = files.exists(final)
        if former and not files.rename(final, old):
            raise CallError(f"{out} could not be replaced; it is as before")
        if not files.rename(new, final):
            back = former and files.rename(old, final)
            where = "it is as before" if back or not former else f"what it was is in {old}"
            raise CallError(f"{out} could not be written; {where}")
        if former:
            files.delete(old, True)
    finally:
        with suppress(Py4JError):  # why it failed is more to the point
            files.delete(new, True)


def is_there(spark: SparkSession, place: str) -> bool:
    """Is there a file or folder? Asks the file system that Spark would write to."""
    files, paths = _file_system(spark, place)
    return bool(files.exists(paths(place)))


def file_names(spark: SparkSession, place: str) -> list[str]:
    """Of a file, of a folder's files at any depth, of what a pattern stands for: NAMES_MAX at most that Spark would read."""
    files, paths = _file_system(spark, place)
    found: list[str] = []
    for status in files.globStatus(paths(place)) or []:
        each = files.listFiles(status.getPath(), True)
        while each.hasNext() and len(found) < NAMES_MAX:
            path = str(each.next().getPath())
            if not any(part.startswith(("_", ".")) for part in path.removeprefix(str(status.getPath())).split("/")):
                found.append(path)
    return found


def _file_system(spark: SparkSession, place: str) -> tuple[Any, Any]:
    """Hadoop's file system of a place, and its class of paths."""
    paths = spark._jvm.org.apache.hadoop.fs.Path
    return paths(place).getFileSystem(spark._jsparkSession.sessionState().newHadoopConf()), paths
