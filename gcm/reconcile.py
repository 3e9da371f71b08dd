"""From what is wanted to what is written. Pure.

Three steps: `wanted_processes` says what a queue needs where; `assign` puts that into the hosts' assignments; `changes` is
the difference of two clusters as ZooKeeper operations. Written state is always whole, so reading the newest is enough.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import TypeVar

import msgspec

from gcm.cluster import ClusterState, Host, Record, differing, monitor_address
from gcm.history import keeps_history, told_of_history, writes_history
from gcm.placement import takes_monitor
from gcm.transactions import groups_of, shard_names
from roq.coordination import paths
from roq.coordination.link import Create, Delete, Op, SetData
from roq.coordination.paths import TransactionKind
from roq.wire.assignment import (
    STORES,
    FormerProcess,
    MonitorAddress,
    MonitorRole,
    ProcessKind,
    ProcessSpec,
    QueueRecord,
    to_json,
    work_subject,
)
from roq.wire.policy import split
from roq.wire.work_queue import WorkQueueRecord

STORE = ProcessSpec(ProcessKind.STORE, "")
V = TypeVar("V", bound=msgspec.Struct)


def wanted_processes(cluster: ClusterState, record: Record) -> dict[str, list[ProcessSpec]]:
    """What each host shall run for the queue: nothing if it is stopped.

    An Exchange away from its Monitor is wanted once the Monitor's ports are known; they are the last known ones while the
    Monitor restarts.
    """
    if isinstance(record, WorkQueueRecord):
        return _wanted_masters(record)
    if not record.running:
        return {}
    addresses = monitor_addresses(cluster, record)
    told = tuple(addresses.values()) if record.backups else ()

    def spec(kind: ProcessKind, exchange: str = "", monitor: MonitorAddress | None = None) -> ProcessSpec:
        given = cluster.policies.get(record.name) if kind is ProcessKind.SCALING else None
        policy, rules = split(given) if given is not None else (None, ())
        recording = record.recording if kind is ProcessKind.EXCHANGE else None
        history = writes_history(kind, record.name) and keeps_history(cluster)
        about = (kind, record.name, exchange, record.term, record.settings, monitor, policy)
        return ProcessSpec(*about, recording=recording, history=history, rules=rules)

    def monitor(role: MonitorRole) -> ProcessSpec:
        former = tuple(one for one in record.former if may_live(cluster, record, one))
        return msgspec.structs.replace(spec(ProcessKind.MONITOR), role=role, monitors=told, former=former)

    wanted = {record.monitor_host: [monitor(MonitorRole.ACTIVE), spec(ProcessKind.SCALING)]}
    for host in record.backups:
        wanted[host] = [monitor(MonitorRole.BACKUP)]
    for exchange, host in record.exchanges.items():
        if host == record.monitor_host:
            wanted[host].append(spec(ProcessKind.EXCHANGE, exchange))
        elif (address := addresses.get(record.monitor_host)) is not None:
            wanted.setdefault(host, []).append(spec(ProcessKind.EXCHANGE, exchange, address))
    return wanted


def may_live(cluster: ClusterState, record: QueueRecord, former: FormerProcess) -> bool:
    """Nobody could tell it to end, as its host is lost; or it is the Monitor whose place another took, which ends just now."""
    return not cluster.host(former.host).alive or (former.planned and former.host not in record.monitor_hosts)


def _wanted_masters(record: WorkQueueRecord) -> dict[str, list[ProcessSpec]]:
    def master(role: MonitorRole) -> ProcessSpec:
        return ProcessSpec(ProcessKind.MASTER, record.name, term=record.term, role=role, work=record.spec)

    standbys = {host: [master(MonitorRole.BACKUP)] for host in record.standby_hosts}
    return {**standbys, record.master_host: [master(MonitorRole.ACTIVE)]}


def monitor_addresses(cluster: ClusterState, record: QueueRecord) -> dict[str, MonitorAddress]:
    """Where the queue's Monitors serve, by host, the active one's first. One that restarts keeps its ports, so that its last
    known address holds; one that never served is left out."""
    addresses: dict[str, MonitorAddress] = {}
    last: dict[str, MonitorAddress] | None = None
    for host in record.monitor_hosts:
        address = monitor_address(cluster, record, host)
        if address is None:
            last = last if last is not None else _last_known(cluster, record)
            address = last.get(host)
        if address is not None:
            role = MonitorRole.ACTIVE if host == record.monitor_host else MonitorRole.BACKUP
            addresses[host] = msgspec.structs.replace(address, term=record.term, role=role)
    return addresses


def _last_known(cluster: ClusterState, record: QueueRecord) -> dict[str, MonitorAddress]:
    """What the queue's processes were told of its Monitors, by host."""
    known: dict[str, MonitorAddress] = {}
    for name in cluster.hosts_of(record):
        for spec in cluster.host(name).assigned_by_subject.get(record.name, {}).values():
            known |= {address.host: address for address in spec.monitors}
            known |= {spec.monitor.host: spec.monitor} if spec.monitor is not None else {}
    return known


