"""The control plane's invariants: of a quiet cluster at the end, and of what a witness saw all the time. Pure.

C1 Writes of two epochs never mix: in the order of ZooKeeper's transactions the epochs of all assignments and of `gcm/epoch`
   never decrease, and no host takes orders of an older epoch or revision than before. Quiet, no order is newer than the epoch,
   every host has obeyed its newest order, and no transaction is left.
C2 One active Monitor per queue; over time, one host per term of a queue, or of a work queue.
C3 Quiet: that, replication - 1 backups on distinct hosts, one ScalingProcess, an Exchange at least; of a work queue or group
   the master and its standbys, on distinct hosts.
C4 Quiet: hosts run exactly what the queues' records place there, and the operating system nothing else. This is also
C7 for what the run revived: a process of a former life is one that no record places there, or an orphan.
C5 and C6 are checked by administration.py, the data plane's D1 to D5 by verdict.py, D6 by resources.py.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from roq.testing import HostProcess
from roq.wire.assignment import MonitorRole, ProcessKind, ProcessState
from roq.wire.gcm import ClusterView, QueueInfo, WorkQueueInfo


class EpochWritten(NamedTuple):
    """`gcm/epoch` as it was written by the ZooKeeper transaction `zxid`."""

    zxid: int
    epoch: int


class Order(NamedTuple):
    """An assignment."""

    zxid: int
    host: str
    epoch: int
    revision: int


class HostReported(NamedTuple):
    """A host's report of which assignment it has taken in."""

    zxid: int
    host: str
    epoch: int
    revision: int


class Term(NamedTuple):
    """A queue's or work queue's record. queue: of one life, from creation to removal; host: of its active Monitor or master."""

    zxid: int
    queue: str
    term: int
    host: str


Seen = EpochWritten | Order | HostReported | Term


def violations(view: ClusterView, processes: Mapping[str, Sequence[HostProcess]]) -> list[str]:
    """One line per violation. processes: by host, what its operating system runs."""
    found = [text for info in view.queues if info.record.running for text in _queue(info)]
    found += [text for work_queue in view.work_queues for text in _work_queue(work_queue)]
    wanted = _wanted(view)
    for host in view.hosts:
        if not host.alive or host.report is None:
            found.append(f"C3: host {host.host} is not there")
            continue
        running = sorted(one.name for one in host.report.processes if one.state is ProcessState.RUNNING)
        if running != sorted(wanted.get(host.host, [])):
            found.append(f"C4: {host.host} runs {running}, should run {sorted(wanted.get(host.host, []))}")
        pids = {one.pid for one in host.report.processes}
        found += [f"C4: orphan {one.name} (pid {one.pid}) on {host.host}" for one in processes.get(host.host, ()) if one.orphan]
        gone = pids - {one.pid for one in processes.get(host.host, ())}
        if gone:
            found.append(f"C4: {host.host} reports processes that are gone: {sorted(gone)}")
    return found


def unsettled(now: Iterable[Seen], transactions: Collection[str]) -> list[str]:
    """C1 of a quiet cluster. now: everything in ZooKeeper at one moment."""
    now = list(now)
    found = [f"C1: transaction {path} is left" for path in transactions]
    newest = max((one.epoch for one in now if isinstance(one, EpochWritten)), default=0)
    reports = {one.host: one for one in now if isinstance(one, HostReported)}
    for order in now:
        if not isinstance(order, Order):
            continue
        if order.epoch > newest:
            found.append(f"C1: assignment of {order.host} has epoch {order.epoch}, the epoch is {newest}")
        report = reports.get(order.host)
        if report is None or report[2:] != order[2:]:
            obeyed = f"{report.epoch}/{report.revision}" if report is not None else "nothing"
            found.append(f"C1: {order.host} has obeyed {obeyed}, its assignment is {order.epoch}/{order.revision}")
    return found


