"""What the leading GCM broadcasts of its cluster: what has changed, and from time to time that nothing has.

The socket is that of the whole cluster (roq/wire/gcm.py), the topic another: parts [b"changes", msgpack TopologyDelta]. Who
listens asks for the whole once (GetCluster), and again when a delta is missing.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec

from roq.wire.gcm import ClusterView, HostInfo, QueueInfo, WorkQueueInfo

CHANGES_TOPIC = b"changes"  # nothing that begins like the topic of the whole: who wants that gets no deltas
V = TypeVar("V", HostInfo, QueueInfo, WorkQueueInfo)


class HostUsage(msgspec.Struct, frozen=True, array_like=True):
    """A host of which nothing else has changed."""

    host: str
    cpu_fraction: float
    memory_fraction: float


class TopologyDelta(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """What is new or other than it was at `since`, the time of the delta before, as it is at `time`; names of what is gone.
    Times: seconds since 1970, of the GCM. leader: "host:port"."""

    epoch: int
    since: float
    time: float
    leader: str
    hosts: tuple[HostInfo, ...] = ()
    queues: tuple[QueueInfo, ...] = ()
    work_queues: tuple[WorkQueueInfo, ...] = ()
    hosts_gone: tuple[str, ...] = ()
    queues_gone: tuple[str, ...] = ()
    work_queues_gone: tuple[str, ...] = ()
    loads: tuple[HostUsage, ...] = ()


def applied(view: ClusterView, delta: TopologyDelta) -> ClusterView:
    """The cluster after it. Applied to a view that has some of it already, it changes the rest."""
    hosts = {host.host: host for host in view.hosts}
    for load in delta.loads:
        if (known := hosts.get(load.host)) is not None:
            fractions = {"cpu_fraction": load.cpu_fraction, "memory_fraction": load.memory_fraction}
            hosts[load.host] = msgspec.structs.replace(known, **fractions)
    return ClusterView(
        delta.epoch,
        delta.leader,
        delta.time,
        _merged(hosts, {host.host: host for host in delta.hosts}, delta.hosts_gone),
        _merged(
            {one.record.name: one for one in view.queues}, {one.record.name: one for one in delta.queues}, delta.queues_gone
        ),
        _merged(
            {one.record.name: one for one in view.work_queues},
            {one.record.name: one for one in delta.work_queues},
            delta.work_queues_gone,
        ),
    )


def _merged(known: dict[str, V], changed: dict[str, V], gone: tuple[str, ...]) -> tuple[V, ...]:
    """By name."""
    for name in gone:
        known.pop(name, None)
    if changed.keys() - known.keys():
        return tuple(one for _, one in sorted({**known, **changed}.items()))
    return tuple({**known, **changed}.values())