def assign(cluster: ClusterState, subjects: Iterable[str], before: ClusterState) -> ClusterState:
    """The cluster with the assignments of these queues, work queues, and the STORES made right. before: where their processes
    may still be assigned."""
    changed: dict[str, Mapping[str, Mapping[str, ProcessSpec]]] = {}  # by host, on which something differs; by subject
    for subject in _with_parts(subjects, cluster, before):
        if subject == STORES:
            for name in lacking_stores(cluster):
                changed[name] = {**changed.get(name, cluster.host(name).assigned_by_subject), STORES: {STORE.name: STORE}}
            continue
        record, former = cluster.record(subject), before.record(subject)
        wanted = wanted_processes(cluster, record) if record is not None else {}
        touched = {*wanted, *(before.hosts_of(former) if former is not None else ())}
        for name in touched | ({*cluster.hosts_of(record)} if record is not None else set()):
            parts = changed[name] if name in changed else cluster.host(name).assigned_by_subject
            processes = {spec.name: spec for spec in wanted.get(name, ())}
            if processes != parts.get(subject, {}):
                kept = {other: part for other, part in parts.items() if other != subject}
                changed[name] = {**kept, subject: processes} if processes else kept
    hosts = {**cluster.hosts, **{name: _with_assigned(cluster.host(name), parts) for name, parts in changed.items()}}
    if (keeps := keeps_history(cluster)) != keeps_history(before):
        hosts = {name: told_of_history(host, keeps) for name, host in hosts.items()}
    return replace(cluster, hosts=hosts)


def _with_parts(subjects: Iterable[str], cluster: ClusterState, before: ClusterState) -> Iterator[str]:
    """The groups of a queue that is removed go with it, also one that was made in the same write; the shards of a work queue
    follow it in everything."""
    for subject in subjects:
        yield subject
        if subject in before.queues and subject not in cluster.queues:
            yield from (work_subject(group.name) for group in groups_of(before, subject))
        records = [(state, state.record(subject)) for state in (before, cluster)]
        shards = {name for state, one in records if isinstance(one, WorkQueueRecord) for name in shard_names(state, one)}
        yield from map(work_subject, sorted(shards))


def lacking_stores(cluster: ClusterState) -> list[str]:
    """Hosts that shall run a store and are not told so. Each does once there are work queues, shuffles or recorded queues, and
    does so from then on: what a store keeps is removed or moved by what uses it."""
    recorded = any(record.record is not None for record in cluster.queues.values())
    if not cluster.work_queues and not cluster.shuffles and not recorded:
        return []
    return [name for name, host in cluster.hosts.items() if takes_monitor(host) and STORE.name not in host.assigned]


def _with_assigned(host: Host, by_subject: Mapping[str, Mapping[str, ProcessSpec]]) -> Host:
    return replace(host, assigned={name: spec for part in by_subject.values() for name, spec in part.items()})


