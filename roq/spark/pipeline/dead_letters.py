"""What went wrong in a work queue: its dead letters by error, attempts, age and payload size. Nothing in the queue changes.

    roq pipeline run dead_letters log:///data/tasks --out /data/dead
    roq pipeline run dead_letters roq://zk1:2181/orders --out /data/dead --top 20 --examples 5

Errors are grouped by class and pattern, the first line without ids, numbers, paths and quoted texts. What is written:
dead_letters.json, the report, and letters/, every dead letter as Parquet. A cluster shows 10,000 dead letters at most, and of
large payloads fewer: the report tells how many there are and how many it is about.
"""

from __future__ import annotations

import argparse
import re
import time
from collections.abc import Iterable, Iterator
from functools import partial

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import Column, DataFrame, Row, SparkSession, Window
from pyspark.sql import functions as sf
from pyspark.sql.types import StructType

from roq.blocking import open_queue
from roq.errors import CallError
from roq.spark.pipeline.job import arguments, local_path, moment, run_job, say, whole, write_atomically
from roq.workqueue.address import parse

NO_ERROR = "(no error given)"
NO_CLASS = "(other)"
PATTERN_CHARACTERS_MAX = 200
_CLASS = re.compile(r"\s*((?:[A-Za-z_]\w*\.)*[A-Z]\w*)\s*(?::|$)")  # pkg.Class: message
_VARIABLE = (  # in this order: what is longer comes first
    (re.compile(r"\b[a-z][a-z0-9+.-]*://\S+", re.IGNORECASE), "<address>"),
    (re.compile(r"\b[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\b", re.IGNORECASE), "<id>"),
    (re.compile(r"\b\d{4}-\d\d-\d\d(?:[T ]\d\d:\d\d(?::\d\d(?:\.\d+)?)?(?:Z|[+-]\d\d:?\d\d)?)?"), "<time>"),
    (re.compile(r"\b\d{1,3}(?:\.\d{1,3}){3}(?::\d+)?\b"), "<address>"),
    (re.compile(r"(?<![\w.])(?:/[\w.@%+~-]+)+/?"), "<path>"),
    (re.compile(r"b?'(?:[^'\\\n]|\\.)*'(?!\w)"), "<text>"),
    (re.compile(r'"(?:[^"\\\n]|\\.)*"'), "<text>"),
    (re.compile(r"\b0x[0-9a-f]+\b", re.IGNORECASE), "<id>"),
    (re.compile(r"\b(?=[0-9a-f]*\d)(?=[0-9a-f]*[a-f])[0-9a-f]{8,}\b", re.IGNORECASE), "<id>"),
    (re.compile(r"(?<![A-Za-z_])[+-]?\d+(?:[.,]\d+)*(?:e[+-]?\d+)?", re.IGNORECASE), "#"),
    (re.compile(r"\s+"), " "),
)
CLUSTER_MAX = 10_000  # dead letters that a master shows
PAYLOAD_SHOWN = 200  # characters of an example's
ERROR_SHOWN = 500
LEVELS = [0.5, 0.95]
PATTERN_SHOWN = 100
KINDS = StructType().add("error_class", "string").add("pattern", "string")
LETTERS = (
    StructType()
    .add("id", "string")
    .add("attempt", "integer")
    .add("priority", "integer")
    .add("inserted", "timestamp")
    .add("age_seconds", "double")
    .add("error_class", "string")
    .add("pattern", "string")
    .add("error", "string")
    .add("payload_bytes", "long")
    .add("payload", "binary")
)


class NumberSpread(msgspec.Struct, frozen=True):
    """Of one number over some dead letters."""

    least: float
    median: float
    p95: float
    most: float


class Example(msgspec.Struct, frozen=True):
    """One dead letter. payload: its beginning, as text."""

    id: str
    attempts: int
    inserted: str
    error: str
    payload: str


class Group(msgspec.Struct, frozen=True):
    """Dead letters with errors alike. age_seconds: since they were put."""

    error_class: str
    pattern: str
    count: int
    share: float
    attempts: NumberSpread | None
    age_seconds: NumberSpread | None
    payload_bytes: NumberSpread | None
    examples: list[Example]


