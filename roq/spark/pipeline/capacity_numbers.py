"""Spark's part of a capacity report: one row of numbers per record, then per queue, and per time bucket for the picture."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from pyspark.sql import Column, DataFrame, Row, Window
from pyspark.sql import functions as sf

from roq.pubsub.scaling.decide import GAP_SECONDS
from roq.spark.pipeline.capacity import DecisionTaken, QueueReport, SpreadOverTime, Trial
from roq.spark.pipeline.job import moment
from roq.wire.policy import Policy

BUCKETS = 400  # points of a line in a picture
DECISIONS_TOLD = 100  # of one queue and policy, the first ones; all are counted
ACTIONS = ("scale-out", "rebalance", "scale-in", "hold")
MEDIAN, P95 = 0.5, 0.95
SPREADS = (
    "messages_per_second",
    "bytes_per_second",
    "delivered_per_second",
    "busiest_exchange_per_second",
    "busiest_host_cpu",
    "busiest_host_memory",
    "latency_p50_seconds",
    "latency_p99_seconds",
    "lag_seconds",
)


class Course(NamedTuple):
    """A policy and what it would have done: rows of kpi_records.COURSE."""

    name: str
    policy: Policy
    steps: DataFrame


class CapacityFindings(NamedTuple):
    """A report, and what its picture is drawn from: per time bucket of `seconds`, in order, what was recorded, and for each
    policy its Exchanges."""

    report: QueueReport
    begin: float
    end: float
    seconds: float
    points: list[Row]
    steps: list[tuple[str, list[Row]]]


def queue_reports(records: DataFrame, courses: list[Course]) -> list[CapacityFindings]:
    """Of every queue, by name."""
    rows = _numbers(records).persist()
    try:
        summaries = {row["queue"]: row for row in _summaries(rows)}
        widths = rows.groupBy("queue").agg(sf.min("time").alias("begin"), _bucket_seconds().alias("width"))
        points = _by_queue(rows, widths, _point_measures())
        steps = [_by_queue(course.steps, widths, [sf.max("exchanges").alias("exchanges")]) for course in courses]
        trials = [_trials(course) for course in courses]
    finally:
        rows.unpersist()
    found = []
    for queue, summary in sorted(summaries.items()):
        report = _report(summary, [trial[queue] for trial in trials if queue in trial])
        lines = [(course.name, step.get(queue, [])) for course, step in zip(courses, steps, strict=True)]
        found.append(CapacityFindings(report, summary["begin"], summary["end"], summary["width"], points[queue], lines))
    return found


def _numbers(records: DataFrame) -> DataFrame:
    """One row per record: what the report is about."""

    def most(members: str, field: str) -> Column:
        return sf.array_max(sf.transform(members, lambda each: each[field]))

    return records.select(
        *("queue", "term", "time", "messages_per_second", "bytes_per_second", "delivered_per_second", "lost"),
        sf.size(sf.filter("exchanges", lambda each: each["state"] == "active")).alias("exchanges"),
        most("exchanges", "messages_per_second").alias("busiest_exchange_per_second"),
        most("hosts", "cpu_fraction").alias("busiest_host_cpu"),
        most("hosts", "memory_fraction").alias("busiest_host_memory"),
        sf.size("publishers").alias("publishers"),
        sf.size("subscribers").alias("subscribers"),
        most("subscribers", "latency_p50_seconds").alias("latency_p50_seconds"),
        most("subscribers", "latency_p99_seconds").alias("latency_p99_seconds"),
        most("subscribers", "lag_seconds").alias("lag_seconds"),
    )


def _bucket_seconds() -> Column:
    """Length of a queue's time buckets: whole seconds, so that there are at most about BUCKETS."""
    return sf.greatest(sf.lit(1.0), sf.ceil((sf.max("time") - sf.min("time")) / BUCKETS).cast("double"))


def _summaries(rows: DataFrame) -> list[Row]:
    per_queue = Window.partitionBy("queue").orderBy("time", "term")
    before = sf.lag("lost").over(per_queue)
    goes_on = (sf.lag("term").over(per_queue) == sf.col("term")) & (sf.col("lost") >= before)  # else it counts from 0 again
    added = sf.when(before.isNull(), 0).when(goes_on, sf.col("lost") - before).otherwise(sf.col("lost"))
    since = sf.col("time") - sf.lag("time").over(per_queue)
    missing = sf.greatest(sf.lit(0.0), sf.round(since) - 1)
    measures = [
        sf.struct(
            sf.avg(name).alias("mean"),
            sf.percentile_approx(name, [MEDIAN, P95]).alias("levels"),
            sf.max(sf.struct(sf.col(name), -sf.col("time"))).alias("highest"),  # the first time, if there are several
        ).alias(name)
        for name in SPREADS
    ]
    grouped = rows.withColumns({"added": added, "missing": missing, "sparse": since > GAP_SECONDS}).groupBy("queue")
    summary = grouped.agg(
        sf.min("time").alias("begin"),
        sf.max("time").alias("end"),
        _bucket_seconds().alias("width"),
        sf.count("*").alias("records"),
        sf.sum("missing").cast("long").alias("missing"),
        sf.count_if("sparse").alias("sparse"),
        sf.min("exchanges").alias("exchanges_least"),
        sf.avg("exchanges").alias("exchanges_mean"),
        sf.max("exchanges").alias("exchanges_most"),
        sf.sum("exchanges").alias("exchange_seconds"),
        sf.max("publishers").alias("publishers"),
        sf.max("subscribers").alias("subscribers"),
        sf.sum("added").cast("long").alias("lost"),
        *measures,
    )
    return list(summary.collect())


