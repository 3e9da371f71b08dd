"""What each request changes: pure functions from a cluster to the next one, and how far a transaction has got.

Every function raises a RoqError if the request can't be, and returns the cluster unchanged if it is so already: the same
request again is harmless. Assignments follow by reconcile.assign. Nothing here waits or writes.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import lru_cache
from itertools import islice
from typing import TypeVar

import msgspec

from gcm.cluster import (
    STORE_NAME,
    Action,
    ClientTransaction,
    ClusterState,
    exchange_name,
    failure,
    is_running,
    monitor_name,
    process_names,
    running_stores,
)
from gcm.placement import place, place_exchange, place_monitor
from roq.errors import (
    ExchangeNotFound,
    HostNotFound,
    InvalidConfiguration,
    LastExchange,
    NoHosts,
    NotReady,
    ProcessFailed,
    QueueConflict,
    QueueNotFound,
    QueueStopped,
    UnknownFormat,
)
from roq.wire.assignment import Leaving, QueueRecord, QueueSettings, work_subject
from roq.wire.gcm import CreateExchange, CreateQueue, DrainHost, RecordQueue, RemoveExchange, RemoveQueue, SetPolicy
from roq.wire.limits import FRAME_BYTES_CEILING
from roq.wire.recording import RECORDED_FRAME_BYTES_MAX, Record, tapes_prefix
from roq.wire.work_queue import WorkQueueRecord

REPLICATION_MAX = 16  # Monitors of one queue: each backup costs its active one an update
FRAME_BYTES_MIN = 1024  # smaller ones hold no topic
SUCCESSORS_MAX = 4  # hosts lost one after the other while an Exchange is being replaced
SUCCESSORS_KEPT = 1024  # ids that need not be drawn anew; a leader asks again and again for those of its queues
REMOVAL_KEPT_SECONDS = 60.0  # a removal repeated within this time is answered as the first one was

V = TypeVar("V")
Revisions = Mapping[str, int]  # by host: the assignment it must have taken in before its report counts


def exchange_id(queue: str, transaction: str) -> str:
    """The Exchange this transaction creates: derived, so a repetition names the same one even after its record is gone."""
    return hashlib.sha256(f"{queue}\0{transaction}".encode()).hexdigest()[:16]


@lru_cache(SUCCESSORS_KEPT)
def replacement_id(queue: str, exchange: str) -> str:
    """The Exchange that takes the place of this one, of a lost host or of one that it leaves: the same whoever decides it."""
    return exchange_id(queue, f"replaces {exchange}")


def _successors(queue: str, exchange: str) -> Iterator[str]:
    """Ids of those that take its place, one after the other: of some the host was lost before they had."""
    while True:
        yield (exchange := replacement_id(queue, exchange))


def successor(record: QueueRecord, exchange: str) -> str | None:
    """The Exchange that is about to take the place of this one, if there is one."""
    ids = islice(_successors(record.name, exchange), SUCCESSORS_MAX)
    return next((id for id in ids if id in record.exchanges), None)


def successor_id(record: QueueRecord, exchange: str, taken: Collection[str] = ()) -> str:
    """Of a new Exchange that is to take its place. A former one's is never used again: that may live behind a cut, and the
    new one would be taken for it. taken: neither are these."""
    used = {*taken, *record.exchanges, *(one.exchange for one in record.former)}
    return next(id for id in _successors(record.name, exchange) if id not in used)


def record_of(cluster: ClusterState, queue: str) -> QueueRecord:
    """The queue's record; raises QueueNotFound, UnknownFormat."""
    record = cluster.queues.get(queue)
    if record is None and queue in cluster.unreadable:
        raise UnknownFormat(f"the record of queue {queue!r} is damaged, or of a newer version: the GCM's log says more")
    if record is None:
        raise QueueNotFound(f"no queue is named {queue!r}")
    return record


def groups_of(cluster: ClusterState, queue: str) -> list[WorkQueueRecord]:
    """The groups of a queue, by name."""
    found = [one for one in cluster.work_queues.values() if one.spec.source is not None and one.spec.source.queue == queue]
    return sorted(found, key=lambda record: record.name)


def check_settings(settings: QueueSettings) -> None:
    """Raises InvalidConfiguration. More replicas than hosts are fine: the missing ones run once hosts join."""
    if not 1 <= settings.replication <= REPLICATION_MAX:
        raise InvalidConfiguration(f"replication is 1 to {REPLICATION_MAX}, got {settings.replication}")
    if not FRAME_BYTES_MIN <= settings.max_frame_bytes <= FRAME_BYTES_CEILING:
        raise InvalidConfiguration(
            f"max_frame_bytes is {FRAME_BYTES_MIN} to {FRAME_BYTES_CEILING}, got {settings.max_frame_bytes}"
        )


