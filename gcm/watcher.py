"""The leader's view of the cluster: read from ZooKeeper once at the start of a term, kept fresh by watches from then on.

Registrations and reports come from the hosts and are watched; all else is the leader's own and is taken over from its writes
(`written`). A znode that can't be read is logged. It never stops a leader: see ClusterSnapshot for what becomes of it. Not
covered: writing (term.py).
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeVar

import msgspec

from gcm.cluster import ClientTransaction, ClusterState, Host, HostRecovery, HostRegistration, differing
from gcm.reconcile import changed_hosts
from roq.coordination import paths
from roq.coordination.link import Node
from roq.coordination.registration import parse_instance
from roq.coordination.session import Session, Watch
from roq.errors import FrameError, NotLeader, RoqError
from roq.runtime.observe import logger
from roq.runtime.run import Tasks
from roq.wire.assignment import STORES, Assignment, HostReport, QueueRecord, from_json, work_subject
from roq.wire.fleet import FleetRecord, MachineRecord
from roq.wire.hcm import HostPayload
from roq.wire.options import ClusterOptions
from roq.wire.policy import Policy
from roq.wire.work_queue import WorkQueueRecord

MADE_AT_ONCE = 100
ADMITTED_AT_ONCE = 16  # hosts that were never seen: others' requests are not to wait behind hundreds
WAKE_SECONDS = 0.05  # from what may concern anybody who waits to a look by all of them: many reports are one look

T = TypeVar("T", bound=msgspec.Struct)
log = logger(__name__)


class ClusterWatcher:
    """cluster: the newest view. readings: of its hosts, as they were read for it. on_change(before, after): after every change
    of it. monitors_moved(queues, host): what runs on this host has changed, and assignments elsewhere name ports of these
    queues' Monitors there.

    Watches from `start` on, until `close`.
    """

    def __init__(
        self,
        session: Session,
        cluster: ClusterState,
        readings: Iterable[HostReading],
        tasks: Tasks,
        monitors_moved: Callable[[list[str], str], None],
    ) -> None:
        self.cluster = cluster
        self.on_change: list[Callable[[ClusterState, ClusterState], None]] = []
        self._session, self._tasks, self._monitors_moved = session, tasks, monitors_moved
        self._ended = False
        self._waiters: dict[str, set[asyncio.Future[None]]] = defaultdict(set)
        self._watches: list[Watch[list[str]]] = []
        self._host_watches: dict[str, list[Watch[Node | None]]] = {}
        self._watched = set(cluster.hosts)
        self._told: dict[str, Node | None] = {}  # newest report, by host
        self._joined: dict[str, int] = {}  # generation of the registration with which each host joined
        self._seen: dict[str, int] = {}  # newest mzxid by path: a re-read of the same is no news
        self._wake_timer: asyncio.TimerHandle | None = None
        self._admitting = asyncio.Semaphore(ADMITTED_AT_ONCE)
        for reading in readings:
            self._take_in(reading)

    def start(self) -> None:
        """Watch from now on. What has changed since the snapshot is read then."""
        for name in sorted(self._watched):
            self._watch_host(name)
        self._watches.append(self._session.watch_children(paths.HOSTS, self._hosts_seen))

    def end(self) -> None:
        """The term is over: nothing is taken in any more, and whoever waits gets NotLeader."""
        self._ended = True
        for futures in self._waiters.values():
            for future in futures:
                if not future.done():
                    future.set_exception(NotLeader("this Global Configuration Manager leads no longer"))

    def close(self) -> None:
        """Watch nothing any more."""
        if self._wake_timer is not None:
            self._wake_timer.cancel()
        for watch in self._watches:
            watch.close()
        for name in list(self._host_watches):
            self._forget_host(name)

    def written(self, before: ClusterState, after: ClusterState) -> None:
        """Take over what the leader wrote, beside what hosts reported meanwhile."""
        hosts = dict(self.cluster.hosts)
        for host in changed_hosts(before, after):
            now = hosts.get(host.name) or Host(host.name)
            hosts[host.name] = replace(
                now,
                assigned=host.assigned,
                draining_wanted=host.draining_wanted,
                leaving=host.leaving,
                revision=host.revision,
            )
        for name in differing(before.hosts, after.hosts):
            if name not in after.hosts:
                hosts.pop(name, None)
                self._forget_host(name)
        self._become(replace(after, hosts=hosts))
        self._wake(differing(before.queues, after.queues))
        self._wake(map(work_subject, differing(before.work_queues, after.work_queues)))

    def _become(self, cluster: ClusterState) -> None:
        before, self.cluster = self.cluster, cluster
        for callback in self.on_change:
            callback(before, cluster)

    async def until(self, subject: str, done: Callable[[ClusterState], bool]) -> ClusterState:
        """The first cluster of which `done` is true; asked again whenever something about `subject` (a queue) changes.

        Raises what `done` raises, or NotLeader if the term ends.
        """
        while not done(self.cluster):
            if self._ended:
                raise NotLeader("this Global Configuration Manager leads no longer")
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiters[subject].add(future)
            try:
                await future
            finally:
                self._waiters[subject].discard(future)
                if not self._waiters[subject]:
                    del self._waiters[subject]
        return self.cluster

    def _wake(self, subjects: Iterable[str]) -> None:
        for subject in subjects:
            for future in self._waiters.get(subject, ()):
                if not future.done():
                    future.set_result(None)

    def _wake_all_soon(self) -> None:
        if self._wake_timer is None:
            self._wake_timer = asyncio.get_running_loop().call_later(WAKE_SECONDS, self._wake_all)

    def _wake_all(self) -> None:
        self._wake_timer = None
        self._wake(list(self._waiters))

    def _hosts_seen(self, names: list[str]) -> None:
        for name in names:
            if name not in self._watched:
                self._watched.add(name)
                self._tasks.start(self._admit(name), f"admit host {name}")

    async def _admit(self, name: str) -> None:
        """A host that was never seen: its folder is made before anything can be placed on it."""
        try:
            async with self._admitting:
                await self._session.ensure_path(paths.host_state(name))
                reading = await read_host(self._session, name)
        except RoqError as error:
            self._watched.discard(name)  # the watch tells its name again
            log.warning(
                "registration of a new host is unreadable: nothing is placed there",
                extra={"fields": {"host": name, "reason": str(error)}},
            )
            return
        if name not in self.cluster.hosts:
            self._take_in(reading)
            self._become(self.cluster.with_host(reading.host))
        self._watch_host(name)

    def _forget_host(self, name: str) -> None:
        for watch in self._host_watches.pop(name, ()):
            watch.close()
        self._watched.discard(name)
        self._told.pop(name, None)
        self._joined.pop(name, None)
        for path in (paths.host(name), paths.running(name)):
            self._seen.pop(path, None)

    def _take_in(self, reading: HostReading) -> None:
        """What was read of a host is no news to the watches that follow."""
        name, registration = reading.host.name, reading.host.registration
        if registration is not None:
            self._joined[name] = registration.generation
        self._told[name] = reading.report
        self._is_news(paths.host(name), reading.registration)
        self._is_news(paths.running(name), reading.report)

    def _watch_host(self, name: str) -> None:
        self._host_watches[name] = [
            self._session.watch_data(paths.host(name), lambda node: self._registration_seen(name, node)),
            self._session.watch_data(paths.running(name), lambda node: self._report_seen(name, node)),
        ]

    def _is_news(self, path: str, node: Node | None) -> bool:
        newest = node.mzxid if node is not None else -1
        if self._seen.get(path) == newest:
            return False
        self._seen[path] = newest
        return True

    def _registration_seen(self, name: str, node: Node | None) -> None:
        if self._ended or not self._is_news(paths.host(name), node):
            return
        host = self.cluster.host(name)
        registration = decode_registration(name, node)
        if registration is not None and not host.alive:
            self._joined[name] = registration.generation
        after = replace(host, registration=registration, report=None, last_report=host.report or host.last_report)
        if registration is not None:
            after = replace(after, report=self._report(name), last_report=None)
        self._become(self.cluster.with_host(after))
        if host.alive != after.alive:
            log.info(
                "host joined" if after.alive else "host is lost: its queues are recovered elsewhere",
                extra={"fields": {"host": name}},
            )
            self._wake_all_soon()

    def _report_seen(self, name: str, node: Node | None) -> None:
        if self._ended or not self._is_news(paths.running(name), node):
            return
        self._told[name] = node
        before = self.cluster.host(name)
        if not before.alive:
            return  # it counts once the host has registered
        after = replace(before, report=self._report(name))
        self._become(self.cluster.with_host(after))
        changed = {
            (before.running.get(key) or after.running[key]).subject
            for key in {**before.running, **after.running}
            if before.running.get(key) != after.running.get(key)
        }
        self._wake(changed | (self._waiters.keys() & after.assigned_by_subject.keys()))
        if before.reported_revision != after.reported_revision or STORES in changed:
            self._wake_all_soon()
        if moved := [queue for queue in changed if self._monitor_matters(queue, name)]:
            self._monitors_moved(moved, name)

    def _report(self, name: str) -> HostReport | None:
        """The newest report; None if it is older than the host's joining, and so of an earlier life."""
        node = self._told.get(name)
        return decode_report(name, node) if node is not None and node.mzxid > self._joined.get(name, 0) else None

    def _monitor_matters(self, queue: str, host: str) -> bool:
        """A Monitor of the queue is on `host`, and a process elsewhere must know its ports."""
        record = self.cluster.queues.get(queue)
        if record is None or not record.running or host not in record.monitor_hosts:
            return False
        return bool(record.backups) or any(other != host for other in record.exchanges.values())


