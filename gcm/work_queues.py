"""Work queues as the GCM sees them, groups of recorded queues among them: creation, removal, fail-over and repair. Pure, as
transactions.py and recovery.py, whose counterparts these are. Not covered: what is in a work queue, which only its master
knows; that groups go with their queue (transactions.py).
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Collection
from dataclasses import replace

import msgspec

from gcm import transactions
from gcm.cluster import (
    STORE_NAME,
    Action,
    ClientTransaction,
    ClusterState,
    failure,
    is_running,
    master_name,
    running_stores,
)
from gcm.placement import place_master, refilled
from roq.errors import (
    GroupNotFound,
    InvalidConfiguration,
    InvalidName,
    NoHosts,
    NotReady,
    NotRecorded,
    ProcessFailed,
    WorkQueueConflict,
    WorkQueueNotFound,
)
from roq.ids import GROUP_MARK, RESERVED, group_name, is_reserved
from roq.pubsub.start import read_group_start
from roq.pubsub.subscription import check_filter
from roq.wire.assignment import work_subject
from roq.wire.gcm import CreateWorkQueue, RemoveWorkQueue
from roq.wire.limits import CONTROL_BYTES_MAX
from roq.wire.master import TRANSACTIONS
from roq.wire.recording import TapePosition, is_position
from roq.wire.where import Where
from roq.wire.work_queue import (
    INLINE_BYTES,
    INLINE_BYTES_MAX,
    QUORUM_MAX,
    STANDBYS_MAX,
    GroupSource,
    TaskSettings,
    WorkQueueRecord,
    WorkQueueSpec,
)

WRITE_QUORUM_DEFAULT = 3
STANDBYS_DEFAULT = 1
EVERYTHING = ">"
TOPICS_MAX = 100  # filters of one group: they stand in its record and in the assignments of its hosts
GROUPS_MAX = 1_000  # of one queue: each gets a copy of its messages, and all are removed with it in one write


def record_of(cluster: ClusterState, name: str) -> WorkQueueRecord:
    """The work queue's record; raises WorkQueueNotFound, GroupNotFound."""
    record = cluster.work_queues.get(name)
    if record is None:
        if GROUP_MARK in name:
            raise GroupNotFound(f"no group is named {name!r}")
        raise WorkQueueNotFound(f"no work queue is named {name!r}")
    return record


def log_id(name: str, transaction: str) -> str:
    """The log of the work queue this transaction creates."""
    return hashlib.sha256(f"log\0{name}\0{transaction}".encode()).hexdigest()[:16]


def check(request: CreateWorkQueue) -> None:
    """Raises InvalidConfiguration."""
    write, ack, standbys, settings = request.write_quorum, request.ack_quorum, request.standbys, request.settings
    if not 0 <= write <= QUORUM_MAX or not 0 <= ack <= (write or QUORUM_MAX):
        raise InvalidConfiguration(f"write_quorum is 1 to {QUORUM_MAX}, ack_quorum not above it; got {write}, {ack}")
    if standbys is not None and not 0 <= standbys <= STANDBYS_MAX:
        raise InvalidConfiguration(f"standbys are 0 to {STANDBYS_MAX}, got {standbys}")
    if not 0 <= request.inline_bytes <= INLINE_BYTES_MAX:
        raise InvalidConfiguration(f"inline_bytes is 1 to {INLINE_BYTES_MAX}, got {request.inline_bytes}")
    if settings is not None and (
        settings.max_attempts < 0 or settings.dedup_seconds < 0 or not 0 < settings.payload_bytes_max <= CONTROL_BYTES_MAX // 2
    ):
        raise InvalidConfiguration(f"not possible for a work queue: {settings}")
    if request.source is not None:
        _check_source(request.source)


def _check_source(source: GroupSource) -> None:
    """Raises InvalidTopic, InvalidPosition, InvalidFilter, InvalidConfiguration."""
    if len(source.topics) > TOPICS_MAX:
        raise InvalidConfiguration(f"a group has at most {TOPICS_MAX} topics, got {len(source.topics)}")
    for topic in source.topics:
        check_filter(topic)
    if source.where:
        Where(source.where)
    read_group_start(source.start)


