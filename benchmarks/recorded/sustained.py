"""Recording for a long time, on against off: throughput flat out, then latency at a steady rate, each for so long.

    python -m benchmarks.recorded.sustained --seconds 300 --rate 10000 --json sustained.json

One publisher and one live subscriber, 100 bytes, `publish` one by one, on a cluster of its own on this machine for each run.
What is recorded is kept up to --keep-gib (8), so old segments go while new ones are written, as they do in production. Goals:
at least half the throughput with recording on, and at most twice the p99. Memory is looked at every ten seconds: the last look
against the one after a fifth of the time says whether it grows. Short runs of the same, more often: `python -m benchmarks
recorded --only "recording on"`.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import msgspec
import uvloop

import roq
from benchmarks.machine import QUIET_SECONDS, disk_of, quiet
from benchmarks.recorded.footprint import MEGABYTE, Footprint, footprint
from benchmarks.recorded.workload import SIZE, Wrong
from benchmarks.report import markdown
from roq.tools.bench.cpu import Pids, queue_pids
from roq.tools.bench.harness import CLIENT_MODULE, IDLE_SECONDS, PubSubResult, drive
from roq.tools.bench.load import Load
from roq.tools.local.cluster import LocalCluster

QUEUE = "sustained"
LOOK_SECONDS, SETTLED = 10.0, 0.2  # between two looks at memory; part of the run after which it shall not grow
THROUGHPUT_GOAL, P99_GOAL = 0.5, 2.0  # recorded against not recorded
KINDS = ("exchange", "store")


class Run(msgspec.Struct, frozen=True):
    """One load through one kind of queue. looks: at memory, in time."""

    recorded: bool
    result: PubSubResult
    looks: list[Footprint]

    def grown(self, kind: str) -> float:
        """Bytes that this kind of process has at the end beyond what it had after a fifth of the time."""
        first = self.looks[min(int(len(self.looks) * SETTLED), len(self.looks) - 1)]
        return self.looks[-1].kinds.get(kind, 0) - first.kinds.get(kind, 0)


class Found(msgspec.Struct, frozen=True):
    """Pairs: not recorded, recorded."""

    seconds: float
    rate: float
    flat_out: list[Run]
    steady: list[Run]

    @property
    def throughput_ratio(self) -> float:
        """Recorded against not."""
        return self.flat_out[1].result.throughput / self.flat_out[0].result.throughput

    @property
    def p99_ratio(self) -> float:
        """The same, of the steady rate."""
        off, on = (run.result.latency_us["p99"] or 0.0 for run in self.steady)
        return on / off if off else 0.0


async def _watched(local: LocalCluster, cluster: roq.Cluster, looks: list[Footprint], pause: float) -> None:
    while True:
        await asyncio.sleep(pause)
        looks.append(await footprint(local, cluster))


async def run(load: Load, record: roq.Record | None) -> Run:
    """On a cluster of its own. Raises Wrong if a message is lost, repeated or out of order."""
    with tempfile.TemporaryDirectory(prefix="roq-bench-sustained-") as folder:
        async with LocalCluster(Path(folder)) as local, roq.connect(local.zookeeper) as cluster:
            await cluster.create_queue(QUEUE, overflow=roq.Overflow.BLOCK, record=record)
            await quiet(patience_seconds=min(QUIET_SECONDS, load.duration))
            looks: list[Footprint] = []
            watch = asyncio.create_task(_watched(local, cluster, looks, min(LOOK_SECONDS, load.duration / 5)))

            async def pids() -> Pids:
                return queue_pids(await cluster.view(), QUEUE)

            try:
                result = await drive(load, "roq", local.zookeeper, QUEUE, CLIENT_MODULE, pids, IDLE_SECONDS)
                looks.append(await footprint(local, cluster))
            finally:
                watch.cancel()
    if result.lost or result.duplicated or result.reordered:
        raise Wrong(f"lost {result.lost}, duplicated {result.duplicated}, reordered {result.reordered}")
    return Run(record is not None, result, looks)


async def measure(seconds: float, rate: float, keep_bytes: int, tell: Callable[[str], None]) -> Found:
    """All four runs."""
    pairs: list[list[Run]] = []
    for load in (Load(size=SIZE, duration=seconds), Load(size=SIZE, duration=seconds, rate=rate)):
        pair = []
        for record in (None, roq.Record(days=1, max_bytes=keep_bytes)):
            pair.append(await run(load, record))
            tell(_told(pair[-1]))
        pairs.append(pair)
    return Found(seconds, rate, *pairs)


def _told(run: Run) -> str:
    shown, result = "recorded" if run.recorded else "not recorded", run.result
    latency = result.latency_us
    p50, p99 = latency["p50"] or 0.0, latency["p99"] or 0.0
    memory = ", ".join(f"{kind} {run.looks[-1].megabytes(kind):.0f} ({run.grown(kind) / MEGABYTE:+.0f})" for kind in KINDS)
    rates = f"{result.delivered:,} messages, {result.throughput:,.0f}/s, p50 {p50:,.0f} us, p99 {p99:,.0f} us"
    return f"{shown}: {rates}; MB: {memory}"


def rows(found: Found) -> list[list[str]]:
    """What, off, on, ratio, goal, verdict."""

    def latency(name: str) -> list[float]:
        return [run.result.latency_us[name] or 0.0 for run in found.steady]

    rates = [f"{one.result.throughput:,.0f}" for one in found.flat_out]
    p50s, p99s = ([f"{value:,.0f}" for value in latency(name)] for name in ("p50", "p99"))
    ratio, worse, at = found.throughput_ratio, found.p99_ratio, f"at {found.rate:,.0f}/s, us"
    lines = [
        ["messages/s", *rates, f"{ratio:.2f}", f"at least {THROUGHPUT_GOAL}"],
        [f"p50 {at}", *p50s, "", ""],
        [f"p99 {at}", *p99s, f"{worse:.2f}", f"at most {P99_GOAL:g}"],
    ]
    verdicts = ["met" if ratio >= THROUGHPUT_GOAL else "MISSED", "", "met" if worse <= P99_GOAL else "MISSED"]
    for kind in KINDS:
        memory = [f"{run.looks[-1].megabytes(kind):.0f} ({run.grown(kind) / MEGABYTE:+.0f})" for run in found.flat_out]
        lines.append([f"MB of {kind}, flat out (grown)", *memory, "", ""])
        verdicts.append("")
    return [[*line, verdict] for line, verdict in zip(lines, verdicts, strict=True)]


async def main(words: list[str]) -> None:
    """See the module."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.recorded.sustained",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--seconds", type=float, default=300.0, help="of each of the four runs")
    parser.add_argument("--rate", type=float, default=10_000.0, help="messages/s while latency is measured")
    parser.add_argument("--keep-gib", type=float, default=8.0, help="of what was recorded")
    parser.add_argument("--json", type=Path, help="write everything that was found to this file")
    given = parser.parse_args(words)
    disk = disk_of(Path(tempfile.gettempdir()))
    found = await measure(
        given.seconds, given.rate, int(given.keep_gib * 2**30), lambda line: print(line, file=sys.stderr, flush=True)
    )
    print(f"Stored on {disk}. {given.seconds:g} s each.\n")
    print(markdown(("what", "not recorded", "recorded", "ratio", "goal", "verdict"), rows(found)))
    if given.json:
        given.json.write_bytes(msgspec.json.encode(found))


if __name__ == "__main__":
    uvloop.run(main(sys.argv[1:]))
