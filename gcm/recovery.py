"""What becomes of a queue when hosts are lost, join, or have room again. Pure: from a cluster to the next one.

`fail_over` restores service: a backup Monitor becomes active, lost Exchanges are replaced. `repair` restores the replication
factor. Both look at the present state only: doing them again, or half of them under another leader, is harmless. What can't
be placed stays recorded on its lost host, which runs it again if it comes back first.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace

import msgspec

from gcm import work_queues
from gcm.cluster import (
    Action,
    ClientTransaction,
    ClusterState,
    Host,
    HostRecovery,
    exchange_name,
    failure,
    is_running,
    monitor_name,
)
from gcm.placement import has_room, place_monitor, refilled, takes_monitor
from gcm.transactions import successor, successor_id
from roq.wire.assignment import LEASE_UNKNOWN_SECONDS, FormerProcess, QueueRecord
from roq.wire.work_queue import WorkQueueRecord

FORMER_MAX = 64  # the newest replaced processes that are remembered: leases are short, and hosts are lost seldom

Step = Callable[[ClusterState, str, random.Random], ClusterState]  # (cluster, subject, chance)


def lost_hosts(cluster: ClusterState) -> dict[str, list[str]]:
    """Subjects of the queues and work queues that still have a part on a lost host, by host."""
    lost: dict[str, list[str]] = {}
    for subject, record in cluster.records().items():
        for name in cluster.hosts_of(record):
            if not cluster.host(name).alive:
                lost.setdefault(name, []).append(subject)
    return lost


def begin(cluster: ClusterState, hosts: Iterable[str], now: float) -> ClusterState:
    """The recovery of these hosts is recorded, so that the next leader knows of it."""
    fresh = {name: HostRecovery(name, cluster.epoch, now) for name in hosts if name not in cluster.recoveries}
    return replace(cluster, recoveries={**cluster.recoveries, **fresh}) if fresh else cluster


def finished(cluster: ClusterState) -> list[str]:
    """Recorded recoveries of hosts that are back, or of which nothing is left to replace."""
    lost = lost_hosts(cluster)
    return [name for name in cluster.recoveries if name not in lost]


def end(cluster: ClusterState, hosts: Iterable[str]) -> ClusterState:
    """Without the records of these recoveries, as far as they are finished."""
    gone = {*hosts} & {*finished(cluster)}
    kept = {name: entry for name, entry in cluster.recoveries.items() if name not in gone}
    return replace(cluster, recoveries=kept) if gone else cluster


# --- service -----------------------------------------------------------------------------------------------------------


def fail_over(cluster: ClusterState, subject: str, chance: random.Random) -> ClusterState:
    """Nothing of the queue or work queue stands on a lost host any more, as far as there is room elsewhere."""
    record = cluster.record(subject)
    if record is None or all(cluster.host(name).alive for name in cluster.hosts_of(record)):
        return cluster
    if isinstance(record, WorkQueueRecord):
        return work_queues.fail_over(cluster, record, chance)
    moved = _with_live_monitors(cluster, record, chance)
    cluster, moved = _with_live_exchanges(cluster, moved, chance)
    return _with_record(cluster, msgspec.structs.replace(moved, former=_former(cluster, record, moved)))


def _former(cluster: ClusterState, before: QueueRecord, after: QueueRecord) -> tuple[FormerProcess, ...]:
    """What may live on at lost hosts: it was replaced, and nobody there could be told."""
    replaced = {id: host for id, host in before.exchanges.items() if after.exchanges.get(id) != host}
    places = {exchange_name(before.name, id): (host, id) for id, host in replaced.items()}
    if after.monitor_host != before.monitor_host:
        places[monitor_name(before.name)] = (before.monitor_host, "")
    known = tuple(one for one in before.former if one.planned or not cluster.host(one.host).alive)
    fresh = tuple(_former_process(cluster, name, host, id) for name, (host, id) in places.items())
    return (*known, *(one for one in fresh if one is not None))[-FORMER_MAX:]


def _former_process(cluster: ClusterState, name: str, host: str, exchange: str) -> FormerProcess | None:
    at = cluster.host(host)
    report = at.last_report
    if report is None:
        return FormerProcess(name, host, exchange)
    lease = report.lease_seconds or LEASE_UNKNOWN_SECONDS
    process = next((one for one in report.processes if one.name == name), None)
    if process is None:
        told = report.revision >= at.revision  # of everything that it took in
        return None if told else FormerProcess(name, host, exchange, lease_seconds=lease)
    return FormerProcess(name, host, exchange, report.address, process.ports.get("control", 0), lease)


def _with_live_monitors(cluster: ClusterState, record: QueueRecord, chance: random.Random) -> QueueRecord:
    """A backup is activated under the next term, rather one that runs; without any, a new Monitor is placed."""
    backups = [name for name in record.backups if cluster.host(name).alive]
    active = record.monitor_host
    if not cluster.host(active).alive:
        if backups:
            name = monitor_name(record.name)
            active = min(backups, key=lambda host: (not is_running(cluster, host, name), cluster.host(host).monitors, host))
            backups.remove(active)
        elif (new := place_monitor(cluster, (), chance)) is not None:
            active = new.name
    term = record.term + (active != record.monitor_host)
    return msgspec.structs.replace(record, monitor_host=active, term=term, backups=tuple(backups))


def _with_live_exchanges(cluster: ClusterState, record: QueueRecord, chance: random.Random) -> tuple[ClusterState, QueueRecord]:
    """Each lost Exchange is replaced by a new one. One that is just being created, and is not known to have run, is created
    elsewhere, so that its request is answered with what it asked for. Of one that ran, a Monitor would take the new process
    for another life."""
    exchanges: dict[str, str] = {}
    added: Counter[str] = Counter()
    for id, host in record.exchanges.items():
        if not cluster.host(host).alive and successor(record, id) is not None:
            continue  # another one was about to take its place (evacuation.py), and is replaced itself if it was lost
        new = None if cluster.host(host).alive else _exchange_host(cluster, record, added, chance)
        if new is None:
            exchanges[id] = host
            continue
        added[new] += 1
        creating = _creation(cluster, record.name, id)
        if creating is None or _has_run(cluster, host, exchange_name(record.name, id)):
            exchanges[successor_id(record, id, exchanges)] = new
            continue
        exchanges[id] = new
        entry = msgspec.structs.replace(creating, hosts=(new,))
        cluster = replace(cluster, transactions={**cluster.transactions, entry.id: entry})
    return cluster, msgspec.structs.replace(record, exchanges=exchanges)


def _has_run(cluster: ClusterState, host: str, process: str) -> bool:
    report = cluster.host(host).last_report
    return report is not None and any(one.name == process for one in report.processes)


def _creation(cluster: ClusterState, queue: str, exchange: str) -> ClientTransaction | None:
    """The request that is just creating this Exchange."""
    for entry in cluster.transactions.values():
        if entry.action is Action.CREATE_EXCHANGE and (entry.queue, entry.exchange) == (queue, exchange):
            return entry
    return None


def _exchange_host(cluster: ClusterState, record: QueueRecord, added: Counter[str], chance: random.Random) -> str | None:
    """Rather the active Monitor's host while nobody knows that Monitor's ports: there the Exchange can start at once."""
    hosts = [
        host for host in cluster.hosts.values() if has_room(host) and host.exchanges + added[host.name] < host.exchanges_max
    ]
    if not hosts:
        return None
    if not is_running(cluster, record.monitor_host, monitor_name(record.name)) and any(
        host.name == record.monitor_host for host in hosts
    ):
        return record.monitor_host

    def load(host: Host) -> tuple[int, int, int]:
        return added[host.name], host.exchanges + added[host.name] - host.exchanges_max, host.monitors

    least = min(map(load, hosts))
    return chance.choice(sorted(host.name for host in hosts if load(host) == least))


# --- replication factor ------------------------------------------------------------------------------------------------


def lacking(cluster: ClusterState) -> list[str]:
    """Subjects of the queues and work queues whose replication factor can be restored, in part at least."""
    takers = {name for name, host in cluster.hosts.items() if takes_monitor(host)}
    return [
        queue
        for queue, record in cluster.queues.items()
        if record.settings.replication > 1 and takers - {*record.monitor_hosts} and _missing(cluster, record)
    ] + work_queues.lacking(cluster, takers)


def repair(cluster: ClusterState, subject: str, chance: random.Random) -> ClusterState:
    """As many backups as the queue or work queue was created with, each on a host of its own, as far as there are hosts. One
    that its host has given up goes to another host."""
    record = cluster.record(subject)
    if record is None:
        return cluster
    if isinstance(record, WorkQueueRecord):
        return work_queues.repair(cluster, record, chance)
    backups = refilled(
        record.backups,
        record.settings.replication - 1,
        lambda host: failure(cluster, host, monitor_name(record.name)) is not None,
        lambda taken: place_monitor(cluster, (record.monitor_host, *taken), chance),
    )
    return _with_record(cluster, msgspec.structs.replace(record, backups=backups))


def _missing(cluster: ClusterState, record: QueueRecord) -> bool:
    if len(record.backups) < record.settings.replication - 1:
        return True
    return any(failure(cluster, name, monitor_name(record.name)) is not None for name in record.backups)


def _with_record(cluster: ClusterState, record: QueueRecord) -> ClusterState:
    if cluster.queues.get(record.name) == record:
        return cluster
    return replace(cluster, queues={**cluster.queues, record.name: record})
