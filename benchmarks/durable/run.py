"""One run: a fresh server, one process per client, a common start for each phase, rates by the clients' own clocks."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from statistics import quantiles
from typing import Any, NamedTuple

import msgspec

from benchmarks.crew import Crew, Parent, Worker
from benchmarks.durable.systems import SYSTEMS
from benchmarks.durable.workload import Mode, Phase, Rate, Workload
from benchmarks.machine import disk_flushes, quiet
from roq.tools.bench.cpu import MachineMeter

QUEUE = "figure2"
PHASE_SECONDS = 120.0
QUIET_PATIENCE_SECONDS = 15.0


class Part(NamedTuple):
    """What one client did in one phase. Nanoseconds of the machine's monotonic clock; seconds of CPU."""

    began: int
    ended: int
    cpu_seconds: float
    latencies: list[int]


def _client(parent: Parent, system: str, address: str, index: int, work: Workload) -> None:
    """Body of a client process: says that it is ready for a phase, waits for the word, tells what it did."""
    client = SYSTEMS[system].client(address, QUEUE, index)
    payload = os.urandom(work.size)
    for phase in Phase:
        parent.ready()
        parent.tell(_phase(client, phase, work, payload))
    client.close()


def _phase(client: Any, phase: Phase, work: Workload, payload: bytes) -> Part:
    latencies: list[int] = []
    cpu, began, clock = time.process_time(), time.monotonic_ns(), time.monotonic_ns
    if work.mode is Mode.WINDOW:
        if phase is Phase.WRITE:
            client.put_many(work.messages, payload, work.window)
        else:
            client.take_many(work.messages, work.window)
    else:
        one: Callable[[], object] = (lambda: client.put(payload)) if phase is Phase.WRITE else client.take
        for _ in range(work.messages):
            start = clock()
            one()
            latencies.append(clock() - start)
    return Part(began, clock(), time.process_time() - cpu, latencies)


async def run(system: str, work: Workload) -> list[Rate]:
    """Both phases of one run. Raises RuntimeError when a client failed or did not end in time."""
    async with SYSTEMS[system].start() as address:
        await asyncio.to_thread(SYSTEMS[system].prepare, address, QUEUE)
        await quiet(patience_seconds=QUIET_PATIENCE_SECONDS)
        return await asyncio.to_thread(_run_clients, system, address, work)


def _run_clients(system: str, address: str, work: Workload) -> list[Rate]:
    with Crew() as crew:
        workers = [crew.start(_client, system, address, index, work) for index in range(work.clients)]
        return [_measured(phase, work, workers) for phase in Phase]


def _measured(phase: Phase, work: Workload, workers: list[Worker]) -> Rate:
    for worker in workers:
        worker.until_ready()
    flushes, meter, began = disk_flushes(), MachineMeter(), time.monotonic()
    for worker in workers:
        worker.say()
    parts: list[Part] = [worker.told(PHASE_SECONDS) for worker in workers]
    wall, cpu = time.monotonic() - began, sum(part.cpu_seconds for part in parts)
    other, flushed = meter.foreign_cores(cpu), disk_flushes() - flushes
    operations = work.clients * work.messages
    seconds = (max(part.ended for part in parts) - min(part.began for part in parts)) / 1e9
    latencies = sorted(latency for part in parts for latency in part.latencies)
    cuts = quantiles(latencies, n=100) if len(latencies) > 1 else [0.0] * 99
    return Rate(phase, operations / seconds, cuts[49] / 1e3, cuts[98] / 1e3, flushed / operations, cpu / wall, other)


class Measured(msgspec.Struct, frozen=True):
    """Every run of one workload by system."""

    work: Workload
    runs: dict[str, list[list[Rate]]]
    failures: list[str]


async def measure(work: Workload, systems: list[str], runs: int, tell: Callable[[str], None]) -> Measured:
    """`runs` runs of each system, interleaved."""
    found: dict[str, list[list[Rate]]] = {name: [] for name in systems}
    failures: list[str] = []
    for number in range(runs):
        for name in systems:
            try:
                rates = await run(name, work)
            except (RuntimeError, TimeoutError, OSError) as error:
                failures.append(f"{name}, {work.clients} clients, {work.mode}, run {number + 1}: {error}")
                tell(failures[-1])
                continue
            found[name].append(rates)
            told = ", ".join(f"{rate.phase} {rate.operations_per_second:,.0f}/s ({rate.flushes:.2f} flushes)" for rate in rates)
            head = f"{work.clients} clients, {work.mode} | run {number + 1} | {name}"
            tell(f"{head} | {told} | others {rates[0].other_cores:.2f} cores")
    return Measured(work, found, failures)
