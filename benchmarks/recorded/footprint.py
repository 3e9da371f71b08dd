"""What the processes of a local cluster take of the machine's memory, by kind. Linux: proportional set size, which divides a
page among those who share it, as masters share those of the fork server."""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict

import msgspec

import roq
from benchmarks.machine import proportional_bytes
from roq.tools.local.cluster import LocalCluster
from roq.wire.assignment import ProcessKind

MEGABYTE = 1_000_000
DAEMONS = {"host": "hcm", "gcm": "gcm"}  # by the first word of their name; an HCM with its fork server


class Footprint(msgspec.Struct, frozen=True):
    """Bytes by kind of process; of every master by its work queue."""

    kinds: dict[str, int]
    masters: dict[str, int]

    def megabytes(self, kind: str) -> float:
        """All processes of a kind."""
        return self.kinds.get(kind, 0) / MEGABYTE

    def told(self) -> str:
        """In one line."""
        parts = [f"{kind} {size / MEGABYTE:,.1f}" for kind, size in sorted(self.kinds.items())]
        return f"MB: {', '.join(parts)} ({len(self.masters)} masters)"


async def pids(local: LocalCluster, cluster: roq.Cluster) -> tuple[dict[str, set[int]], dict[str, int]]:
    """Process ids by kind, and of every work queue's master, as the hosts report them."""
    kinds, masters = defaultdict[str, set[int]](set), dict[str, int]()
    for host in (await cluster.view()).hosts:
        for process in host.report.processes if host.report is not None else ():
            kinds[str(process.kind)].add(process.pid)
            if process.kind is ProcessKind.MASTER and process.queue:
                masters[process.queue] = process.pid
    if local.zookeeper_pid:
        kinds["zookeeper"].add(local.zookeeper_pid)
    known = set[int]().union(*kinds.values())
    for left in local.processes():
        if left.pid not in known:
            kinds[DAEMONS.get(left.owner.partition("-")[0], left.owner)].add(left.pid)
    return kinds, masters


async def footprint(local: LocalCluster, cluster: roq.Cluster) -> Footprint:
    """Now. What has just ended counts nothing."""
    kinds, masters = await pids(local, cluster)
    return await asyncio.to_thread(_measured, kinds, masters)


def _measured(kinds: dict[str, set[int]], masters: dict[str, int]) -> Footprint:
    sizes = {name: _size(pid) for name, pid in masters.items()}
    others = {kind: sum(map(_size, found)) for kind, found in kinds.items() if kind != ProcessKind.MASTER}
    return Footprint({**others, str(ProcessKind.MASTER): sum(sizes.values())}, sizes)


def _size(pid: int) -> int:
    with contextlib.suppress(OSError):
        return proportional_bytes([pid])
    return 0