def create(cluster: ClusterState, request: CreateWorkQueue, now: float, chance: random.Random) -> ClusterState:
    """The work queue with its master, and standbys on as many other hosts as there are."""
    source = _filled(cluster, request) if request.source is not None else None
    existing = cluster.work_queues.get(request.name)
    if existing is not None:
        if differences := [*_differences(existing, request), *_source_differences(existing.spec.source, source, request.asked)]:
            raise WorkQueueConflict(f"{_what(source)} {request.name!r} exists with {', '.join(differences)}")
        return cluster
    _check_new(cluster, request.name, source)
    _check_reserved(request)
    if transactions.leftovers(cluster, work_subject(request.name)):
        raise NotReady(f"processes of a removed work queue {request.name!r} are still stopping")
    write, ack = _quorums(cluster, request)
    hosts: tuple[str, ...] = ()
    standbys = request.standbys if request.standbys is not None else STANDBYS_DEFAULT
    while len(hosts) < 1 + standbys and (another := place_master(cluster, hosts, chance)) is not None:
        hosts += (another.name,)
    if not hosts:
        raise NoHosts
    settings, inline = request.settings or TaskSettings(), request.inline_bytes or INLINE_BYTES
    spec = WorkQueueSpec(log_id(request.name, request.transaction), write, ack, settings, inline, source)
    grows = not (request.write_quorum or request.ack_quorum)
    record = WorkQueueRecord(request.name, spec, standbys, hosts[0], 1, hosts[1:], now, request.transaction, grows)
    entry = ClientTransaction(request.transaction, Action.CREATE_WORK_QUEUE, request.name, hosts, now)
    return transactions.begin(_with_record(cluster, record), entry)


def _what(source: GroupSource | None) -> str:
    return "work queue" if source is None else "group"


def _filled(cluster: ClusterState, request: CreateWorkQueue) -> GroupSource:
    """The group's source as it is kept: with the queue's tapes, and the same filters in one order. Raises QueueNotFound,
    NotRecorded, InvalidName."""
    asked = request.source
    assert asked is not None
    recording = transactions.record_of(cluster, asked.queue).recording
    if recording is None:
        raise NotRecorded(f"queue {asked.queue!r} is not recorded and can't have groups: `roq queue record` switches that on")
    mark = f"{asked.queue}{GROUP_MARK}"
    if not request.name.startswith(mark) or request.name != group_name(asked.queue, request.name.removeprefix(mark)):
        raise InvalidName(f"a group of queue {asked.queue!r} is named {mark}GROUP, got {request.name!r}")
    topics = tuple(sorted({*asked.topics})) or (EVERYTHING,)
    return msgspec.structs.replace(asked, tapes=recording.tapes, topics=topics)


def _check_new(cluster: ClusterState, name: str, source: GroupSource | None) -> None:
    """Raises GroupNotFound, InvalidPosition, InvalidConfiguration."""
    if source is None:
        if GROUP_MARK in name:
            made = "create_group or `roq queue group create` makes one"
            raise GroupNotFound(f"no group is named {name!r}: {made}; names of other work queues have no {GROUP_MARK!r}")
        return
    if is_position(source.start):
        TapePosition.parse(source.start).check_queue(source.tapes, f"the position of a group of {source.queue!r}")
    if len(transactions.groups_of(cluster, source.queue)) >= GROUPS_MAX:
        raise InvalidConfiguration(f"queue {source.queue!r} has {GROUPS_MAX} groups, and there can't be more: remove one first")


