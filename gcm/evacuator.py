"""What a leader does in one term so that hosts are left: takes the steps that evacuation.py and rebalance.py decide, a few at a
time, and says what is still on a host. Nothing is remembered: what is to be done stands in the assignments of hosts and the
records of queues, so the next leader goes on.

Stores learn from their hosts' reports who is leaving (roq/log/replicated/stores.py): the owners of logs and payloads, and the
leader of shuffles, move what is there by themselves. Here it is only counted.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from functools import partial

import msgspec

from gcm import evacuation, rebalance
from gcm.background import NextLook
from gcm.cluster import STORE_NAME, ClusterState, Host, differing, is_running, store_endpoints, work_queue_info
from gcm.evacuation import DrainExchange, StepWaits
from gcm.placement import takes_monitor
from gcm.term import LeaderTerm
from roq.errors import FrameError, HostFull, NotLeader, RoqError, Unavailable
from roq.log.replicated.metadata import LogMeta
from roq.log.replicated.stores import StaticDirectory, Stores
from roq.runtime.observe import logger
from roq.runtime.rpc import RpcPool
from roq.wire import master, monitor
from roq.wire import store as store_wire
from roq.wire.assignment import Leaving, from_json
from roq.wire.hosts import HostRemains

log = logger(__name__)

EMPTY_SECONDS = 5.0  # nothing was found on a host for so long: its store ends
AVOIDED_SECONDS = 600.0  # what was moved to a host is not moved there again for so long, however that ended
LOOK_SECONDS = 1.0  # from a change to the next look, and between two tries
STEPS_AT_ONCE = 16  # queues under way: each has one Exchange that is drained, or one Monitor that is replaced
DRAIN_SECONDS = 35.0  # a Monitor answers within 30
ASK_SECONDS = 5.0  # a master or a store how much it keeps
ASKED_AT_ONCE = 32
COUNTED_SECONDS = 1.0  # so long an answer about data is good for all who ask
UNKNOWN = -1
TABLES = ("queues", "work_queues", "options", "recoveries", "transactions")  # after a change of which there may be a step


class Evacuator:
    """Made once per term; ends with it. quiet_seconds: after hosts came or went, before anything is levelled. count(host): what
    is still there; raises Unavailable."""

    def __init__(self, term: LeaderTerm, quiet_seconds: float, count: Callable[[str], Awaitable[HostRemains]]) -> None:
        self._term, self._quiet_seconds, self._count = term, quiet_seconds, count
        self._empty_since: dict[str, float] = {}  # by host: nothing was found there
        self._chance = random.Random()
        self._hosts, self._since = frozenset[str](), time.monotonic()  # that can be used, since when
        self._avoided: dict[tuple[str, str], float] = {}  # (subject, target) -> until when
        self._monitors = RpcPool(monitor.Reply, DRAIN_SECONDS)
        self._under_way: dict[str, asyncio.Task[None]] = {}  # by subject
        self._told: dict[str, str] = {}  # why a subject waits
        self._tried: dict[str, float] = {}  # when, by subject
        self._next = NextLook()
        term.view.on_change.append(self._changed)

    def start(self) -> None:
        """Look now, and from now on."""
        self._next.within(0)
        self._term.tasks.start(self._run(), "evacuations")

    def _changed(self, before: ClusterState, after: ClusterState) -> None:
        tables = all(getattr(before, table) is getattr(after, table) for table in TABLES)
        hosts = ((before.host(name), after.host(name)) for name in differing(before.hosts, after.hosts))
        if not tables or any(_differs(*pair) for pair in hosts):
            self._next.within(LOOK_SECONDS)

    async def _run(self) -> None:
        try:
            while True:
                await self._next.due()
                self._begin(evacuation.subjects(self._term.view.cluster))
                await self._end_stores()
                await self._level()
        except NotLeader:
            return  # the next leader goes on
        finally:
            self._next.close()
            self._monitors.close()

    def _begin(self, subjects: list[str]) -> None:
        """Those first that were tried longest ago, so that none that waits keeps others waiting."""
        concerned = frozenset(subjects)
        self._told = {subject: why for subject, why in self._told.items() if subject in concerned}
        self._tried = {subject: at for subject, at in self._tried.items() if subject in concerned}
        free = [subject for subject in subjects if subject not in self._under_way]
        free.sort(key=lambda subject: self._tried.get(subject, 0.0))
        for subject in free[: STEPS_AT_ONCE - len(self._under_way)]:
            self._tried[subject] = time.monotonic()
            self._under_way[subject] = self._term.tasks.start(self._step(subject), f"evacuation of {subject}")

    async def _end_stores(self) -> None:
        """Of evacuated hosts, when nothing has counted on them for a while. Looks again until then."""
        hosts, now = evacuation.to_empty(self._term.view.cluster), time.monotonic()
        self._empty_since = {host: self._empty_since[host] for host in hosts if host in self._empty_since}
        for host in hosts:
            self._next.within(LOOK_SECONDS)
            try:
                remains = await self._count(host)
            except Unavailable as error:
                log.info("host %s is being evacuated, and what it keeps can't be counted: %s", host, error)
                continue
            if remains.processes or remains.data:
                self._empty_since.pop(host, None)
            elif now - self._empty_since.setdefault(host, now) >= EMPTY_SECONDS:
                await self._term.change(partial(evacuation.emptied, host=host))
                log.info("host was evacuated: nothing counts on it, its store ends", extra={"fields": {"host": host}})

    async def _level(self) -> None:
        """Begin one move, if hosts have been as they are for long enough, and differ."""
        cluster, now = self._term.view.cluster, time.monotonic()
        hosts = frozenset(name for name, host in cluster.hosts.items() if takes_monitor(host))
        if hosts != self._hosts:
            self._hosts, self._since = hosts, now
        if (wait := self._since + self._quiet_seconds - now) > 0:
            self._next.within(wait)
            return
        self._avoided = {key: until for key, until in self._avoided.items() if until > now}
        avoided = frozenset(self._avoided)
        if avoided:
            self._next.within(max(LOOK_SECONDS, min(self._avoided.values()) - now))
        move = rebalance.next_move(cluster, avoided)
        if move is None:
            return
        self._avoided[move.subject, move.target] = now + AVOIDED_SECONDS
        try:
            await self._term.change(lambda cluster: rebalance.begun(cluster, move, avoided, self._chance), move.subject)
        except HostFull as error:
            log.info("levelling waits: %s", error, extra={"fields": {"subject": move.subject, "to": move.target}})
            return
        what = f"Exchange {move.exchange}" if move.exchange else "a Monitor or master"
        log.info("levelling: %s moves, %s", what, move.why, extra={"fields": {"subject": move.subject, "to": move.target}})

    async def _step(self, subject: str) -> None:
        """One step, and a look for the next one behind it."""
        try:
            await self._take(subject)
        except NotLeader:
            return  # the next leader goes on
        except RoqError as error:
            self._tell(subject, str(error))
        finally:
            del self._under_way[subject]
            self._next.within(LOOK_SECONDS)

    async def _take(self, subject: str) -> None:
        what = evacuation.step(self._term.view.cluster, subject, self._chance)
        match what:
            case StepWaits(why):
                self._tell(subject, why)
            case DrainExchange(queue, exchange, address):
                await self._monitors.request(address.clients_endpoint(), monitor.Drain(exchange), monitor.Drained)
                await self._term.change(lambda cluster: evacuation.drained(cluster, queue, exchange), subject)
                log.info("Exchange was drained and goes", extra={"fields": {"queue": queue, "exchange": exchange}})
            case ClusterState():
                await self._term.change(lambda cluster: evacuation.changed(cluster, subject, self._chance), subject)
                self._told.pop(subject, None)

    def _tell(self, subject: str, why: str) -> None:
        if self._told.get(subject) != why:
            self._told[subject] = why
            log.info("evacuation waits: %s", why, extra={"fields": {"subject": subject}})


def _differs(before: Host, after: Host) -> bool:
    """In more than its load."""
    told = before.alive, before.draining, before.leaving, before.stopping, before.report, before.exchanges_max
    return told != (after.alive, after.draining, after.leaving, after.stopping, after.report, after.exchanges_max)


class RemainsCounter:
    """What is still on hosts; of one term."""

    def __init__(self, term: LeaderTerm) -> None:
        self._term = term
        self._chance = random.Random(0)
        self._masters = RpcPool(master.Reply, ASK_SECONDS)
        self._counted: dict[str, tuple[float, int, int, tuple[str, ...]]] = {}  # when, what, who is silent
        self._gate = asyncio.Semaphore(ASKED_AT_ONCE)
        self._one = asyncio.Lock()

    async def count(self, host: str, ranges: int) -> HostRemains:
        """ranges: of shuffles, on this host. Raises Unavailable."""
        cluster = self._term.view.cluster
        remains = evacuation.processes_left(cluster, host, self._chance)
        async with self._one:
            at, segments, payloads, silent = self._counted.get(host, (0.0, 0, 0, ()))
            if time.monotonic() - at > COUNTED_SECONDS:
                metas = await self.logs()
                segments = sum(_named(meta, host) for meta in metas.values())
                payloads, silent = await self._payloads(cluster, host)
                self._counted[host] = time.monotonic(), segments, payloads, silent
        stuck = [name for name, record in cluster.queues.items() if not record.running and record.record is not None]
        waits = remains.waits
        if silent and remains.leaving is Leaving.EVERYTHING:
            named = ", ".join(silent[:3])
            waits += (f"the masters of these do not say what it keeps of them, they may be of an older version: {named}",)
        if stuck and segments and remains.leaving is Leaving.EVERYTHING:
            waits += (f"nobody moves the tapes of stopped queues, start them: {', '.join(sorted(stuck)[:3])}",)
        return msgspec.structs.replace(remains, segments=segments, payloads=payloads, ranges=ranges, waits=waits)

    async def logs(self) -> dict[str, LogMeta]:
        """All of them, as ZooKeeper has them now. Raises Unavailable."""
        found = {}
        for id, data in (await self._term.logs("", only_asked=True)).items():
            try:
                found[id] = from_json(data, LogMeta)
            except FrameError as error:
                log.error("metadata of a log are unreadable: %s", error, extra={"fields": {"log": id}})
        return found

    async def copies(self, host: str) -> dict[str, int]:
        """How many copies are wanted of what the store of this host keeps, or may be about to; by what that is."""
        cluster = self._term.view.cluster
        wanted = {f"log {id}": meta.write_quorum for id, meta in (await self.logs()).items() if _named(meta, host)}
        wanted |= {f"work queue {name}": one.spec.write_quorum for name, one in cluster.work_queues.items()}
        wanted |= evacuation.seats_wanted(cluster, host)
        recorded = {name: one.record for name, one in cluster.queues.items() if one.record is not None and one.recorded}
        return wanted | {f"queue {name}": max(record.copies, record.ack) for name, record in recorded.items()}

    async def _payloads(self, cluster: ClusterState, host: str) -> tuple[int, tuple[str, ...]]:
        """Of tasks, as the masters know, those of a lost host and uploads under way as well: on the host there may be more,
        which nobody needs. UNKNOWN, and of which work queues: a master does not say, nor does the store that it has none. One
        that has ended had none."""
        infos = [work_queue_info(cluster, record) for record in cluster.work_queues.values()]
        masters = [next((one.endpoint() for one in info.masters if one.active), None) for info in infos]
        counts = await asyncio.gather(*(self._held(endpoint, host) for endpoint in masters))
        known = sum(count for count in counts if count != UNKNOWN)
        silent = tuple(info.record.name for info, count in zip(infos, counts, strict=True) if count == UNKNOWN)
        if silent and STORE_NAME not in cluster.host(host).assigned:
            return known, silent
        if silent and (known or not await self._has_no_blob(cluster, host)):
            return UNKNOWN, silent
        return known, ()

    @staticmethod
    async def _has_no_blob(cluster: ClusterState, host: str) -> bool:
        """Its store says so."""
        endpoint = store_endpoints(cluster).get(host)
        if endpoint is None or not is_running(cluster, host, STORE_NAME):
            return False
        stores = Stores(StaticDirectory({host: endpoint}))
        try:
            return not (await stores.request(host, store_wire.DescribeStore(), store_wire.StoreView, ASK_SECONDS)).blobs
        except RoqError:
            return False
        finally:
            stores.close()

    async def _held(self, endpoint: str | None, host: str) -> int:
        if endpoint is None:
            return UNKNOWN
        async with self._gate:
            try:
                return (await self._masters.request(endpoint, master.CountHeld(host), master.Counted)).count
            except RoqError as error:
                log.info("master at %s does not say how many payloads are on host %s: %s", endpoint, host, error)
                return UNKNOWN

    def close(self) -> None:
        """Count no more."""
        self._masters.close()


def _named(meta: LogMeta, host: str) -> int:
    """Stretches and snapshots of the log of which a copy is on the host."""
    parts = sum(host in part.nodes for segment in meta.segments for part in segment.fragments)
    return parts + (meta.snapshot is not None and host in meta.snapshot.nodes)
