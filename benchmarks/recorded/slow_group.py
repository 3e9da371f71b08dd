"""A group whose members never ack, beside one whose members do: what it costs publishers and the other group.

    python -m benchmarks.recorded.slow_group --seconds 20 --rate 20000 --runs 3 --json slow_group.json

One publisher at a steady rate, one group with a member that takes and acks; then the same with a second group, whose member
leases what it gets and never acks. In turn, each run on a cluster of its own on this machine. Told are how late the publisher
got, and how old messages were when the quick member had them: those of the first 75,000, and the others. The slow group has
room for 50,000: until then its master works as that of the other does, then not at all. Goal: of the others, the p99 age is at
most 1.5 times what it is alone.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median, quantiles

import msgspec
import uvloop

import roq
from benchmarks.crew import Crew, Parent
from benchmarks.machine import disk_of, quiet
from benchmarks.recorded.workload import QUEUE_TOPIC, Wrong, payloads, published_ns
from benchmarks.report import markdown, spread
from roq.tools.bench.load import TICK_SECONDS, Pace
from roq.tools.local.cluster import LocalCluster

QUEUE, QUICK, SLOW = "beside", "quick", "slow"
LEASE_COUNT, LEASE_SECONDS, POLL_SECONDS = 1_000, 600.0, 0.5
WAIT_SECONDS = 60.0
FILLING_MESSAGES = 75_000  # after so many a group that acks nothing has no room
P99_GOAL = 1.5


class Beside(msgspec.Struct, frozen=True):
    """One run. late_seconds: by how much the publisher was behind its rate at most; filling_p99_ms: age of one of the first
    messages when the quick group's member had it; p50_ms, p99_ms: of the others; held: messages that the slow member has, 0:
    there was none."""

    slow: bool
    messages: int
    late_seconds: float
    filling_p99_ms: float
    p50_ms: float
    p99_ms: float
    held: int


class Published(msgspec.Struct, frozen=True):
    """What the publisher did."""

    messages: int
    late_seconds: float


# --- clients --------------------------------------------------------------------------------------------------------------


def publish(parent: Parent, address: str, rate: int, seconds: float) -> None:
    """Body of the publisher: at this rate, for so long."""

    async def body() -> Published:
        async with roq.connect(address) as cluster, cluster.publisher(QUEUE, confirm="stored") as publisher:
            await asyncio.to_thread(parent.ready)
            pace, late, until = Pace(rate, 0, time.monotonic_ns()), 0, time.monotonic() + seconds
            while time.monotonic() < until:
                now, first = time.monotonic_ns(), pace.sent
                if due := pace.due(now):
                    late = max(late, due)
                    await publisher.publish_many(QUEUE_TOPIC, payloads(first, due, now))
                await asyncio.sleep(TICK_SECONDS)
            if (await publisher.flush(WAIT_SECONDS)).level != "stored":
                raise Wrong("what was published is not stored")
            return Published(pace.sent, late / rate)

    parent.tell(uvloop.run(body()))


def take(parent: Parent, address: str) -> None:
    """Body of the quick member: acks everything, until it hears how many messages there were and has had them; tells the age
    of each in ns, in order."""

    async def body() -> list[int]:
        ages, wanted = list[int](), 0
        async with roq.open_queue(f"roq://{address}/{QUEUE}@{QUICK}") as group:
            await asyncio.to_thread(parent.ready)
            while not wanted or len(ages) < wanted:
                if not wanted and parent.heard():
                    wanted = parent.hear()
                tasks = await group.lease(LEASE_SECONDS, count=LEASE_COUNT, wait_seconds=POLL_SECONDS)
                now = time.monotonic_ns()
                ages += [now - published_ns(task.payload) for task in tasks]
                if await group.ack_many(tasks):
                    raise Wrong("acks came too late")
            return ages

    parent.tell(uvloop.run(body()))


def hold(parent: Parent, address: str) -> None:
    """Body of the slow member: leases whatever there is, acks nothing, until it hears that it is over; tells how many it
    has."""

    async def body() -> int:
        held = 0
        async with roq.open_queue(f"roq://{address}/{QUEUE}@{SLOW}") as group:
            await asyncio.to_thread(parent.ready)
            while not parent.heard():
                held += len(await group.lease(LEASE_SECONDS, count=LEASE_COUNT, wait_seconds=POLL_SECONDS))
        return held

    parent.tell(uvloop.run(body()))


# --- the runs -------------------------------------------------------------------------------------------------------------


def _together(address: str, rate: int, seconds: float, slow: bool) -> Beside:
    with Crew() as crew:
        publisher, member = crew.start(publish, address, rate, seconds), crew.start(take, address)
        slow_members = [crew.start(hold, address)] if slow else []
        workers = [*slow_members, member, publisher]
        for worker in workers:
            worker.until_ready()
        for worker in workers:
            worker.say()
        published: Published = publisher.told(seconds + 2 * WAIT_SECONDS)
        member.say(published.messages)
        ages: list[int] = member.told(WAIT_SECONDS)
        for worker in slow_members:
            worker.say()
        held = sum(worker.told(WAIT_SECONDS) for worker in slow_members)
    if len(ages) != published.messages:
        raise Wrong(f"{len(ages)} messages came of {published.messages}")
    first = min(FILLING_MESSAGES, len(ages) // 2)
    filling, others = (quantiles(part, n=100) for part in (ages[:first], ages[first:]))
    return Beside(slow, published.messages, published.late_seconds, filling[98] / 1e6, others[49] / 1e6, others[98] / 1e6, held)


async def run(rate: int, seconds: float, *, slow: bool) -> Beside:
    """On a cluster of its own. Raises RoqError, RuntimeError (Wrong among them)."""
    with tempfile.TemporaryDirectory(prefix="roq-bench-slow-group-") as folder:
        async with LocalCluster(Path(folder)) as local, roq.connect(local.zookeeper) as cluster:
            await cluster.create_queue(QUEUE, overflow="block", record=roq.Record(days=1))
            for group in (QUICK, SLOW)[: 1 + slow]:
                await cluster.create_group(QUEUE, group, order="none")
            await quiet(patience_seconds=seconds)
            return await asyncio.to_thread(_together, local.zookeeper, rate, seconds, slow)


def rows(found: list[Beside]) -> list[list[str]]:
    """Without the slow group, and with it."""
    lines = []
    for slow in (False, True):
        some = [one for one in found if one.slow is slow]
        late, filling = [one.late_seconds * 1e3 for one in some], [one.filling_p99_ms for one in some]
        values = (late, filling, [one.p50_ms for one in some], [one.p99_ms for one in some])
        held = f"{median(one.held for one in some):,.0f}" if slow else "-"
        lines.append(["beside a slow group" if slow else "alone", *map(spread, values), held])
    return lines


def ratio(found: list[Beside]) -> float:
    """p99 age beside the slow group, against alone."""
    alone, beside = (median(one.p99_ms for one in found if one.slow is slow) for slow in (False, True))
    return beside / alone


async def measure(rate: int, seconds: float, runs: int, tell: Callable[[str], None]) -> list[Beside]:
    """All runs, interleaved."""
    found = []
    for _ in range(runs):
        for slow in (False, True):
            found.append(await run(rate, seconds, slow=slow))
            tell(f"{found[-1]}")
    return found


async def main(words: list[str]) -> None:
    """See the module."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.recorded.slow_group",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rate", type=int, default=20_000, help="messages/s")
    parser.add_argument("--seconds", type=float, default=20.0, help="of a run")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write everything that was found to this file")
    given = parser.parse_args(words)
    disk = disk_of(Path(tempfile.gettempdir()))
    found = await measure(given.rate, given.seconds, given.runs, lambda line: print(line, file=sys.stderr, flush=True))
    verdict = "met" if ratio(found) <= P99_GOAL else "MISSED"
    print(f"Stored on {disk}; {given.rate:,} messages/s. p99: {ratio(found):.2f} times, at most {P99_GOAL}: {verdict}\n")
    columns = (
        "the quick group is",
        "publisher late, ms",
        "first ones' age p99, ms",
        "age p50, ms",
        "p99, ms",
        "held by the slow member",
    )
    print(markdown(columns, rows(found)))
    if given.json:
        given.json.write_bytes(msgspec.json.encode(found))


if __name__ == "__main__":
    uvloop.run(main(sys.argv[1:]))