class Report(msgspec.Struct, frozen=True):
    """dead: how many there were; analysed: how many this is about. classes: count of each. groups: the largest ones."""

    address: str
    at: str
    dead: int
    analysed: int
    attempts: NumberSpread | None
    age_seconds: NumberSpread | None
    payload_bytes: NumberSpread | None
    attempts_counts: dict[int, int]
    classes: dict[str, int]
    patterns: int
    groups: list[Group]


class DeadLettersResult(msgspec.Struct, frozen=True):
    """What the job did."""

    dead: int
    analysed: int
    patterns: int
    report: str
    letters: str


def parser() -> argparse.ArgumentParser:
    """The arguments."""
    found = arguments("dead_letters", __doc__ or "")
    found.add_argument("address", help="of the work queue: file:///dir, log:///dir, roq://zk1:2181/name")
    found.add_argument("--out", required=True, help="folder for the report and the letters; what is there is replaced")
    found.add_argument("--top", type=whole(1), default=10, help="groups in the report (default 10)")
    found.add_argument("--examples", type=whole(0), default=3, help="dead letters shown of each group (default 3)")
    found.add_argument("--count", type=whole(1), help="look at so many at most, the oldest ones")
    return found


def work(spark: SparkSession, given: argparse.Namespace) -> DeadLettersResult:
    """Look, group, write. Raises RoqError."""
    now = time.time()
    place = parse(given.address)
    if place.scheme == "memory":
        raise CallError("memory: is a queue within one program; this job is another one")
    folder = local_path(given.out, "--out")
    source = spark.read.format("roq").option("address", given.address).option("state", "dead")
    wanted = min(given.count or CLUSTER_MAX, CLUSTER_MAX) if place.scheme == "roq" else given.count
    letters = (source.option("rows", wanted) if wanted else source).load()
    found = letters.mapInArrow(partial(add_kinds, now=now), LETTERS)
    kept = str(folder / "letters")
    found.write.mode("overwrite").parquet(kept)
    with open_queue(given.address) as queue:  # the reader has made sure that there is such a queue
        dead = queue.status().dead
    report = analyse(spark.read.parquet(kept), given.address, now, dead, given.top, given.examples)
    write_atomically(folder / "dead_letters.json", msgspec.json.format(msgspec.json.encode(report), indent=2).decode() + "\n")
    _tell(report)
    return DeadLettersResult(report.dead, report.analysed, report.patterns, str(folder / "dead_letters.json"), kept)


def add_kinds(batches: Iterable[pa.RecordBatch], now: float) -> Iterator[pa.RecordBatch]:
    """For mapInArrow: what the source tells of dead letters to rows of LETTERS. now: Unix seconds that ages count to."""
    for batch in batches:
        errors = [error or "" for error in batch.column("error").to_pylist()]
        ages = [max(0.0, now - inserted.timestamp()) for inserted in batch.column("inserted").to_pylist()]
        found = {
            "error_class": pa.array([error_class(error) for error in errors], pa.string()),
            "pattern": pa.array([error_pattern(error) for error in errors], pa.string()),
            "payload_bytes": pc.binary_length(batch.column("payload")).cast(pa.int64()),
            "age_seconds": pa.array(ages, pa.float64()),
        }
        columns = [found[name] if name in found else batch.column(name) for name in LETTERS.names]
        yield pa.RecordBatch.from_arrays(columns, names=LETTERS.names)


def analyse(letters: DataFrame, address: str, now: float, dead: int, top: int, examples: int) -> Report:
    """The report on rows of LETTERS."""
    letters = letters.persist()
    try:
        kinds = letters.groupBy("error_class", "pattern")
        groups = kinds.agg(*_measures()).orderBy(sf.desc("count"), "error_class", "pattern").limit(top).collect()
        patterns = kinds.agg(sf.lit(1)).count()
        shown = _examples(letters, groups, examples)
        total = letters.agg(*_measures()).first()
        counts = letters.groupBy("attempt").count().orderBy("attempt").collect()
        classes = letters.groupBy("error_class").count().orderBy(sf.desc("count"), "error_class").collect()
    finally:
        letters.unpersist()
    assert total is not None  # an aggregate without groups has one row
    return Report(
        address=address,
        at=moment(now),
        dead=max(dead, total["count"]),
        analysed=total["count"],
        attempts=_spread(total["attempt"]),
        age_seconds=_spread(total["age_seconds"]),
        payload_bytes=_spread(total["payload_bytes"]),
        attempts_counts={row["attempt"]: row["count"] for row in counts},
        classes={row["error_class"]: row["count"] for row in classes},
        patterns=patterns,
        groups=[_group(row, total["count"], shown.get((row["error_class"], row["pattern"]), [])) for row in groups],
    )


