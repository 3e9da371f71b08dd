"""Who takes part: RoQ and its peers, each able to run a load once, on a server of its own started for that run."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from benchmarks import servers
from benchmarks.machine import quiet
from benchmarks.peer_client import PEERS, find_peer
from benchmarks.scenarios import OURS
from roq.tools.bench.cpu import Pids
from roq.tools.bench.harness import PubSubResult, drive
from roq.tools.bench.load import Load
from roq.tools.bench.pubsub import own_cluster, run_on
from roq.wire.assignment import Overflow

ROQ, ROQ_SECURED = OURS
PEER_MODULE = "benchmarks.peer_client"
IDLE_SECONDS = 5.0
Run = Callable[[Load], Awaitable[PubSubResult]]


def _roq_run(*, secured: bool) -> Run:
    """RoQ: a fresh cluster on this machine, overflow "block", every message accounted for."""

    async def run(load: Load) -> PubSubResult:
        async with own_cluster(secured=secured) as cluster:
            await quiet()
            return await run_on(cluster.zookeeper, load, Overflow.BLOCK, IDLE_SECONDS, cluster.zookeeper_pid)

    return run


def _peer_run(name: str) -> Run:
    async def run(load: Load) -> PubSubResult:
        async with servers.running(find_peer(name).server) as server:
            await quiet()

            async def pids() -> Pids:
                return {"server": server.pids}

            return await drive(load, name, server.address, "", PEER_MODULE, pids, IDLE_SECONDS)

    return run


def contenders() -> tuple[dict[str, Run], dict[str, str]]:
    """(who takes part, why others don't), by name."""
    present: dict[str, Run] = {ROQ: _roq_run(secured=False), ROQ_SECURED: _roq_run(secured=True)}
    absent: dict[str, str] = {}
    for name in PEERS:
        try:
            server = find_peer(name).server
        except ImportError as error:
            absent[name] = f"Python library not installed: {error.name}"
            continue
        if servers.installed(server):
            present[name] = _peer_run(name)
        else:
            absent[name] = f"{servers.PROGRAMS[server]} not installed"
    return present, absent