def check_recordable(cluster: ClusterState, settings: QueueSettings, record: Record) -> None:
    """Raises NoHosts if more copies were asked for than there are hosts now (where none were, they follow the hosts), and
    InvalidConfiguration if its frames are too large."""
    asked = max(record.copies, record.ack)
    if asked > cluster.alive:
        raise NoHosts(f"{asked} copies of each message need as many hosts, {cluster.alive} are there")
    if settings.max_frame_bytes > RECORDED_FRAME_BYTES_MAX:
        raise InvalidConfiguration(
            f"a recorded queue has a max_frame_bytes of {RECORDED_FRAME_BYTES_MAX} at most, this one {settings.max_frame_bytes}"
        )


def create_queue(cluster: ClusterState, request: CreateQueue, now: float, chance: random.Random) -> ClusterState:
    """The queue with its first Exchange beside its active Monitor, and backup Monitors on as many other hosts as there are."""
    existing = cluster.queues.get(request.name)
    record = request.record.check() if request.record is not None else None
    if existing is not None:
        _check_same(existing, request)
        return cluster
    if record is not None:
        check_recordable(cluster, request.settings, record)
    if leftovers(cluster, request.name):
        raise NotReady(f"processes of a removed queue {request.name!r} are still stopping")
    host = place(cluster, request.host, chance).name
    exchange = exchange_id(request.name, request.transaction)
    backups: tuple[str, ...] = ()
    while len(backups) < request.settings.replication - 1:
        another = place_monitor(cluster, (host, *backups), chance)
        if another is None:
            break  # gcm.recovery adds it when a host joins
        backups += (another.name,)
    queue = QueueRecord(
        *(request.name, request.settings, True, host, 1, {exchange: host}, now, request.transaction, backups),
        record=record,
        recorded=record is not None,
    )
    policies = {**cluster.policies, request.name: request.policy} if request.policy is not None else cluster.policies
    entry = ClientTransaction(request.transaction, Action.CREATE_QUEUE, request.name, (host, *backups), now)
    return begin(replace(cluster, queues={**cluster.queues, queue.name: queue}, policies=policies), entry)


def _check_same(existing: QueueRecord, request: CreateQueue) -> None:
    """Raises QueueConflict. Whether it is recorded at present is for `record_queue`."""
    if existing.settings != request.settings:
        raise QueueConflict(f"queue {request.name!r} exists with other settings: {existing.settings}")
    if request.record is not None and request.record != existing.record:
        has = f"is recorded with {existing.record}" if existing.record is not None else "is not recorded"
        raise QueueConflict(f"queue {request.name!r} exists and {has}, asked for: {request.record}")


def leftovers(cluster: ClusterState, subject: str) -> bool:
    """Some live host reports processes of a queue or work queue that does not exist."""
    return cluster.record(subject) is None and any(
        subject in host.subjects_reported and host.alive for host in cluster.hosts.values()
    )


def remove_queue(cluster: ClusterState, request: RemoveQueue, now: float) -> ClusterState:
    """Without the queue, its groups, and all about them."""
    former = cluster.transactions.get(request.transaction)
    if former is not None and former.action is Action.REMOVE_QUEUE and former.queue == request.name:
        return cluster
    record = record_of(cluster, request.name)
    tapes = tapes_prefix(record.recording.tapes) if record.recording is not None else ""
    groups = groups_of(cluster, request.name)
    hosts = tuple(dict.fromkeys((*cluster.hosts_of(record), *(host for group in groups for host in group.hosts))))
    logs = {group.name: group.spec.log for group in groups}
    about = request.transaction, Action.REMOVE_QUEUE, request.name, hosts, now
    entry = ClientTransaction(*about, tapes=tapes, groups=logs, former=_life(record))
    return begin(without_queue(cluster, request.name), entry)


def without_queue(cluster: ClusterState, queue: str) -> ClusterState:
    """Nothing of the queue and its groups is wanted any more, nor of what was being created for them."""
    groups = [group.name for group in groups_of(cluster, queue)]
    cluster = without_work_queues(without_creations(cluster, queue), *groups)
    return replace(cluster, queues=_without(cluster.queues, queue), policies=_without(cluster.policies, queue))


def shard_names(cluster: ClusterState, record: WorkQueueRecord) -> tuple[str, ...]:
    """A work queue's shards but the first, as work queues. A leader of 0.1 writes its record without their list: then all whose
    names say that they are of it."""
    return record.shard_names if record.shards is not None else cluster.shards_by_queue.get(record.name, ())