# --- reading it once --------------------------------------------------------------------------------------------------------


class HostReading(NamedTuple):
    """One host, and the nodes of its registration and report."""

    host: Host
    registration: Node | None
    report: Node | None


@dataclass(frozen=True)
class ClusterSnapshot:
    """The cluster, its hosts as they were read, and paths of unreadable policies and transactions, to be deleted (unreadable
    queue records are kept)."""

    cluster: ClusterState
    readings: tuple[HostReading, ...]
    unreadable: tuple[str, ...]


async def read_snapshot(session: Session, epoch: int) -> ClusterSnapshot:
    """Everything, as of now or later. Call it after the epoch was taken: no older leader changes anything meanwhile."""
    unreadable, strange, strange_work = list[str](), list[str](), list[str]()
    queues = await _table(session, paths.QUEUES, QueueRecord, strange)
    work_queues = await _table(session, paths.WORK_QUEUES, WorkQueueRecord, strange_work)
    policies = await _table(session, paths.POLICIES, Policy, unreadable)
    transactions: dict[str, ClientTransaction] = {}
    for kind in (paths.TransactionKind.QUEUE, paths.TransactionKind.EXCHANGE):
        transactions |= await _table(session, paths.transactions(kind), ClientTransaction, unreadable)
    recoveries = await _table(session, paths.transactions(paths.TransactionKind.HOST), HostRecovery, unreadable)
    known_names, registered = await session.children(paths.HOST_STATES), await session.children(paths.HOSTS)
    strangers = sorted({*registered} - {*known_names})
    for first in range(0, len(strangers), MADE_AT_ONCE):  # a deadline counts from the call
        await asyncio.gather(*(session.ensure_path(paths.host_state(name)) for name in strangers[first : first + MADE_AT_ONCE]))
    readings = await read_hosts(session, sorted({*known_names, *registered}))
    shuffles = frozenset(await session.children(paths.SHUFFLES))
    known = {reading.host.name: reading.host for reading in readings}
    kept = frozenset((*map(_name, strange), *(work_subject(_name(path)) for path in strange_work)))
    fleet, machines, damaged = await _read_fleet(session)
    node = await session.get(paths.OPTIONS)
    options = _decode(paths.OPTIONS, node.data, ClusterOptions) if node is not None and node.data else None
    tables = epoch, known, queues, work_queues, policies, transactions, recoveries, shuffles, kept
    cluster = ClusterState(*tables, options=options or ClusterOptions(), fleet=fleet, machines=machines)
    cluster = replace(cluster, unreadable=kept | damaged)
    return ClusterSnapshot(cluster, tuple(readings), tuple(unreadable))


