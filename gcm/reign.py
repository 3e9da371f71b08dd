"""One reign of a leader: its snapshot of the cluster, kept fresh by watches, and the one door through which it writes.

Changes asked for at the same time are written together: each is applied to what the one before it left, then the whole
difference goes out as one fenced multi, or more if it is large. The reign ends at the first write that fails for whatever
reason: the next reign bumps the epoch, so that a write whose outcome is unknown can't take effect any more, and reads
everything anew.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

from gcm.cluster import ClusterState, Host
from gcm.reconcile import assign, assign_all, changed_hosts, changes, stamp
from gcm.snapshot import decode_registration, decode_report, read_host, read_snapshot
from roq.coordination import paths
from roq.coordination.errors import NoNode
from roq.coordination.multi import Create, Delete, Fence, Op, SetData, fenced
from roq.coordination.session import Node, Session, Watch
from roq.errors import CallError, HostFull, NotLeader, RoqError
from roq.runtime.observe import Counters, logger
from roq.runtime.run import Tasks
from roq.wire.assignment import STORES, HostReport

log = logger(__name__)

CHANGES_AT_ONCE = 64  # requests written in one multi: enough to keep up, few enough to answer the first ones soon
PROCESSES_AT_ONCE = 2_000  # assigned to the hosts of one write: 200 to 500 bytes each, and ZooKeeper takes 1 MB
CHANGES_WAITING = 10_000  # beyond this requests are refused

BYTES_AT_ONCE = 400_000  # of one multi; larger differences go out in parts, the records first (see `_parts`)

Decide = Callable[[ClusterState], ClusterState]


@dataclass(frozen=True)
class _Change:
    decide: Decide
    subjects: tuple[str, ...]  # whose assignments follow
    done: asyncio.Future[ClusterState]


class Reign:
    """Made by `begin`, ended by `end`. `ended` has the reason, None if it was asked for."""

    def __init__(self, session: Session, fence: Fence, cluster: ClusterState, counters: Counters) -> None:
        self.fence = fence
        self.cluster = cluster
        self.counters = counters
        self.ended: asyncio.Future[BaseException | None] = asyncio.get_running_loop().create_future()
        self.tasks = Tasks(self._fail)
        self.on_change: list[Callable[[ClusterState, ClusterState], None]] = []  # (before, after), after every change
        self._session = session
        self._waiting: deque[_Change] = deque()
        self._under_way: list[_Change] = []  # being written
        self._work = asyncio.Event()
        self._waiters: dict[str, set[asyncio.Future[None]]] = defaultdict(set)
        self._watches: list[Watch[Node | None] | Watch[list[str]]] = []
        self._watched: set[str] = set()
        self._told: dict[str, Node | None] = {}  # newest report, by host
        self._joined: dict[str, int] = {}  # generation of the registration with which each host joined
        self._seen: dict[str, int] = {}  # newest mzxid by path: a re-read of the same is no news

    @classmethod
    async def begin(cls, session: Session, fence: Fence, counters: Counters) -> Reign:
        """Read everything, make the assignments right, and watch the hosts from now on."""
        snapshot = await read_snapshot(session, fence.epoch)
        before = snapshot.cluster
        after = stamp(before, assign_all(before))
        repairs = [*changes(before, after), *(Delete(path) for path in snapshot.unreadable)]
        if repairs:
            log.warning(
                "inconsistent metadata are repaired", extra={"fields": {"paths": [operation.path for operation in repairs]}}
            )
            for part in _parts(repairs):
                await fenced(session, fence, *part)
        reign = cls(session, fence, after, counters)
        for host in after.hosts.values():
            reign._watch_host(host)
        reign._watches.append(session.watch_children(paths.HOSTS, reign._hosts_seen))
        reign.tasks.start(reign._write(), "gcm writer")
        return reign

    async def end(self, reason: BaseException | None) -> None:
        """Stop at once; whoever waits for something gets NotLeader."""
        self._finish(reason)
        for watch in self._watches:
            watch.close()
        await self.tasks.stop()

    def _fail(self, error: BaseException) -> None:
        self._finish(error)

    def _finish(self, reason: BaseException | None) -> None:
        if not self.ended.done():
            self.ended.set_result(reason)
        for change in (*self._under_way, *self._waiting):
            if not change.done.done():
                change.done.set_exception(NotLeader("this Global Configuration Manager leads no longer"))
        self._waiting.clear()
        for futures in self._waiters.values():
            for future in futures:
                if not future.done():
                    future.set_exception(NotLeader("this Global Configuration Manager leads no longer"))

    # --- changing ----------------------------------------------------------------------------------------------------

    async def change(self, decide: Decide, *subjects: str) -> ClusterState:
        """The cluster after `decide` has been applied, written, and the assignments of `subjects` (queues, work queues) made
        to follow.

        Raises what `decide` raises, or NotLeader if the write failed (it may still have taken effect).
        """
        if self.ended.done() or len(self._waiting) >= CHANGES_WAITING:
            raise NotLeader("this Global Configuration Manager leads no longer")
        done: asyncio.Future[ClusterState] = asyncio.get_running_loop().create_future()
        self._waiting.append(_Change(decide, subjects, done))
        self._work.set()
        return await done

    async def _write(self) -> None:
        while True:
            await self._work.wait()
            self._work.clear()
            while self._waiting:
                before = self.cluster
                accepted, after = self._decide(before)
                self._under_way = accepted
                try:
                    after = stamp(before, after)
                    if operations := changes(before, after):
                        self.counters["writes"] += 1
                        for part in _parts(operations):
                            await fenced(self._session, self.fence, *part)
                        self._install(before, after)
                except CallError as error:  # too large for ZooKeeper: nothing was written
                    for change in accepted:
                        if not change.done.done():
                            change.done.set_exception(HostFull(f"no more fits on these hosts: {error}"))
                    continue
                except RoqError as error:
                    for change in accepted:
                        if not change.done.done():
                            change.done.set_exception(NotLeader(f"the change could not be written: {error}"))
                    self._finish(error)
                    return
                for change in accepted:
                    if not change.done.done():
                        change.done.set_result(after)

    def _decide(self, before: ClusterState) -> tuple[list[_Change], ClusterState]:
        """Changes that are possible, and the cluster after all of them; impossible ones are answered."""
        after, accepted = before, list[_Change]()
        while self._waiting and len(accepted) < CHANGES_AT_ONCE:
            change = self._waiting.popleft()
            if change.done.cancelled():
                continue
            try:
                after = assign(change.decide(after), change.subjects, after)
            except RoqError as error:
                change.done.set_exception(error)
                continue
            except Exception as error:  # a defect that concerns this request only
                log.exception("reconciliation failed")
                change.done.set_exception(RoqError(f"{type(error).__name__}: {error}"))
                continue
            accepted.append(change)
            if sum(len(host.assigned) for host in changed_hosts(before, stamp(before, after))) > PROCESSES_AT_ONCE:
                break
        return accepted, after

    def _install(self, before: ClusterState, after: ClusterState) -> None:
        """Take over what was written, beside what hosts told meanwhile."""
        hosts = dict(self.cluster.hosts)
        for host in changed_hosts(before, after):
            now = hosts.get(host.name) or Host(host.name)
            hosts[host.name] = replace(
                now, assigned=host.assigned, draining_wanted=host.draining_wanted, revision=host.revision
            )
        self._become(replace(after, hosts=hosts))
        old, new = before.records(), after.records()
        self._wake([subject for subject in {**old, **new} if old.get(subject) is not new.get(subject)])

    def _become(self, cluster: ClusterState) -> None:
        before, self.cluster = self.cluster, cluster
        for callback in self.on_change:
            callback(before, cluster)

    async def remove_log(self, id: str) -> None:
        """Forget the log of a work queue that is gone; its stores drop what they hold of it."""
        try:
            await fenced(self._session, self.fence, Delete(paths.log(id)))
        except NoNode:
            return
        except RoqError as error:
            self._finish(error)
            raise NotLeader(f"a log could not be removed: {error}") from error

    async def write(self, *operations: Op) -> None:
        """One fenced multi of what is not part of the cluster (shuffles). Raises NotLeader if it failed: the reign is over;
        CallError if it is too large for ZooKeeper: nothing was written."""
        try:
            await fenced(self._session, self.fence, *operations)
        except CallError:
            raise
        except RoqError as error:
            self._finish(error)
            raise NotLeader(f"the change could not be written: {error}") from error

    def step_down(self, reason: RoqError) -> None:
        """Somebody else leads, as a follower has said."""
        self._finish(reason)

    # --- waiting -----------------------------------------------------------------------------------------------------

    async def until(self, subject: str, done: Callable[[ClusterState], bool]) -> ClusterState:
        """The first cluster of which `done` is true; asked again whenever something about `subject` (a queue) changes.

        Raises what `done` raises, or NotLeader if the reign ends.
        """
        while not done(self.cluster):
            if self.ended.done():
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

    # --- hosts -------------------------------------------------------------------------------------------------------

    def _hosts_seen(self, names: list[str]) -> None:
        for name in names:
            if name not in self._watched:
                self._watched.add(name)
                self.tasks.start(self._admit(name), f"admit host {name}")

    async def _admit(self, name: str) -> None:
        """A host that was never seen: its folder is made before anything can be placed on it."""
        try:
            host = await read_host(self._session, name)
        except RoqError as error:
            self._watched.discard(name)  # the watch tells its name again
            log.warning("registration of a new host is unreadable", extra={"fields": {"host": name, "reason": str(error)}})
            return
        if name not in self.cluster.hosts:
            self._become(self.cluster.with_host(host))
        self._watch_host(host)

    def _watch_host(self, host: Host) -> None:
        name = host.name
        self._watched.add(name)
        if host.registration is not None:
            self._joined[name] = host.registration.generation
        self._watches += [
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
        if self.ended.done() or not self._is_news(paths.host(name), node):
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
            log.info("host joined" if after.alive else "host lost", extra={"fields": {"host": name}})
            self._wake(list(self._waiters))

    def _report_seen(self, name: str, node: Node | None) -> None:
        if self.ended.done() or not self._is_news(paths.running(name), node):
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
        if before.reported_revision != after.reported_revision or STORES in changed:
            changed |= self._waiters.keys()
        self._wake(changed)
        if moved := [queue for queue in changed if self._monitor_matters(queue, name)]:
            self.tasks.start(self._follow_monitor(moved), f"follow monitors on {name}")

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

    async def _follow_monitor(self, queues: list[str]) -> None:
        try:
            await self.change(lambda cluster: cluster, *queues)
        except NotLeader:
            return


def _parts(operations: list[Op]) -> Iterator[list[Op]]:
    """The operations in the same order, cut so that each part (but for one single large node) fits into a multi.

    A leader that dies between two parts leaves records without their assignments: the next reign begins with repairing them.
    """
    part, size = list[Op](), 0
    for operation in operations:
        data = len(operation.data) if isinstance(operation, Create | SetData) else 0
        if part and size + data > BYTES_AT_ONCE:
            yield part
            part, size = [], 0
        part.append(operation)
        size += data + len(operation.path)
    if part:
        yield part
