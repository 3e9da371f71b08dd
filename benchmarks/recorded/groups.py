"""Many groups on one recorded queue of many topics: what each takes to start, in memory and in CPU while nothing happens, and
what publishers notice of them.

    python -m benchmarks.recorded.groups --groups 0 10 50 200 --topics 10000 --seconds 20 --json groups.json

A cluster of its own on this machine for each number of groups: one host, so one store. Groups have no members, so each fills
its room in its master's memory and leaves the rest on the tape. --share: a group takes the topics of one tenant of so many as
there are groups, instead of all. --fill: messages that each group's topics get, so that more groups than full ones have room
in this memory. --rate: what is published a second at most, as each group reads all of the stream. Goal: 1,000 groups and
10,000 topics. Not covered: a group that is slow beside one that is not (slow_group.py), one that is far behind (behind.py).
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from statistics import median, quantiles
from typing import NamedTuple

import msgspec
import psutil
import uvloop

import roq
from benchmarks.crew import Crew, Parent
from benchmarks.machine import disk_of, quiet
from benchmarks.recorded.footprint import MEGABYTE, Footprint, footprint, pids
from benchmarks.recorded.workload import WINDOW, payloads
from benchmarks.report import markdown
from roq.tools.bench.cpu import CpuMeter, MachineMeter
from roq.tools.local.cluster import LocalCluster

QUEUE, GOAL = "crowd", 1_000
AT_ONCE = 8  # groups being created at a time
SERVE_SECONDS, CREATE_SECONDS = 300.0, 120.0
FILL_MESSAGES = 60_000  # of each group, unless told otherwise: it has room for 50,000
LOOK_SECONDS = 0.5  # between two looks whether all masters have read what there is
STILL_LOOKS = 3  # at an unchanged group: it takes no more in
TAPE_BYTES = 4 << 30  # that are kept: who publishes for long shall not fill the disk
WAIT_SECONDS = 120.0  # for a publisher to end, beyond the time it publishes
NOISE_BYTES = 512 * 1024 * 1024  # that the machine keeps for itself
Tell = Callable[[str], None]


class Published(msgspec.Struct, frozen=True):
    """What one publisher did: windows of WINDOW messages, each flushed before the next. p50_us, p99_us: of a window. cores: by
    kind of process, busy meanwhile."""

    messages: int
    seconds: float
    p50_us: float
    p99_us: float
    cores: dict[str, float]

    @property
    def rate(self) -> float:
        """Messages a second that are stored."""
        return self.messages / self.seconds


class Step(msgspec.Struct, frozen=True):
    """One number of groups. create_seconds: of each group, in the order in which they were asked for; all_seconds: until the
    last one's master served; idle_cores: of all processes of the cluster; taking: what was published while groups took it in;
    full: when every master has in memory what has room; full_seconds: how long that took after the publisher's end; still: what
    was published then, while no group takes anything."""

    groups: int
    create_seconds: list[float]
    all_seconds: float
    idle: Footprint
    idle_cores: dict[str, float]
    taking: Published
    full: Footprint
    full_seconds: float
    still: Published


class Found(msgspec.Struct, frozen=True):
    """All steps."""

    topics: int
    share: bool
    seconds: float
    steps: list[Step]


# --- the publisher --------------------------------------------------------------------------------------------------------


def topic_of(number: int, topics: int, tenants: int) -> str:
    """The topic of message `number`: topic k of the queue belongs to tenant k modulo tenants."""
    topic = number % topics
    return f"tenant{topic % tenants}.t{topic}"


class Load(NamedTuple):
    """What the publisher does: topics in all, of so many tenants, for so long; rate: messages a second, 0: flat out."""

    topics: int
    tenants: int
    seconds: float
    rate: float


def publish(parent: Parent, address: str, load: Load) -> None:
    """Body of the publisher."""

    async def body() -> Published:
        topics = load.topics
        names = [topic_of(number, topics, load.tenants) for number in range(topics)]
        async with roq.connect(address) as cluster, cluster.publisher(QUEUE, confirm="stored") as publisher:
            await asyncio.to_thread(parent.ready)
            sent, taken, began = 0, list[float](), time.perf_counter()
            while (before := time.perf_counter()) - began < load.seconds:
                for place, payload in enumerate(payloads(sent, WINDOW), sent):
                    await publisher.publish(names[place % topics], payload)
                receipt = await publisher.flush()
                if receipt.level != "stored":
                    raise RuntimeError(f"what was published is {receipt.level}, not stored")
                sent += WINDOW
                taken.append(time.perf_counter() - before)
                if load.rate:
                    await asyncio.sleep(began + sent / load.rate - time.perf_counter())
            cuts = quantiles(taken, n=100) if len(taken) > 1 else taken * 99
            return Published(sent, time.perf_counter() - began, cuts[49] * 1e6, cuts[98] * 1e6, {})

    parent.tell(uvloop.run(body()))


async def _fill(cluster: roq.Cluster, topics: int, tenants: int, messages: int) -> None:
    """So many for each tenant, in large batches: that is soon read."""
    async with cluster.publisher(QUEUE, confirm="stored") as publisher:
        for tenant in range(tenants):
            topic = topic_of(tenant, topics, tenants)
            for first in range(0, messages, WINDOW):
                await publisher.publish_many(topic, payloads(first, WINDOW))


# --- one number of groups -------------------------------------------------------------------------------------------------


async def _create(cluster: roq.Cluster, groups: int, share: bool) -> list[float]:
    """Seconds that each took."""
    slots, taken = asyncio.Semaphore(AT_ONCE), [0.0] * groups

    async def one(number: int) -> None:
        async with slots:
            began = time.perf_counter()
            topics = [f"tenant{number}.*"] if share else []
            await cluster.create_group(QUEUE, f"g{number}", *topics, order="none", timeout_seconds=CREATE_SECONDS)
            taken[number] = time.perf_counter() - began

    await asyncio.gather(*(one(number) for number in range(groups)))
    return taken


async def _status(address: str, group: int) -> roq.Status:
    async with roq.open_queue(f"roq://{address}/{QUEUE}@g{group}") as queue:
        return await queue.status()


async def _all_full(address: str, groups: int) -> float:
    """Seconds until no group takes any more in: each has read all, or has no room."""
    began, waiting, before, still = time.perf_counter(), set(range(groups)), dict[int, int](), Counter[int]()
    async with asyncio.timeout(SERVE_SECONDS + groups):
        while waiting:
            for number in sorted(waiting):
                status = await _status(address, number)
                same = before.get(number) == status.inserted and status.lag >= 0
                still[number] = still[number] + 1 if same else 0
                if still[number] == STILL_LOOKS:
                    waiting.discard(number)
                before[number] = status.inserted
            await asyncio.sleep(LOOK_SECONDS)
    return time.perf_counter() - began


async def _idle_cores(local: LocalCluster, cluster: roq.Cluster, seconds: float) -> dict[str, float]:
    """Cores by kind of process while nothing happens."""
    meter, began = CpuMeter((await pids(local, cluster))[0]), time.perf_counter()
    await asyncio.sleep(seconds)
    elapsed = time.perf_counter() - began
    return {kind: round(used / elapsed, 4) for kind, used in meter.seconds().items()}


async def step(
    groups: int, topics: int, seconds: float, share: bool, tell: Tell, fill: int = FILL_MESSAGES, rate: float = 0.0
) -> Step:
    """One number of groups on a cluster of its own. Raises RoqError, RuntimeError, TimeoutError: something did not work."""
    with tempfile.TemporaryDirectory(prefix="roq-bench-groups-") as folder:
        async with LocalCluster(Path(folder)) as local, roq.connect(local.zookeeper) as cluster:
            await cluster.create_queue(QUEUE, overflow="block", record=roq.Record(days=1, max_bytes=TAPE_BYTES))
            began = time.perf_counter()
            created = await _create(cluster, groups, share)
            for number in range(groups):
                await _status(local.zookeeper, number)
            all_seconds = time.perf_counter() - began
            tell(f"{groups} groups: all serve after {all_seconds:.1f} s")
            await quiet(patience_seconds=seconds)
            cores = await _idle_cores(local, cluster, seconds)
            idle = await footprint(local, cluster)
            tell(f"{groups} groups, idle: {sum(cores.values()):.3f} cores; {idle.told()}")
            load = Load(topics, max(groups, 1) if share else 1, seconds, rate)
            taking = await _published(local, cluster, load)
            tell(f"{groups} groups take it in: {_told(taking)}")
            await _fill(cluster, topics, load.tenants, fill)
            full_seconds = await _all_full(local.zookeeper, groups)
            full = await footprint(local, cluster)
            tell(f"{groups} groups, full after {full_seconds:.1f} s: {full.told()}")
            still = await _published(local, cluster, load)
            tell(f"{groups} groups stand still: {_told(still)}")
    return Step(groups, created, all_seconds, idle, cores, taking, full, full_seconds, still)


def _told(published: Published) -> str:
    cores = ", ".join(f"{kind} {busy:.2f}" for kind, busy in published.cores.items() if busy >= 0.01)
    return f"{published.rate:,.0f} messages/s stored, a window {published.p99_us:,.0f} us (p99), cores: {cores}"


async def _published(local: LocalCluster, cluster: roq.Cluster, load: Load) -> Published:
    """By a publisher of its own."""

    def run() -> Published:
        with Crew() as crew:
            worker = crew.start(publish, local.zookeeper, load)
            worker.until_ready()
            meter, machine, began = CpuMeter(kinds), MachineMeter(), time.perf_counter()
            worker.say()
            found: Published = worker.told(load.seconds + WAIT_SECONDS)
            used, elapsed = meter.seconds(), time.perf_counter() - began
        cores = {kind: round(busy / elapsed, 3) for kind, busy in used.items()}
        cores["publisher and others"] = machine.foreign_cores(sum(used.values()))
        return msgspec.structs.replace(found, cores=cores)

    kinds, _ = await pids(local, cluster)
    return await asyncio.to_thread(run)


# --- what it says ---------------------------------------------------------------------------------------------------------


def each_master(step: Step, before: Footprint) -> float:
    """Bytes of a master, mean."""
    return sum(before.masters.values()) / step.groups if step.groups else 0.0


def room_for(step: Step, memory_bytes: int) -> int:
    """Groups that memory of this size holds, all of them full, by what one more takes of everything."""
    if not step.groups:
        return 0
    alone = sum(size for kind, size in step.full.kinds.items() if kind != "master")
    return int((memory_bytes - NOISE_BYTES - alone) / each_master(step, step.full))


def growth(step: Step) -> float:
    """How much longer the last tenth of the groups took to create than the first; 1: the same."""
    tenth = max(1, step.groups // 10)
    taken = step.create_seconds
    return median(taken[-tenth:]) / median(taken[:tenth]) if taken else 1.0


def rows(found: Found, memory_bytes: int) -> list[list[str]]:
    """A line for each number of groups."""
    return [
        [
            f"{one.groups}",
            f"{one.all_seconds:.1f} s, last/first {growth(one):.1f}" if one.groups else "-",
            f"{each_master(one, one.idle) / MEGABYTE:.1f}, {each_master(one, one.full) / MEGABYTE:.1f}",
            f"{one.full.megabytes('hcm'):.0f}, {one.full.megabytes('gcm'):.0f}, {one.full.megabytes('zookeeper'):.0f}",
            f"{one.full.megabytes('exchange'):.0f}, {one.full.megabytes('store'):.0f}",
            f"{sum(one.idle_cores.values()):.3f}",
            *(f"{load.rate:,.0f}, {load.p50_us:,.0f}, {load.p99_us:,.0f}" for load in (one.taking, one.still)),
            f"{room_for(one, memory_bytes):,}" if one.groups else "-",
        ]
        for one in found.steps
    ]


COLUMNS = (
    "groups",
    "until all serve",
    "MB of a master, idle and full",
    "MB of HCM, GCM, ZooKeeper",
    "MB of Exchange, store",
    "cores, idle",
    "stored/s while they take it in; us of a window of 1,000, p50 and p99",
    "the same once all are full",
    "full groups that this memory holds",
)


def tell_progress(line: str) -> None:
    """On standard error."""
    print(line, file=sys.stderr, flush=True)


async def main(words: list[str]) -> None:
    """See the module."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.recorded.groups",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--groups", type=int, nargs="+", default=[0, 10, 50, 200], help="how many, in turn")
    parser.add_argument("--topics", type=int, default=10_000)
    parser.add_argument("--seconds", type=float, default=20.0, help="of idleness, then of publishing")
    parser.add_argument("--share", action="store_true", help="each group takes its share of the topics, not all")
    parser.add_argument("--fill", type=int, default=FILL_MESSAGES, help="messages that fill each group's topics")
    parser.add_argument("--rate", type=float, default=0.0, help="messages a second that are published; 0: flat out")
    parser.add_argument("--json", type=Path, help="write everything that was found to this file")
    given = parser.parse_args(words)
    disk = disk_of(Path(tempfile.gettempdir()))
    options = given.topics, given.seconds, given.share, tell_progress, given.fill, given.rate
    steps = [await step(number, *options) for number in given.groups]
    found = Found(given.topics, given.share, given.seconds, steps)
    memory = psutil.virtual_memory().total
    print(f"{given.topics:,} topics; stored on {disk}; {memory / 2**30:.0f} GiB; goal {GOAL:,} groups\n")
    print(markdown(COLUMNS, rows(found, memory)))
    if given.json:
        given.json.write_bytes(msgspec.json.encode(found))


if __name__ == "__main__":
    uvloop.run(main(sys.argv[1:]))
