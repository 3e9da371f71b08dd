"""What a cluster broadcasts: its topology as it changes (hosts, queues, work queues, where processes are), and queues' KPIs.

The leading GCM broadcasts what has changed, soon after each change, and every few seconds that nothing has
(roq/wire/topology.py); what that means is found here, by comparing the whole with the one before. A broadcast may be missed, a
reader may be slow: the whole is asked for then, and what happened in between told as one step. Not covered: health
(overview.py).
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping
from contextlib import aclosing
from enum import StrEnum
from functools import partial
from typing import TypeVar

import msgspec

from roq.coordination.locate import GcmClient, read_leader
from roq.coordination.parts import read_cluster
from roq.errors import Closed, FrameError, TemporaryError
from roq.runtime.backoff import delays
from roq.runtime.links import SubscriberLink
from roq.runtime.observe import Counters, Refusals, logger
from roq.wire import kpi
from roq.wire.assignment import MonitorAddress
from roq.wire.decoding import UNDECODABLE
from roq.wire.gcm import ClusterView, LeaderAddress
from roq.wire.topology import CHANGES_TOPIC, TopologyDelta, applied

K = TypeVar("K")
SILENCE_SECONDS = 2.5  # without a broadcast, until it is asked whether another GCM leads; longer than between two broadcasts
LOOK_SECONDS = 2.0  # one look at ZooKeeper
VIEW_SECONDS = 5.0  # one question to the GCM, of which the whole needs as many as it has parts
DELTAS_KEPT = 100  # read ahead of a slow reader: 20 s of a cluster that never rests
DELTA_BYTES_KEPT = 8 * 1024 * 1024  # of them together; two of the largest fit
SPREAD_SECONDS = 1.0  # a follower that has to ask anew waits up to so long: others that missed the same ask as well
RECORDS_KEPT = 60  # KPIs read ahead of a slow reader; older ones are dropped
log = logger(__name__)


class Change(StrEnum):
    """What happened."""

    SNAPSHOT = "snapshot"
    HOST_JOINED = "host-joined"
    HOST_LEFT = "host-left"
    HOST_DRAINING = "host-draining"
    HOST_DRAINING_ENDED = "host-draining-ended"
    QUEUE_CREATED = "queue-created"
    QUEUE_REMOVED = "queue-removed"
    QUEUE_STARTED = "queue-started"
    QUEUE_STOPPED = "queue-stopped"
    MONITOR_MOVED = "monitor-moved"
    EXCHANGE_ADDED = "exchange-added"
    EXCHANGE_REMOVED = "exchange-removed"
    EXCHANGE_MOVED = "exchange-moved"
    WORK_QUEUE_CREATED = "work-queue-created"
    WORK_QUEUE_REMOVED = "work-queue-removed"
    MASTER_MOVED = "master-moved"


class TopologyChange(msgspec.Struct, frozen=True):
    """What happened to what. time: seconds since 1970, of the GCM; epoch: number of its leadership term.

    host: whose change it is, or where the process is now (of what is gone: was). queue, exchange, work_queue: "" where it is
    about none.
    """

    change: Change
    time: float
    epoch: int
    host: str = ""
    queue: str = ""
    exchange: str = ""
    work_queue: str = ""


class TopologyEvent(TopologyChange, frozen=True):
    """One change. view: of a SNAPSHOT, the whole cluster, which replaces what was told before; else None."""

    view: ClusterView | None = None


Tell = Callable[..., TopologyEvent]  # of a moment


def changes(before: ClusterView | None, after: ClusterView) -> list[TopologyEvent]:
    """What happened between two views; of another leadership term, or the first: a snapshot. Pure."""
    if before is None or before.epoch != after.epoch:
        return [TopologyEvent(Change.SNAPSHOT, time=after.time, epoch=after.epoch, view=after)]
    return differences(before, after)


def differences(before: ClusterView, after: ClusterView) -> list[TopologyEvent]:
    """What happened between two views, whoever told them. Pure."""
    tell = partial(TopologyEvent, time=after.time, epoch=after.epoch)
    return [*_hosts(before, after, tell), *_queues(before, after, tell), *_work_queues(before, after, tell)]


def _hosts(before: ClusterView, after: ClusterView, tell: Tell) -> Iterator[TopologyEvent]:
    old, new = ({host.host: host for host in view.hosts if host.alive} for view in (before, after))
    for name in _gone(old, new):
        yield tell(Change.HOST_LEFT, host=name)
    for name, host in new.items():
        if name not in old:
            yield tell(Change.HOST_JOINED, host=name)
        before_it = old.get(name)
        stops = host.stopping and not (before_it is not None and before_it.stopping)
        if stops or host.draining != (before_it is not None and before_it.draining):
            yield tell(Change.HOST_DRAINING if host.draining else Change.HOST_DRAINING_ENDED, host=name)


def _queues(before: ClusterView, after: ClusterView, tell: Tell) -> Iterator[TopologyEvent]:
    old, new = ({(one.record.name, one.record.transaction): one.record for one in view.queues} for view in (before, after))
    for key in _gone(old, new):  # another one of the same name is another queue
        yield tell(Change.QUEUE_REMOVED, host=old[key].monitor_host, queue=key[0])
    for key, record in new.items():
        name, at, former = key[0], record.monitor_host, old.get(key)
        if former is None:
            yield tell(Change.QUEUE_CREATED, host=at, queue=name)
        else:
            if former.running != record.running:
                yield tell(Change.QUEUE_STARTED if record.running else Change.QUEUE_STOPPED, host=at, queue=name)
            if former.monitor_host != at:
                yield tell(Change.MONITOR_MOVED, host=at, queue=name)
        had = former.exchanges if former is not None else {}
        for exchange in _gone(had, record.exchanges):
            yield tell(Change.EXCHANGE_REMOVED, host=had[exchange], queue=name, exchange=exchange)
        for exchange, host in record.exchanges.items():
            if had.get(exchange) != host:
                change = Change.EXCHANGE_MOVED if exchange in had else Change.EXCHANGE_ADDED
                yield tell(change, host=host, queue=name, exchange=exchange)


def _work_queues(before: ClusterView, after: ClusterView, tell: Tell) -> Iterator[TopologyEvent]:
    old, new = ({(one.record.name, one.record.transaction): one.record for one in view.work_queues} for view in (before, after))
    for key in _gone(old, new):
        yield tell(Change.WORK_QUEUE_REMOVED, host=old[key].master_host, work_queue=key[0])
    for key, record in new.items():
        if key not in old:
            yield tell(Change.WORK_QUEUE_CREATED, host=record.master_host, work_queue=key[0])
        elif old[key].master_host != record.master_host:
            yield tell(Change.MASTER_MOVED, host=record.master_host, work_queue=key[0])


def _gone(old: Mapping[K, object], new: Mapping[K, object]) -> Iterator[K]:
    return (key for key in old if key not in new)


class Deltas:
    """What the leader has told and nobody has looked at. A reader that is slow keeps DELTAS_KEPT of at most DELTA_BYTES_KEPT:
    one is missing then, as if it had never come."""

    def __init__(self) -> None:
        self.came = asyncio.Event()
        self._bodies: deque[bytes] = deque(maxlen=DELTAS_KEPT)
        self._refusals = Refusals(log, Counters())

    def told(self, messages: list[list[bytes]]) -> None:
        """Messages of the broadcast."""
        self._bodies.extend(parts[-1] for parts in messages)
        while len(self._bodies) > 1 and sum(map(len, self._bodies)) > DELTA_BYTES_KEPT:
            self._bodies.popleft()
        self.came.set()

    def take(self) -> list[TopologyDelta]:
        """In order; those that can't be read are missing."""
        bodies, found = list(self._bodies), list[TopologyDelta]()
        self._bodies.clear()
        self.came.clear()
        for body in bodies:
            try:
                found.append(msgspec.msgpack.decode(body, type=TopologyDelta))
            except UNDECODABLE as error:
                self._refusals.note("undecodable", error)
        return found


