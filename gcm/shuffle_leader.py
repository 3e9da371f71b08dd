"""All shuffles of one term: requests about them, what followers report, and hosts that join or are lost.

Each shuffle is driven by itself (shuffle_driver.py). Followers that join are asked what they keep: what belongs to no shuffle
any more is forgotten. A shuffle whose record can't be read exists all the same: nothing is done about it, or to it.
Receipts of a large commit come in parts, and are in memory for the few commits that are told last: whoever finds that some are
not here (any more, or as another GCM leads now) tells all of them again.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import replace

from gcm.cluster import ClusterState, differing
from gcm.crash import crash_point
from gcm.followers import STORE, FollowerLinks, FollowerMembership, endpoints, follower_of
from gcm.placement import takes_monitor
from gcm.shuffle_driver import Driver, DriverContext
from gcm.shuffle_store import ShuffleStore, read_all
from gcm.term import LeaderTerm
from gcm.transactions import REMOVAL_KEPT_SECONDS
from roq.coordination.session import Session
from roq.errors import (
    FrameError,
    InvalidConfiguration,
    NoHosts,
    NotLeader,
    NotReady,
    RoqError,
    ShuffleConflict,
    ShuffleNotFound,
    ShuffleSealed,
)
from roq.ids import check_name
from roq.runtime.observe import logger
from roq.shuffle import events
from roq.shuffle.plan import ShufflePlan
from roq.shuffle.ranges import Placement
from roq.shuffle.record import FollowerHosts, ShuffleRecord, Stage
from roq.shuffle.sampling import is_sound
from roq.wire import gcm as wire
from roq.wire import shuffle
from roq.wire.assignment import STORES, ProcessState
from roq.wire.gcm import CommitShuffle, NameReceipts, ShuffleInfo, TableInfo
from roq.wire.shuffle import COMMITTED_AT_ONCE, PARTITIONS_MAX, RANGES_MAX, REPLICAS_MAX, Receipt, ShuffleState, Spec

log = logger(__name__)
COMMITS_MAX = 8  # whose receipts are told at a time
PARTS_MAX = -(-PARTITIONS_MAX // COMMITTED_AT_ONCE)
KEYS_MAX = 100
KEY_NAME_BYTES_MAX = 64 * 1024  # of all keys: they are in the record's node, of which ZooKeeper takes 1 MB
SCHEMA_BYTES_MAX = 1024 * 1024
FORGET_SECONDS = 5.0  # a removal waits so long for followers to forget; they do all the same
START_SECONDS = 10.0  # a new shuffle waits so long for hosts to start their stores


class Receipts:
    """Of one term."""

    def __init__(self) -> None:
        self._told: OrderedDict[tuple[str, str], dict[int, list[Receipt]]] = OrderedDict()  # by shuffle and transaction

    def add(self, part: NameReceipts) -> None:
        """One part; again: the same. Raises FrameError."""
        if not 0 <= part.number < PARTS_MAX or len(part.receipts) > COMMITTED_AT_ONCE:
            raise FrameError(f"part {part.number} of the receipts of shuffle {part.name!r}, with {len(part.receipts)}")
        commit = (part.name, part.transaction)
        self._told.setdefault(commit, {})[part.number] = part.receipts
        self._told.move_to_end(commit)
        while len(self._told) > COMMITS_MAX:
            self._told.popitem(last=False)

    def of(self, commit: CommitShuffle) -> tuple[Receipt, ...]:
        """All that the commit names. Raises NotReady."""
        told = self._told.get((commit.name, commit.transaction), {})
        missing = [number for number in range(min(commit.parts, PARTS_MAX + 1)) if number not in told]
        if missing:
            raise NotReady(f"{len(missing)} of {commit.parts} parts of the receipts of {commit.name!r} are not known")
        return (*(receipt for number in range(commit.parts) for receipt in told[number]), *commit.receipts)

    def forget(self, commit: CommitShuffle) -> None:
        """It is sealed."""
        self._told.pop((commit.name, commit.transaction), None)


class ShuffleLeader:
    """Made by `begin`, ended by `close`. Requests wait as long as it takes; handlers.py bounds them."""

    def __init__(self, term: LeaderTerm, abandoned_seconds: float) -> None:
        self._term, self._abandoned_seconds = term, abandoned_seconds
        self._links = FollowerLinks()
        self._context = DriverContext(term, self._links, {}, self._forgotten)
        self._drivers: dict[str, Driver] = {}  # by id
        self._unreadable: frozenset[str] = frozenset()  # ids
        self._receipts = Receipts()
        self._membership = FollowerMembership(time.monotonic())
        self._hosts = FollowerHosts(frozenset(), frozenset(), False)
        self._timer: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()
        self._creating = asyncio.Lock()

    @classmethod
    async def begin(cls, session: Session, term: LeaderTerm, abandoned_seconds: float) -> ShuffleLeader:
        """Read all shuffles and go on with them. Raises NotLeader, ZooKeeperUnavailable."""
        leader = cls(term, abandoned_seconds)
        shuffles, leader._unreadable = await read_all(session, term)
        for record, store in shuffles:
            leader._drive(record, store)
        term.view.on_change.append(leader._changed)
        leader._look()
        return leader

    def close(self) -> None:
        """With the term."""
        if self._timer is not None:
            self._timer.cancel()
        for driver in self._drivers.values():
            driver.stop(NotLeader("this Global Configuration Manager leads no longer"))
        self._links.close()

    def _drive(self, record: ShuffleRecord, store: ShuffleStore) -> Driver:
        plan = ShufflePlan(record, self._term.fence.epoch, self._abandoned_seconds)
        driver = self._drivers[record.id] = Driver(plan, store, self._context)
        driver.feed(self._hosts)
        driver.start()
        return driver

    def _named(self, name: str) -> Iterator[Driver]:
        return (
            each
            for each in self._drivers.values()
            if each.record.name == name and each.record.state is not ShuffleState.REMOVED
        )

    def _driver(self, name: str) -> Driver:
        found = next(self._named(check_name(name, "shuffle")), None)
        if found is None:
            raise ShuffleNotFound(f"no shuffle is named {name!r}")
        return found

    # --- requests -----------------------------------------------------------------------------------------------------

    async def create(self, request: wire.CreateShuffle, now: float) -> ShuffleInfo:
        """Created, and followers run; the same for a repetition, and for another request with the same spec."""
        name = check_name(request.name, "shuffle")
        check_name(request.transaction, "transaction")
        _check_spec(request.spec)
        crash_point("create_shuffle.received")
        async with self._creating:
            driver = next(self._named(name), None) or await self._new(request, now)
        crash_point("create_shuffle.recorded")
        if driver.record.spec != request.spec:
            raise ShuffleConflict(f"shuffle {name!r} exists with other keys, columns or settings")
        driver.feed(events.Touched())
        id = driver.record.id
        await self._term.change(lambda cluster: replace(cluster, shuffles=cluster.shuffles | {id}), STORES)
        await self._until_followers()
        crash_point("create_shuffle.settled")
        return self.info(driver.record.name)

    async def _new(self, request: wire.CreateShuffle, now: float) -> Driver:
        id = hashlib.sha256(f"shuffle\0{request.name}\0{request.transaction}".encode()).hexdigest()[:16]
        if id in self._drivers:
            raise ShuffleNotFound(f"shuffle {request.name!r} was created and removed again")
        if id in self._unreadable:
            raise ShuffleConflict(f"shuffle {request.name!r} is recorded as {id}, which this GCM can't read")
        record = ShuffleRecord(request.name, id, request.spec, now, request.transaction, placement=Placement.RING)
        store = ShuffleStore(self._term, id)
        await store.create(record)
        return self._drive(record, store)

    async def _until_followers(self) -> None:
        """Every host that shall run a store does; those that can't are not waited for any longer than START_SECONDS."""
        if not any(takes_monitor(host) for host in self._term.view.cluster.hosts.values()):
            raise NoHosts
        try:
            async with asyncio.timeout(START_SECONDS):
                await self._term.view.until(STORES, lambda cluster: not _storeless(cluster))
        except TimeoutError:
            hosts = _storeless(self._term.view.cluster)
            log.warning("stores are not ready; shuffles begin without these hosts", extra={"fields": {"hosts": hosts}})
        if not endpoints(self._term.view.cluster):
            raise NotReady("no host takes part in shuffles: is roq-messaging[shuffle] installed there?")
        self._membership.admit(self._term.view.cluster, time.monotonic())
        self._look()

    async def remove(self, request: wire.RemoveShuffle) -> wire.Done:
        """Removed; followers forget it."""
        name = check_name(request.name, "shuffle")
        check_name(request.transaction, "transaction")
        removed = (each for each in self._drivers.values() if each.record.removal == request.transaction)
        driver = next(removed, None) or self._driver(name)
        await driver.submit(events.Remove(request.transaction))
        try:
            async with asyncio.timeout(FORGET_SECONDS):
                await driver.until(lambda _: driver.plan.forgotten)
        except TimeoutError:
            log.info("followers are still deleting a removed shuffle", extra={"fields": {"shuffle": name}})
        return wire.Done()

    def info(self, name: str) -> ShuffleInfo:
        """One shuffle. Raises ShuffleNotFound."""
        driver = self._driver(name)
        description = driver.record.describe(len(driver.plan.stored))
        return ShuffleInfo(description, dict(self._links.endpoints), tuple(sorted(self._hosts.members)))

    def list(self) -> wire.ShuffleList:
        """All shuffles."""
        shown = [each for each in self._drivers.values() if each.record.state is not ShuffleState.REMOVED]
        shown.sort(key=lambda each: each.record.name)
        return wire.ShuffleList(tuple(each.record.describe(len(each.plan.stored), complete=False) for each in shown))

    def ranges_on(self, host: str) -> int:
        """How many ranges of shuffles are kept on this host, of the tables that are read now."""
        records = [each.record for each in self._drivers.values() if each.record.state is not ShuffleState.REMOVED]
        return sum(host in each.holders for record in records for each in (*record.table, *record.former))

    def copies_wanted(self) -> dict[str, int]:
        """Followers that keep each range, by shuffle in words."""
        shown = [each.record for each in self._drivers.values() if each.record.state is not ShuffleState.REMOVED]
        return {f"shuffle {record.name}": record.spec.replicas for record in shown}

    def name_receipts(self, request: wire.NameReceipts) -> wire.Done:
        """Remembered for a commit."""
        self._driver(request.name)
        check_name(request.transaction, "transaction")
        self._receipts.add(request)
        return wire.Done()

    async def commit(self, request: wire.CommitShuffle) -> ShuffleInfo:
        """Sealed with these attempts. Raises what can't be, or why they can't be committed."""
        check_name(request.transaction, "transaction")
        driver = self._driver(request.name)
        await driver.submit(events.Commit(self._receipts.of(request)))

        def sealed(record: ShuffleRecord) -> bool:
            if record.state is ShuffleState.FILLING:
                raise driver.refused or NotReady(f"shuffle {record.name!r} is not sealed: commit it again")
            if record.state is ShuffleState.REMOVED:
                raise ShuffleNotFound(f"shuffle {record.name!r} was removed while it was sealed")
            return record.state is ShuffleState.SEALED

        await driver.until(sealed)
        self._receipts.forget(request)
        return self.info(request.name)

    async def rebalance(self, request: wire.RebalanceShuffle) -> ShuffleInfo:
        """Cut anew, and the data has moved."""
        check_name(request.transaction, "transaction")
        if not 0 <= request.ranges <= RANGES_MAX:
            raise InvalidConfiguration(f"ranges are 0 to {RANGES_MAX}, got {request.ranges}")
        driver = self._driver(request.name)
        await driver.submit(events.Rebalance(request.transaction, request.ranges))

        def balanced(record: ShuffleRecord) -> bool:
            if record.state is ShuffleState.REMOVED:
                raise ShuffleNotFound(f"shuffle {record.name!r} was removed while it was rebalanced")
            return record.rebalanced == request.transaction and record.stage in (Stage.KEEPING, Stage.NONE)

        await driver.until(balanced)
        return self.info(request.name)

    async def report(self, request: wire.ReportRuns) -> TableInfo:
        """What a follower's buffer role has; the table as it is now."""
        driver = self._drivers.get(request.shuffle)
        if request.shuffle in self._unreadable or (driver is not None and driver.given_up is not None):
            raise NotReady(f"shuffle {request.name!r} ({request.shuffle}) is left alone: ask the next leader")
        if driver is None or driver.record.state is ShuffleState.REMOVED:
            raise ShuffleNotFound(f"shuffle {request.name!r} ({request.shuffle}) does not exist any more")
        if not all(is_sound(sample) for sample in request.samples):
            raise FrameError(f"follower {request.host} reported invalid samples")
        await driver.submit(events.AttemptReported(tuple(request.samples), tuple(request.stored), request.wanted))
        record = driver.record
        committed = record.committed if record.state is ShuffleState.SEALED else {}
        if record.state is ShuffleState.SEALED and not committed:
            raise ShuffleSealed(f"shuffle {record.name!r} is sealed: no attempt was committed")
        ranges = record.table if record.epoch != request.epoch else ()
        return TableInfo(record.epoch, ranges, dict(self._links.endpoints), record.spec.replicas, committed)

    # --- hosts --------------------------------------------------------------------------------------------------------

    def _changed(self, before: ClusterState, after: ClusterState) -> None:
        if any(follower_of(before, name) != follower_of(after, name) for name in differing(before.hosts, after.hosts)):
            self._look()

    def _look(self) -> None:
        """Who runs now, and again when that may change by itself."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        cluster = self._term.view.cluster
        self._links.update(endpoints(cluster))
        hosts, seconds = self._membership.hosts(cluster, time.monotonic())
        if seconds is not None and not self._term.ended.done():
            self._timer = self._loop.call_later(seconds + 0.01, self._look)
        if hosts == self._hosts:
            return
        for host in sorted(hosts.running - self._hosts.running):
            self._term.tasks.start(self._sweep(host), f"sweep {host}")
        self._hosts = hosts
        for driver in self._drivers.values():
            driver.feed(hosts)

    async def _sweep(self, host: str) -> None:
        """Have a follower forget shuffles that do not exist any more. What it told before the check of the epoch was made under
        this term or one before it: so we know every shuffle in it that exists."""
        try:
            view = await self._links.request(host, shuffle.DescribeFollower(), shuffle.FollowerView, 10.0)
            unknown = view.shuffles.keys() - self._drivers.keys() - self._unreadable
            if unknown:
                await self._term.write()
            for id in sorted(unknown - self._drivers.keys()):
                log.info("asking a follower to delete a removed shuffle", extra={"fields": {"host": host, "id": id}})
                await self._links.request(host, shuffle.ForgetShuffle(self._term.fence.epoch, id), shuffle.FollowerDone, 10.0)
        except NotLeader:
            return
        except RoqError as error:  # when it comes back the next time
            log.info("follower could not be swept", extra={"fields": {"host": host, "reason": str(error)}})

    def _forgotten(self, id: str) -> None:
        """The record stays known for a while, so that a repeated removal gets the same answer."""
        self._term.tasks.start(self._delete(id), f"delete shuffle {id}")

    async def _delete(self, id: str) -> None:
        await asyncio.sleep(REMOVAL_KEPT_SECONDS)
        try:
            await self._drivers[id].store.delete()
            self._drivers.pop(id).stop()
            await self._term.change(lambda cluster: replace(cluster, shuffles=cluster.shuffles - {id}))
        except NotLeader:
            return  # the next leader does it


def _storeless(cluster: ClusterState) -> list[str]:
    """Hosts whose store neither runs nor has failed, though they shall run one."""
    running = {host.name: host.running.get(STORE) for host in cluster.hosts.values() if takes_monitor(host)}
    settled = (ProcessState.RUNNING, ProcessState.FAILED)
    return sorted(name for name, each in running.items() if each is None or each.state not in settled)


def _check_spec(spec: Spec) -> None:
    """Raises InvalidConfiguration."""
    if not 0 < len(spec.keys) <= KEYS_MAX or len({*spec.keys}) != len(spec.keys) or not all(spec.keys):
        raise InvalidConfiguration(f"keys are 1 to {KEYS_MAX} different columns, got {spec.keys}")
    if (size := sum(len(key.encode()) for key in spec.keys)) > KEY_NAME_BYTES_MAX:
        raise InvalidConfiguration(f"the names of keys have at most {KEY_NAME_BYTES_MAX} bytes together, got {size}")
    if not 0 < len(spec.schema) <= SCHEMA_BYTES_MAX:
        raise InvalidConfiguration(f"a schema is 1 to {SCHEMA_BYTES_MAX} bytes, got {len(spec.schema)}")
    if not 1 <= spec.replicas <= REPLICAS_MAX or not 0 <= spec.ranges <= RANGES_MAX:
        raise InvalidConfiguration(
            f"replicas are 1 to {REPLICAS_MAX}, ranges 0 to {RANGES_MAX}, got {spec.replicas}, {spec.ranges}"
        )