def _check_reserved(request: CreateWorkQueue) -> None:
    """Raises InvalidName: the name is the cluster's own; InvalidConfiguration: that of transactions is made by whoever needs it
    first, so it is the same whoever that is. A group of one of the cluster's own queues is a user's."""
    if not is_reserved(request.name) or request.source is not None:
        return
    if request.name != TRANSACTIONS:
        raise InvalidName(f"{request.name!r} can't name a work queue: names that begin with {RESERVED} are the cluster's own")
    plain = CreateWorkQueue(request.name, request.transaction, asked=request.asked)
    bare = msgspec.structs.replace(request, settings=None, shards=None)
    if bare != plain or request.settings not in (None, TaskSettings()) or (request.shards or 0) > 1:
        raise InvalidConfiguration(f"work queue {TRANSACTIONS} is made without settings: the first transaction makes it")


def _source_differences(has: GroupSource | None, asked: GroupSource | None, fields: Collection[str] | None) -> list[str]:
    """As _differences, of where its tasks come from; `start` was for the first time. fields: that matter, None: all."""
    if asked is None:
        return []
    if has is None:
        return [f"tasks that were put, not messages of queue {asked.queue!r}"]
    if has.tapes != asked.tapes:
        return [f"messages of a former queue {asked.queue!r}: remove this group first"]
    named = [
        ("order", has.order, asked.order),
        ("topics", " ".join(has.topics), " ".join(asked.topics)),
        ("where", repr(has.where), repr(asked.where)),
    ]
    matters = [one for one in named if fields is None or one[0] in fields]
    return [f"{name} {mine}, not {its}" for name, mine, its in matters if mine != its]


def _differences(record: WorkQueueRecord, request: CreateWorkQueue) -> list[str]:
    """What is asked for and the work queue does not have, each as it is and as it should be."""
    spec, settings = record.spec, record.spec.settings
    asked = msgspec.structs.asdict(request.settings or settings)
    if request.asked is not None:
        asked = {name: value for name, value in asked.items() if name in request.asked}
    asked["write_quorum"] = request.write_quorum or spec.write_quorum
    asked["ack_quorum"] = request.ack_quorum or spec.ack_quorum
    asked["standbys"] = request.standbys if request.standbys is not None else record.standbys
    asked["inline_bytes"] = request.inline_bytes or spec.inline_bytes
    has = {**msgspec.structs.asdict(settings), **msgspec.structs.asdict(spec), "standbys": record.standbys}
    return [f"{name} {has[name]}, not {value}" for name, value in asked.items() if has[name] != value]


def _quorums(cluster: ClusterState, request: CreateWorkQueue) -> tuple[int, int]:
    alive = cluster.alive
    if not alive:
        raise NoHosts
    write = request.write_quorum or max(min(WRITE_QUORUM_DEFAULT, alive), request.ack_quorum)
    if write > alive:
        raise NoHosts(f"a write quorum of {write} needs as many hosts, {alive} are there")
    return write, request.ack_quorum or _majority(write)


def _majority(write_quorum: int) -> int:
    return write_quorum // 2 + 1


def _possible_quorum(cluster: ClusterState) -> int:
    """The write quorum of a queue for which none was chosen, with the stores that run and stay."""
    stores = sum(is_running(cluster, name, STORE_NAME) and not host.draining for name, host in cluster.hosts.items())
    return min(WRITE_QUORUM_DEFAULT, stores)


def _grown(cluster: ClusterState, spec: WorkQueueSpec) -> WorkQueueSpec:
    """With higher quorums if there are stores for them, as if it were created now; never lower: what was promised holds."""
    write = _possible_quorum(cluster)
    if write <= spec.write_quorum:
        return spec
    return msgspec.structs.replace(spec, write_quorum=write, ack_quorum=max(spec.ack_quorum, _majority(write)))


