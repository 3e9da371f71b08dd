"""Who takes part: how each system is started for one run, prepared, and talked to."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import NamedTuple

from benchmarks import servers
from benchmarks.durable.clients import beanstalk, jetstream, rabbitmq, redis_streams, roq_queue
from benchmarks.durable.clients.client import Client
from roq.tools.local.cluster import JAVA, LocalCluster

Started = Callable[[], AbstractAsyncContextManager[str]]


class System(NamedTuple):
    """start: gives the address. durable: it syncs before it acknowledges."""

    start: Started
    prepare: Callable[[str, str], None]
    client: Callable[[str, str, int], Client]
    durable: bool = True


def _peer(kind: str) -> Started:
    @contextlib.asynccontextmanager
    async def start() -> AsyncIterator[str]:
        async with servers.running(kind) as server:
            yield server.address

    return start


def _over(kind: str, address: Callable[[str], str]) -> Started:
    """A work queue over the log of such a server. address: from the server's, up to the queue's name."""

    @contextlib.asynccontextmanager
    async def start() -> AsyncIterator[str]:
        async with servers.running(kind) as server:
            yield address(server.address)

    return start


def _in_database(address: str) -> str:
    return f"{address}?queue="


def _in_jetstream(address: str) -> str:
    return f"{address.replace('nats://', 'jetstream://')}/"


@contextlib.asynccontextmanager
async def _log() -> AsyncIterator[str]:
    with tempfile.TemporaryDirectory(prefix="roq-bench-log-") as directory:
        yield f"log://{directory}/"


def _cluster(hosts: int) -> Started:
    @contextlib.asynccontextmanager
    async def start() -> AsyncIterator[str]:
        with tempfile.TemporaryDirectory(prefix="roq-bench-cluster-") as directory:
            async with LocalCluster(Path(directory), hosts=hosts, zookeeper=JAVA) as cluster:
                yield f"roq://{cluster.zookeeper}/"

    return start


SYSTEMS: dict[str, System] = {
    "RoQ log:": System(_log, roq_queue.prepare, roq_queue.RoqQueue),
    "RoQ roq:, 1 store": System(_cluster(1), roq_queue.prepare, roq_queue.RoqQueue),
    "RoQ roq:, 3 stores": System(_cluster(3), roq_queue.prepare, roq_queue.RoqQueue),
    "RoQ postgresql:": System(_over("postgresql", _in_database), roq_queue.prepare, roq_queue.RoqQueue),
    "RoQ jetstream:, sync": System(_over("jetstream-sync", _in_jetstream), roq_queue.prepare, roq_queue.RoqQueue),
    "RoQ jetstream:": System(_over("jetstream", _in_jetstream), roq_queue.prepare, roq_queue.RoqQueue, durable=False),
    "rabbitmq-quorum": System(_peer("rabbitmq"), rabbitmq.prepare_quorum, rabbitmq.RabbitMQ),
    "rabbitmq-classic": System(_peer("rabbitmq"), rabbitmq.prepare_classic, rabbitmq.RabbitMQ),
    "redis-streams": System(_peer("redis-aof"), redis_streams.prepare, redis_streams.RedisStreams),
    "beanstalkd": System(_peer("beanstalkd"), beanstalk.prepare, beanstalk.Beanstalk),
    "jetstream-sync": System(_peer("jetstream-sync"), jetstream.prepare, jetstream.JetStream),
    "jetstream-default": System(_peer("jetstream"), jetstream.prepare, jetstream.JetStream, durable=False),
}
NEEDS = {
    "RoQ postgresql:": "postgresql",
    "RoQ jetstream:, sync": "jetstream-sync",
    "RoQ jetstream:": "jetstream",
    "rabbitmq-quorum": "rabbitmq",
    "rabbitmq-classic": "rabbitmq",
    "redis-streams": "redis-aof",
    "beanstalkd": "beanstalkd",
    "jetstream-sync": "jetstream-sync",
    "jetstream-default": "jetstream",
}


async def present(wanted: list[str] | None) -> tuple[dict[str, System], dict[str, str]]:
    """Who can take part, and why the others can't."""
    there, absent = {}, {}
    for name, system in SYSTEMS.items():
        if wanted and name not in wanted:
            continue
        need = NEEDS.get(name)
        if need and not servers.installed(need):
            absent[name] = "not installed"
        elif need == "jetstream-sync" and not await servers.jetstream_syncs():
            absent[name] = "this nats-server knows no sync_interval"
        else:
            there[name] = system
    return there, absent