def assign_all(cluster: ClusterState) -> ClusterState:
    """Every assignment made right, whatever stands there now (start of a term)."""
    known = {key: record for key, record in cluster.records().items() if isinstance(record, WorkQueueRecord) or record.running}
    cleaned = {
        name: replace(host, assigned={key: spec for key, spec in host.assigned.items() if _belongs(known, name, spec)})
        for name, host in cluster.hosts.items()
        if any(not _belongs(known, name, spec) for spec in host.assigned.values())
    }
    return assign(replace(cluster, hosts={**cluster.hosts, **cleaned}), [*known, STORES], cluster)


def _belongs(known: Mapping[str, Record], host: str, spec: ProcessSpec) -> bool:
    if spec.kind is ProcessKind.STORE:
        return True
    record = known.get(spec.subject)
    if record is None:
        return False
    if isinstance(record, WorkQueueRecord):
        return host in record.hosts
    if spec.kind is ProcessKind.EXCHANGE:
        return record.exchanges.get(spec.exchange) == host
    return host in record.monitor_hosts if spec.kind is ProcessKind.MONITOR else host == record.monitor_host


def stamp(before: ClusterState, after: ClusterState) -> ClusterState:
    """`after` with the next revision on every assignment that differs."""
    stamped = {
        name: replace(host, revision=before.host(name).revision + 1)
        for name in differing(before.hosts, after.hosts)
        if name in after.hosts and _differs(before.host(name), host := after.hosts[name])
    }
    return replace(after, hosts={**after.hosts, **stamped}) if stamped else after


def _differs(before: Host, after: Host) -> bool:
    told = before.assigned, before.draining_wanted, before.leaving
    return told != (after.assigned, after.draining_wanted, after.leaving)


def changed_hosts(before: ClusterState, after: ClusterState) -> list[Host]:
    """Hosts whose assignment has another revision."""
    hosts = [after.hosts[name] for name in differing(before.hosts, after.hosts) if name in after.hosts]
    return [host for host in hosts if host.revision != before.host(host.name).revision]


def changes(before: ClusterState, after: ClusterState) -> list[Op]:
    """The operations that turn the znodes of `before` into those of `after` (stamped)."""
    operations = _table(before.transactions, after.transactions, lambda _, entry: paths.transaction(entry.kind, entry.id))
    operations += _table(before.recoveries, after.recoveries, lambda host, _: paths.transaction(TransactionKind.HOST, host))
    operations += _table(before.queues, after.queues, lambda name, _: paths.queue(name))
    operations += _table(before.work_queues, after.work_queues, lambda name, _: paths.work_queue(name))
    operations += _table(before.policies, after.policies, lambda name, _: paths.policy(name))
    operations += _fleet_changes(before, after)
    if before.options != after.options:
        operations.append(SetData(paths.OPTIONS, to_json(after.options)))
    for host in changed_hosts(before, after):
        data, path = to_json(host.assignment(after.epoch)), paths.assignment(host.name)
        operations.append(SetData(path, data) if before.host(host.name).revision else Create(path, data))
    return operations


def _fleet_changes(before: ClusterState, after: ClusterState) -> list[Op]:
    """A machine comes with the folder of its host's state, and goes with what is assigned there."""
    operations: list[Op] = [Create(paths.host_state(name), b"") for name in after.machines if name not in before.machines]
    operations += _table(before.machines, after.machines, lambda name, _: paths.machine(name))
    if after.fleet is not None and after.fleet != before.fleet:
        data = to_json(after.fleet)
        operations.append(Create(paths.FLEET, data) if before.fleet is None else SetData(paths.FLEET, data))
    forgotten = [host for name, host in before.hosts.items() if name not in after.hosts and host.revision]
    return [*operations, *(Delete(paths.assignment(host.name)) for host in forgotten)]


def _table(before: Mapping[str, V], after: Mapping[str, V], path: Callable[[str, V], str]) -> list[Op]:
    changed = differing(before, after)
    operations: list[Op] = [Delete(path(key, before[key])) for key in changed if key not in after]
    for key in changed:
        former, new = before.get(key), after.get(key)
        if new is not None and former is None:
            operations.append(Create(path(key, new), to_json(new)))
        elif new is not None and former != new:
            operations.append(SetData(path(key, new), to_json(new)))
    return operations
