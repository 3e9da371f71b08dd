"""`python -m benchmarks.overhead [--rounds 7] [--seconds 4]`: what metrics and tracing cost, as ratios to neither.

One publisher to one subscriber, flat out, 100 bytes, on a cluster of its own whose host serves metrics; in each round every way
once, the order turned by one from round to round, so that what the machine does meanwhile hits all alike. Ways:

    plain     nobody asks for metrics, `roq.tracing` is not imported
    scraped   each host's /metrics is read once a second
    off       `roq.tracing` is imported, instrumented, and put back
    sampled   instrumented; OpenTelemetry's SDK keeps one trace in a hundred
    on        instrumented; it keeps all. Its exporter throws them away

A ratio is the median of the rounds' ratios to that round's plain; beside it the lowest and the highest. Markdown on stdout.
Not covered: exporters; a Prometheus's own work.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
import tempfile
import urllib.request
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import msgspec
import uvloop

from benchmarks.machine import QUIET_SECONDS, quiet
from benchmarks.report import markdown
from benchmarks.traced_client import OFF, ON, PLAIN, SAMPLED, WAY
from roq.client.cluster import connect
from roq.ids import new_token
from roq.tools.bench.cpu import Pids
from roq.tools.bench.harness import IDLE_SECONDS, PubSubResult, drive
from roq.tools.bench.load import Load
from roq.tools.local.cluster import LocalCluster
from roq.wire.assignment import Overflow

SCRAPED = "scraped"
WAYS = (PLAIN, SCRAPED, OFF, SAMPLED, ON)
LOADS = {
    "`publish`, one by one": Load(publishers=1, subscribers=1, size=100),
    "`publish_many` of 100": Load(publishers=1, subscribers=1, size=100, batch=100),
}
METRICS_PORT = 9464
SCRAPE_SECONDS = 1.0
CLIENT = "benchmarks.traced_client"
Found = Mapping[str, Sequence[float]]  # messages per second of each round, by way


async def main(rounds: int, seconds: float, patience_seconds: float) -> None:
    """All loads, all ways; the report goes to standard output."""
    with tempfile.TemporaryDirectory(prefix="roq-overhead-") as folder:
        async with LocalCluster(Path(folder), hosts=1, metrics_port=METRICS_PORT) as cluster:
            for name, load in LOADS.items():
                timed = msgspec.structs.replace(load, duration=seconds)
                found = await _rounds(cluster, timed, rounds, name, patience_seconds)
                print(f"\n{name}, medians of {rounds} rounds of {seconds:g} s:\n")
                print(markdown(("way", "messages/s", "of plain", "lowest", "highest"), rows(found)), flush=True)


async def _rounds(cluster: LocalCluster, load: Load, rounds: int, name: str, patience_seconds: float) -> Found:
    found: dict[str, list[float]] = {way: [] for way in WAYS}
    for number in range(rounds):
        turned = number % len(WAYS)
        for way in (*WAYS[turned:], *WAYS[:turned]):
            busy = await quiet(patience_seconds=patience_seconds)
            result = await _run(cluster, load, way)
            if result.lost or result.duplicated or result.reordered:
                raise RuntimeError(f"{way}: lost {result.lost}, duplicated {result.duplicated}, reordered {result.reordered}")
            found[way].append(result.throughput)
            told = f"{name} | round {number + 1} | {way} | {result.throughput:,.0f}/s | others had {busy:.2f} cores before"
            print(told, file=sys.stderr, flush=True)
    return found


async def _run(cluster: LocalCluster, load: Load, way: str) -> PubSubResult:
    """Through a queue of its own."""
    queue = f"overhead-{new_token()}"

    async def nobody() -> Pids:
        return {}

    os.environ[WAY] = PLAIN if way == SCRAPED else way
    try:
        async with connect(cluster.zookeeper) as connected, _scraped(cluster, way):
            await connected.create_queue(queue, overflow=Overflow.BLOCK)
            try:
                return await drive(load, "roq", cluster.zookeeper, queue, CLIENT, nobody, IDLE_SECONDS)
            finally:
                await connected.remove_queue(queue)
    finally:
        del os.environ[WAY]


@asynccontextmanager
async def _scraped(cluster: LocalCluster, way: str) -> AsyncIterator[None]:
    """Every host's metrics are read once a second meanwhile, if that is the way."""

    def look() -> None:
        for place in cluster.metrics.values():
            with urllib.request.urlopen(f"http://{place}/metrics", timeout=10) as answer:
                answer.read()

    async def repeat() -> None:
        while True:
            await asyncio.to_thread(look)
            await asyncio.sleep(SCRAPE_SECONDS)

    if way != SCRAPED:
        yield
        return
    scraping = asyncio.create_task(repeat())
    try:
        yield
    finally:
        scraping.cancel()
        with suppress(asyncio.CancelledError):  # what it failed with is raised
            await scraping


def rows(found: Found) -> list[tuple[str, ...]]:
    """Of the report. found: as many rounds of each way."""
    told = list[tuple[str, ...]]()
    for way, rates in found.items():
        ratios = [rate / plain for rate, plain in zip(rates, found[PLAIN], strict=True)]
        middle = statistics.median(ratios)
        told.append((way, f"{statistics.median(rates):,.0f}", f"{middle:.3f}", f"{min(ratios):.3f}", f"{max(ratios):.3f}"))
    return told


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=4.0, help="of one run")
    parser.add_argument(
        "--patience", type=float, default=QUIET_SECONDS, help="seconds to wait for a quiet machine before a run"
    )
    asked = parser.parse_args()
    uvloop.run(main(asked.rounds, asked.seconds, asked.patience))