def without_work_queues(cluster: ClusterState, *names: str) -> ClusterState:
    """Nothing of these work queues is wanted any more, their shards included, nor of what was being created for them."""
    if not names:
        return cluster
    known = (cluster.work_queues.get(name) for name in names)
    names += tuple(shard for record in known if record is not None for shard in shard_names(cluster, record))
    kept = {name: record for name, record in cluster.work_queues.items() if name not in names}
    return replace(without_creations(cluster, *map(work_subject, names)), work_queues=kept)


def without_orphans(cluster: ClusterState, entry: ClientTransaction) -> ClusterState:
    """Without what should have gone with this removal and did not, as the leader before died between two parts of its write:
    the queue or work queue itself, groups, shards. (An Exchange may have been made anew under its id: it stays.)"""
    record = cluster.record(entry.subject)
    if isinstance(record, QueueRecord) and _life(record) == entry.former:
        cluster = without_queue(cluster, record.name)
    logs = {entry.queue: entry.log, **entry.groups}
    known = cluster.work_queues
    return without_work_queues(cluster, *(name for name, log in logs.items() if name in known and known[name].spec.log == log))


def _life(record: QueueRecord) -> str:
    """Tells a queue from a later one of its name, also one that the same transaction id has made."""
    return f"{record.transaction} {record.created}"


def without_creations(cluster: ClusterState, *subjects: str) -> ClusterState:
    """Without what was being created for these queues and work queues."""
    kept = {
        id: entry
        for id, entry in cluster.transactions.items()
        if entry.subject not in subjects
        or entry.action not in (Action.CREATE_QUEUE, Action.CREATE_EXCHANGE, Action.CREATE_WORK_QUEUE)
    }
    return replace(cluster, transactions=kept)


def start_queue(cluster: ClusterState, queue: str) -> ClusterState:
    """Running, under the next term: clients tell its new Monitor from the old one."""
    record = record_of(cluster, queue)
    return (
        cluster
        if record.running
        else _with_record(cluster, msgspec.structs.replace(record, running=True, term=record.term + 1))
    )


def stop_queue(cluster: ClusterState, queue: str) -> ClusterState:
    """Stopped."""
    record = record_of(cluster, queue)
    return _with_record(cluster, msgspec.structs.replace(record, running=False)) if record.running else cluster


def create_exchange(cluster: ClusterState, request: CreateExchange, now: float, chance: random.Random) -> ClusterState:
    """One more Exchange."""
    record = record_of(cluster, request.queue)
    exchange = exchange_id(request.queue, request.transaction)
    if exchange in record.exchanges:
        return cluster
    if not record.running:
        raise QueueStopped(f"queue {request.queue!r} is stopped: start it first")
    host = place_exchange(cluster, request.host, chance).name
    record = msgspec.structs.replace(record, exchanges={**record.exchanges, exchange: host})
    entry = ClientTransaction(request.transaction, Action.CREATE_EXCHANGE, request.queue, (host,), now, exchange)
    return begin(_with_record(cluster, record), entry)


def remove_exchange(cluster: ClusterState, request: RemoveExchange, now: float) -> ClusterState:
    """One Exchange less."""
    former = cluster.transactions.get(request.transaction)
    if former is not None and former.action is Action.REMOVE_EXCHANGE and former.exchange == request.exchange:
        return cluster
    record = record_of(cluster, request.queue)
    host = record.exchanges.get(request.exchange)
    if host is None:
        raise ExchangeNotFound(f"queue {request.queue!r} has no Exchange {request.exchange!r}")
    if not record.running:
        raise QueueStopped(f"queue {request.queue!r} is stopped: start it first")
    if len(record.exchanges) == 1:
        raise LastExchange(f"{request.exchange!r} is the only Exchange of queue {request.queue!r}")
    entry = ClientTransaction(request.transaction, Action.REMOVE_EXCHANGE, request.queue, (host,), now, request.exchange)
    return begin(without_exchange(cluster, request.queue, request.exchange), entry)


def without_exchange(cluster: ClusterState, queue: str, exchange: str) -> ClusterState:
    """The Exchange is not wanted any more."""
    record = record_of(cluster, queue)
    return _with_record(cluster, msgspec.structs.replace(record, exchanges=_without(record.exchanges, exchange)))


def drain_host(cluster: ClusterState, request: DrainHost) -> ClusterState:
    """The host takes nothing new, or takes part again; what is to leave it goes from then on (evacuation.py)."""
    host = cluster.hosts.get(request.host)
    if host is None:
        raise HostNotFound(f"no host is named {request.host!r}")
    leaving = request.leaving if request.draining else Leaving.NOTHING
    if leaving is Leaving.PROCESSES and host.leaving is Leaving.EVERYTHING:
        leaving = Leaving.EVERYTHING  # to drain it is a part of that, and calls nothing off
    return cluster.with_host(replace(host, draining_wanted=request.draining, leaving=leaving))