class FollowedView:
    """The whole cluster, followed from delta to delta. Pure. view: None until it is told whole (`begin`), and again when a
    delta is missing. clock: steady seconds."""

    def __init__(self) -> None:
        self.view: ClusterView | None = None
        self._begun = 0.0

    def begin(self, view: ClusterView, clock: float) -> None:
        """The whole, as it was answered."""
        self.view, self._begun = view, clock

    def take(self, delta: TopologyDelta, clock: float) -> None:
        """The next one. One that was told before the whole was answered is in it, which is only believed for a while: clocks
        step."""
        view = self.view
        if view is None or delta.epoch < view.epoch:
            return
        if delta.epoch == view.epoch and (delta.since == view.time or delta.since < view.time < delta.time):
            self.view = applied(view, delta)
        elif delta.epoch > view.epoch or delta.since > view.time or clock - self._begun > VIEW_SECONDS:
            self.view = None


async def topology_events(client: GcmClient) -> AsyncGenerator[TopologyEvent, None]:
    """For ever: a snapshot, then every change; a snapshot again under another GCM. While none leads, it is looked for."""
    last: ClusterView | None = None
    async with aclosing(cluster_views(client)) as views:
        async for view in views:
            for event in changes(last, view):
                yield event
            last = view


async def cluster_views(client: GcmClient) -> AsyncGenerator[ClusterView, None]:
    """For ever the whole cluster, soon after each change and every few seconds, of one leader after the other. Who is slow
    misses views, never the newest one. Raises Closed."""
    epoch = 0
    while True:
        leader = await _leader(client)
        deltas = Deltas()
        link = SubscriberLink(f"tcp://{leader.host}:{leader.broadcast}", [CHANGES_TOPIC], deltas.told)
        try:
            async with aclosing(_views(client, leader, deltas)) as views:
                async for view in views:
                    if view.epoch >= epoch:  # else of a GCM that does not know yet that it leads no more
                        epoch = view.epoch
                        yield view
        finally:
            link.close()


