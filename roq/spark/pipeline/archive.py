"""A work queue into Parquet: every task of it once, in folders by the day it was put (UTC).

    roq pipeline run archive log:///data/tasks --into /data/archive                 # what is there now, then end
    roq pipeline run archive roq://zk1:2181/orders --into /data/archive --every 10  # for ever, a batch every 10 s

A task is acked when it is in the archive. The source gives a task again when its lease ended too early or the job was killed;
the archive holds it once all the same: what has an id that is there already is left out, and a batch that was written in part
is completed. So the job may be killed at any moment and started again, with the same folders. One job at a time per archive.
"""

from __future__ import annotations

import argparse
import threading

import msgspec
from py4j.protocol import Py4JError  # type: ignore[import-untyped]
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as sf
from pyspark.sql.types import StructType

from roq.spark.pipeline.job import arguments, read_kept, reason, run_job, say, seconds, whole
from roq.workqueue.stop_signals import stopped_by_signals

ARCHIVE = (
    StructType()
    .add("id", "string")
    .add("payload", "binary")
    .add("attempt", "integer")
    .add("priority", "integer")
    .add("inserted", "timestamp")
    .add("day", "date")
)
DAY_SECONDS = 86_400
LOOK_SECONDS = 1.0  # between looks whether a signal has come
CHECKPOINT = "_checkpoint"  # in the archive; readers of Parquet pass over names that begin so
ALL, REPEATED = "all", "repeated"


class ArchiveResult(msgspec.Struct):
    """What the job did. repeated: rows left out because the archive has them."""

    into: str
    batches: int = 0
    archived: int = 0
    repeated: int = 0


def parser() -> argparse.ArgumentParser:
    """The arguments."""
    found = arguments("archive", __doc__ or "")
    found.add_argument("address", help="of the work queue: file:///dir, log:///dir, roq://zk1:2181/name")
    found.add_argument("--into", required=True, help="folder of the archive (Parquet, by day)")
    found.add_argument("--every", type=seconds, help="go on for ever, a batch every so many seconds; default: end when done")
    found.add_argument("--checkpoint", help=f"folder for Spark's checkpoint; default: {CHECKPOINT} in the archive")
    found.add_argument("--manifests", help="folder for what is leased, shared by driver and executors; needed for roq://")
    found.add_argument("--batch-rows", type=whole(1), help="tasks of one batch at most")
    found.add_argument("--lease-seconds", type=whole(5), help="how long a batch may take")
    found.add_argument(
        "--check",
        choices=(ALL, REPEATED),
        default=ALL,
        help="which tasks are looked up in the archive: all, or only those leased before and the first batch of a run, which is"
        " faster with many millions a day but takes a dead letter that was made ready again for a new task",
    )
    return found


def work(spark: SparkSession, given: argparse.Namespace) -> ArchiveResult:
    """Run the stream until there is nothing left, or until a signal. Raises what the stream met with."""
    result = ArchiveResult(given.into)
    options = {
        "address": given.address,
        "manifests": given.manifests,
        "maxRowsPerBatch": given.batch_rows,
        "leaseSeconds": given.lease_seconds,
    }
    source = spark.readStream.format("roq").options(**{name: value for name, value in options.items() if value is not None})

    def append(batch: DataFrame, number: int) -> None:
        add(batch, result, everything=given.check == ALL or not result.batches)
        say(f"batch {number}: {result.archived:,} tasks archived so far, {result.repeated:,} were there")

    writer = source.load().writeStream.foreachBatch(append).queryName("archive")
    writer = writer.option("checkpointLocation", given.checkpoint or f"{given.into}/{CHECKPOINT}")
    trigger = {"availableNow": True} if given.every is None else {"processingTime": f"{round(given.every * 1000)} milliseconds"}
    stopped = threading.Event()
    with stopped_by_signals(stopped.set):
        query = writer.trigger(**trigger).start()
        try:
            while not stopped.is_set() and not query.awaitTermination(LOOK_SECONDS):
                pass
            query.stop()
        except (PySparkException, Py4JError, ConnectionError) as error:
            if not stopped.is_set():
                raise
            say(f"Spark got the signal too and ended first: {reason(error)}")
    if stopped.is_set():
        say("stopped; what is not archived yet goes back to the queue")
    return result


def add(batch: DataFrame, result: ArchiveResult, *, everything: bool) -> None:
    """Append to the archive what it does not have, and count. everything: look every task up, not only those leased before."""
    rows = batch.withColumn("day", sf.date_from_unix_date(sf.floor(sf.unix_seconds("inserted") / DAY_SECONDS).cast("int")))
    rows = rows.select(*ARCHIVE.names).persist()
    try:
        to_ask = sf.expr("true" if everything else "attempt > 1")
        total = rows.agg(sf.count("*").alias("rows"), sf.collect_set(sf.when(to_ask, sf.col("day"))).alias("days")).first()
        assert total is not None  # an aggregate without groups has one row
        kept = read_kept(batch.sparkSession, result.into, ARCHIVE).where(sf.col("day").isin(total["days"])).select("id")
        known = kept.join(sf.broadcast(rows.where(to_ask).select("id")), "id", "left_semi")
        new = (rows.join(known, "id", "left_anti") if total["days"] else rows).dropDuplicates(["id"])
        new = new.select(*ARCHIVE.names).persist()
        added = new.count() if total["rows"] else 0
        if added:
            new.hint("rebalance", "day").write.mode("append").partitionBy("day").parquet(result.into)
        new.unpersist()
    finally:
        rows.unpersist()
    result.batches += 1
    result.archived += added
    result.repeated += total["rows"] - added


def main() -> None:
    """Run the job."""
    run_job("archive", parser(), work)


if __name__ == "__main__":
    main()
