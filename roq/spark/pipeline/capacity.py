"""A capacity report: what each queue carried, with what, how fast, and what other policies would have used.

A record of the KPI history stands for one second, also where others are missing. From top to bottom: the report, Spark's part
(one row of numbers per record, then per queue, and per time bucket), the chart of each queue: load, Exchanges (as they were,
and under each policy), latency, processor; over time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import msgspec
from pyspark.sql import Column, DataFrame, Row, Window
from pyspark.sql import functions as sf

from roq.pubsub.scaling.decide import GAP_SECONDS
from roq.spark.pipeline.job import moment, write_atomically
from roq.tools.charts import ChartLine, Panel, Point, draw
from roq.wire.policy import Policy

SPARSE_SHARE = 0.1  # of all records; with more of them far apart, a policy's decisions are not what it would have decided
BUCKETS = 400  # points of a line in a chart
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
# A colour means one thing in the whole chart.
PUBLISHED, PUBLISHED_MOST, DELIVERED = "#2458b8", "#c3d5f6", "#35a853"
AS_IT_WAS, CPU = "#b4b9bf", "#37474f"
P99, P50 = "#9c1c1c", "#ee8a80"
POLICY_COLOURS = ("#d95f02", "#7d3c98", "#0097a7", "#d81b7a", "#b8960c", "#6d4c2f")
POLICY_DASHES = ("", "7 3", "2 3", "9 3 2 3")  # with the colours, 12 policies look different
APART, APART_MOST = 2.0, 12.0  # pixels between policies of the same value, and between the first and the last
GAP_BUCKETS = 3  # so many without a record are not bridged by a line


class SpreadOverTime(msgspec.Struct, frozen=True):
    """Of one number over time. highest_at: when it was highest."""

    mean: float
    median: float
    p95: float
    highest: float
    highest_at: str


class DecisionTaken(msgspec.Struct, frozen=True):
    """One decision. action: scale-out, scale-in, rebalance, hold."""

    at: str
    action: str
    cause: str


class Trial(msgspec.Struct, frozen=True):
    """What a policy would have done. exchange_hours: Exchanges times hours. over_seconds: records in which one of its limits
    would have been exceeded; recorded_over_seconds: in which it really was."""

    policy: str
    rules: Policy
    exchanges_least: int
    exchanges_mean: float
    exchanges_most: int
    exchange_hours: float
    busiest_exchange_per_second: float
    over_seconds: int
    recorded_over_seconds: int
    actions: dict[str, int]
    decisions: list[DecisionTaken]


class QueueReport(msgspec.Struct, frozen=True):
    """One queue. Latencies and lags are those of the slowest subscriber in each record. missing_seconds: between the first and
    the last record, but without one; hours and seconds don't count them. sparse_records: that came more than GAP_SECONDS after
    the one before, where policies forget what they had seen. lost: what was added while it was recorded. None: there was no
    such member."""

    queue: str
    begin: str
    end: str
    records: int
    missing_seconds: int
    sparse_records: int
    messages_per_second: SpreadOverTime
    bytes_per_second: SpreadOverTime
    delivered_per_second: SpreadOverTime
    exchanges_least: int
    exchanges_mean: float
    exchanges_most: int
    exchange_hours: float
    busiest_exchange_per_second: SpreadOverTime | None
    busiest_host_cpu: SpreadOverTime | None
    busiest_host_memory: SpreadOverTime | None
    publishers_most: int
    subscribers_most: int
    latency_p50_seconds: SpreadOverTime | None
    latency_p99_seconds: SpreadOverTime | None
    lag_seconds: SpreadOverTime | None
    lost: int
    trials: list[Trial]

    def in_words(self) -> str:
        """Some lines for people."""
        load, latency = self.messages_per_second, self.latency_p99_seconds
        lines = [
            f"{self.queue}: {self.begin} to {self.end}, {self.records} records",
            *self._warnings(),
            f"  load {load.mean:,.0f} messages/s on average, {load.highest:,.0f} at most ({load.highest_at})",
            f"  Exchanges {self.exchanges_least} to {self.exchanges_most}, {self.exchange_hours:,.2f} Exchange hours",
            f"  p99 latency {latency.p95 * 1000:,.1f} ms in 95 % of the time, {latency.highest * 1000:,.1f} ms at most"
            if latency
            else "  no subscribers",
            f"  {self.lost:,} messages lost",
        ]
        for trial in self.trials:
            actions = ", ".join(f"{count} {action}" for action, count in sorted(trial.actions.items())) or "no decision"
            lines.append(
                f"  policy {trial.policy}: Exchanges {trial.exchanges_least} to {trial.exchanges_most},"
                f" {trial.exchange_hours:,.2f} Exchange hours; over a limit {trial.over_seconds:,} s"
                f" (as it was: {trial.recorded_over_seconds:,} s); {actions}"
            )
        return "\n".join(lines)

    def _warnings(self) -> list[str]:
        """What the numbers that follow can't tell."""
        found = []
        if self.missing_seconds:
            found.append(f"  {self.missing_seconds:,} s have no record: hours and seconds below are those of the records alone")
        if self.trials and self.sparse_records > SPARSE_SHARE * self.records:
            found.append(
                f"  warning: {self.sparse_records:,} records came more than {GAP_SECONDS:g} s after the one before. Policies"
                " decide on records in a row: what they would have done is not known from these"
            )
        return found


