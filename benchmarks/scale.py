"""Throughput by hosts, each held to a part of one processor so that the machine is not the limit:

    python -m benchmarks.scale exchanges | shards | stores | clients [--cpus 0.1] [--seconds 6] [--rounds 3] [--chart FILE.svg]

exchanges   a queue with 1, 2 and 3 Exchanges, each on a host of its own, a pair of a publisher and a subscriber for each,
            overflow "block", so that nobody is faster than its Exchange; messages of 10 KB
shards      a work queue of 1, 2 and 3 shards on as many hosts, each with a master and a store of its own, four producers and
            four workers for each, tasks of 100 bytes one at a time
stores      a work queue with payloads of 128 KiB, which go straight to a store, on 1, 2 and 3 hosts; two producers and two
            workers for each
clients     the same payloads on 3 hosts, and on one as the line to hold them against, with 1, 2, 4 and 8 producers and as many
            workers

Work queues keep one copy and have no standby here, so that a host more takes work from the others. Hosts are containers
(Docker, root; `make image` first), publishers, subscribers, producers and workers run beside them without a limit. Rounds are
interleaved, each run has a cluster of its own, medians count. Linear is what one host gave, times their number.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import NamedTuple

from benchmarks import shards
from benchmarks.shards import TaskLoad
from roq import blocking
from roq.client.cluster import Cluster
from roq.coordination import paths
from roq.coordination.locate import GcmClient
from roq.coordination.session import Session
from roq.log.replicated.metadata import LogMeta
from roq.testing import DockerCluster, TestedCluster
from roq.tools.bench.cpu import Pids
from roq.tools.bench.harness import CLIENT_MODULE, IDLE_SECONDS, drive
from roq.tools.bench.load import Load
from roq.tools.charts import ChartLine, Panel, draw, numbers
from roq.wire import gcm
from roq.wire.assignment import from_json

NUMBERS = (1, 2, 3)
CLIENT_NUMBERS = (1, 2, 4, 8)
HOSTS = (1, 3)
GOAL = 0.85
BLUE, GREY = "#1f618d", "#808080"
MESSAGE_BYTES, PAYLOAD_BYTES = 10_000, 128 * 1024
ATTEMPTS_MAX = 50
SHARD_CLIENTS, CLIENTS = 4, 2  # of each kind, for each shard and for each store
ONE_COPY = "write_quorum=1&ack_quorum=1&standbys=0"


class Part(NamedTuple):
    """What is there several times. hosts: of the cluster that has so many; run(cluster, number, seconds): what is done in a
    second."""

    title: str
    below: str
    hosts: Callable[[int], int]
    run: Callable[[DockerCluster, int, float], Awaitable[float]]


async def messages(machines: DockerCluster, exchanges: int, seconds: float) -> float:
    """Raises SystemExit if something was lost: the figure would mean nothing."""
    queue = "scale"
    async with machines.connect() as cluster:
        await _with_exchanges(cluster, queue, exchanges)
        load = Load(publishers=exchanges, subscribers=exchanges, size=MESSAGE_BYTES, duration=seconds, pairs=True)
        result = await drive(load, "roq", machines.zookeeper, queue, CLIENT_MODULE, _nobody, IDLE_SECONDS)
    if result.lost or result.duplicated or result.reordered:
        raise SystemExit(
            f"{exchanges} Exchanges: {result.lost} lost, {result.duplicated} twice, {result.reordered} out of order"
        )
    return result.throughput


async def _with_exchanges(cluster: Cluster, queue: str, exchanges: int) -> None:
    await cluster.create_queue(queue, overflow="block")
    for _ in range(exchanges - 1):
        await cluster.create_exchange(queue)


async def _nobody() -> Pids:
    """Whose processor time is counted: it is in containers."""
    return {}


async def small_tasks(machines: DockerCluster, number: int, seconds: float) -> float:
    """By shards. A log's store is drawn by hash: queues are made until each shard has a master and a store of its own."""
    load = TaskLoad(SHARD_CLIENTS * number, seconds, batch=1, options=ONE_COPY)
    for attempt in range(ATTEMPTS_MAX):
        name = f"scale-{attempt}"
        await asyncio.to_thread(_try_queue, f"roq://{machines.zookeeper}/{name}?shards={number}&{ONE_COPY}")
        if len(await _stores(machines.zookeeper)) == len(await _masters(machines.zookeeper, name)) == number:
            return (await asyncio.to_thread(shards.run, machines.zookeeper, number, load, name)).per_second
        async with machines.connect() as cluster:
            await cluster.remove_work_queue(name)
    raise SystemExit(f"{ATTEMPTS_MAX} queues of {number} shards, and none with a store for each")


