"""The picture of one queue's capacity: load, Exchanges (as they were, and under each policy), latency, processor; over time."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from urllib.parse import quote

from pyspark.sql import Row

from roq.spark.pipeline.capacity_numbers import Found
from roq.spark.pipeline.job import write_whole
from roq.spark.pipeline.picture import Line, Panel, Point, draw

BLUE, GREEN, ORANGE, RED = "#2f6fde", "#2a9d4a", "#e08a1e", "#c63737"
POLICY_COLOURS = (ORANGE, "#7d3c98", GREEN, RED, "#117a8b")
GAP_BUCKETS = 3  # so many without a record are not bridged by a line


def write_pictures(found: Iterable[Found], folder: Path) -> list[str]:
    """capacity-QUEUE.svg of each; their paths."""
    paths = []
    for each in found:
        path = folder / f"capacity-{quote(each.report.queue, safe='')}.svg"
        write_whole(path, picture(each))
        paths.append(str(path))
    return paths


def picture(found: Found) -> str:
    """As SVG."""
    gap = GAP_BUCKETS * found.seconds

    def line(name: str, colour: str, column: str, rows: list[Row] = found.points, *, scale: float = 1.0) -> Line:
        points: list[Point] = [(row["at"], row[column] * scale) for row in rows if row[column] is not None]
        return Line(name, colour, points, gap, steps=column == "exchanges")

    tried = [
        line(f"policy {name}", POLICY_COLOURS[number % len(POLICY_COLOURS)], "exchanges", rows)
        for number, (name, rows) in enumerate(found.steps)
    ]
    panels = [
        Panel(
            "Load (messages/s)",
            [
                line("highest", "#b9cdf5", "messages_most"),
                line("published", BLUE, "messages"),
                line("delivered", GREEN, "delivered"),
            ],
        ),
        Panel("Exchanges", [line("as it was", BLUE, "exchanges"), *tried]),
        Panel(
            "Latency of the slowest subscriber (ms)",
            [line("p99, highest", RED, "p99", scale=1000.0), line("p50, mean", BLUE, "p50", scale=1000.0)],
        ),
        Panel("Busiest host (% of its CPU)", [line("highest", ORANGE, "cpu", scale=100.0)]),
    ]
    report = found.report
    return draw(f"Queue {report.queue}: {report.begin} to {report.end}", panels, found.begin, found.end)
