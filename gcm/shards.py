"""Shards of work queues: as the GCM makes, closes and removes them. Pure, as work_queues.py, for which each of them is a work
queue: it fails over, is repaired and is evacuated by itself.

    made ──► open ──► closing ── empty, and kept long enough ──► removed
                      takes no tasks

All that is ever decided is one write: the record of the queue with the new list, the records of new shards, and the assignments
of all of them. A shard that closes never opens again, and its number is not used twice: so what its master says of being empty
stays true. Not covered: who asks for it (shard_keeper.py), how clients use them (roq/workqueue/sharded.py).
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import replace

import msgspec

from gcm import transactions, work_queues
from gcm.cluster import Action, ClientTransaction, ClusterState
from gcm.placement import place_master
from gcm.reconcile import assign
from roq.errors import IncompatibleVersion, InvalidConfiguration, InvalidName, NoHosts, NotReady, UnknownFormat
from roq.ids import GROUP_MARK, is_reserved
from roq.wire.assignment import WORK, work_subject
from roq.wire.gcm import CreateWorkQueue
from roq.wire.shards import (
    SHARDED_NAME_MAX,
    SHARDS_MAX,
    ClosingShard,
    SetShards,
    ShardList,
    is_shard,
    queue_of,
    shard_name,
    shard_number,
)
from roq.wire.work_queue import WorkQueueRecord


def check(name: str, shards: int) -> None:
    """Whether a work queue of this name may have so many. Raises InvalidConfiguration, InvalidName."""
    if not 1 <= shards <= SHARDS_MAX:
        raise InvalidConfiguration(f"a work queue has 1 to {SHARDS_MAX} shards, got {shards}")
    if GROUP_MARK in name:
        raise InvalidConfiguration(f"{name!r} is a group, and a group has no shards: make more groups, or more queues")
    if is_reserved(name):
        raise InvalidConfiguration(f"{name!r} is the cluster's own, and has no shards that can be chosen")
    if len(name) > SHARDED_NAME_MAX:
        raise InvalidName(f"a work queue with shards has a name of at most {SHARDED_NAME_MAX} characters, got {len(name)}")


def create(cluster: ClusterState, request: CreateWorkQueue, now: float, chance: random.Random) -> ClusterState:
    """The work queue with its shards; one that exists keeps those it has. Raises also IncompatibleVersion: whoever asks knows
    no shards, and would see one of several; and UnknownFormat."""
    _check_readable(cluster, request.name)
    known, count = cluster.work_queues.get(request.name), request.shards or 1
    if known is not None and known.shards is not None and not known.shards.single and request.shards is None:
        raise IncompatibleVersion(
            f"work queue {request.name!r} has {len(known.shards.open)} shards, and this program's version of RoQ would see one "
            "of them: install the cluster's version, or `roq task shards` it to 1"
        )
    if count > 1:
        check(request.name, count)
    after = work_queues.create(cluster, request, now, chance)
    if known is not None or count == 1:
        return after  # what a leader before left undone: `completed`
    free = 1 + max((shard_number(name) for name in transactions.shard_names(after, after.work_queues[request.name])), default=0)
    numbers = (0, *range(free, free + count - 1))  # beside what a leader of 0.1 may have left of a former queue of this name
    listed = ShardList(_later(0, now), numbers, numbers, (), numbers[-1] + 1)
    after = _with_shards(after, request.name, listed, numbers[1:], request.transaction, now, chance)
    entry = after.transactions[request.transaction]
    logs = {name: after.work_queues[name].spec.log for name in after.work_queues[request.name].shard_names}
    return replace(after, transactions={**after.transactions, entry.id: msgspec.structs.replace(entry, groups=logs)})


def _later(version: int, now: float) -> int:
    """The version of a changed list. That of a queue which is made anew under a name is later than any of the former one's:
    clients that had that open go on with the new one."""
    return max(version + 1, int(now))


def shards_of(cluster: ClusterState, record: WorkQueueRecord, now: float) -> ShardList:
    """The shards of a work queue. Where a leader of 0.1 has written its record without their list, it is what is left in the
    records of the shards."""
    if record.shards is not None:
        return record.shards
    found = [cluster.work_queues[name] for name in transactions.shard_names(cluster, record)]
    known = {shard_number(one.name): one for one in found if one.created >= record.created}  # else of a former queue
    if not known:
        return ShardList()
    numbers = (0, *sorted(known))
    opened = tuple(number for number in numbers if not number or not known[number].spec.closed)
    keyed = tuple(number for number in numbers if not number or known[number].transaction == record.transaction)
    closing = tuple(ClosingShard(number, now) for number in numbers if number not in opened)
    made = 1 + max(shard_number(one.name) for one in found)
    return ShardList(_later(0, now), opened, keyed, closing, made)


def set_shards(cluster: ClusterState, request: SetShards, now: float, chance: random.Random) -> ClusterState:
    """So many take tasks: new ones, or the newest of them close. Raises WorkQueueNotFound, InvalidConfiguration, InvalidName,
    NoHosts, NotReady, UnknownFormat."""
    record = work_queues.record_of(cluster, request.name)
    check(request.name, request.shards)
    if record.shards is None:
        for name in _unreadable(cluster, record.name):
            _check_readable(cluster, name)
    has = shards_of(cluster, record, now)
    more = request.shards - len(has.open)
    if more == 0:
        return cluster if record.shards is not None else completed(cluster, record.name, now, chance)
    made = tuple(range(has.made, has.made + max(more, 0)))
    closing = () if more > 0 else tuple(ClosingShard(number, now) for number in has.open[more:])
    kept = has.open[: len(has.open) - len(closing)]
    after = ShardList(_later(has.version, now), (*kept, *made), has.keyed, (*has.closing, *closing), has.made + len(made))
    for one in closing:
        cluster = _closed(cluster, shard_name(record.name, one.number))
    return _with_shards(cluster, record.name, after, made, request.transaction, now, chance)


def _closed(cluster: ClusterState, name: str) -> ClusterState:
    shard = cluster.work_queues.get(name)
    if shard is None:
        return cluster
    closed = msgspec.structs.replace(shard, spec=msgspec.structs.replace(shard.spec, closed=True))
    return replace(cluster, work_queues={**cluster.work_queues, name: closed})


def _with_shards(
    cluster: ClusterState,
    name: str,
    shards: ShardList,
    new: Iterable[int],
    transaction: str,
    now: float,
    chance: random.Random,
) -> ClusterState:
    """With this list, and shards of these numbers made. Each is placed with regard to those before it."""
    before = _listed(cluster, name, shards)
    cluster = assign(before, (work_subject(name),), before)
    for number in new:
        record = cluster.work_queues[name]
        shard, subject = shard_name(name, number), work_subject(shard_name(name, number))
        _check_readable(cluster, shard)
        if transactions.leftovers(cluster, subject):
            raise NotReady(f"processes of a removed work queue {name!r} are still stopping: try again")
        hosts: tuple[str, ...] = ()
        while len(hosts) < 1 + record.standbys and (another := place_master(cluster, hosts, chance)) is not None:
            hosts += (another.name,)
        if not hosts:
            raise NoHosts
        spec = msgspec.structs.replace(record.spec, log=work_queues.log_id(shard, transaction), shards=0)
        made = WorkQueueRecord(shard, spec, record.standbys, hosts[0], 1, hosts[1:], now, transaction, record.grows)
        before = cluster
        cluster = assign(replace(cluster, work_queues={**cluster.work_queues, shard: made}), (subject,), before)
    return cluster


def _listed(cluster: ClusterState, name: str, shards: ShardList) -> ClusterState:
    record = cluster.work_queues[name]
    spec = msgspec.structs.replace(record.spec, shards=shards.version)
    return replace(
        cluster, work_queues={**cluster.work_queues, name: msgspec.structs.replace(record, spec=spec, shards=shards)}
    )


def _unreadable(cluster: ClusterState, queue: str) -> list[str]:
    """Its shards whose records are there and can't be read."""
    names = (subject.removeprefix(WORK) for subject in cluster.unreadable if subject.startswith(WORK))
    return sorted(name for name in names if is_shard(name) and queue_of(name) == queue)