def _try_queue(address: str) -> None:
    """With a first task, so that its logs are there."""
    with blocking.open_queue(address) as queue:
        count = len(queue.put_many([b""] * 100))
        while count:
            tasks = queue.lease(60.0, 100, 1.0)
            count -= len(tasks) - len(queue.ack_many(tasks))


async def _masters(zookeeper: str, queue: str) -> set[str]:
    """Where those of all shards are."""
    client = GcmClient(zookeeper)
    try:
        info = await client.request(gcm.DescribeWorkQueue(queue), gcm.WorkQueueInfo)
    finally:
        client.close()
    return {one.masters[0].host for one in (info, *info.shards)}


async def _stores(zookeeper: str) -> set[str]:
    """That all logs are on."""
    session = await Session.connect(zookeeper)
    try:
        found = await session.get_many([paths.log(id) for id in await session.children(paths.LOGS)])
    finally:
        await session.close()
    logs = [from_json(node.data, LogMeta) for node in found if node is not None]
    return {store for log in logs for segment in log.segments for each in segment.fragments for store in each.nodes}


async def large_tasks(machines: DockerCluster, number: int, seconds: float) -> float:
    """By stores."""
    return await large_tasks_of(machines, CLIENTS * number, seconds)


async def large_tasks_of(machines: TestedCluster, clients: int, seconds: float) -> float:
    """With so many producers and as many workers."""
    load = TaskLoad(clients, seconds, PAYLOAD_BYTES, batch=4, ahead=100, options=ONE_COPY)
    return (await asyncio.to_thread(shards.run, machines.zookeeper, 1, load, "scale")).per_second


PARTS = {
    "exchanges": Part(
        "Throughput by Exchanges, one on each host", f"messages of {MESSAGE_BYTES:,} bytes", lambda _: NUMBERS[-1], messages
    ),
    "shards": Part(
        "Throughput by shards of a work queue, one on each host", "tasks of 100 bytes, one at a time", int, small_tasks
    ),
    "stores": Part("Throughput of a work queue by stores", f"payloads of {PAYLOAD_BYTES // 1024} KiB", int, large_tasks),
}


async def measured(part: Part, cpus: float, seconds: float, rounds: int) -> dict[int, list[float]]:
    """What was done in a second, by their number."""
    found: dict[int, list[float]] = {number: [] for number in NUMBERS}
    for turn in range(rounds):
        for number in NUMBERS:
            limited = DockerCluster(gcms=1, hcms=part.hosts(number), exchanges_max=1, host_cpus=cpus)
            async with limited:
                rate = await part.run(limited, number, seconds)
            found[number].append(rate)
            print(f"round {turn + 1}, {number}: {rate:,.0f}/s", file=sys.stderr, flush=True)
    return found


async def measured_by_clients(cpus: float, seconds: float, rounds: int) -> dict[int, dict[int, list[float]]]:
    """By hosts, and by clients."""
    found: dict[int, dict[int, list[float]]] = {hosts: {number: [] for number in CLIENT_NUMBERS} for hosts in HOSTS}
    for turn in range(rounds):
        for number in CLIENT_NUMBERS:
            for hosts in HOSTS:
                async with DockerCluster(gcms=1, hcms=hosts, exchanges_max=1, host_cpus=cpus) as limited:
                    rate = await large_tasks_of(limited, number, seconds)
                found[hosts][number].append(rate)
                print(f"round {turn + 1}, {number} clients, {hosts} hosts: {rate:,.0f}/s", file=sys.stderr, flush=True)
    return found


