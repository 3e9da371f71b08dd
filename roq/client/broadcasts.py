"""What a cluster broadcasts: its topology as it changes (hosts, queues, work queues, where processes are), and queues' KPIs.

The leading GCM broadcasts the whole cluster, soon after each change and every few seconds (roq/wire/gcm.py); what changed is
found here, by comparing it with the one before. A broadcast may be missed, a reader may be slow: what happened in between is
told then, as one step. Not covered: health (overview.py).
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping
from contextlib import aclosing
from enum import StrEnum
from functools import partial
from typing import TypeVar

import msgspec

from roq.coordination.locate import GcmClient, read_leader
from roq.errors import Closed, FrameError, TemporaryError
from roq.runtime.backoff import delays
from roq.runtime.links import SubscriberLink
from roq.runtime.observe import Counters, Refusals, logger
from roq.wire import kpi
from roq.wire.assignment import MonitorAddress
from roq.wire.decoding import UNDECODABLE
from roq.wire.gcm import BROADCAST_TOPIC, ClusterView, GetCluster, LeaderAddress

K = TypeVar("K")
SILENCE_SECONDS = 2.5  # without a broadcast, until it is asked whether another GCM leads; longer than between two broadcasts
LOOK_SECONDS = 2.0  # one look at ZooKeeper
VIEW_SECONDS = 5.0  # one question to the GCM
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
    tell = partial(TopologyEvent, time=after.time, epoch=after.epoch)
    if before is None or before.epoch != after.epoch:
        return [tell(Change.SNAPSHOT, view=after)]
    return [*_hosts(before, after, tell), *_queues(before, after, tell), *_work_queues(before, after, tell)]


def _hosts(before: ClusterView, after: ClusterView, tell: Tell) -> Iterator[TopologyEvent]:
    old, new = ({host.host: host for host in view.hosts if host.alive} for view in (before, after))
    for name in _gone(old, new):
        yield tell(Change.HOST_LEFT, host=name)
    for name, host in new.items():
        if name not in old:
            yield tell(Change.HOST_JOINED, host=name)
        if host.draining != (name in old and old[name].draining):
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


class Latest:
    """The newest broadcast that nobody has looked at, and no more: a reader that is slow keeps no others."""

    def __init__(self) -> None:
        self.came = asyncio.Event()
        self._body: bytes | None = None
        self._refusals = Refusals(log, Counters())

    def told(self, messages: list[list[bytes]]) -> None:
        """Messages of the broadcast."""
        self._body = messages[-1][-1]
        self.came.set()

    def take(self) -> ClusterView | None:
        """None if there is none, or none that can be read."""
        body, self._body = self._body, None
        self.came.clear()
        if body is None:
            return None
        try:
            return msgspec.msgpack.decode(body, type=ClusterView)
        except UNDECODABLE as error:
            self._refusals.note("undecodable", error)
            return None


async def topology_events(client: GcmClient) -> AsyncGenerator[TopologyEvent, None]:
    """For ever: a snapshot, then every change; a snapshot again under another GCM. While none leads, it is looked for."""
    last: ClusterView | None = None
    while True:
        leader = await _leader(client)
        latest = Latest()
        link = SubscriberLink(f"tcp://{leader.host}:{leader.broadcast}", [BROADCAST_TOPIC], latest.told)
        try:
            async with aclosing(_views(client, leader, latest)) as views:
                async for view in views:
                    if last is not None and view.epoch < last.epoch:
                        continue  # of a GCM that does not know yet that it leads no more
                    for event in changes(last, view):
                        yield event
                    last = view
        finally:
            link.close()


async def _views(client: GcmClient, leader: LeaderAddress, latest: Latest) -> AsyncGenerator[ClusterView, None]:
    """Whole views, in order, as long as this GCM leads."""
    known = await _ask(client)
    if known is not None:
        yield known
    asked = time.monotonic()
    while True:
        _check_open(client)
        try:
            async with asyncio.timeout(SILENCE_SECONDS):
                await latest.came.wait()
        except TimeoutError:
            if await _leader(client) != leader:
                return
            known, asked = await _ask(client), time.monotonic()
            if known is not None:
                yield known
            continue
        view = latest.take()
        # A broadcast may be older than the answer that came meanwhile; soon after it none is.
        if view is not None and (known is None or view.time >= known.time or time.monotonic() - asked > VIEW_SECONDS):
            yield view


async def _ask(client: GcmClient) -> ClusterView | None:
    """The whole cluster now; None if nobody leads just now."""
    try:
        return await client.request(GetCluster(), ClusterView, VIEW_SECONDS)
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
