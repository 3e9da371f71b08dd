"""A work queue, or what a recorded queue keeps, into Parquet: everything of it once, in folders by day (UTC).

    roq pipeline run archive log:///data/tasks --into /data/archive                 # what is there now, then end
    roq pipeline run archive roq://zk1:2181/tasks --into /data/archive --every 10   # for ever, a batch every 10 s
    roq pipeline run archive roq://zk1:2181/orders --since 7d --into /data/orders   # a recorded queue

A task is acked when it is in the archive. The source gives a task again when its lease ended too early or the job was killed;
the archive holds it once all the same: what has an id that is there already is left out, and a batch that was written in part
is completed. Messages of a recorded queue stay where they are; the next run goes on behind them, whatever its --since, and
their publisher and sequence are the id. So the job may be killed at any moment and started again, with the same folders. One
job at a time per archive.
"""

from __future__ import annotations

import argparse
from typing import NamedTuple

import msgspec
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as sf
from pyspark.sql.types import StructType

from roq.errors import CallError
from roq.spark.pipeline.job import arguments, read_kept, run_job, say, whole
from roq.spark.pipeline.streaming import CHECKPOINT, add_arguments, run_stream, since
from roq.spark.tape_reading import SCHEMA

ARCHIVE = (
    StructType()
    .add("id", "string")
    .add("payload", "binary")
    .add("attempt", "integer")
    .add("priority", "integer")
    .add("inserted", "timestamp")
    .add("day", "date")
)
MESSAGES = StructType(list(SCHEMA.fields)).add("day", "date")
DAY_SECONDS = 86_400
ALL, REPEATED = "all", "repeated"


class Archived(NamedTuple):
    """What is archived. key: columns that name a row. time: the column that its day is of. repeats: which rows may be there
    already, when not all are looked up (SQL)."""

    noun: str
    schema: StructType
    key: list[str]
    time: str
    repeats: str


TASKS = Archived("tasks", ARCHIVE, ["id"], "inserted", "attempt > 1")
RECORDED = Archived("messages", MESSAGES, ["publisher", "sequence"], "timestamp", "false")


class ArchiveResult(msgspec.Struct):
    """What the job did. repeated: rows left out because the archive has them."""

    into: str
    batches: int = 0
    archived: int = 0
    repeated: int = 0


def parser() -> argparse.ArgumentParser:
    """The arguments."""
    found = arguments("archive", __doc__ or "")
    found.add_argument("address", help="of the queue: file:///dir, log:///dir, roq://zk1:2181/name")
    found.add_argument("--into", required=True, help="folder of the archive (Parquet, by day)")
    add_arguments(found, "archive")
    found.add_argument("--since", type=since, help="a recorded queue, the first time from then on: 7d, a time, earliest")
    found.add_argument("--topics", help="of a recorded queue: filters with commas between; default: all")
    found.add_argument("--where", help="of a recorded queue: only messages for which this condition is true")
    found.add_argument("--batch-entries", type=whole(1), help="of a recorded queue: entries of its tapes in one batch at most")
    found.add_argument("--manifests", help="folder for what is leased, shared by driver and executors; needed for roq://")
    found.add_argument("--batch-rows", type=whole(1), help="tasks of one batch at most")
    found.add_argument("--lease-seconds", type=whole(5), help="how long a batch may take")
    found.add_argument(
        "--check",
        choices=(ALL, REPEATED),
        default=ALL,
        help="which rows are looked up in the archive: all, or only tasks leased before and the first batch of a run, which is"
        " faster with many millions a day but takes a dead letter that was made ready again for a new task, and a message that"
        " its publisher had to send again for a new one",
    )
    return found


def work(spark: SparkSession, given: argparse.Namespace) -> ArchiveResult:
    """Run the stream until there is nothing left, or until a signal. Raises what the stream met with; CallError."""
    result = ArchiveResult(given.into)
    what, options = source_options(given)
    source = spark.readStream.format("roq").options(**{name: value for name, value in options.items() if value is not None})

    def append(batch: DataFrame, number: int) -> None:
        add(batch, result, everything=given.check == ALL or not result.batches, what=what)
        say(f"batch {number}: {result.archived:,} {what.noun} archived so far, {result.repeated:,} were there")

    if not run_stream("archive", source.load(), append, given.checkpoint or f"{given.into}/{CHECKPOINT}", given.every):
        say("stopped; what is not archived yet is still in the queue, or goes back to it")
    return result


def source_options(given: argparse.Namespace) -> tuple[Archived, dict[str, object]]:
    """What is archived, and the options of its source. Raises CallError: some are for the other kind of queue."""
    tasks = {"manifests": given.manifests, "maxRowsPerBatch": given.batch_rows, "leaseSeconds": given.lease_seconds}
    recorded = {"topics": given.topics, "where": given.where, "maxEntriesPerTrigger": given.batch_entries}
    if given.since is None:
        if any(value is not None for value in recorded.values()):
            raise CallError("--topics, --where and --batch-entries are for recorded queues: give --since, such as earliest")
        return TASKS, {"address": given.address, **tasks}
    if any(value is not None for value in tasks.values()):
        raise CallError("--manifests, --batch-rows and --lease-seconds are for work queues: not with --since")
    return RECORDED, {"address": given.address, "kind": "queue", "startingPosition": given.since, **recorded}


def add(batch: DataFrame, result: ArchiveResult, *, everything: bool, what: Archived = TASKS) -> None:
    """Append to the archive what it does not have, and count. everything: look every row up, not only what may be a repeat."""
    rows = batch.withColumn("day", sf.date_from_unix_date(sf.floor(sf.unix_seconds(what.time) / DAY_SECONDS).cast("int")))
    rows = rows.select(*what.schema.names).persist()
    try:
        to_ask = sf.expr("true" if everything else what.repeats)
        total = rows.agg(sf.count("*").alias("rows"), sf.collect_set(sf.when(to_ask, sf.col("day"))).alias("days")).first()
        assert total is not None  # an aggregate without groups has one row
        kept = read_kept(batch.sparkSession, result.into, what.schema)
        kept = kept.where(sf.col("day").isin(total["days"])).select(*what.key)
        known = kept.join(sf.broadcast(rows.where(to_ask).select(*what.key)), what.key, "left_semi")
        new = (rows.join(known, what.key, "left_anti") if total["days"] else rows).dropDuplicates(what.key)
        new = new.select(*what.schema.names).persist()
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
