"""A day in five minutes: the load of a queue rises to ten times what it was and falls again, hosts come and go with it as
containers: `python -m benchmarks.elastic.day [--seconds 300] [--low 1000] [--high 10000] [--chart FILE.svg]`.

Needs Docker (root; `make image` first). One host is always there; each has room for one Exchange, and the policy says that one
carries a quarter of the highest load. Publishers and the subscriber are one program beside the containers. Compared: host
seconds with those of a fleet that always has as many as were there at most.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import uvloop

import roq
from benchmarks.elastic.rig import with_fleet
from roq.client.cluster import Cluster
from roq.client.fleet import read_fleet, set_limits
from roq.coordination.locate import GcmClient
from roq.testing import DockerCluster
from roq.tools.charts import ChartLine, Panel, draw, since
from roq.wire.fleet import FleetLimits

PUBLISHERS, TICK_SECONDS, PAYLOAD_BYTES = 8, 0.01, 100
HOSTS_MAX = 5
BOOT_SECONDS, IDLE_SECONDS = 20.0, 5.0
LATE_SECONDS = 10.0  # for the last messages
QUEUE = "shop"
BLUE, RED, GREY, GREEN = "#1f618d", "#b03a2e", "#808080", "#1e8449"


class Moment(msgspec.Struct, frozen=True):
    """One second. p50, p99: of latency, seconds."""

    at: float
    published: int
    hosts: int
    exchanges: int
    p50: float
    p99: float
    late: int  # messages beyond the agreed latency
    delivered: int


class Day(msgspec.Struct, frozen=True):
    """What was seen. agreed: seconds."""

    agreed: float
    published: int
    delivered: int
    lost: int
    moments: tuple[Moment, ...]

    @property
    def within(self) -> float:
        """Part of the messages that came in time."""
        return 1 - sum(one.late for one in self.moments) / max(1, self.delivered)

    @property
    def seconds_within(self) -> float:
        """Part of the seconds whose p99 is as agreed."""
        return sum(one.p99 <= self.agreed for one in self.moments) / max(1, len(self.moments))

    @property
    def cost(self) -> float:
        """Host seconds, as a part of those of a fleet of as many as there were at most."""
        hosts = [one.hosts for one in self.moments]
        return sum(hosts) / (max(hosts) * len(hosts))


def load_at(part: float, low: float, high: float) -> float:
    """Messages per second. part: of the day, 0 to 1: night for a fifth of it, up and down in between."""
    if not 0.2 < part < 0.8:
        return low
    return low + (high - low) * math.sin(math.pi * (part - 0.2) / 0.6) ** 2


class Shop:
    """The load, and what becomes of it."""

    def __init__(self, rate: Callable[[], float], agreed: float) -> None:
        self.rate, self.agreed = rate, agreed
        self.published = self.delivered = self.lost = self.late = 0
        self._latencies: list[float] = []
        self._over, self._all_there = False, asyncio.Event()

    async def publish(self, publisher: roq.Publisher, until: float) -> None:
        """Its share, evenly."""
        owed, before = 0.0, time.monotonic()
        while before < until:
            await asyncio.sleep(TICK_SECONDS)
            now = time.monotonic()
            owed, before = owed + self.rate() / PUBLISHERS * (now - before), now
            while owed >= 1:
                owed -= 1
                await publisher.publish("basket", time.time_ns().to_bytes(8, "big").ljust(PAYLOAD_BYTES, b"\0"))
                self.published += 1

    async def read(self, subscriber: roq.Subscriber) -> None:
        """Until cancelled."""
        async for batch in subscriber.batches():
            now = time.time_ns()
            for message in batch:
                seconds = (now - int.from_bytes(message.payload[:8], "big")) / 1e9
                self._latencies.append(seconds)
                self.late += seconds > self.agreed
            self.delivered += len(batch)
            self.lost = subscriber.lost
            if self._over and self.delivered + self.lost >= self.published:
                self._all_there.set()

    async def rest(self) -> None:
        """Nothing more is published: wait for the last. Raises TimeoutError."""
        self._over = True
        if self.delivered + self.lost < self.published:
            async with asyncio.timeout(LATE_SECONDS):
                await self._all_there.wait()

    def taken(self) -> tuple[int, float, float, int]:
        """Messages since the last look, their p50 and p99, and how many were late."""
        latencies, late = sorted(self._latencies), self.late
        self._latencies, self.late = [], 0
        if not latencies:
            return 0, 0.0, 0.0, 0
        return len(latencies), latencies[len(latencies) // 2], latencies[int(len(latencies) * 0.99)], late


async def watch(shop: Shop, cluster: Cluster, until: float, began: float) -> list[Moment]:
    """A moment each second."""
    found, published, at = list[Moment](), 0, time.monotonic()
    while at < until:
        at += 1.0
        await asyncio.sleep(max(0.0, at - time.monotonic()))
        hosts, info = await cluster.hosts(), await cluster.queue(QUEUE)
        delivered, p50, p99, late = shop.taken()
        alive = sum(host.alive for host in hosts)
        moment = Moment(
            time.monotonic() - began, shop.published - published, alive, len(info.record.exchanges), p50, p99, late, delivered
        )
        published = shop.published
        found.append(moment)
        if len(found) % 10 == 0:
            print(
                f"{moment.at:5.0f} s: {moment.published:6,}/s  {moment.exchanges} Exchanges on {moment.hosts} hosts"
                f"  p99 {p99 * 1000:.1f} ms",
                file=sys.stderr,
            )
    return found


async def day(seconds: float, low: float, high: float, agreed: float) -> Day:
    """Raises SystemExit if a message is missing that nobody reported."""
    policy = roq.Policy(
        queue=roq.QueueRule(max_messages_per_second_per_exchange=high / 4),
        bounds=roq.Bounds(max_exchanges=HOSTS_MAX, cooldown_seconds=2.0),
    )
    with tempfile.TemporaryDirectory() as folder:
        machines = DockerCluster(gcms=1, hcms=1, exchanges_max=1)
        async with machines, with_fleet(machines, Path(folder)), machines.connect() as cluster:
            asked = GcmClient(machines.zookeeper)
            limits = FleetLimits(0, HOSTS_MAX - 1, boot_seconds=BOOT_SECONDS, idle_seconds=IDLE_SECONDS)
            await set_limits(asked, limits)
            await cluster.create_queue(QUEUE, overflow="block", policy=policy)
            try:
                return await _opened(cluster, seconds, low, high, agreed)
            finally:
                await cluster.remove_queue(QUEUE)
                print(f"fleet in the end: {(await read_fleet(asked)).machines}", file=sys.stderr)
                asked.close()


async def _opened(cluster: Cluster, seconds: float, low: float, high: float, agreed: float) -> Day:
    began = time.monotonic()
    until = began + seconds
    shop = Shop(lambda: load_at((time.monotonic() - began) / seconds, low, high), agreed)
    async with cluster.subscriber(QUEUE) as subscriber:
        reading = asyncio.create_task(shop.read(subscriber))
        publishers = [cluster.publisher(QUEUE) for _ in range(PUBLISHERS)]
        for one in publishers:
            await one.open()
        watching = asyncio.create_task(watch(shop, cluster, until, began))
        await asyncio.gather(*(shop.publish(one, until) for one in publishers))
        moments = await watching
        for one in publishers:
            await one.close()
        await shop.rest()
        reading.cancel()
    if shop.delivered != shop.published:
        raise SystemExit(f"{shop.published} published, {shop.delivered} delivered, {shop.lost} reported as lost")
    return Day(agreed, shop.published, shop.delivered, shop.lost, tuple(moments))


def table(found: Day) -> str:
    """In Markdown."""
    hosts = [one.hosts for one in found.moments]
    loads = [one.published for one in found.moments]
    worst = max(one.p99 for one in found.moments)
    rows = [
        ("messages published, delivered, lost", f"{found.published:,}, {found.delivered:,}, {found.lost}"),
        ("load, messages/s", f"{min(loads):,} to {max(loads):,}"),
        ("hosts", f"{min(hosts)} to {max(hosts)}"),
        ("host seconds against a fixed fleet", f"{found.cost:.2f}"),
        (f"messages within {found.agreed * 1000:g} ms", f"{found.within:.2%}"),
        (f"seconds whose p99 is within {found.agreed * 1000:g} ms", f"{found.seconds_within:.2%}"),
        ("worst second's p99", f"{worst * 1000:.1f} ms"),
    ]
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows)])


def chart(found: Day) -> str:
    """As SVG: load, hosts and Exchanges, latency."""
    times = [one.at for one in found.moments]

    def line(name: str, colour: str, values: list[float], *, steps: bool = False, dashes: str = "") -> ChartLine:
        return ChartLine(name, colour, list(zip(times, values, strict=True)), steps=steps, dashes=dashes)

    peak = float(max(one.hosts for one in found.moments))
    panels = [
        Panel("messages per second", [line("published", BLUE, [float(one.published) for one in found.moments])]),
        Panel(
            "hosts",
            [
                line("fixed fleet", GREY, [peak] * len(times), dashes="4 3"),
                line("Exchanges", GREEN, [float(one.exchanges) for one in found.moments], steps=True),
                line("hosts", BLUE, [float(one.hosts) for one in found.moments], steps=True),
            ],
            axis="whole",
        ),
        Panel(
            "latency, ms",
            [
                line("agreed", GREY, [found.agreed * 1000] * len(times), dashes="4 3"),
                line("p99 of a second", RED, [max(0.01, one.p99 * 1000) for one in found.moments]),
                line("p50", BLUE, [max(0.01, one.p50 * 1000) for one in found.moments]),
            ],
            axis="logarithmic",
        ),
    ]
    below = (
        f"{found.within:.2%} of messages within {found.agreed * 1000:g} ms, {found.cost:.0%} of a fixed fleet's host seconds"
    )
    return draw("A day in minutes: hosts follow the load", below, panels, times[0], times[-1], across=since)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.elastic.day", description=__doc__)
    parser.add_argument("--seconds", type=float, default=300.0, help="that the day takes (300)")
    parser.add_argument("--low", type=float, default=1_000.0, help="messages/s at night (1,000)")
    parser.add_argument("--high", type=float, default=10_000.0, help="messages/s at noon (10,000)")
    parser.add_argument("--agreed", type=float, default=0.05, help="seconds within which messages are to come (0.05)")
    parser.add_argument("--chart", type=Path, help="write a picture to this file")
    parser.add_argument("--json", type=Path, help="write what was seen to this file")
    arguments = parser.parse_args()
    found = uvloop.run(day(arguments.seconds, arguments.low, arguments.high, arguments.agreed))
    print(table(found))
    if arguments.chart is not None:
        arguments.chart.write_text(chart(found))
    if arguments.json is not None:
        arguments.json.write_bytes(msgspec.json.encode(found))


if __name__ == "__main__":
    main()
