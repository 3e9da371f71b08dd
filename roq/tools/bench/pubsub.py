"""One publish/subscribe run through RoQ: a queue of its own on a given cluster, or on one brought up for it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec

from roq.client.cluster import Cluster, connect
from roq.ids import new_token
from roq.tools.bench.cpu import Pids, daemon_pids, queue_pids
from roq.tools.bench.harness import CLIENT_MODULE, IDLE_SECONDS, PubSubResult, drive
from roq.tools.bench.load import Load
from roq.tools.local.cluster import LocalCluster
from roq.wire.assignment import Overflow
from roq.wire.limits import FRAME_BYTES_MAX, FRAME_OVERHEAD_BYTES

SERVER_KINDS = ("exchange", "monitor", "scaling", "hcm", "gcm", "zookeeper")


async def run_on(
    address: str, load: Load, overflow: Overflow, idle_seconds: float = IDLE_SECONDS, zookeeper_pid: int = 0
) -> PubSubResult:
    """Run the load on the cluster at `address`, through a new queue that is removed afterwards."""
    load.check()
    queue = f"bench-{new_token()}"
    async with connect(address) as cluster:
        frame_bytes = max(FRAME_BYTES_MAX, load.size + FRAME_OVERHEAD_BYTES)
        await cluster.create_queue(queue, overflow=overflow, max_frame_bytes=frame_bytes)
        try:

            async def pids() -> Pids:
                return await _pids(cluster, address, queue, zookeeper_pid)

            result = await drive(load, "roq", address, queue, CLIENT_MODULE, pids, idle_seconds)
        finally:
            await cluster.remove_queue(queue)
    return msgspec.structs.replace(result, overflow=str(overflow))


async def _pids(cluster: Cluster, address: str, queue: str, zookeeper_pid: int) -> Pids:
    pids = {kind: set[int]() for kind in SERVER_KINDS}
    pids |= queue_pids(await cluster.view(), queue) | await asyncio.to_thread(daemon_pids, address)
    return pids | {"zookeeper": {zookeeper_pid}} if zookeeper_pid else pids


@contextlib.asynccontextmanager
async def own_cluster(*, secured: bool = False) -> AsyncIterator[LocalCluster]:
    """A small cluster of the load generator's own, gone afterwards. secured: with cards; the load's programs get one too."""
    with tempfile.TemporaryDirectory(prefix="roq-bench-") as directory:
        async with LocalCluster(Path(directory), secured=secured) as cluster:
            if cluster.card is None:
                yield cluster
                return
            os.environ["ROQ_CARD"] = str(cluster.card)
            try:
                yield cluster
            finally:
                del os.environ["ROQ_CARD"]


async def run(address: str, load: Load, overflow: Overflow, idle_seconds: float = IDLE_SECONDS) -> PubSubResult:
    """Run the load on the cluster at `address`, or without one on a cluster of its own."""
    load.check()
    if address:
        return await run_on(address, load, overflow, idle_seconds)
    async with own_cluster() as cluster:
        return await run_on(cluster.zookeeper, load, overflow, idle_seconds, cluster.zookeeper_pid)
