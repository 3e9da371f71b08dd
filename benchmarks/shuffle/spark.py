"""A DataFrame in key order, end to end on local[2]: format("roq-shuffle") written and read beside Spark's own range sort.

Both read the same Parquet files (random 16-byte keys, 100-byte values) and give the sorted rows to Spark's `noop` sink; runs
alternate in one session. Spark alone: `repartitionByRange(ranges, key).sortWithinPartitions(key)`.

    python -m benchmarks.shuffle.spark --rows 10000000
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import msgspec
from pyspark.sql import DataFrame, SparkSession

import roq.shuffle
import roq.spark
from benchmarks.report import markdown, spread
from benchmarks.shuffle.data import make_files

ROOT = Path(__file__).parents[2]
FILES, RANGES = 8, 64
WARM_UP_ROWS, WARM_UP_RUNS = 200_000, 2
NAME = "measured"
COLUMNS = ("rows", "Spark alone, s", "RoQ write + read, s", "write, s", "read, s", "RoQ / Spark (rows/s)", "target", "verdict")
TARGET = 0.5


class SparkFound(msgspec.Struct, frozen=True):
    """Seconds of each run."""

    rows: int
    ranges: int
    spark: list[float]
    write: list[float]
    read: list[float]

    @property
    def ratio(self) -> float:
        """Rows per second of ours to Spark's, by medians."""
        return median(self.spark) / (median(self.write) + median(self.read))


def session(folder: Path, memory: str) -> SparkSession:
    """local[2], with RoQ's formats."""
    os.environ.update(PYSPARK_PYTHON=sys.executable, SPARK_LOCAL_IP="127.0.0.1")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    spark = (
        SparkSession.builder.master("local[2]")
        .config("spark.driver.memory", memory)
        .config("spark.local.dir", str(folder))
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .getOrCreate()
    )
    spark.sparkContext.setLogLevel("ERROR")
    roq.spark.register(spark)
    return spark


def swallow(frame: DataFrame) -> float:
    """Have every row computed; seconds."""
    begun = time.perf_counter()
    frame.write.format("noop").mode("overwrite").save()
    return time.perf_counter() - begun


def through_roq(frame: DataFrame, address: str, ranges: int) -> tuple[float, float]:
    """Seconds to write and to read."""
    begun = time.perf_counter()
    writer = frame.write.format("roq-shuffle").option("address", address).option("keys", "key").option("ranges", ranges)
    writer.mode("overwrite").save(NAME)
    written = time.perf_counter() - begun
    begun = time.perf_counter()
    swallow(frame.sparkSession.read.format("roq-shuffle").option("address", address).load(NAME))
    return written, time.perf_counter() - begun


def measure_spark(
    spark: SparkSession, folder: Path, rows: int, ranges: int, runs: int, address: str, tell: Callable[[str], None]
) -> SparkFound:
    """`runs` runs of each, in turn, after some of each with few rows."""
    found = SparkFound(rows, ranges, [], [], [])
    for name, count in (("few", WARM_UP_ROWS), ("rows", rows)):
        make_files(folder / name, "uniform", count, FILES)
    few, frame = (spark.read.parquet(str(folder / name)) for name in ("few", "rows"))
    for _ in range(WARM_UP_RUNS):
        swallow(few.repartitionByRange(ranges, "key").sortWithinPartitions("key"))
        through_roq(few, address, ranges)
    for number in range(runs):
        found.spark.append(swallow(frame.repartitionByRange(ranges, "key").sortWithinPartitions("key")))
        written, read = through_roq(frame, address, ranges)
        found.write.append(written)
        found.read.append(read)
        tell(f"{rows:,} rows | run {number + 1} | Spark {found.spark[-1]:.1f} s | RoQ {written:.1f} + {read:.1f} s")
    with roq.shuffle.open(address) as shuffles:
        shuffles.remove(NAME)
    return found


def row(found: SparkFound) -> list[str]:
    """For the table."""
    both = [write + read for write, read in zip(found.write, found.read, strict=True)]
    times = [spread(seconds) for seconds in (found.spark, both, found.write, found.read)]
    verdict = "met" if found.ratio >= TARGET else "MISSED"
    return [f"{found.rows:,}", *times, f"{found.ratio:.2f}", f"at least {TARGET:g}", verdict]


def main(words: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.shuffle.spark", description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--ranges", type=int, default=RANGES)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--address", default="", help="of a cluster; a folder of its own otherwise")
    parser.add_argument("--driver-memory", default="4g", help="of Spark's JVM")
    arguments = parser.parse_args(words)
    with tempfile.TemporaryDirectory(prefix="roq-bench-") as name:
        folder = Path(name)
        spark = session(folder, arguments.driver_memory)
        address = arguments.address or f"file://{folder}/shuffles"
        found = measure_spark(
            spark, folder, arguments.rows, arguments.ranges, arguments.runs, address, lambda line: print(line, file=sys.stderr)
        )
        spark.stop()
    print(markdown(COLUMNS, [row(found)]))


if __name__ == "__main__":
    main(sys.argv[1:])