async def _read_fleet(session: Session) -> tuple[FleetRecord | None, dict[str, MachineRecord], frozenset[str]]:
    """A record that can't be read stays: its machine is then one of which nothing is known, and is left alone."""
    machines = await _table(session, paths.MACHINES, MachineRecord, [])
    node = await session.get(paths.FLEET)
    record = _decode(paths.FLEET, node.data, FleetRecord) if node is not None else None
    return record, machines, frozenset((paths.FLEET,) if node is not None and record is None else ())


async def read_host(session: Session, name: str) -> HostReading:
    """One host, as read_hosts reads it."""
    return (await read_hosts(session, [name]))[0]


async def read_hosts(session: Session, names: Sequence[str]) -> list[HostReading]:
    """Hosts, in the order of their names."""
    nodes = await session.get_many([path(name) for name in names for path in (paths.assignment, paths.running, paths.host)])
    return [_reading(name, *nodes[at : at + 3]) for name, at in zip(names, range(0, len(nodes), 3), strict=True)]


def _reading(name: str, assigned: Node | None, report: Node | None, registration: Node | None) -> HostReading:
    """A report older than the registration is of an earlier life: it tells of processes that the host has stopped, or is gone
    with."""
    current = registration is not None and report is not None and report.mzxid > registration.czxid
    told = decode_report(name, report) if current or registration is None else None
    host = Host(name, decode_registration(name, registration), report=told if current else None)
    if registration is None:
        host = replace(host, last_report=told)
    wanted = _decode(paths.assignment(name), assigned.data, Assignment) if assigned is not None else None
    if wanted is not None:
        processes = {spec.name: spec for spec in wanted.processes}
        host = replace(host, draining_wanted=wanted.draining, leaving=wanted.leaving)
        host = replace(host, assigned=processes, revision=max(wanted.revision, 1))
    elif assigned is not None:  # written anew by the next change; the revision must grow all the same
        host = replace(host, revision=assigned.version + 1)
    return HostReading(host, registration, report)


