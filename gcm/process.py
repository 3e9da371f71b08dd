"""The sockets and loops of one Global Configuration Manager: requests, and the topology broadcast (DESIGN §4), a PUB socket
that tells the whole cluster soon after each change and every so often. Nothing is decided here."""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial

import msgspec

from gcm.access import AccessKeeper, take_access
from gcm.cluster import ClusterState, differing, view
from gcm.crash import arm
from gcm.handlers import Handlers
from gcm.leadership import Leadership
from gcm.providers.means import FleetMeans, fleet_means
from gcm.topology import Stamp, TouchedNames, delta
from roq.config import GcmConfig
from roq.coordination import paths
from roq.coordination.link import CoordinationError
from roq.coordination.session import Session
from roq.errors import NotLeader, ZooKeeperUnavailable
from roq.runtime.audit import acted
from roq.runtime.links import Broadcaster
from roq.runtime.observe import Counters, Refusals, logger
from roq.runtime.rpc import RpcServer
from roq.runtime.run import READY, STOPPING, WATCHDOG, Tasks, notify, watchdog_seconds
from roq.runtime.security import process_security
from roq.runtime.shutdown import ShutdownMonitor
from roq.wire import gcm as wire
from roq.wire.access import GetAccess, SetAccess
from roq.wire.card import Right
from roq.wire.gcm import BROADCAST_TOPIC, LeaderAddress
from roq.wire.limits import CONTROL_BYTES_MAX
from roq.wire.producers import OpenProducer, ProducerGrant
from roq.wire.rights import ADMINISTRATIVE, EVERYTHING, GCM, check, check_creation, for_names
from roq.wire.topology import CHANGES_TOPIC

log = logger(__name__)
CLOSE_SECONDS = 600.0  # from one look at the rights of the cluster's nodes to the next

SPACING_SECONDS = 0.2  # between two broadcasts, however much changes
DELTA_BYTES_MAX = 4 * 1024 * 1024  # more has changed at once: as a message it would soon be too large
BUSY_SHARE = 10  # a broadcast that took s seconds to make is followed by at least BUSY_SHARE * s of silence


class GcmReady(msgspec.Struct, frozen=True):
    """The line a launcher waits for."""

    ready: bool
    port: int
    broadcast: int
    control: int
    pid: int


class TopologyBroadcast:
    """Bound at `address:port` (0: any free port, see `port`). `cluster` raises NotLeader while there is nothing to tell:
    only the leader broadcasts, as `leader`, and what is `now`. Changes are coalesced, and telling never takes more than a
    tenth of the leader's time. The whole cluster is told only if somebody listens who wants that."""

    def __init__(
        self, address: str, port: int, every_seconds: float, cluster: Callable[[], ClusterState], stamp: Callable[[], Stamp]
    ) -> None:
        self._broadcaster = Broadcaster(address, port, let_in=partial(check, rule=(Right.DESCRIBE,), name=EVERYTHING))
        self.port = self._broadcaster.port
        self._cluster, self._stamp, self._every_seconds = cluster, stamp, every_seconds
        self._news = asyncio.Event()
        self._told, self._told_at = ClusterState(), 0.0  # what deltas have told so far, and when
        self._touched = TouchedNames()  # since then
        self._refusals = Refusals(log, Counters())

    def changed(self, before: ClusterState, after: ClusterState) -> None:
        """Tell soon, if this is more than a host's new load."""
        if before.epoch == after.epoch:  # else whoever listens asks for the whole
            self._touched.note(before, after)
        if _shape(before) != _shape(after) or any(
            _matters(before, after, name) for name in differing(before.hosts, after.hosts)
        ):
            self._news.set()

    async def run(self) -> None:
        """Broadcast until cancelled."""
        while True:
            started = time.monotonic()
            with suppress(NotLeader):  # then the leader tells
                self._tell(self._cluster(), self._stamp())
            await asyncio.sleep(max(SPACING_SECONDS, BUSY_SHARE * (time.monotonic() - started)))
            with suppress(TimeoutError):
                async with asyncio.timeout(self._every_seconds):  # wait_for of Python 3.11 may swallow our cancellation
                    await self._news.wait()
            self._news.clear()

    def _tell(self, cluster: ClusterState, stamp: Stamp) -> None:
        if self._broadcaster.is_heard(BROADCAST_TOPIC):
            self._tell_whole(msgspec.msgpack.encode(view(cluster, stamp.leader, stamp.time)))
        if cluster.epoch != self._told.epoch:
            self._told, self._told_at, self._touched = cluster, stamp.time, TouchedNames()
        body = msgspec.msgpack.encode(delta(self._told, self._told_at, cluster, stamp, self._touched))
        if len(body) > DELTA_BYTES_MAX:  # who listens finds that something is missing, and asks for the whole
            body = msgspec.msgpack.encode(delta(cluster, stamp.time, cluster, stamp))
        self._broadcaster.send((CHANGES_TOPIC, body))
        self._told, self._told_at, self._touched = cluster, stamp.time, TouchedNames()

    def _tell_whole(self, body: bytes) -> None:
        if len(body) + len(BROADCAST_TOPIC) > CONTROL_BYTES_MAX:  # whoever got it would end the connection
            self._refusals.note("whole_too_large", f"{len(body):,} bytes: whoever listens has to follow the changes instead")
            return
        self._broadcaster.send((BROADCAST_TOPIC, body))

    def close(self) -> None:
        """Tell nothing more."""
        self._broadcaster.close()


