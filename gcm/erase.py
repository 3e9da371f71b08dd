"""Deleting what the stores keep of a work queue that is gone: segments and snapshots of its log, payloads of its tasks.

Done once, as well as it goes: a store that is away keeps its part.
"""

from __future__ import annotations

import asyncio

from gcm.cluster import ClusterState, is_running
from roq.errors import RoqError
from roq.log.replicated.stores import PORT, StaticDirectory, Stores
from roq.runtime.observe import logger
from roq.wire import store as wire
from roq.wire.assignment import ProcessKind

LAST_EPOCH = 1 << 62  # after every writer there was, and every copy
log = logger(__name__)


async def erase(cluster: ClusterState, log_id: str) -> int:
    """How many segments and blobs were deleted."""
    stores = Stores(StaticDirectory(_endpoints(cluster)))
    try:
        counts = await asyncio.gather(*(_erase_on(stores, host, log_id) for host in sorted(stores.directory.hosts())))
    finally:
        stores.close()
    return sum(counts)


def _endpoints(cluster: ClusterState) -> dict[str, str]:
    name = str(ProcessKind.STORE)
    return {
        host.name: f"tcp://{host.report.address}:{host.running[name].ports[PORT]}"
        for host in cluster.hosts.values()
        if host.report is not None and is_running(cluster, host.name, name) and PORT in host.running[name].ports
    }


async def _erase_on(stores: Stores, host: str, log_id: str) -> int:
    count = 0
    try:
        for segment in await stores.segments(host, f"{log_id}~"):
            await stores.request(host, wire.DeleteSegment(segment, LAST_EPOCH), wire.StoreDone)
            count += 1
        for prefix in (f"{log_id}~", f"{log_id}/"):
            for blob in await stores.inventory(host, prefix):
                await stores.request(host, wire.DeleteBlob(blob.blob), wire.StoreDone)
                count += 1
    except RoqError as error:
        log.warning("host %s keeps part of removed log %s, %d items were deleted: %s", host, log_id, count, error)
    return count
