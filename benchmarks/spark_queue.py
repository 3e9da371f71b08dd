"""format("roq") on this machine: streams from a work queue with acks, and durable writes into one, 100-byte payloads.

    python -m benchmarks.spark_queue [--rounds 3] [--rows 2000000] [--cluster-rows 400000] [--only log-stream …]

Four cases take turns: a stream of what is available from `log:` and from a cluster work queue (three hosts of
`roq.tools.local`, all on this machine), and a save into each. A stream's time is from its first batch's end, when all of
Spark runs, to its own end, every task acked by then; a save's is that of `save()`. CPU seconds are those of everything this
program started: Spark's JVM, its Python processes and, for the cluster, stores and master. Not covered: other payload sizes,
latency.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import psutil
from pyspark.sql import DataFrame, SparkSession

import roq.blocking
import roq.spark
from roq.tools.local.cluster import JAVA, LocalCluster
from roq.wire.task import NewTask

PAYLOAD = "repeat('v', 92) || lpad(cast(id as string), 8, '0')"
HOSTS = 3
WAIT_SECONDS = 600.0
Measured = tuple[int, float, float]  # rows, seconds, CPU seconds
Case = Callable[[], Measured]


def session(folder: Path) -> SparkSession:
    root = str(Path(__file__).parents[1])
    os.environ.update(PYSPARK_PYTHON=sys.executable, SPARK_LOCAL_IP="127.0.0.1")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    builder = SparkSession.builder.master("local[2]").appName("spark_queue")
    settings = {
        "spark.ui.enabled": "false",
        "spark.driver.memory": "1g",
        "spark.ui.showConsoleProgress": "false",
        "spark.local.dir": str(folder),
        "spark.sql.warehouse.dir": str(folder / "warehouse"),
    }
    for key, value in settings.items():
        builder = builder.config(key, value)
    spark = builder.getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    roq.spark.register(spark)
    return spark


def fill(address: str, rows: int) -> None:
    with roq.blocking.open_queue(address) as queue:
        for start in range(0, rows, 10_000):
            queue.put_many(NewTask(b"v" * 92 + b"%08d" % number) for number in range(start, min(rows, start + 10_000)))


def stream(spark: SparkSession, address: str, rows: int, folder: Path) -> Measured:
    """Everything that is there, into nowhere; the queue must say that all is acked."""
    checkpoint = tempfile.mkdtemp(dir=folder)
    reader = spark.readStream.format("roq").option("address", address).option("manifests", f"{checkpoint}/manifests").load()
    query = reader.writeStream.format("noop").option("checkpointLocation", f"{checkpoint}/c").trigger(availableNow=True).start()
    while query.lastProgress is None and query.isActive:
        time.sleep(0.01)
    began, cpu, first = time.monotonic(), cpu_seconds(), sum(progress["numInputRows"] for progress in query.recentProgress)
    query.awaitTermination()
    seconds = time.monotonic() - began
    with roq.blocking.open_queue(address) as queue:
        status = queue.status()
    assert sum(progress["numInputRows"] for progress in query.recentProgress) == rows
    assert (status.ready, status.leased) == (0, 0), status
    return rows - first, seconds, cpu_seconds() - cpu


def save(frame: DataFrame, address: str, rows: int, folder: Path) -> Measured:
    began, cpu = time.monotonic(), cpu_seconds()
    frame.write.format("roq").option("address", address).option("staging", str(folder)).mode("append").save()
    seconds, cpu = time.monotonic() - began, cpu_seconds() - cpu
    with roq.blocking.open_queue(address) as queue:
        assert queue.status().inserted == rows
    return rows, seconds, cpu


def cpu_seconds() -> float:
    """Of this process and all below it; of those that are gone as far as their parents have waited for them."""
    total = 0.0
    for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += times.user + times.system + times.children_user + times.children_system
    return total


def rounds(cases: dict[str, Case], count: int) -> dict[str, dict[str, object]]:
    """The cases in turn; rows per second of each round, and CPU microseconds per row."""
    rates: dict[str, list[float]] = {name: [] for name in cases}
    cpu: dict[str, list[float]] = {name: [] for name in cases}
    for number in range(count + 1):  # the first warms up
        for name, case in cases.items():
            rows, seconds, used = case()
            if number:
                rates[name].append(rows / seconds)
                cpu[name].append(used / rows * 1e6)
            print(f"{name}: {rows / seconds:,.0f} rows/s, load {os.getloadavg()[0]:.1f}", file=sys.stderr, flush=True)
    return {
        name: {
            "rows_per_second": round(median(rates[name])),
            "all": [round(rate) for rate in rates[name]],
            "cpu_us_per_row": round(median(cpu[name]), 1),
        }
        for name in cases
    }


def measure(zookeeper: str, folder: Path, options: argparse.Namespace) -> dict[str, dict[str, object]]:
    spark = session(folder)
    frame = {rows: spark.range(rows).selectExpr(f"{PAYLOAD} as payload") for rows in {options.rows, options.cluster_rows}}
    made = iter(range(1_000_000))

    def log_queue() -> str:
        for old in folder.glob("queue-*"):
            shutil.rmtree(old)
        return f"log://{folder}/queue-{next(made)}"

    def cluster_queue() -> str:
        return f"roq://{zookeeper}/bench-{next(made)}"

    def streamed(address: str, rows: int) -> Measured:
        fill(address, rows)
        return stream(spark, address, rows, folder)

    cases: dict[str, Case] = {
        "log-stream": lambda: streamed(log_queue(), options.rows),
        "cluster-stream": lambda: streamed(cluster_queue(), options.cluster_rows),
        "log-save": lambda: save(frame[options.rows], log_queue(), options.rows, folder),
        "cluster-save": lambda: save(frame[options.cluster_rows], cluster_queue(), options.cluster_rows, folder),
    }
    try:
        return rounds({name: case for name, case in cases.items() if name in (options.only or cases)}, options.rounds)
    finally:
        spark.stop()


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rows", type=int, default=2_000_000)
    parser.add_argument("--cluster-rows", type=int, default=400_000)
    parser.add_argument("--only", nargs="*")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="roq-spark-queue-") as folder:
        if options.only and not any(name.startswith("cluster") for name in options.only):
            found = await asyncio.to_thread(measure, "", Path(folder), options)
        else:
            async with LocalCluster(Path(folder) / "cluster", hosts=HOSTS, zookeeper=JAVA) as cluster:
                await cluster.settled(60)
                found = await asyncio.to_thread(measure, cluster.zookeeper, Path(folder), options)
    print(json.dumps(found))


if __name__ == "__main__":
    asyncio.run(main())