def _point_measures() -> list[Column]:
    return [
        sf.avg("messages_per_second").alias("messages"),
        sf.max("messages_per_second").alias("messages_most"),
        sf.avg("delivered_per_second").alias("delivered"),
        sf.max("exchanges").alias("exchanges"),
        sf.max("busiest_host_cpu").alias("cpu"),
        sf.avg("latency_p50_seconds").alias("p50"),
        sf.max("latency_p99_seconds").alias("p99"),
    ]


def _by_queue(rows: DataFrame, widths: DataFrame, measures: list[Column]) -> dict[str, list[Row]]:
    """Per queue its buckets in order; `at` is where one begins."""
    bucket = sf.floor((sf.col("time") - sf.col("begin")) / sf.col("width")).alias("bucket")
    at = (sf.min("begin") + sf.col("bucket") * sf.min("width")).alias("at")
    joined = rows.join(sf.broadcast(widths), "queue").withColumn("bucket", bucket)
    found: dict[str, list[Row]] = {}
    for row in joined.groupBy("queue", "bucket").agg(at, *measures).orderBy("queue", "bucket").collect():
        found.setdefault(row["queue"], []).append(row)
    return found


def _trials(course: Course) -> dict[str, Trial]:
    """Per queue."""
    decisions = course.steps.select("queue", "time", sf.explode("decisions").alias("decision"))
    place = sf.row_number().over(Window.partitionBy("queue").orderBy("time"))
    told: dict[str, list[DecisionTaken]] = {}
    for row in (
        decisions.withColumn("place", place).where(sf.col("place") <= DECISIONS_TOLD).orderBy("queue", "place").collect()
    ):
        action, _, cause = row["decision"].partition(": ")
        told.setdefault(row["queue"], []).append(DecisionTaken(moment(row["time"]), action, cause))
    actions = {action: sf.filter("decisions", _begins_with(f"{action}:")) for action in ACTIONS}
    totals = course.steps.groupBy("queue").agg(
        sf.min("exchanges").alias("least"),
        sf.avg("exchanges").alias("mean"),
        sf.max("exchanges").alias("most"),
        sf.sum("exchanges").alias("seconds"),
        sf.max("busiest_exchange").alias("busiest"),
        sf.count_if("over").alias("over"),
        sf.count_if("recorded_over").alias("recorded_over"),
        *(sf.sum(sf.size(found)).alias(action) for action, found in actions.items()),
    )
    return {
        row["queue"]: Trial(
            policy=course.name,
            rules=course.policy,
            exchanges_least=row["least"],
            exchanges_mean=round(row["mean"], 3),
            exchanges_most=row["most"],
            exchange_hours=round(row["seconds"] / 3600, 4),
            busiest_exchange_per_second=row["busiest"],
            over_seconds=row["over"],
            recorded_over_seconds=row["recorded_over"],
            actions={action: row[action] for action in ACTIONS if row[action]},
            decisions=told.get(row["queue"], []),
        )
        for row in totals.collect()
    }


def _begins_with(text: str) -> Callable[[Column], Column]:
    return lambda each: each.startswith(text)


def _report(row: Row, trials: list[Trial]) -> QueueReport:
    spreads: dict[str, Any] = {name: _spread(row[name]) for name in SPREADS}
    return QueueReport(
        queue=row["queue"],
        begin=moment(row["begin"]),
        end=moment(row["end"]),
        records=row["records"],
        missing_seconds=row["missing"] or 0,
        sparse_records=row["sparse"],
        exchanges_least=row["exchanges_least"],
        exchanges_mean=round(row["exchanges_mean"], 3),
        exchanges_most=row["exchanges_most"],
        exchange_hours=round(row["exchange_seconds"] / 3600, 4),
        publishers_most=row["publishers"],
        subscribers_most=row["subscribers"],
        lost=row["lost"] or 0,
        trials=trials,
        **spreads,
    )


def _spread(one: Row) -> SpreadOverTime | None:
    if one["mean"] is None:
        return None
    median, p95 = one["levels"]
    highest, before = one["highest"]
    return SpreadOverTime(one["mean"], median, p95, highest, moment(-before))
