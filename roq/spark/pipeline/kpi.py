"""KPI history of publish/subscribe queues in Parquet, and a capacity report made of it.

    roq pipeline run kpi --history /data/kpis --cluster zk1:2181 --queue orders --seconds 3600
    roq pipeline run kpi --history /data/kpis --cluster zk1:2181 --since 7d
    roq pipeline run kpi --history /data/kpis --records 'logs/*.jsonl'
    roq pipeline run kpi --history /data/kpis --report /data/report --policy stricter.toml

Records are collected from a running cluster, come from its own history (`roq history on`; --since) or from files that `roq
queue kpis` wrote. A record that is in the history already is not added twice, so that a job that was killed can be run again.
With --since, the next run goes on behind what this one has added. One job at a time may add to a history.
The report is capacity.json and one chart per queue: load, Exchanges, latency over time, and for each --policy what it
would have done (assumptions: roq/pubsub/scaling/what_if.py).
"""

from __future__ import annotations

import argparse
import asyncio
import tomllib
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TextIO

import msgspec
from pyspark import StorageLevel
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as sf

from roq.client.cluster import Cluster, connect
from roq.errors import CallError, DeadlineExceeded, InvalidPolicy, QueueStopped, TemporaryError
from roq.ids import is_reserved
from roq.runtime.backoff import delays
from roq.spark.pipeline.capacity import Course, queue_reports, write_charts
from roq.spark.pipeline.job import arguments, is_local, local_path, read_kept, run_job, say, whole, write_atomically
from roq.spark.pipeline.kpi_records import COURSE, HISTORY, READ, read_lines, run_courses
from roq.spark.pipeline.streaming import CHECKPOINT, add_arguments, run_stream, since
from roq.wire.kpi import HISTORY_KPIS
from roq.wire.policy import Policy, policy_from_toml

KEY = ["queue", "term", "time"]
COLLECTED = "_collected"  # folder in the history for what is being recorded; Spark does not read names that begin so
UNREADABLE_SHOWN = 3
CONNECT_SECONDS = 10.0
SILENT_SECONDS = 5.0  # without a record, the stream's address is asked for again


class KpiResult(msgspec.Struct):
    """What the job did. unreadable: lines that are no KPI records."""

    history: str
    added: int
    known: int
    unreadable: int
    report: str = ""
    pictures: list[str] = []


def parser() -> argparse.ArgumentParser:
    """The arguments."""
    found = arguments("kpi", __doc__ or "")
    found.add_argument("--history", required=True, help="folder of the history (Parquet, by day)")
    found.add_argument("--records", nargs="+", default=[], metavar="FILE", help="recorded files to add (JSON lines)")
    found.add_argument("--cluster", help="collect from this cluster: ZooKeeper addresses")
    found.add_argument("--queue", action="append", default=[], help="which queue; may be repeated; default: all")
    found.add_argument("--seconds", type=whole(1), default=60, help="how long to collect (default 60)")
    found.add_argument(
        "--since", type=since, help="read the cluster's history instead, the first time from then on: 7d, a time, earliest"
    )
    add_arguments(found, "history")
    found.add_argument("--report", help="folder for the report")
    found.add_argument("--policy", action="append", default=[], help="a policy (TOML) to try; may be repeated")
    return found


def work(spark: SparkSession, given: argparse.Namespace) -> KpiResult:
    """Collect, add, report. Raises RoqError."""
    if given.policy and not given.report:
        raise CallError("--policy goes with --report: give --report FOLDER too")
    policies = [_policy(Path(path)) for path in given.policy]
    folder = local_path(given.report, "--report") if given.report else None
    if given.since or given.every is not None or given.checkpoint:
        check_kept(given)
        result = KpiResult(given.history, 0, 0, 0)
        add_kept(spark, given, result)
        if folder:
            report(spark, result, given.history, folder, policies)
        return result
    if given.cluster and not is_local(given.history):
        raise CallError(f"what is collected is first kept on this machine, not at {given.history}: record it, then --records")
    collected = local_path(given.history, "--history") / COLLECTED if is_local(given.history) else None
    if given.cluster and collected:
        say(f"recording for {given.seconds} s")
        collect(given.cluster, given.queue, given.seconds, collected / "records.jsonl")
    left = sorted(collected.glob("*.jsonl")) if collected else []
    files = [*given.records, *(str(path.absolute()) for path in left)]
    result = add(spark, given.history, files) if files else KpiResult(given.history, 0, 0, 0)
    for path in left:
        path.unlink()
    if folder:
        report(spark, result, given.history, folder, policies)
    return result


def check_kept(given: argparse.Namespace) -> None:
    """Raises CallError: what --since needs, or what does not go with it."""
    if not given.cluster or not given.since or given.records:
        raise CallError("--since, --every and --checkpoint read a cluster's history: give --since and --cluster, no --records")


