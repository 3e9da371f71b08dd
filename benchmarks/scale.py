"""Throughput with 1, 2 and 3 Exchanges on as many hosts, each held to a part of one processor, so that the machine is not the
limit: `python -m benchmarks.scale [--cpus 0.1] [--size 10000] [--seconds 6] [--rounds 3] [--chart FILE.svg]`.

Hosts are containers (Docker, root; `make image` first), publishers and subscribers run beside them without a limit: a pair for
each Exchange, overflow "block", so that nobody is faster than its Exchange. Rounds are interleaved, medians count. Linear is
what one Exchange gave, times their number.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
from pathlib import Path

from roq.client.cluster import Cluster
from roq.testing import DockerCluster
from roq.tools.bench.cpu import Pids
from roq.tools.bench.harness import CLIENT_MODULE, IDLE_SECONDS, PubSubResult, drive
from roq.tools.bench.load import Load
from roq.tools.charts import ChartLine, Panel, draw, numbers

EXCHANGES = (1, 2, 3)
GOAL = 0.85
BLUE, GREY = "#1f618d", "#808080"


async def run(cluster: Cluster, address: str, exchanges: int, size: int, seconds: float) -> PubSubResult:
    """One run through a queue of its own. Raises SystemExit if something was lost: the figure would mean nothing."""
    queue = f"scale-{exchanges}"
    await cluster.create_queue(queue, overflow="block")
    try:
        for _ in range(exchanges - 1):
            await cluster.create_exchange(queue)
        load = Load(publishers=exchanges, subscribers=exchanges, size=size, duration=seconds, pairs=True)
        result = await drive(load, "roq", address, queue, CLIENT_MODULE, _nobody, IDLE_SECONDS)
    finally:
        await cluster.remove_queue(queue)
    if result.lost or result.duplicated or result.reordered:
        raise SystemExit(
            f"{exchanges} Exchanges: {result.lost} lost, {result.duplicated} twice, {result.reordered} out of order"
        )
    return result


async def _nobody() -> Pids:
    """Whose processor time is counted: it is in containers."""
    return {}


async def measured(cpus: float, size: int, seconds: float, rounds: int) -> dict[int, list[float]]:
    """Messages/s by number of Exchanges."""
    found: dict[int, list[float]] = {number: [] for number in EXCHANGES}
    limited = DockerCluster(gcms=1, hcms=len(EXCHANGES), exchanges_max=1, host_cpus=cpus)
    async with limited as machines, machines.connect() as cluster:
        for number in range(rounds):
            for exchanges in EXCHANGES:
                result = await run(cluster, machines.zookeeper, exchanges, size, seconds)
                found[exchanges].append(result.throughput)
                busy = f"{result.foreign_cores:.2f} processors busy beside publishers and subscribers"
                print(f"round {number + 1}, {exchanges} Exchanges: {result.throughput:,.0f}/s, {busy}", file=sys.stderr)
    return found


def table(found: dict[int, list[float]]) -> str:
    """In Markdown."""
    one = statistics.median(found[1])
    lines = ["| Exchanges | messages/s | spread | of linear |", "| --- | --- | --- | --- |"]
    for exchanges, runs in found.items():
        median = statistics.median(runs)
        part = median / (one * exchanges)
        missed = "" if part >= GOAL else f" (goal {GOAL}: missed)"
        lines.append(f"| {exchanges} | {median:,.0f} | {min(runs):,.0f} to {max(runs):,.0f} | {part:.2f}{missed} |")
    return "\n".join(lines)


def chart(found: dict[int, list[float]], below: str) -> str:
    """As SVG: medians, and the line through the first."""
    medians = [(0.0, 0.0), *((float(number), statistics.median(runs)) for number, runs in found.items())]
    one, last = medians[1][1], medians[-1][0]
    lines = [
        ChartLine("linear", GREY, [(0.0, 0.0), (last, one * last)], dashes="4 3"),
        ChartLine("measured", BLUE, medians, width=2.2),
    ]
    return draw(
        "Throughput by Exchanges, one on each host", below, [Panel("messages per second", lines)], 0.0, last, across=numbers
    )


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scale", description=__doc__)
    parser.add_argument("--cpus", type=float, default=0.1, help="of each host (0.1)")
    parser.add_argument("--size", type=int, default=10_000, help="bytes of a message (10,000)")
    parser.add_argument("--seconds", type=float, default=6.0, help="of a run (6)")
    parser.add_argument("--rounds", type=int, default=3, help="of each number of Exchanges; medians count (3)")
    parser.add_argument("--chart", type=Path, help="write a picture to this file")
    arguments = parser.parse_args()
    found = asyncio.run(measured(arguments.cpus, arguments.size, arguments.seconds, arguments.rounds))
    print(table(found))
    if arguments.chart is not None:
        below = f"hosts held to {arguments.cpus:g} of a processor each; messages of {arguments.size:,} bytes"
        arguments.chart.write_text(chart(found, below))


if __name__ == "__main__":
    main()