def remove(cluster: ClusterState, request: RemoveWorkQueue, now: float) -> ClusterState:
    """Without the work queue."""
    former = cluster.transactions.get(request.transaction)
    if former is not None and former.action is Action.REMOVE_WORK_QUEUE and former.queue == request.name:
        return cluster
    record = record_of(cluster, request.name)
    shards = [cluster.work_queues[name] for name in transactions.shard_names(cluster, record) if name in cluster.work_queues]
    hosts = tuple(dict.fromkeys(host for one in (record, *shards) for host in one.hosts))
    logs = {one.name: one.spec.log for one in shards}
    entry = ClientTransaction(
        request.transaction, Action.REMOVE_WORK_QUEUE, record.name, hosts, now, log=record.spec.log, groups=logs
    )
    return transactions.begin(transactions.without_work_queues(cluster, record.name), entry)


def created(cluster: ClusterState, entry: ClientTransaction, revisions: transactions.Revisions) -> bool:
    """The hosts run what this transaction created, with as many copies as live hosts allow. Raises ProcessFailed, or
    WorkQueueNotFound if it is unwanted again."""
    record = cluster.work_queues.get(entry.queue)
    if record is None or record.transaction != entry.id:
        raise WorkQueueNotFound(f"work queue {entry.queue!r} was removed while it was being created")
    enough = running_stores(cluster) >= min(record.spec.write_quorum, cluster.alive)
    return enough and serves(cluster, record, revisions)


def serves(cluster: ClusterState, record: WorkQueueRecord, revisions: transactions.Revisions) -> bool:
    """Its master runs, and enough stores to acknowledge. Raises ProcessFailed if a host has given the master up."""
    name = master_name(record.name)
    if (reason := failure(cluster, record.master_host, name)) is not None:
        raise ProcessFailed(reason)
    enough = running_stores(cluster) >= record.spec.ack_quorum
    return enough and transactions.all_run(cluster, [(record.master_host, name)], revisions)


def fail_over(cluster: ClusterState, record: WorkQueueRecord, chance: random.Random) -> ClusterState:
    """A standby is activated under the next term, rather one that runs; without any, a new master is placed."""
    standbys = [name for name in record.standby_hosts if cluster.host(name).alive]
    active, name = record.master_host, master_name(record.name)
    if not cluster.host(active).alive:
        if standbys:
            active = min(standbys, key=lambda host: (not is_running(cluster, host, name), cluster.host(host).masters, host))
            standbys.remove(active)
        elif (new := place_master(cluster, (), chance)) is not None:
            active = new.name
    term = record.term + (active != record.master_host)
    return _with_record(cluster, msgspec.structs.replace(record, master_host=active, term=term, standby_hosts=tuple(standbys)))


def lacking(cluster: ClusterState, takers: Collection[str]) -> list[str]:
    """Subjects of work queues that lack a standby one of these hosts could run, or copies other stores could keep."""
    possible = _possible_quorum(cluster)
    return [
        work_subject(name)
        for name, record in cluster.work_queues.items()
        if (record.grows and possible > record.spec.write_quorum)
        or (record.standbys and {*takers} - {*record.hosts} and _missing(cluster, record))
    ]


def _missing(cluster: ClusterState, record: WorkQueueRecord) -> bool:
    return len(record.standby_hosts) < record.standbys or any(_given_up(cluster, record, host) for host in record.standby_hosts)


def _given_up(cluster: ClusterState, record: WorkQueueRecord, host: str) -> bool:
    return failure(cluster, host, master_name(record.name)) is not None


def repair(cluster: ClusterState, record: WorkQueueRecord, chance: random.Random) -> ClusterState:
    """As many standbys as it was created with, and as many copies as it should have, as far as there are hosts."""
    standbys = refilled(
        record.standby_hosts,
        record.standbys,
        lambda host: _given_up(cluster, record, host),
        lambda taken: place_master(cluster, (record.master_host, *taken), chance),
    )
    spec = _grown(cluster, record.spec) if record.grows else record.spec
    return _with_record(cluster, msgspec.structs.replace(record, standby_hosts=standbys, spec=spec))


def _with_record(cluster: ClusterState, record: WorkQueueRecord) -> ClusterState:
    if cluster.work_queues.get(record.name) == record:
        return cluster
    return replace(cluster, work_queues={**cluster.work_queues, record.name: record})
