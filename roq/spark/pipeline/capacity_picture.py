"""The picture of one queue's capacity: load, Exchanges (as they were, and under each policy), latency, processor; over time."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from urllib.parse import quote

from pyspark.sql import Row

from roq.spark.pipeline.capacity_numbers import CapacityFindings
from roq.spark.pipeline.job import write_whole
from roq.tools.charts import ChartLine, Panel, Point, draw

# A colour means one thing in the whole picture.
PUBLISHED, PUBLISHED_MOST, DELIVERED = "#2458b8", "#c3d5f6", "#35a853"
AS_IT_WAS, CPU = "#b4b9bf", "#37474f"
P99, P50 = "#9c1c1c", "#ee8a80"
POLICY_COLOURS = ("#d95f02", "#7d3c98", "#0097a7", "#d81b7a", "#b8960c", "#6d4c2f")
POLICY_DASHES = ("", "7 3", "2 3", "9 3 2 3")  # with the colours, 12 policies look different
APART, APART_MOST = 2.0, 12.0  # pixels between policies of the same value, and between the first and the last
GAP_BUCKETS = 3  # so many without a record are not bridged by a line


def write_pictures(found: Iterable[CapacityFindings], folder: Path) -> list[str]:
    """capacity-QUEUE.svg of each; their paths."""
    paths = []
    for each in found:
        path = folder / f"capacity-{quote(each.report.queue, safe='')}.svg"
        write_whole(path, picture(each))
        paths.append(str(path))
    return paths


def picture(found: CapacityFindings) -> str:
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
