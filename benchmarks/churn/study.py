"""What Blizzard evaluated, done again: persistence (section 3.2), throughput (3.3), and that nothing else is ever lost."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from statistics import mean

import msgspec

from benchmarks.churn.persistence import READINGS, lost_within
from benchmarks.churn.simulation import Churned, Scene, churn, persist
from roq.tools.charts import ChartLine, Panel, draw, numbers, since

NODES = (6, 12, 24, 57)
CLIENTS = (1, 2, 4, 8, 16, 32, 64)
FAILURES = (0.0, 0.0001, 0.001, 0.003, 0.01)  # per second and node
OPERATIONS, QUICK_OPERATIONS = 100, 20
HOUR = 3600.0
STEPS = 60
TWO_DAYS = 48 * HOUR
COLOURS = ("#1f618d", "#c0392b", "#1e8449", "#7d3c98")


class Study(msgspec.Struct, frozen=True):
    """churned: (clients, failure, what happened), 57 nodes. throughput: (nodes, clients, operations per second), no failures.
    lost: (seconds, share of the values lost) at 1 %/s."""

    churned: list[tuple[int, float, Churned]]
    throughput: list[tuple[int, int, float]]
    lost: list[tuple[float, float]]


def study(operations: int, hours: float, values: int, seeds: int, tell: Callable[[str], None]) -> Study:
    """Everything. seeds: runs of the persistence curve, averaged."""
    churned = []
    for clients in (1, 16, 64):
        for failure in FAILURES:
            found = churn(Scene(57, clients, operations, failure))
            churned.append((clients, failure, found))
            tell(f"57 nodes, {clients} clients, {failure:.2%}/s: {found}")
    throughput = []
    for nodes in NODES:
        for clients in CLIENTS:
            found = churn(Scene(nodes, clients, operations))
            throughput.append((nodes, clients, clients * 200 / (found.enqueue_seconds + found.dequeue_seconds)))
        tell(f"{nodes} nodes: {throughput[-1][2]:,.0f} operations/s with {throughput[-1][1]} clients")
    curves = [persist(Scene(57, failure=0.01, seed=seed), values, hours * HOUR) for seed in range(seeds)]
    lost = [(points[0][0], mean(point[1] for point in points)) for points in zip(*curves, strict=False)]
    tell(f"lost after {lost[-1][0] / HOUR:.1f} h at 1 %/s: {lost[-1][1]:.1%}")
    return Study(churned, throughput, lost)


def rows(found: Study) -> list[list[str]]:
    """The churn table."""
    return [
        [
            str(clients),
            f"{failure:.2%}",
            str(one.failures),
            f"{one.acknowledged:,}",
            str(one.lost),
            "met" if one.lost <= one.gone else "MISSED",
            f"{clients * 100 / one.enqueue_seconds:,.0f}",
            f"{one.displacement:.1f}",
        ]
        for clients, failure, one in found.churned
    ]


COLUMNS = (
    "clients",
    "failures per second and node",
    "nodes failed",
    "acknowledged",
    "lost",
    "only with all copies gone at once",
    "enqueues/s",
    "displacement",
)


def charts(found: Study) -> dict[str, str]:
    """SVG by file name."""
    end = max(found.lost[-1][0], HOUR)
    loss = [ChartLine("simulated, 57 nodes", COLOURS[0], found.lost), *_computed(0.01, end)]
    rare = [msgspec.structs.replace(one, points=[(t, 100 * y) for t, y in one.points]) for one in _computed(0.0001, TWO_DAYS)]
    through = [
        ChartLine(f"{nodes} nodes", colour, [(clients, rate) for n, clients, rate in found.throughput if n == nodes])
        for nodes, colour in zip(NODES, COLOURS, strict=False)
    ]
    lost, often, seldom = "A value with 3 copies is lost", "nodes fail at 1 %/s", "nodes fail at 0.01 %/s (computed)"
    moved = "Enqueues and dequeues of 100 KB, simulated"
    return {
        "blizzard-loss.svg": draw(lost, often, [Panel("probability", loss)], 0.0, end, across=since),
        "blizzard-loss-rare.svg": draw(lost, seldom, [Panel("percent", rare)], 0.0, TWO_DAYS, across=since),
        "blizzard-throughput.svg": draw(
            moved, "by clients", [Panel("operations/s", through)], 0.0, CLIENTS[-1], across=numbers
        ),
    }


def _computed(failure: float, end: float) -> list[ChartLine]:
    times = [end * step / STEPS for step in range(STEPS + 1)]
    return [
        ChartLine(one.name, colour, [(t, lost_within(one, failure, t)) for t in times], dashes="6 4")
        for one, colour in zip(READINGS, COLOURS[1:], strict=False)
    ]


def save(found: Study, folder: Path) -> None:
    """Write the charts."""
    for name, text in charts(found).items():
        (folder / name).write_text(text)