def history_violations(seen: Collection[Seen]) -> list[str]:
    """C1 and C2 over the whole run."""
    found = [*_epochs(seen), *_obedience(seen)]
    places: dict[tuple[str, int], set[str]] = {}
    for one in seen:
        if isinstance(one, Term):
            places.setdefault((one.queue, one.term), set()).add(one.host)
    for (queue, term), hosts in sorted(places.items()):
        if len(hosts) > 1:
            found.append(f"C2: in term {term} queue {queue} had active Monitors on {', '.join(sorted(hosts))}")
    return found


def _epochs(seen: Collection[Seen]) -> list[str]:
    began = {one.epoch: one.zxid for one in seen if isinstance(one, EpochWritten)}
    found, highest = [], 0
    for write in sorted((one for one in seen if isinstance(one, EpochWritten | Order)), key=lambda one: one.zxid):
        what = f"assignment of {write.host}" if isinstance(write, Order) else "gcm/epoch"
        if write.epoch < highest:
            found.append(f"C1: {what}: epoch {write.epoch} wrote after epoch {highest} had begun (zxid {write.zxid:x})")
        if write.zxid < began.get(write.epoch, 0):
            found.append(f"C1: {what}: epoch {write.epoch} wrote before it began (zxid {write.zxid:x})")
        highest = max(highest, write.epoch)
    return found


def _obedience(seen: Collection[Seen]) -> list[str]:
    found: list[str] = []
    last: dict[str, HostReported] = {}
    for report in sorted((one for one in seen if isinstance(one, HostReported)), key=lambda one: one.zxid):
        before = last.get(report.host)
        if before is not None and report[2:] < before[2:]:
            went = f"from {before.epoch}/{before.revision} back to {report.epoch}/{report.revision}"
            found.append(f"C1: {report.host} went {went}")
        last[report.host] = report
    return found


def _queue(info: QueueInfo) -> list[str]:
    record, name = info.record, info.record.name
    active = [monitor for monitor in info.monitors if monitor.role is MonitorRole.ACTIVE]
    found = []
    if len(active) != 1:
        found.append(f"C2: queue {name} has {len(active)} active Monitors")
    hosts = record.monitor_hosts
    if len(set(hosts)) != record.settings.replication:
        found.append(f"C3: queue {name} has Monitors on {hosts}, wants {record.settings.replication} hosts")
    if not record.exchanges:
        found.append(f"C3: queue {name} has no Exchange")
    if not info.ready:
        found.append(f"C3: queue {name} is not ready")
    return found


def _work_queue(info: WorkQueueInfo) -> list[str]:
    record, name = info.record, info.record.name
    found = []
    if not info.ready:
        found.append(f"C3: work queue {name} is not ready")
    if len(record.standby_hosts) != record.standbys or len(set(record.hosts)) != len(record.hosts):
        found.append(f"C3: work queue {name} has masters on {record.hosts}, wants {record.standbys + 1} hosts")
    return found


def _wanted(view: ClusterView) -> dict[str, list[str]]:
    """Names of processes by host, from the records alone; of stores, each host has one as soon as one is needed."""
    wanted: dict[str, list[str]] = {}
    running = [one.kind for host in view.hosts if host.report is not None for one in host.report.processes]
    if view.work_queues or ProcessKind.STORE in running:
        wanted = {host.host: [ProcessKind.STORE.value] for host in view.hosts}
    for work_queue in view.work_queues:
        for host in work_queue.record.hosts:
            wanted.setdefault(host, []).append(f"master/{work_queue.record.name}")
    for info in view.queues:
        record = info.record
        if not record.running:
            continue
        for host in record.monitor_hosts:
            wanted.setdefault(host, []).append(f"monitor/{record.name}")
        wanted.setdefault(record.monitor_host, []).append(f"scaling/{record.name}")
        for exchange, host in record.exchanges.items():
            wanted.setdefault(host, []).append(f"exchange/{record.name}/{exchange}")
    return wanted
