"""What the stores of a cluster hold of one work queue."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

import roq
from roq.log.replicated.stores import StaticDirectory, Stores
from roq.tools.local.cluster import LocalCluster
from roq.wire import store as store_wire
from roq.wire.assignment import ProcessKind

T = TypeVar("T")


async def blobs_of(cluster: LocalCluster, name: str) -> dict[str, list[str]]:
    """Blobs of the work queue, by host."""
    async with roq.connect(cluster.zookeeper) as connected:
        log = (await connected.work_queue(name)).record.spec.log
    return await held_of(cluster, log, "/")


async def held_of(cluster: LocalCluster, log: str, kind: str) -> dict[str, list[str]]:
    """What the stores hold of a log, by host. kind "/": payloads, "~": segments and snapshots."""

    async def ask(stores: Stores) -> dict[str, list[str]]:
        hosts = stores.directory.hosts()
        held = {host: [view.blob for view in await stores.inventory(host, f"{log}{kind}")] for host in hosts}
        if kind == "~":
            for host in hosts:
                listed = await stores.request(host, store_wire.ListSegments(f"{log}~"), store_wire.SegmentList)
                held[host] += [view.segment for view in listed.segments]
        return held

    return await with_stores(cluster, ask)


async def with_stores(cluster: LocalCluster, ask: Callable[[Stores], Awaitable[T]]) -> T:
    async with roq.connect(cluster.zookeeper) as connected:
        reports = [host.report for host in await connected.hosts() if host.alive and host.report is not None]
    endpoints = {
        report.host: f"tcp://{report.address}:{process.ports['clients']}"
        for report in reports
        for process in report.processes
        if process.kind is ProcessKind.STORE
    }
    stores = Stores(StaticDirectory(endpoints))
    try:
        return await ask(stores)
    finally:
        stores.close()
