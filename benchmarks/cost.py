"""What queues cost while nothing flows: memory, idle CPU, creation time, and many of them at once."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from statistics import median

import msgspec

from benchmarks.machine import proportional_bytes, quiet
from roq.client.cluster import Cluster, connect
from roq.tools.bench.cpu import CpuMeter, queue_pids
from roq.tools.local.cluster import JAVA, LocalCluster

EXCHANGES_MAX = 400  # slots of the one host: room for every queue of this benchmark
IDLE_WATCH_SECONDS = 20.0
SETTLE_SECONDS = 3.0
CREATIONS = 20
AT_ONCE = 8  # queues being created at a time
SAMPLED = 10  # queues a message is sent through
MESSAGE_SECONDS = 10.0
MEGABYTE = 1_000_000


class Cost(msgspec.Struct, frozen=True):
    """The findings. CPU: cores; memory: proportional set size."""

    idle_queue_bytes: int
    one_queue_cores: float
    many_queues: int
    many_queues_cores: float
    own_processes_cores: float  # of a queue's three processes, mean over all queues
    create_seconds_median: float
    create_seconds_max: float
    crowd: int
    crowd_seconds: float
    crowd_bytes: int
    crowd_sampled: int
    crowd_delivered: int

    @property
    def cores_per_queue(self) -> float:
        """What one more idle queue costs, daemons included."""
        return (self.many_queues_cores - self.one_queue_cores) / max(1, self.many_queues - 1)


@contextlib.asynccontextmanager
async def _cluster() -> AsyncIterator[tuple[LocalCluster, Cluster]]:
    with tempfile.TemporaryDirectory(prefix="roq-cost-") as directory:
        started = LocalCluster(Path(directory), exchanges_max=EXCHANGES_MAX, zookeeper=JAVA)
        async with started as local, connect(local.zookeeper) as cluster:
            yield local, cluster


async def _create(cluster: Cluster, names: list[str]) -> None:
    """All these queues, AT_ONCE at a time."""
    slots = asyncio.Semaphore(AT_ONCE)

    async def one(name: str) -> None:
        async with slots:
            await cluster.create_queue(name)

    async with asyncio.TaskGroup() as group:
        for name in names:
            group.create_task(one(name))


async def _pids(cluster: Cluster, names: list[str]) -> set[int]:
    view = await cluster.view()
    return {pid for name in names for kind, pids in queue_pids(view, name).items() if kind != "hcm" for pid in pids}


async def _idle_cores(local: LocalCluster, own: set[int], seconds: float) -> tuple[float, float]:
    """(cores of the whole cluster, cores of the processes in `own`) while nothing happens."""
    await asyncio.sleep(SETTLE_SECONDS)
    everything = {process.pid for process in local.processes()} | {local.zookeeper_pid}
    meter = CpuMeter({"own": own, "other": everything - own})
    began = time.monotonic()
    await asyncio.sleep(seconds)
    used, elapsed = meter.seconds(), time.monotonic() - began
    return (used["own"] + used["other"]) / elapsed, used["own"] / elapsed


async def _works(cluster: Cluster, name: str) -> bool:
    """One message through the queue arrives."""
    async with asyncio.timeout(MESSAGE_SECONDS), cluster.subscriber(name, ">") as subscriber:
        await subscriber.ready()
        async with cluster.publisher(name) as publisher:
            await publisher.publish("hello", name.encode())
        async for message in subscriber:
            return bool(message.payload == name.encode())
    return False


async def _creation_seconds(cluster: Cluster, count: int) -> list[float]:
    taken = []
    for number in range(count):
        began = time.monotonic()
        await cluster.create_queue(f"timed-{number}")
        taken.append(time.monotonic() - began)
    return taken


async def cost(many: int, crowd: int, seconds: float, tell: Callable[[str], None]) -> Cost:
    """Measure all of it. many: queues for the idle CPU; crowd: queues at once; seconds: how long idleness is watched."""
    async with _cluster() as (local, cluster):
        await cluster.create_queue("idle")
        await quiet()
        one = await _pids(cluster, ["idle"])
        one_cores, _ = await _idle_cores(local, one, seconds)
        idle_bytes = proportional_bytes(one)
        tell(f"one idle queue: {idle_bytes / MEGABYTE:.1f} MB, {one_cores * 100:.2f} % of a core with all daemons")
        taken = await _creation_seconds(cluster, min(CREATIONS, many - 1))
        tell(f"creation: median {median(taken) * 1000:.0f} ms, max {max(taken) * 1000:.0f} ms")
        names = ["idle", *(f"timed-{number}" for number in range(len(taken)))]
        more = [f"more-{number}" for number in range(many - len(names))]
        await _create(cluster, more)
        await quiet()
        all_own = await _pids(cluster, [*names, *more])
        many_cores, own_cores = await _idle_cores(local, all_own, seconds)
        tell(f"{many} idle queues: {many_cores * 100:.2f} % of a core with all daemons")
        crowd_names = [f"crowd-{number}" for number in range(crowd - many)]
        began = time.monotonic()
        await _create(cluster, crowd_names)
        crowd_seconds = time.monotonic() - began
        everybody = [*names, *more, *crowd_names]
        crowd_bytes = proportional_bytes(await _pids(cluster, everybody))
        sample = everybody[:: max(1, len(everybody) // SAMPLED)][:SAMPLED]
        delivered = [await _works(cluster, name) for name in sample]
        tell(f"{len(everybody)} queues: {crowd_bytes / MEGABYTE:.0f} MB, {sum(delivered)} of {len(sample)} sampled deliver")
    return Cost(
        idle_bytes,
        one_cores,
        many,
        many_cores,
        own_cores / many,
        median(taken),
        max(taken),
        len(everybody),
        crowd_seconds,
        crowd_bytes,
        len(sample),
        sum(delivered),
    )


def cost_rows(found: Cost) -> list[list[str]]:
    """What, measured, target, verdict."""

    def row(what: str, value: float, unit: str, target: float | None = None) -> list[str]:
        told = f"{value:.3g} {unit}"
        if target is None:
            return [what, told, "-", "-"]
        return [what, told, f"at most {target:g} {unit}", "met" if value <= target else "MISSED"]

    verdict = "met" if found.crowd_delivered == found.crowd_sampled else "MISSED"
    return [
        row("an idle queue's three processes, PSS", found.idle_queue_bytes / MEGABYTE, "MB", 40),
        row("an idle queue's three processes, CPU", found.own_processes_cores * 100, "% of a core", 0.5),
        row(f"one more idle queue, daemons included (of {found.many_queues})", found.cores_per_queue * 100, "% of a core", 0.5),
        row("creating a queue, median", found.create_seconds_median * 1000, "ms", 100),
        row("creating a queue, slowest", found.create_seconds_max * 1000, "ms"),
        row(f"creating the rest of {found.crowd} queues, {AT_ONCE} at a time", found.crowd_seconds, "s"),
        row(f"{found.crowd} queues, PSS", found.crowd_bytes / MEGABYTE, "MB"),
        [
            f"a message through {found.crowd_sampled} of {found.crowd} queues",
            f"{found.crowd_delivered} arrived",
            "all",
            verdict,
        ],
    ]
