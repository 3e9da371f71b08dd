"""The cluster as clients see it, in parts that are all of one moment (roq/wire/parts.py). Pure.

Who asks for the first part gets it of the cluster as it is now, with the name of this snapshot; who asks for another part says
which. The last few are kept: a cluster may change many times a second, and nobody could read all parts between two changes.
They share what has not changed: a ClusterState is never written to.
Not covered: where one is cut (parts.py).
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import NamedTuple

import msgspec

from gcm.cluster import ClusterState, host_info, host_is_shown, queue_info, work_queue_info
from gcm.parts import fitting
from roq.errors import IncompatibleVersion
from roq.wire import gcm as wire
from roq.wire.gcm import ClusterView, HostInfo, QueueInfo, WorkQueueInfo
from roq.wire.limits import CONTROL_BYTES_MAX
from roq.wire.parts import HOST, QUEUE, WORK_QUEUE
from roq.wire.shards import is_shard

SNAPSHOTS_MAX = 16  # read at the same time while the cluster changes; one more has a table of its own of what changed: 1 MB for
# 20,000 queues
HEAD_BYTES = 1024  # of a message, beside what it lists

Listing = wire.GetCluster | wire.ListHosts | wire.ListQueues | wire.ListWorkQueues
KINDS: dict[type[Listing], tuple[str, ...]] = {  # in the order of places
    wire.GetCluster: (HOST, QUEUE, WORK_QUEUE),
    wire.ListHosts: (HOST,),
    wire.ListQueues: (QUEUE,),
    wire.ListWorkQueues: (WORK_QUEUE,),
}


class SnapshotPart(NamedTuple):
    """more: there are others behind these. size: bytes, if these are all."""

    hosts: tuple[HostInfo, ...] = ()
    queues: tuple[QueueInfo, ...] = ()
    work_queues: tuple[WorkQueueInfo, ...] = ()
    more: bool = False
    size: int = 0


class Snapshot:
    """The cluster at one moment, under a name."""

    def __init__(self, name: str, cluster: ClusterState) -> None:
        self.name, self.cluster = name, cluster
        self._names: dict[str, list[str]] = {}
        self._told: dict[tuple[tuple[str, ...], str | None], SnapshotPart] | None = {}

    def release(self) -> None:
        """Forget what was told: others ask for a newer one."""
        self._told = None

    def part(self, kinds: tuple[str, ...], after: str | None) -> SnapshotPart:
        """What comes behind that place, as much as fits; None: all. Made once for all who ask."""
        if self._told is None:
            return self._part(kinds, after)
        if (part := self._told.get((kinds, after))) is None:
            part = self._told[kinds, after] = self._part(kinds, after)
        return part

    def _part(self, kinds: tuple[str, ...], after: str | None) -> SnapshotPart:
        if after is None:
            infos, more = [info for _, info in self._behind(kinds, "")], False
        else:
            found, more = fitting(self._behind(kinds, after), _size)
            infos = [*found.values()]
        told = (
            tuple(info for info in infos if isinstance(info, HostInfo)),
            tuple(info for info in infos if isinstance(info, QueueInfo)),
            tuple(info for info in infos if isinstance(info, WorkQueueInfo)),
        )
        return SnapshotPart(*told, more, _size(told) if after is None else 0)

    def _behind(self, kinds: tuple[str, ...], after: str) -> Iterator[tuple[str, HostInfo | QueueInfo | WorkQueueInfo]]:
        for kind in kinds:
            names = self._sorted(kind)
            begin = bisect_right(names, after.removeprefix(kind)) if after.startswith(kind) else 0
            if kind > after or after.startswith(kind):
                yield from ((kind + name, self._info(kind, name)) for name in names[begin:])

    def _sorted(self, kind: str) -> list[str]:
        if kind not in self._names:
            cluster = self.cluster
            names = {
                HOST: (name for name, host in cluster.hosts.items() if host_is_shown(cluster, host)),
                QUEUE: iter(cluster.queues),
                WORK_QUEUE: (name for name in cluster.work_queues if not is_shard(name)),
            }
            self._names[kind] = sorted(names[kind])
        return self._names[kind]

    def _info(self, kind: str, name: str) -> HostInfo | QueueInfo | WorkQueueInfo:
        if kind == HOST:
            return host_info(self.cluster.hosts[name])
        if kind == QUEUE:
            return queue_info(self.cluster, self.cluster.queues[name])
        return work_queue_info(self.cluster, self.cluster.work_queues[name])


def _size(part: object) -> int:
    return len(msgspec.msgpack.encode(part))


class Snapshots:
    """Those of one GCM in its present term; who has read one to its end, or did not go on for longest, makes room for others.
    leader: "host:port". clock: seconds since 1970."""

    def __init__(self, leader: str, clock: Callable[[], float]) -> None:
        self._leader, self._clock = leader, clock
        self._kept: OrderedDict[str, Snapshot] = OrderedDict()
        self._newest = Snapshot("", ClusterState())
        self._number = 0

    def answer(self, cluster: ClusterState, request: Listing) -> msgspec.Struct:
        """The reply. Of a snapshot that is not kept any more an empty one, without a name. Raises IncompatibleVersion."""
        if self._newest.cluster.epoch != cluster.epoch:
            self._kept.clear()
        first = not request.after and not request.snapshot
        if (snapshot := self._now(cluster) if first else self._kept.get(request.snapshot)) is None:
            snapshot, part, name = self._newest, SnapshotPart(), ""
        else:
            part, name = snapshot.part(KINDS[type(request)], request.after), snapshot.name
            self._kept.move_to_end(name, last=part.more or snapshot is self._newest)
        if part.size > CONTROL_BYTES_MAX - HEAD_BYTES:
            raise IncompatibleVersion(
                f"the answer has {part.size:,} bytes, a message at most {CONTROL_BYTES_MAX:,}: what asks is of an older RoQ,"
                " which does not ask in parts: upgrade it"
            )
        match request:
            case wire.GetCluster():
                told = snapshot.cluster.epoch, self._leader, self._clock(), part.hosts, part.queues, part.work_queues
                return ClusterView(*told, name, part.more)
            case wire.ListHosts():
                return wire.Hosts(part.hosts, name, part.more)
            case wire.ListQueues():
                return wire.Queues(part.queues, name, part.more)
            case wire.ListWorkQueues():
                return wire.WorkQueues(part.work_queues, name, part.more)

    def _now(self, cluster: ClusterState) -> Snapshot:
        """Of this cluster: who missed the same broadcast asks at the same time."""
        if self._newest.cluster is not cluster:
            self._newest.release()
            self._number += 1
            self._newest = Snapshot(f"{cluster.epoch}.{self._number}", cluster)
            self._kept[self._newest.name] = self._newest
            if len(self._kept) > SNAPSHOTS_MAX:
                self._kept.popitem(last=False)
        return self._newest
