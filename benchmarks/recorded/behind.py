"""A group that is far behind: what that takes of memory, and how fast it catches up.

    python -m benchmarks.recorded.behind --messages 100000000 --catch-up-seconds 300 --json behind.json

A cluster of its own on this machine, one host, one store. A group without members fills its room; that is what a group takes
which is just a little behind. Then `messages` more of 100 bytes are stored, as fast as one publisher can, and the same
processes are measured again; then members take and ack for so long, or until nothing is left, while memory is looked at.
Goals: no more memory for who is far behind, and it catches up as fast as it takes anything else. A hundred million messages
need 13 GB in TMPDIR. What members get is counted and added up: nothing may be missing, or come twice, once it has caught up.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Callable
from pathlib import Path

import msgspec
import uvloop

import roq
from benchmarks.crew import Crew, Parent, Worker
from benchmarks.machine import disk_of
from benchmarks.recorded.footprint import MEGABYTE, Footprint, footprint
from benchmarks.recorded.workload import QUEUE_TOPIC, Wrong, numbers, payloads
from benchmarks.report import markdown
from roq.tools.local.cluster import LocalCluster

QUEUE, GROUP = "behind", "late"
ROOM_MESSAGES = 100_000  # twice what a group has room for
BATCH, LEASE_BATCH, LEASE_SECONDS = 5_000, 1_000, 60.0
LOOK_SECONDS = 1.0  # between two looks at memory
STILL_LOOKS = 3  # at an unchanged group: it takes no more in
FILL_SECONDS, ROUND_SECONDS = 120.0, 10.0
WAIT_SECONDS = 60.0
PUBLISH_RATE_LEAST = 20_000  # messages/s, below which a publisher is given up
KINDS = ("master", "exchange", "store")


class Taken(msgspec.Struct, frozen=True):
    """By a member, or all of them: messages that it acked, and the sum of their numbers."""

    messages: int = 0
    total: int = 0


class Found(msgspec.Struct, frozen=True):
    """rates: messages/s acked by all members together, in each ROUND_SECONDS; done: all of them were. highest: bytes by kind of
    process while it caught up."""

    messages: int
    members: int
    publish_rate: float
    little: Footprint
    far: Footprint
    far_lag: int
    far_again: Footprint
    highest: dict[str, int]
    rates: list[float]
    taken: Taken
    done: bool

    def ratio(self, kind: str) -> float:
        """Memory of this kind of process, far behind against a little behind."""
        return self.far_again.kinds[kind] / self.little.kinds[kind]


# --- clients --------------------------------------------------------------------------------------------------------------


def publish(parent: Parent, address: str, first: int, count: int) -> None:
    """Body of the publisher: as fast as it can; tells how many seconds it took until all was stored."""

    async def body() -> float:
        async with roq.connect(address) as cluster, cluster.publisher(QUEUE, confirm="stored") as publisher:
            await asyncio.to_thread(parent.ready)
            began = time.perf_counter()
            for at in range(first, first + count, BATCH):
                await publisher.publish_many(QUEUE_TOPIC, payloads(at, min(BATCH, first + count - at)))
            if (await publisher.flush(WAIT_SECONDS)).level != "stored":
                raise Wrong("what was published is not stored")
            return time.perf_counter() - began

    parent.tell(uvloop.run(body()))


def take(parent: Parent, address: str) -> None:
    """Body of a member: takes and acks, and tells what, once in ROUND_SECONDS; until it hears that it is over."""

    async def body() -> None:
        async with roq.open_queue(f"roq://{address}/{QUEUE}@{GROUP}") as group:
            await asyncio.to_thread(parent.ready)
            while not parent.heard():
                messages, total, until = 0, 0, time.monotonic() + ROUND_SECONDS
                while time.monotonic() < until and not parent.heard():
                    tasks = await group.lease(LEASE_SECONDS, count=LEASE_BATCH, wait_seconds=LOOK_SECONDS)
                    if await group.ack_many(tasks):
                        raise Wrong("acks came too late")
                    messages, total = messages + len(tasks), total + sum(numbers(task.payload for task in tasks))
                parent.tell(Taken(messages, total))

    uvloop.run(body())


# --- the run --------------------------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def _started() -> AsyncGenerator[tuple[LocalCluster, roq.Cluster]]:
    """A cluster with the queue and the group."""
    with tempfile.TemporaryDirectory(prefix="roq-bench-behind-") as folder:
        async with LocalCluster(Path(folder)) as local, roq.connect(local.zookeeper) as cluster:
            await cluster.create_queue(QUEUE, overflow="block", record=roq.Record(days=1))
            await cluster.create_group(QUEUE, GROUP, order="none")
            yield local, cluster


async def _published(address: str, first: int, count: int) -> float:
    """Seconds."""

    def run() -> float:
        with Crew() as crew:
            worker = crew.start(publish, address, first, count)
            worker.until_ready()
            worker.say()
            seconds: float = worker.told(WAIT_SECONDS + count / PUBLISH_RATE_LEAST)
            return seconds

    return await asyncio.to_thread(run)


async def _settled(address: str) -> roq.Status:
    """The group, once it takes no more in."""
    before, still = -1, 0
    async with asyncio.timeout(FILL_SECONDS), roq.open_queue(f"roq://{address}/{QUEUE}@{GROUP}") as group:
        while True:
            status = await group.status()
            still = still + 1 if status.inserted == before and status.lag >= 0 else 0
            if still == STILL_LOOKS:
                return status
            before = status.inserted
            await asyncio.sleep(LOOK_SECONDS)


class _Watch:
    """The highest memory by kind of process, while it runs."""

    def __init__(self) -> None:
        self.highest: dict[str, int] = {}

    async def run(self, local: LocalCluster, cluster: roq.Cluster) -> None:
        """Until cancelled."""
        while True:
            for kind, size in (await footprint(local, cluster)).kinds.items():
                self.highest[kind] = max(size, self.highest.get(kind, 0))
            await asyncio.sleep(LOOK_SECONDS)


def _caught_up(
    workers: list[Worker], wanted: int, seconds: float, tell: Callable[[str], None]
) -> tuple[list[float], Taken, bool]:
    """Rates in each round, all that was taken, and whether nothing is left. Raises Wrong: something came twice, or never."""
    for worker in workers:
        worker.until_ready()
    for worker in workers:
        worker.say()
    rates, taken, until = list[float](), Taken(), time.monotonic() + seconds
    while time.monotonic() < until and taken.messages < wanted:
        began = time.monotonic()
        found: list[Taken] = [worker.told(ROUND_SECONDS + WAIT_SECONDS) for worker in workers]
        taken = Taken(taken.messages + sum(one.messages for one in found), taken.total + sum(one.total for one in found))
        rates.append(sum(one.messages for one in found) / (time.monotonic() - began))
        tell(f"members take {rates[-1]:,.0f} messages/s, {wanted - taken.messages:,} are left")
    for worker in workers:
        worker.say()
    done = taken.messages >= wanted
    if done and (taken.messages, taken.total) != (wanted, wanted * (wanted - 1) // 2):
        raise Wrong(f"{taken.messages:,} messages came of {wanted:,}, and their numbers add up to {taken.total:,}")
    return rates, taken, done


async def run(messages: int, members: int, seconds: float, tell: Callable[[str], None]) -> Found:
    """All of it. Raises RoqError, RuntimeError (Wrong among them), TimeoutError: something did not work."""
    async with _started() as (local, cluster):
        await _published(local.zookeeper, 0, ROOM_MESSAGES)
        status = await _settled(local.zookeeper)
        little = await footprint(local, cluster)
        tell(f"{status.lag:,} messages behind: {little.told()}")
        taken_seconds = await _published(local.zookeeper, ROOM_MESSAGES, messages)
        far = await footprint(local, cluster)
        tell(f"{messages / taken_seconds:,.0f} messages/s stored; at their end: {far.told()}")
        status = await _settled(local.zookeeper)
        again = await footprint(local, cluster)
        tell(f"{status.lag:,} messages behind: {again.told()}")
        watch = _Watch()
        watching = asyncio.create_task(watch.run(local, cluster))
        try:
            with Crew() as crew:
                workers = [crew.start(take, local.zookeeper) for _ in range(members)]
                wanted = ROOM_MESSAGES + messages
                rates, taken, done = await asyncio.to_thread(_caught_up, workers, wanted, seconds, tell)
        finally:
            watching.cancel()
    rate = messages / taken_seconds
    return Found(messages, members, rate, little, far, status.lag, again, watch.highest, rates, taken, done)


def rows(found: Found) -> list[list[str]]:
    """A line for each kind of process."""
    states = (found.little.kinds, found.far_again.kinds, found.highest)
    return [
        [kind, *(f"{state.get(kind, 0) / MEGABYTE:,.1f}" for state in states), f"{found.ratio(kind):.2f}"] for kind in KINDS
    ]


def told(found: Found) -> str:
    """How it caught up, in a line."""
    shown = found.rates[:-1] or found.rates  # the last round may have had nothing more to take
    middle = len(shown) // 2 or 1
    parts = [sum(part) / len(part) for part in (shown[:middle], shown[middle:] or shown)]
    end = "It has caught up: each came once" if found.done else f"{found.taken.messages:,} were taken, then it was ended"
    return (
        f"{found.messages:,} messages stored at {found.publish_rate:,.0f}/s; {found.far_lag:,} behind. "
        f"{found.members} members take {parts[0]:,.0f}/s in the first half and {parts[1]:,.0f}/s in the second. {end}."
    )


async def main(words: list[str]) -> None:
    """See the module."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.recorded.behind",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--messages", type=int, default=2_000_000, help="that it is behind (goal: 100,000,000)")
    parser.add_argument("--members", type=int, default=2)
    parser.add_argument("--catch-up-seconds", type=float, default=120.0, help="at most")
    parser.add_argument("--json", type=Path, help="write everything that was found to this file")
    given = parser.parse_args(words)
    disk = disk_of(Path(tempfile.gettempdir()))
    found = await run(
        given.messages, given.members, given.catch_up_seconds, lambda line: print(line, file=sys.stderr, flush=True)
    )
    columns = ("MB of", f"{ROOM_MESSAGES:,} behind", f"{found.messages:,} behind", "at most while it catches up", "ratio")
    print(f"Stored on {disk}. {told(found)}\n")
    print(markdown(columns, rows(found)))
    if given.json:
        given.json.write_bytes(msgspec.json.encode(found))


if __name__ == "__main__":
    uvloop.run(main(sys.argv[1:]))