class Course(NamedTuple):
    """A policy and what it would have done: rows of kpi_records.COURSE."""

    name: str
    policy: Policy
    steps: DataFrame


class CapacityFindings(NamedTuple):
    """A report, and what its chart is drawn from: per time bucket of `seconds`, in order, what was recorded, and for each
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
    shown: dict[str, list[DecisionTaken]] = {}
    for row in (
        decisions.withColumn("place", place).where(sf.col("place") <= DECISIONS_TOLD).orderBy("queue", "place").collect()
    ):
        action, _, cause = row["decision"].partition(": ")
        shown.setdefault(row["queue"], []).append(DecisionTaken(moment(row["time"]), action, cause))
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
            decisions=shown.get(row["queue"], []),
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


def write_charts(found: Iterable[CapacityFindings], folder: Path) -> list[str]:
    """capacity-QUEUE.svg of each; their paths."""
    paths = []
    for each in found:
        path = folder / f"capacity-{quote(each.report.queue, safe='')}.svg"
        write_atomically(path, chart(each))
        paths.append(str(path))
    return paths


def chart(found: CapacityFindings) -> str:
    """As SVG."""
    gap = GAP_BUCKETS * found.seconds

    def points(column: str, scale: float = 1.0, rows: list[Row] = found.points) -> list[Point]:
        return [(row["at"], row[column] * scale) for row in rows if row[column] is not None]

    tried = [
        ChartLine(
            f"policy {name}",
            POLICY_COLOURS[number % len(POLICY_COLOURS)],
            points("exchanges", rows=rows),
            gap,
            steps=True,
            dashes=POLICY_DASHES[number % len(POLICY_DASHES)],
            raised=raised,
        )
        for number, ((name, rows), raised) in enumerate(zip(found.steps, apart(len(found.steps)), strict=True))
    ]
    load = [
        ChartLine("published", PUBLISHED, points("messages"), gap),
        ChartLine("delivered", DELIVERED, points("delivered"), gap, dashes="4 3"),
    ]
    if found.seconds > 1:  # else each point is one record, and its mean is its highest
        busiest = f"published, highest within {found.seconds:,.0f} s"
        load = [ChartLine(busiest, PUBLISHED_MOST, points("messages_most"), gap, filled=True), *load]
    panels = [
        Panel("Load (messages/s)", load),
        Panel(
            "Exchanges", [ChartLine("as it was", AS_IT_WAS, points("exchanges"), gap, steps=True, width=6.0), *tried], "whole"
        ),
        Panel(
            "Latency of the slowest subscriber (ms)",
            [
                ChartLine("p99, highest", P99, points("p99", 1000.0), gap),
                ChartLine("p50, mean", P50, points("p50", 1000.0), gap),
            ],
            "logarithmic",
        ),
        Panel("Busiest host (% of its CPU)", [ChartLine("highest", CPU, points("cpu", 100.0), gap)]),
    ]
    report = found.report
    return draw(f"Queue {report.queue}", f"{report.begin} to {report.end}", panels, found.begin, found.end)


def apart(count: int) -> list[float]:
    """Pixels upwards (or downwards) for each of so many lines that may lie on each other."""
    step = min(APART, APART_MOST / max(1, count - 1))
    return [step * ((count - 1) / 2 - number) for number in range(count)]