def set_policy(cluster: ClusterState, request: SetPolicy) -> ClusterState:
    """The queue scales by this policy, or never by itself."""
    record_of(cluster, request.queue)
    if request.policy is None:
        return replace(cluster, policies=_without(cluster.policies, request.queue))
    return replace(cluster, policies={**cluster.policies, request.queue: request.policy})


def record_queue(cluster: ClusterState, request: RecordQueue, now: float) -> ClusterState:
    """The queue is recorded like this from now on, or no longer: then how its tapes are kept stays. now: seconds since 1970."""
    before = record_of(cluster, request.queue)
    if request.record is None:
        after = msgspec.structs.replace(before, recorded=False)
    else:
        since = before.recorded_since if before.recorded else now
        after = msgspec.structs.replace(before, record=request.record.check(), recorded=True, recorded_since=since)
    if after == before:
        return cluster
    if request.record is not None:
        check_recordable(cluster, before.settings, request.record)
    return _with_record(cluster, after)


def end(cluster: ClusterState, transaction: str) -> ClusterState:
    """Without the record of a finished transaction."""
    return replace(cluster, transactions=_without(cluster.transactions, transaction))


def begin(cluster: ClusterState, entry: ClientTransaction) -> ClusterState:
    """With this transaction recorded."""
    return replace(cluster, transactions={**cluster.transactions, entry.id: entry})


def _with_record(cluster: ClusterState, record: QueueRecord) -> ClusterState:
    return replace(cluster, queues={**cluster.queues, record.name: record})


def _without(table: Mapping[str, V], key: str) -> Mapping[str, V]:
    return {name: value for name, value in table.items() if name != key} if key in table else table


# --- how far it has got ------------------------------------------------------------------------------------------------


def all_run(cluster: ClusterState, processes: Iterable[tuple[str, str]], revisions: Revisions) -> bool:
    """Every (host, process name) runs, seen by hosts that have taken in these revisions. Raises ProcessFailed."""
    done = True
    for host, process in processes:
        if cluster.host(host).reported_revision < revisions.get(host, 0):
            done = False
        elif (reason := failure(cluster, host, process)) is not None:
            raise ProcessFailed(reason)
        elif not is_running(cluster, host, process):
            done = False
    return done


def serves(cluster: ClusterState, record: QueueRecord, revisions: Revisions) -> bool:
    """The queue runs, its backup Monitors included as far as their hosts live and have not given them up; or it is stopped.
    Raises ProcessFailed for any other process."""
    if not record.running:
        return True
    name = monitor_name(record.name)

    def settled(host: str) -> bool:
        told = cluster.host(host).reported_revision >= revisions.get(host, 0)
        given_up = told and failure(cluster, host, name) is not None
        return not cluster.host(host).alive or given_up or (told and is_running(cluster, host, name))

    return all_run(cluster, process_names(record), revisions) and all(settled(host) for host in record.backups)


def keeps(cluster: ClusterState, record: QueueRecord) -> bool:
    """As many stores run as its messages shall have copies, as far as live hosts allow; or it is not recorded."""
    if record.record is None or not record.recorded:
        return True
    wanted = sum(host.alive and STORE_NAME in host.assigned for host in cluster.hosts.values())  # not on one that drains
    copies, _ = record.record.quorums(wanted)
    return running_stores(cluster) >= min(copies, cluster.alive)


def stopped(cluster: ClusterState, subject: str, hosts: Iterable[str], revisions: Revisions) -> bool:
    """No live host of these reports any process of the queue or work queue, or it is wanted again."""
    record = cluster.record(subject)
    if record is not None and (isinstance(record, WorkQueueRecord) or record.running):
        return True
    return all(_gone(cluster, name, subject, "", revisions) for name in hosts)


def none_left(cluster: ClusterState, entry: ClientTransaction, subject: str, revisions: Revisions) -> bool:
    """No live host of a removal reports what was removed of this one of its subjects. A lost host stops it when it comes
    back."""
    if not entry.exchange:
        return stopped(cluster, subject, entry.hosts, revisions)
    return all(_gone(cluster, name, entry.queue, entry.exchange, revisions) for name in entry.hosts)


def _gone(cluster: ClusterState, host_name: str, subject: str, exchange: str, revisions: Revisions) -> bool:
    host = cluster.host(host_name)
    if not host.alive:
        return True
    if host.reported_revision < revisions.get(host_name, 0):
        return False
    if exchange:
        return exchange_name(subject, exchange) not in host.running
    return subject not in host.subjects_reported