def _check_readable(cluster: ClusterState, name: str) -> None:
    if work_subject(name) in cluster.unreadable:
        raise UnknownFormat(f"the record of work queue {name!r} is damaged, or of a newer version: the GCM's log says more")


def serves(cluster: ClusterState, queue: str, shard: str) -> bool:
    """This shard of it serves, or is not to take tasks any more. Raises WorkQueueNotFound, ProcessFailed."""
    record, known = work_queues.record_of(cluster, queue), cluster.work_queues.get(shard)
    if record.shards is None or shard_number(shard) not in record.shards.open or (known is not None and known.spec.closed):
        return True
    return known is not None and work_queues.serves(cluster, known, {})


def lacking(cluster: ClusterState) -> list[str]:
    """Work queues whose lists name shards that have no records: a change that is too large for one write is written in parts,
    and the leader died between two. And those of which it closed a shard that the list has open, or the other way round; and
    those whose lists a leader of 0.1 has forgotten."""
    names = [record.name for record in cluster.work_queues.values() if record.shards or record.name in cluster.shards_by_queue]
    return [name for name in names if _mended(cluster, name, 0.0) is not None]


def _mended(cluster: ClusterState, name: str, now: float) -> ShardList | None:
    """The list as it should be; None if it is, with its shards. One whose record can't be read is neither lacking nor gone: it
    is left as it is, and so is a list that was forgotten and had it."""
    record = cluster.work_queues[name]
    has = shards_of(cluster, record, now)
    if record.shards is None:
        return None if has == ShardList() or _unreadable(cluster, name) else has
    names = {number: shard_name(name, number) for number in has.numbers}
    there = {number for number, one in names.items() if one in cluster.work_queues or work_subject(one) in cluster.unreadable}
    closed = {number for number, one in names.items() if number and _is_closed(cluster, one)}
    left = tuple(one for one in has.closing if one.number in there)
    late = tuple(ClosingShard(number, now) for number in has.open if number in closed)
    half = any(names[one.number] in cluster.work_queues and one.number not in closed for one in left)
    if there.issuperset(has.open) and left == has.closing and not late and not half:
        return None
    keyed = tuple(number for number in has.keyed if number in there or number in has.open)
    opened = tuple(number for number in has.open if number not in closed)
    return ShardList(_later(has.version, now), opened, keyed, (*left, *late), has.made)