def decode_registration(name: str, node: Node | None) -> HostRegistration | None:
    """What a live HCM says of itself; None if there is none or it can't be understood."""
    if node is None:
        return None
    try:
        instance = parse_instance(node.data)
        return HostRegistration(instance.address or "", instance.port or 0, instance.payload_as(HostPayload), node.czxid)
    except FrameError as error:
        log.error("registration is unreadable", extra={"fields": {"host": name, "reason": str(error)}})
        return None


def decode_report(name: str, node: Node | None) -> HostReport | None:
    """What runs on the host; None if it has not said so, or not so that it can be understood."""
    return _decode(paths.running(name), node.data, HostReport) if node is not None and node.data else None


def _decode(path: str, data: bytes, kind: type[T]) -> T | None:
    try:
        return from_json(data, kind)
    except FrameError as error:
        log.error("znode is unreadable", extra={"fields": {"path": path, "reason": str(error)}})
        return None


async def _table(session: Session, folder: str, kind: type[T], unreadable: list[str]) -> dict[str, T]:
    names = await session.children(folder)
    nodes = await session.get_many([f"{folder}/{name}" for name in names])
    table = {}
    for name, node in zip(names, nodes, strict=True):
        value = _decode(f"{folder}/{name}", node.data, kind) if node is not None else None
        if value is not None:
            table[name] = value
        elif node is not None:
            unreadable.append(f"{folder}/{name}")
    return table


def _name(path: str) -> str:
    return path.rpartition("/")[2]
