"""One run of one scenario: a fresh server, client processes, a common start, rates by the clients' own clocks. All that was
published or read is looked at afterwards."""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import Callable, Iterable, Sequence
from statistics import quantiles
from typing import Any, NamedTuple

import msgspec

from benchmarks.crew import Crew, Parent
from benchmarks.machine import disk_flushes, quiet
from benchmarks.recorded import away, live
from benchmarks.recorded.clients.client import Run
from benchmarks.recorded.systems import ROQ, SYSTEMS
from benchmarks.recorded.workload import (
    MEMBERS,
    Found,
    Scenario,
    Size,
    Wrong,
    check_sequence,
    check_shared,
    numbers,
)
from roq.errors import RoqError
from roq.tools.bench.cpu import MachineMeter

QUEUE = "recorded"
RUN_SECONDS = 300.0


class Job(NamedTuple):
    """What client processes do: a way of a scenario, so many of them at once."""

    system: str
    scenario: Scenario
    way: str
    address: str
    queue: str
    amount: int
    seconds: float = RUN_SECONDS
    members: int = 1


class Part(NamedTuple):
    """What one client did. Nanoseconds of the machine's monotonic clock; seconds of CPU."""

    began_ns: int
    ended_ns: int
    cpu_seconds: float
    confirmed: int
    latencies: list[int]
    numbers: bytes


def _client(parent: Parent, job: Job, group: str, taken: Any) -> None:
    """Body of a client process."""
    clients = SYSTEMS[job.system].clients
    run = Run(parent, job.address, job.queue, job.amount, job.seconds, group, taken)
    confirmed, latencies, payloads = 0, list[int](), list[bytes]()
    match job.scenario:
        case Scenario.PUBLISH:
            run.prepare()
            confirmed = clients.publish[job.way](run)
        case Scenario.ONE_BY_ONE:
            run.prepare()
            latencies = clients.one_by_one[job.way](run)
            confirmed = len(latencies)
        case Scenario.REPLAY:
            payloads = clients.replay[job.way](run)
        case Scenario.GROUP:
            payloads = clients.member[job.way](run)
        case Scenario.GROUP_SINGLY:
            payloads = clients.member_singly[job.way](run)
    cpu = time.process_time() - run.cpu_seconds
    parent.tell(Part(run.began_ns, run.ended_ns, cpu, confirmed, latencies, numbers(payloads).tobytes()))