def _is_closed(cluster: ClusterState, name: str) -> bool:
    record = cluster.work_queues.get(name)
    return record is not None and record.spec.closed


def completed(cluster: ClusterState, name: str, now: float, chance: random.Random) -> ClusterState:
    """Open shards have records; closing ones that have none are on no list, and the others take no tasks; a list that was
    forgotten is there again. Raises NoHosts, NotReady."""
    record = cluster.work_queues.get(name)
    listed = _mended(cluster, name, now) if record is not None else None
    if record is None or listed is None:
        return cluster
    for one in listed.closing:
        cluster = _closed(cluster, shard_name(name, one.number))
    known = {*cluster.work_queues, *(subject.removeprefix(WORK) for subject in cluster.unreadable)}
    new = [number for number in listed.open if shard_name(name, number) not in known]
    return _with_shards(cluster, name, listed, new, f"{record.transaction}-{listed.version}", now, chance)


# --- removal ------------------------------------------------------------------------------------------------------------


def closing(cluster: ClusterState) -> list[tuple[WorkQueueRecord, ClosingShard]]:
    """Shards that are to be removed, each with the record of its queue."""
    return [
        (record, one) for record in cluster.work_queues.values() if record.shards is not None for one in record.shards.closing
    ]


def without_shard(cluster: ClusterState, queue: str, log: str, number: int, now: float) -> ClusterState:
    """Without a closing shard whose master has said that nothing is left in it. log: of that shard. Nothing is changed if it
    is gone, or is another one of that name."""
    record, name = cluster.work_queues.get(queue), shard_name(queue, number)
    shard = cluster.work_queues.get(name)
    if record is None or record.shards is None or shard is None or shard.spec.log != log or not shard.spec.closed:
        return cluster
    left = tuple(one for one in record.shards.closing if one.number != number)
    keyed = tuple(one for one in record.shards.keyed if one != number)
    listed = msgspec.structs.replace(record.shards, version=_later(record.shards.version, now), keyed=keyed, closing=left)
    entry = ClientTransaction(f"shard-{log}", Action.REMOVE_WORK_QUEUE, name, shard.hosts, now, log=log)
    return transactions.begin(_listed(transactions.without_work_queues(cluster, name), queue, listed), entry)
