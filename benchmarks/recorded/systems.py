"""Who takes part: how each system is started for one run, and by what it is talked to."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import NamedTuple, cast

from benchmarks import servers
from benchmarks.recorded.clients.client import Clients
from roq.tools.local.cluster import LocalCluster

ROQ = "RoQ"


@contextlib.asynccontextmanager
async def _cluster() -> AsyncIterator[str]:
    with tempfile.TemporaryDirectory(prefix="roq-bench-recorded-") as directory:
        async with LocalCluster(Path(directory)) as cluster:
            yield cluster.zookeeper


@contextlib.asynccontextmanager
async def _peer(kind: str) -> AsyncIterator[str]:
    async with servers.running(kind) as server:
        yield server.address


class System(NamedTuple):
    """start: gives the address. module: of its clients. server: the kind in servers.py that it needs. durable: a confirmation
    says that the message is on the disk."""

    start: Callable[[], AbstractAsyncContextManager[str]]
    module: str
    server: str = ""
    durable: bool = True

    @property
    def clients(self) -> Clients:
        """Its ways. Raises ImportError if its library is not installed."""
        return cast(Clients, import_module(f"benchmarks.recorded.clients.{self.module}").CLIENTS)


def _of(kind: str, module: str, *, durable: bool) -> System:
    return System(partial(_peer, kind), module, kind, durable)


SYSTEMS: dict[str, System] = {
    ROQ: System(_cluster, "roq_tape"),
    "JetStream, sync always": _of("jetstream-sync", "jetstream", durable=True),
    "JetStream, default": _of("jetstream", "jetstream", durable=False),
    "Redis Streams, always": _of("redis-aof", "redis_streams", durable=True),
    "Redis Streams, everysec": _of("redis-everysec", "redis_streams", durable=False),
    "RabbitMQ streams": _of("rabbitmq-streams", "rabbitmq_streams", durable=False),
    "RabbitMQ quorum queue": _of("rabbitmq", "rabbitmq_quorum", durable=True),
}
UNWRITTEN = {"Kafka": "no client of it is written here"}


async def present(wanted: list[str] | None) -> tuple[dict[str, System], dict[str, str]]:
    """Who can take part, and why the others can't."""
    there: dict[str, System] = {}
    absent = {} if wanted else dict(UNWRITTEN)
    for name, system in SYSTEMS.items():
        if wanted and name not in wanted:
            continue
        if why := await _why_not(system):
            absent[name] = why
        else:
            there[name] = system
    return there, absent


async def _why_not(system: System) -> str:
    try:
        system.clients  # noqa: B018
    except ImportError as error:
        return f"Python library not installed: {error.name}"
    if not system.server:
        return ""
    if not servers.installed(system.server):
        return f"{servers.PROGRAMS[system.server]} is not installed"
    if system.server == "jetstream-sync" and not await servers.jetstream_syncs():
        return f"{await servers.version(system.server)} knows no sync_interval: 2.10 or newer is needed"
    return ""