def _do(job: Job, group: str = "") -> tuple[Found, list[Part]]:
    """Start the clients, let them go, and add up."""
    with Crew() as crew:
        taken = crew.context.Value("q", 0)
        workers = [crew.start(_client, job, group, taken) for _ in range(job.members)]
        for worker in workers:
            worker.until_ready()
        flushes, meter, began = disk_flushes(), MachineMeter(), time.monotonic()
        for worker in workers:
            worker.say()
        parts: list[Part] = [worker.told(RUN_SECONDS) for worker in workers]
        wall, cpu = time.monotonic() - began, sum(part.cpu_seconds for part in parts)
        other, flushed = meter.foreign_cores(cpu), disk_flushes() - flushes
    messages = sum(part.confirmed + len(part.numbers) // 8 for part in parts)
    if not messages:
        raise Wrong("no message was confirmed or read")
    seconds = (max(part.ended_ns for part in parts) - min(part.began_ns for part in parts)) / 1e9
    found = Found(job.way, messages, seconds, None, None, flushed / messages, cpu / wall, other)
    latencies = [latency for part in parts for latency in part.latencies]
    if len(latencies) > 1:
        cuts = quantiles(latencies, n=100)
        found = msgspec.structs.replace(found, p50_us=cuts[49] / 1e3, p99_us=cuts[98] / 1e3)
    return found, parts


def _numbers(part: Part) -> array[int]:
    return array("Q", part.numbers)


def _check_stored(job: Job) -> None:
    """Read everything from the start: what was confirmed is there, in order, and nothing else."""
    way = next(iter(SYSTEMS[job.system].clients.replay))
    _, (part,) = _do(job._replace(scenario=Scenario.REPLAY, way=way))
    check_sequence(_numbers(part), 0, job.amount)


def _publishing(job: Job, size: Size) -> Iterable[Found]:
    clients = SYSTEMS[job.system].clients
    publishing = job.scenario is Scenario.PUBLISH
    for turn, way in enumerate(clients.publish if publishing else clients.one_by_one):
        this = job._replace(way=way, queue=f"{job.queue}-{turn}", seconds=size.publish_seconds)
        clients.prepare(this.address, this.queue)
        asyncio.run(quiet(patience_seconds=size.quiet_seconds))
        found, _ = _do(this)
        _check_stored(this._replace(amount=found.messages))
        yield found


def _filled(job: Job, size: Size) -> int:
    """How many messages are stored now."""
    clients = SYSTEMS[job.system].clients
    clients.prepare(job.address, job.queue)
    way = next(iter(clients.publish))
    found, _ = _do(job._replace(scenario=Scenario.PUBLISH, way=way, seconds=size.fill_seconds))
    asyncio.run(quiet(patience_seconds=size.quiet_seconds))
    return found.messages


def _replaying(job: Job, size: Size) -> Iterable[Found]:
    count = _filled(job, size)
    for way in SYSTEMS[job.system].clients.replay:
        found, (part,) = _do(job._replace(way=way, amount=count))
        check_sequence(_numbers(part), 0, count)
        yield found


def _sharing(job: Job, size: Size) -> Iterable[Found]:
    clients = SYSTEMS[job.system].clients
    ways = clients.member if job.scenario is Scenario.GROUP else clients.member_singly
    count = 0
    for turn, (members, way) in enumerate((members, way) for members in MEMBERS for way in ways):
        if clients.once:
            job = job._replace(queue=f"{QUEUE}-{turn}")
        if clients.once or not count:
            count = _filled(job, size)
        group = f"group-{turn}"
        found, parts = _do(job._replace(way=way, amount=count, members=members), group)
        check_shared(map(_numbers, parts), count)
        if left := clients.unsettled(job.address, job.queue, group):
            raise Wrong(f"{way}: {left} messages are not acknowledged")
        yield msgspec.structs.replace(found, way=f"{members} member{'s' * (members > 1)}: {way}")


SCENARIOS: dict[Scenario, Callable[[Job, Size], Iterable[Found]]] = {
    Scenario.PUBLISH: _publishing,
    Scenario.ONE_BY_ONE: _publishing,
    Scenario.REPLAY: _replaying,
    Scenario.GROUP: _sharing,
    Scenario.GROUP_SINGLY: _sharing,
    Scenario.LIVE: lambda job, size: asyncio.run(live.on_and_off(job.address, size)),
    Scenario.AWAY: lambda job, size: [away.away_and_back(job.system, job.address, job.queue, size)],
}


async def run(system: str, scenario: Scenario, size: Size) -> list[Found]:
    """Every way of the system, on a server of its own. Raises RuntimeError: a client failed, or what it did is Wrong."""
    async with SYSTEMS[system].start() as address:
        amounts = {
            Scenario.ONE_BY_ONE: size.one_by_one,
            Scenario.GROUP: size.group_messages,
            Scenario.GROUP_SINGLY: size.group_singly,
        }
        job = Job(system, scenario, "", address, QUEUE, amounts.get(scenario, size.messages))
        return await asyncio.to_thread(lambda: list(SCENARIOS[scenario](job, size)))


class Measured(msgspec.Struct, frozen=True):
    """Every run of one scenario by system and way."""

    scenario: Scenario
    runs: dict[str, dict[str, list[Found]]]
    failures: list[str]


def takes_part(system: str, scenario: Scenario) -> bool:
    """Whether there is anything to measure."""
    clients = SYSTEMS[system].clients
    match scenario:
        case Scenario.LIVE:
            return system == ROQ
        case Scenario.REPLAY | Scenario.AWAY:
            return not clients.once
        case Scenario.GROUP | Scenario.GROUP_SINGLY:
            return bool(clients.member)
        case _:
            return True


async def measure(scenario: Scenario, systems: Sequence[str], runs: int, size: Size, tell: Callable[[str], None]) -> Measured:
    """`runs` runs of each system, interleaved."""
    taking_part = [name for name in systems if takes_part(name, scenario)]
    measured = Measured(scenario, {name: {} for name in taking_part}, [])
    for number in range(runs):
        for name in taking_part:
            try:
                ways = await run(name, scenario, size)
            except (RoqError, RuntimeError, TimeoutError, OSError) as error:
                measured.failures.append(f"{scenario}, {name}, run {number + 1}: {type(error).__name__}: {error}")
                tell(measured.failures[-1])
                continue
            for found in ways:
                measured.runs[name].setdefault(found.way, []).append(found)
                tell(f"{scenario} | run {number + 1} | {name} | {_told(found)}")
    return measured


def _told(found: Found) -> str:
    latency = "" if found.p50_us is None else f" | {found.p50_us:,.0f}/{found.p99_us or 0:,.0f} us"
    return (
        f"{found.way} | {found.rate:,.0f}/s | {found.messages:,} in {found.seconds:.2f} s{latency} | "
        f"clients {found.client_cores:.2f} cores, others {found.other_cores:.2f}"
    )