def _shape(cluster: ClusterState) -> tuple[int, int, int, int, int]:
    """Differs if the epoch, a queue, a work queue, a policy or the set of hosts does: these tables are replaced whole when
    they change."""
    return cluster.epoch, id(cluster.queues), id(cluster.work_queues), id(cluster.policies), len(cluster.hosts)


def _matters(before: ClusterState, after: ClusterState, name: str) -> bool:
    old, new = before.host(name), after.host(name)
    return (old.alive, old.draining, old.revision, old.report) != (new.alive, new.draining, new.revision, new.report)


class Gcm:
    """Everything one GCM has open. Made by `start`, ended by `close`."""

    def __init__(self, config: GcmConfig, session: Session, stop: asyncio.Event, means: FleetMeans | None) -> None:
        self.counters = Counters()
        self._session = session
        self._tasks = Tasks(lambda _: stop.set())  # a loop that fails is a defect: end, and let the service manager restart us
        opened: list[Callable[[], None]] = []
        try:
            where = config.address, config.broadcast_port
            self.topology = TopologyBroadcast(*where, config.broadcast_seconds, self._cluster, self._stamp)
            opened.append(self.topology.close)
            self.server = RpcServer(
                config.address,
                config.port,
                wire.Request,
                self._handle,
                counters=self.counters,
                allow=for_names(GCM),
                audited=ADMINISTRATIVE,
            )
            opened.append(self.server.close)
            address = f"{config.address}:{self.server.port}"
            name = config.name or address
            self.control = ShutdownMonitor(f"gcm/{name}", config.address, config.control_port, stop, self.counters)
            opened.append(self.control.close)
        except BaseException:
            for close in opened:
                close()
            raise
        self._opened, self._address = opened, address
        here = LeaderAddress(0, config.address, self.server.port, self.topology.port)
        self._leadership = Leadership(session, name, here, self.counters, self.topology.changed, config, means)
        self._handlers = Handlers(self._leadership, address, config.wait_seconds, random.Random())
        self._access = AccessKeeper(session)

    @property
    def ready(self) -> GcmReady:
        """Where it serves."""
        return GcmReady(True, self.server.port, self.topology.port, self.control.port, os.getpid())

    def start(self) -> None:
        """Take part in the election."""
        self._tasks.start(self._leadership.run(), "leadership")
        self._tasks.start(self.topology.run(), "topology broadcast")
        if (security := process_security()) is not None and not security.mixed:
            self._tasks.start(self._close_rest(), "nodes that are open")
        self._tasks.start(_watchdog(), "watchdog")

    async def close(self) -> None:
        """Make room for the next leader at once; what is pending is answered with NotLeader."""
        await self._tasks.stop()
        for close in self._opened:
            close()

    async def _handle(self, peer: bytes, request: wire.Request) -> msgspec.Struct:
        if isinstance(request, SetAccess | GetAccess):
            return await self._access.handle(request)
        if isinstance(request, wire.CreateWorkQueue):
            card, known = self.server.card_of(peer), self._leadership.serving().term.view.cluster.work_queues
            if card is not None:
                check_creation(card, request, request.name in known)
            if request.name not in known:
                acted(card, request)
        reply = await self._handlers.handle(peer, request)
        return self._proved(peer, request, reply) if isinstance(request, OpenProducer) else reply

    def _proved(self, peer: bytes, request: OpenProducer, reply: msgspec.Struct) -> msgspec.Struct:
        """With what the producer shows to Monitor and Exchanges, if it has a card."""
        card, security = self.server.card_of(peer), process_security()
        if card is None or security is None or not isinstance(reply, ProducerGrant):
            return reply
        return msgspec.structs.replace(reply, proof=security.seal_grant(request.queue, reply.publisher, card))

    async def _close_rest(self) -> None:
        """What members without cards, or with those of before, have made after others closed the tree."""
        while True:
            try:
                await _close(self._session)
            except (ZooKeeperUnavailable, CoordinationError) as error:
                log.info("nodes can't be closed yet", extra={"fields": {"reason": str(error)}})
            await asyncio.sleep(CLOSE_SECONDS)

    def _cluster(self) -> ClusterState:
        return self._leadership.serving().term.view.cluster

    def _stamp(self) -> Stamp:
        return Stamp(self._address, self._handlers.now())


async def serve(config: GcmConfig, stop: asyncio.Event, announce: Callable[[GcmReady], None]) -> None:
    """Run one GCM until `stop`. Raises ZooKeeperUnavailable or PortTaken if it can't begin."""
    arm(os.environ)
    means = fleet_means(config)
    session = await Session.connect(config.zookeeper, session_seconds=config.session_seconds)
    try:
        for path in paths.SKELETON:
            await session.ensure_path(path)
        if await session.is_open(paths.GCM):
            await _close(session)
        await take_access(session)
        gcm = Gcm(config, session, stop, means)
        try:
            gcm.start()
            announce(gcm.ready)
            notify(READY)
            await stop.wait()
            log.info("GCM stops")
            notify(STOPPING)
        finally:
            await gcm.close()
    finally:
        await session.close()


async def _close(session: Session) -> None:
    closed, denied = await session.protect()
    if closed:
        log.warning(
            "nodes in ZooKeeper had other rights than members' alone: they are closed", extra={"fields": {"nodes": closed}}
        )
    if denied:
        fields = {"nodes": len(denied), "first": denied[0]}
        log.error("nodes in ZooKeeper are somebody else's: remove them, with ZooKeeper's super user", extra={"fields": fields})


async def _watchdog() -> None:
    """Tell systemd that the loop turns, if it asks."""
    every_seconds = watchdog_seconds()
    while every_seconds is not None:
        notify(WATCHDOG)
        await asyncio.sleep(every_seconds)