def _measures() -> list[Column]:
    spreads = [
        sf.struct(
            sf.min(name).alias("least"), sf.percentile_approx(name, LEVELS).alias("levels"), sf.max(name).alias("most")
        ).alias(name)
        for name in ("attempt", "age_seconds", "payload_bytes")
    ]
    return [sf.count("*").alias("count"), *spreads]


def _spread(row: Row) -> NumberSpread | None:
    if row["least"] is None:
        return None
    median, p95 = row["levels"]
    return NumberSpread(row["least"], median, p95, row["most"])


def _group(row: Row, total: int, examples: list[Example]) -> Group:
    return Group(
        error_class=row["error_class"],
        pattern=row["pattern"],
        count=row["count"],
        share=round(row["count"] / total, 4),
        attempts=_spread(row["attempt"]),
        age_seconds=_spread(row["age_seconds"]),
        payload_bytes=_spread(row["payload_bytes"]),
        examples=examples,
    )


def _examples(letters: DataFrame, groups: list[Row], count: int) -> dict[tuple[str, str], list[Example]]:
    """The oldest letters of each group."""
    if not groups or not count:
        return {}
    chosen = letters.sparkSession.createDataFrame([(row["error_class"], row["pattern"]) for row in groups], KINDS)
    place = sf.row_number().over(Window.partitionBy("error_class", "pattern").orderBy("inserted", "id"))
    few = letters.join(sf.broadcast(chosen), ["error_class", "pattern"]).withColumn("place", place)
    rows = (
        few.where(sf.col("place") <= count)
        .withColumn("start", sf.substring("payload", 1, 4 * PAYLOAD_SHOWN))
        .withColumn("put", sf.unix_micros("inserted") / 1e6)
        .orderBy("place")
        .select("error_class", "pattern", "id", "attempt", "put", "error", "start")
    )
    found: dict[tuple[str, str], list[Example]] = {}
    for row in rows.collect():
        payload = bytes(row["start"]).decode(errors="replace")[:PAYLOAD_SHOWN]
        example = Example(row["id"], row["attempt"], moment(row["put"]), (row["error"] or "")[:ERROR_SHOWN], payload)
        found.setdefault((row["error_class"], row["pattern"]), []).append(example)
    return found


def _tell(report: Report) -> None:
    part = (
        "" if report.analysed == report.dead else f"; this is about {report.analysed:,} of them, the oldest that could be read"
    )
    say(f"{report.address}: {report.dead:,} dead letters, {report.patterns:,} kinds of errors{part}")
    for group in report.groups:
        say(f"  {group.count:8,}  {group.share:4.0%}  {group.error_class}  {group.pattern[:PATTERN_SHOWN]}")


# --- what kind of error a text tells of: its class, and its pattern without what differs from case to case. Pure.


def error_class(text: str) -> str:
    """`ValueError: no such thing` → ValueError. Without an error NO_ERROR, without a class NO_CLASS."""
    if not text.strip():
        return NO_ERROR
    found = _CLASS.match(_first_line(text))
    return found[1] if found else NO_CLASS


def error_pattern(text: str) -> str:
    """The first line with ids, numbers, times, paths, addresses and quoted texts replaced by what they are."""
    line = _first_line(text)
    for variable, name in _VARIABLE:
        line = variable.sub(name, line)
    line = line.strip()
    return line[:PATTERN_CHARACTERS_MAX] or NO_ERROR


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0]


def main() -> None:
    """Run the job."""
    run_job("dead_letters", parser(), work)


if __name__ == "__main__":
    main()