def add_kept(spark: SparkSession, given: argparse.Namespace, result: KpiResult) -> None:
    """Add what the cluster's own history has of these queues (none named: of all), and count."""
    plain = given.queue and not any(set(name) & set(",*>") or name != name.strip() for name in given.queue)
    options = {
        "cluster": given.cluster,
        "queue": HISTORY_KPIS,
        "startingPosition": given.since,
        "topics": ",".join(given.queue) if plain else ">",
    }

    def append(batch: DataFrame, number: int) -> None:
        lines = batch.select(sf.col("payload").cast("string").alias("value")).mapInArrow(read_lines, READ)
        if given.queue:
            lines = lines.where(sf.col("queue").isin(given.queue) | sf.col("unreadable").isNotNull())
        found = add_rows(batch.sparkSession, given.history, lines)
        result.added, result.known = result.added + found.added, result.known + found.known
        result.unreadable += found.unreadable
        say(f"batch {number}: {result.added:,} records added so far, {result.known:,} were there")

    source = spark.readStream.format("roq").options(**options).load()
    run_stream("kpi", source, append, given.checkpoint or f"{given.history}/{CHECKPOINT}", given.every)


def collect(zookeeper: str, queues: Sequence[str], seconds: float, into: Path) -> int:
    """Append the records of these queues (none named: of all there are) to a file; how many. A queue whose Monitor is away
    is asked again. Raises RoqError: no cluster, no such queue, not one record within the time."""
    into.parent.mkdir(parents=True, exist_ok=True)
    with into.open("a") as lines:
        return asyncio.run(_collect(zookeeper, queues, seconds, lines))


async def _collect(zookeeper: str, queues: Sequence[str], seconds: float, lines: TextIO) -> int:
    async with connect(zookeeper, connect_seconds=CONNECT_SECONDS) as cluster:
        known = [queue.record.name for queue in await cluster.queues()]
        chosen = list(queues) or [name for name in known if not is_reserved(name)]
        if not chosen:
            raise CallError("the cluster has no queues")
        for name in chosen:
            await cluster.queue(name)  # raises QueueNotFound
        counts = await asyncio.gather(*(_record(cluster, name, seconds, lines) for name in chosen))
    if not sum(counts):
        raise DeadlineExceeded(f"no KPI record of {', '.join(chosen)} within {seconds:g} s")
    return sum(counts)


async def _record(cluster: Cluster, queue: str, seconds: float, lines: TextIO) -> int:
    loop, count, waits = asyncio.get_running_loop(), 0, delays()
    end = loop.time() + seconds
    while (left := end - loop.time()) > 0:
        stream = cluster.kpis(queue)
        try:
            while True:
                left = max(0.0, end - loop.time())
                kpi = await asyncio.wait_for(anext(stream), min(left, SILENT_SECONDS))
                lines.write(msgspec.json.encode(kpi).decode() + "\n")
                lines.flush()
                count, waits = count + 1, delays()
        except TimeoutError:
            continue  # its Monitor may have moved
        except (TemporaryError, QueueStopped):
            await asyncio.sleep(min(left, next(waits)))
    return count


def add(spark: SparkSession, history: str, files: list[str]) -> KpiResult:
    """Add what is in these files and not in the history."""
    return add_rows(spark, history, spark.read.text(files).mapInArrow(read_lines, READ))


def add_rows(spark: SparkSession, history: str, lines: DataFrame) -> KpiResult:
    """Add rows of READ that are not in the history."""
    lines = lines.persist(StorageLevel.MEMORY_AND_DISK)
    try:
        total = lines.agg(
            sf.count("unreadable").alias("unreadable"),
            sf.count_distinct(*KEY).alias("records"),
            sf.collect_set("day").alias("days"),
        ).first()
        assert total is not None  # an aggregate without groups has one row
        if total["unreadable"]:
            for row in lines.where("unreadable IS NOT NULL").limit(UNREADABLE_SHOWN).collect():
                say(f"left out, {row['unreadable']}")
        known = read_kept(spark, history, HISTORY).where(sf.col("day").isin(total["days"])).select(*KEY)
        new = lines.where("unreadable IS NULL").dropDuplicates(KEY).join(known, KEY, "left_anti").select(*HISTORY.names)
        new.persist(StorageLevel.MEMORY_AND_DISK)
        added = new.count()
        if added:
            tidy = new.hint("rebalance", "day").sortWithinPartitions("day", "queue", "time")
            tidy.write.mode("append").partitionBy("day").parquet(history)
        new.unpersist()
        return KpiResult(history, added, total["records"] - added, total["unreadable"])
    finally:
        lines.unpersist()


def report(spark: SparkSession, result: KpiResult, history: str, folder: Path, policies: list[tuple[str, Policy]]) -> None:
    """Write the report and name it in the result. Raises CallError: the history is empty."""
    records = read_kept(spark, history, HISTORY)
    if records.isEmpty():
        raise CallError(f"the history {history} is empty")
    ordered = records.repartition("queue").sortWithinPartitions("queue", "time")
    courses = [
        Course(name, rules, ordered.mapInArrow(partial(run_courses, policy=rules), COURSE).persist())
        for name, rules in policies
    ]
    try:
        found = queue_reports(records, courses)
    finally:
        for course in courses:
            course.steps.unpersist()
    reports = [each.report for each in found]
    result.pictures = write_charts(found, folder)
    result.report = str(folder / "capacity.json")
    write_atomically(Path(result.report), msgspec.json.format(msgspec.json.encode(reports), indent=2).decode() + "\n")
    for each in reports:
        say(each.in_words())


def _policy(path: Path) -> tuple[str, Policy]:
    try:
        return path.stem, policy_from_toml(path.read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise InvalidPolicy(f"can't read policy file {path}: {error}") from None


def main() -> None:
    """Run the job."""
    run_job("kpi", parser(), work)


if __name__ == "__main__":
    main()
