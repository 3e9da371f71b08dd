"""What has changed of a cluster since it was last told, as clients see it. Pure.

Only what may be another is looked at: queues whose records or policies are, and those of which some process is. In a cluster of
thousands of queues one change costs as much as in one of ten. What came and went in between is told as well: whoever asked for
the whole meanwhile has it. Not covered: telling it (process.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from gcm.cluster import ClusterState, Host, differing, host_info, host_is_shown, queue_info, work_queue_info
from roq.wire.assignment import WORK
from roq.wire.gcm import HostInfo, QueueInfo, WorkQueueInfo
from roq.wire.shards import queue_of
from roq.wire.topology import HostUsage, TopologyDelta


class Stamp(NamedTuple):
    """Who tells it, "host:port", and when: seconds since 1970."""

    leader: str
    time: float


@dataclass
class TouchedNames:
    """Names of what was another at any moment since the last delta, be it now as it was then."""

    hosts: set[str] = field(default_factory=set)
    loads: set[str] = field(default_factory=set)  # hosts of which the load was
    queues: set[str] = field(default_factory=set)
    work_queues: set[str] = field(default_factory=set)  # shards included
    subjects: set[str] = field(default_factory=set)  # of processes and policies

    def note(self, before: ClusterState, after: ClusterState) -> None:
        """One change more."""
        for name in {*differing(before.hosts, after.hosts), *differing(before.machines, after.machines)}:
            old, new = before.host(name), after.host(name)
            if _is_shown(before, name) != _is_shown(after, name) or _but_load(old, new):
                self.hosts.add(name)
            elif _load(old) != _load(new):
                self.loads.add(name)
            self.subjects.update(_subjects(old, new))
        self.queues.update(differing(before.queues, after.queues))
        self.work_queues.update(differing(before.work_queues, after.work_queues))
        self.subjects.update(differing(before.policies, after.policies))


def delta(
    before: ClusterState, since: float, after: ClusterState, stamp: Stamp, touched: TouchedNames | None = None
) -> TopologyDelta:
    """The difference. since: when it was as before. touched: what was another in between, which grows by the difference."""
    touched = touched or TouchedNames()
    touched.note(before, after)
    hosts, hosts_gone, loads = _hosts(after, touched)
    queues, queues_gone = _queues(after, touched)
    work_queues, work_gone = _work_queues(after, touched)
    told = after.epoch, since, stamp.time, stamp.leader
    return TopologyDelta(*told, hosts, queues, work_queues, hosts_gone, queues_gone, work_gone, loads)


def _hosts(after: ClusterState, touched: TouchedNames) -> tuple[tuple[HostInfo, ...], tuple[str, ...], tuple[HostUsage, ...]]:
    here = [name for name in sorted(touched.hosts) if _is_shown(after, name)]
    gone = tuple(name for name in sorted(touched.hosts) if not _is_shown(after, name))
    loads = [name for name in sorted(touched.loads - touched.hosts) if _is_shown(after, name)]
    return (
        tuple(host_info(after.hosts[name]) for name in here),
        gone,
        tuple(HostUsage(name, *_load(after.hosts[name])) for name in loads),
    )


def _is_shown(cluster: ClusterState, name: str) -> bool:
    return name in cluster.hosts and host_is_shown(cluster, cluster.hosts[name])


def _but_load(old: Host, new: Host) -> bool:
    """It is another to clients, be its load as it was."""
    if old.report is not new.report or _standing(old) != _standing(new):
        return True
    return old.assigned is not new.assigned and (old.exchanges, old.monitors) != (new.exchanges, new.monitors)


def _standing(host: Host) -> tuple[object, ...]:
    at = host.registration
    return at and (at.address, at.port), host.draining, host.leaving, host.stopping, host.exchanges_max


def _load(host: Host) -> tuple[float, float]:
    at = host.registration
    return (at.payload.cpu_fraction, at.payload.memory_fraction) if at is not None else (0.0, 0.0)


def _subjects(before: Host, after: Host) -> Iterator[str]:
    """Of processes that are others, or elsewhere."""
    if before.report is after.report and before.alive == after.alive:
        return
    address = before.report is not None and after.report is not None and before.report.address == after.report.address
    every = before.alive != after.alive or not address
    for name in before.running.keys() | after.running.keys():
        old, new = before.running.get(name), after.running.get(name)
        if every or old != new:
            yield from {process.subject for process in (old, new) if process is not None}


def _queues(after: ClusterState, touched: TouchedNames) -> tuple[tuple[QueueInfo, ...], tuple[str, ...]]:
    here = [name for name in sorted(touched.queues | touched.subjects) if name in after.queues]
    gone = tuple(name for name in sorted(touched.queues) if name not in after.queues)
    return tuple(queue_info(after, after.queues[name]) for name in here), gone


def _work_queues(after: ClusterState, touched: TouchedNames) -> tuple[tuple[WorkQueueInfo, ...], tuple[str, ...]]:
    """Those with shards change with them."""
    written = {queue_of(name) for name in touched.work_queues}
    running = {queue_of(subject.removeprefix(WORK)) for subject in touched.subjects if subject.startswith(WORK)}
    here = [name for name in sorted(written | running) if name in after.work_queues]
    gone = tuple(name for name in sorted(written) if name not in after.work_queues)
    return tuple(work_queue_info(after, after.work_queues[name]) for name in here), gone