async def _views(client: GcmClient, leader: LeaderAddress, deltas: Deltas) -> AsyncGenerator[ClusterView, None]:
    """Whole views, in order, as long as this GCM leads. One of an older version tells no deltas: it is asked after each
    silence."""
    followed, pause = FollowedView(), 0.0
    while True:
        _check_open(client)
        if followed.view is None:
            await asyncio.sleep(pause)
            pause = random.uniform(0.0, SPREAD_SECONDS)
            if (known := await _ask(client)) is not None:
                followed.begin(known, time.monotonic())
                yield known
        try:
            async with asyncio.timeout(SILENCE_SECONDS):
                await deltas.came.wait()
        except TimeoutError:
            if await _leader(client) != leader:
                return
            followed = FollowedView()
            continue
        before = followed.view
        for delta in deltas.take():
            followed.take(delta, time.monotonic())
        if followed.view is not None and followed.view is not before:
            yield followed.view


async def _ask(client: GcmClient) -> ClusterView | None:
    """The whole cluster now; None if nobody leads just now."""
    try:
        return await read_cluster(client, VIEW_SECONDS)
    except TemporaryError:
        return None


async def _leader(client: GcmClient) -> LeaderAddress:
    """Waits until one leads. Raises Closed when the connection is closed meanwhile."""
    pauses = delays(0.1, 1.0)
    while True:
        _check_open(client)
        try:
            return await read_leader(client.zookeeper, LOOK_SECONDS)
        except TemporaryError as error:
            log.info("no GCM leads just now: %s", error)
            await asyncio.sleep(next(pauses))


def _check_open(client: GcmClient) -> None:
    if client.closed:
        raise Closed("this cluster connection is closed")


async def kpi_stream(address: MonitorAddress, queue: str) -> AsyncIterator[kpi.QueueKpi]:
    """A queue's KPIs as they come, for ever."""
    records: deque[kpi.QueueKpi] = deque(maxlen=RECORDS_KEPT)
    arrived = asyncio.Event()
    refusals = Refusals(log, Counters())

    def take(messages: list[list[bytes]]) -> None:
        for parts in messages:
            try:
                record = kpi.decode(parts[-1])
            except FrameError as error:
                refusals.note("undecodable", error)
                continue
            if record.queue == queue:
                records.append(record)
                arrived.set()

    link = SubscriberLink(address.kpis_endpoint(), [queue.encode()], take)
    try:
        while True:
            await arrived.wait()
            arrived.clear()
            while records:
                yield records.popleft()
    finally:
        link.close()