def table_by_clients(found: dict[int, dict[int, list[float]]]) -> str:
    """In Markdown."""
    lines = [
        "| producers, and as many workers | one host, per second | spread | three hosts, per second | spread | of one |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for number in CLIENT_NUMBERS:
        one, three = (found[hosts][number] for hosts in HOSTS)
        ratio = statistics.median(three) / statistics.median(one)
        cells = [f"{statistics.median(runs):,.0f} | {min(runs):,.0f} to {max(runs):,.0f}" for runs in (one, three)]
        lines.append(f"| {number} | {' | '.join(cells)} | {ratio:.2f} |")
    return "\n".join(lines)


def chart_by_clients(found: dict[int, dict[int, list[float]]], cpus: float) -> str:
    """As SVG: medians by clients, the line of one host dashed."""
    one, three = ([(float(number), statistics.median(runs)) for number, runs in found[hosts].items()] for hosts in HOSTS)
    lines = [ChartLine("one host", GREY, one, dashes="4 3"), ChartLine("three hosts", BLUE, three, width=2.2)]
    payloads = f"payloads of {PAYLOAD_BYTES // 1024} KiB"
    below = f"hosts held to {cpus:g} of a processor each; {payloads}; by producers, and as many workers"
    last = float(CLIENT_NUMBERS[-1])
    return draw("Throughput of a work queue by clients", below, [Panel("per second", lines)], 0.0, last, across=numbers)


def table(what: str, found: dict[int, list[float]]) -> str:
    """In Markdown."""
    one = statistics.median(found[1])
    lines = [f"| {what} | per second | spread | of linear |", "| --- | --- | --- | --- |"]
    for number, runs in found.items():
        median = statistics.median(runs)
        part = median / (one * number)
        missed = "" if part >= GOAL else f" (goal {GOAL}: missed)"
        lines.append(f"| {number} | {median:,.0f} | {min(runs):,.0f} to {max(runs):,.0f} | {part:.2f}{missed} |")
    return "\n".join(lines)


def chart(part: Part, found: dict[int, list[float]], cpus: float) -> str:
    """As SVG: medians, and the line through the first."""
    medians = [(0.0, 0.0), *((float(number), statistics.median(runs)) for number, runs in found.items())]
    one, last = medians[1][1], medians[-1][0]
    lines = [
        ChartLine("linear", GREY, [(0.0, 0.0), (last, one * last)], dashes="4 3"),
        ChartLine("measured", BLUE, medians, width=2.2),
    ]
    below = f"hosts held to {cpus:g} of a processor each; {part.below}"
    return draw(part.title, below, [Panel("per second", lines)], 0.0, last, across=numbers)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.scale", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=[*PARTS, "clients"])
    parser.add_argument("--cpus", type=float, default=0.1, help="of each host (0.1)")
    parser.add_argument("--seconds", type=float, default=6.0, help="of a run (6)")
    parser.add_argument("--rounds", type=int, default=3, help="of each number; medians count (3)")
    parser.add_argument("--chart", type=Path, help="write a picture to this file")
    arguments = parser.parse_args()
    how = arguments.cpus, arguments.seconds, arguments.rounds
    if arguments.what == "clients":
        by_clients = asyncio.run(measured_by_clients(*how))
        print(table_by_clients(by_clients))
        picture = chart_by_clients(by_clients, arguments.cpus)
    else:
        part = PARTS[arguments.what]
        found = asyncio.run(measured(part, *how))
        print(table(arguments.what, found))
        picture = chart(part, found, arguments.cpus)
    if arguments.chart is not None:
        arguments.chart.write_text(picture)


if __name__ == "__main__":
    main()
