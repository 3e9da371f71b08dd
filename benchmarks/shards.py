"""What shards of a work queue give: tasks put, leased and acked per second by clients that do only that.

    python -m benchmarks.shards --shards 1 2 4 --clients 4 --seconds 15 --runs 3 --json shards.json

A cluster of three hosts on this machine, three copies, and as many producers as workers, each a process: a producer puts
batches, a worker leases and acks batches. In turn, each run with a queue of its own. Masters of all shards share this machine's
processors with the stores and the clients, so with few processors the line is soon flat: the number of them is told.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import msgspec
import uvloop

import roq
from benchmarks.crew import Crew, Parent
from benchmarks.machine import disk_of, quiet
from benchmarks.report import markdown, spread
from roq import blocking
from roq.tools.local.cluster import LocalCluster

HOSTS = 3
LEASE_SECONDS, WAIT_SECONDS, END_SECONDS = 60.0, 0.5, 60.0


class TaskLoad(msgspec.Struct, frozen=True):
    """clients: producers, and as many workers. size: bytes of a payload. ahead: tasks that wait before producers wait: what is
    measured is a queue, not a heap. options: of the queue's address, "write_quorum=1&…"."""

    clients: int
    seconds: float
    size: int = 100
    batch: int = 100
    ahead: int = 20_000
    options: str = ""


class ShardRun(msgspec.Struct, frozen=True):
    """One run. put, done: tasks; per_second: done, while both went on."""

    shards: int
    clients: int
    put: int
    done: int
    per_second: float


def produce(parent: Parent, address: str, load: TaskLoad) -> None:
    """Body of a producer."""
    batch, count = [bytes(load.size)] * load.batch, 0
    with blocking.open_queue(address) as queue:
        parent.ready()
        until, look = time.monotonic() + load.seconds, 0.0
        while (now := time.monotonic()) < until:
            if now >= look:
                look = now + WAIT_SECONDS
                if queue.status().ready > load.ahead:
                    time.sleep(WAIT_SECONDS / 10)
                    look = now
                    continue
            count += len(queue.put_many(batch))
    parent.tell(count)


def work(parent: Parent, address: str, load: TaskLoad) -> None:
    """Body of a worker: tells how many it has acked."""
    count = 0
    with blocking.open_queue(address) as queue:
        parent.ready()
        until = time.monotonic() + load.seconds
        while time.monotonic() < until:
            tasks = queue.lease(LEASE_SECONDS, load.batch, WAIT_SECONDS)
            count += len(tasks) - len(queue.ack_many(tasks))
    parent.tell(count)


def run(zookeeper: str, shards: int, load: TaskLoad, name: str) -> ShardRun:
    """One queue. Raises RuntimeError: a client failed."""
    address = f"roq://{zookeeper}/{name}?shards={shards}" + (f"&{load.options}" if load.options else "")
    with blocking.open_queue(address), Crew() as crew:
        workers = [crew.start(work, address, load) for _ in range(load.clients)]
        producers = [crew.start(produce, address, load) for _ in range(load.clients)]
        for client in (*workers, *producers):
            client.until_ready()
        for client in (*workers, *producers):
            client.say()
        done = sum(client.told(load.seconds + END_SECONDS) for client in workers)
        put = sum(client.told(END_SECONDS) for client in producers)
    with blocking.connect(zookeeper) as cluster:
        cluster.remove_work_queue(name)
    return ShardRun(shards, load.clients, put, done, done / load.seconds)


async def measure(counts: list[int], load: TaskLoad, runs: int) -> list[ShardRun]:
    """All runs, interleaved, on one cluster."""
    found = []
    with tempfile.TemporaryDirectory(prefix="roq-bench-shards-") as folder:
        async with LocalCluster(Path(folder), hosts=HOSTS) as local, roq.connect(local.zookeeper):
            for number in range(runs):
                for shards in counts:
                    await quiet(patience_seconds=load.seconds)
                    found.append(await asyncio.to_thread(run, local.zookeeper, shards, load, f"s{shards}-{number}"))
                    print(found[-1], file=sys.stderr, flush=True)
    return found


def rows(found: list[ShardRun]) -> list[list[str]]:
    """By shards, and how much more than with the fewest."""
    counts = sorted({one.shards for one in found})
    rates = {shards: [one.per_second for one in found if one.shards == shards] for shards in counts}
    least = median(rates[counts[0]])
    return [[str(shards), spread(rates[shards]), f"{median(rates[shards]) / least:.2f}"] for shards in counts]


async def main(words: list[str]) -> None:
    """See the module."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.shards", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shards", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--clients", type=int, default=4, help="producers, and as many workers")
    parser.add_argument("--seconds", type=float, default=15.0, help="of a run")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write everything that was found to this file")
    given = parser.parse_args(words)
    found = await measure(given.shards, TaskLoad(given.clients, given.seconds), given.runs)
    disk, who = disk_of(Path(tempfile.gettempdir())), f"{given.clients} producers, {given.clients} workers"
    print(f"{who}, {os.cpu_count()} processors, {disk}\n")
    print(markdown(("shards", "tasks put, leased and acked per second", "times"), rows(found)))
    if given.json:
        given.json.write_bytes(msgspec.json.encode(found))


if __name__ == "__main__":
    uvloop.run(main(sys.argv[1:]))
