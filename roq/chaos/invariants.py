"""The control plane's invariants (RELIABILITY 1.3) as far as a quiet cluster shows them. Pure.

C2 one active Monitor per queue; C3 that, replication - 1 backups on distinct hosts, one ScalingProcess, an Exchange at least;
C4 and C7 hosts run exactly what the queues' records place there, and the operating system nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from roq.testing import HostProcess
from roq.wire.assignment import MonitorRole, ProcessState
from roq.wire.gcm import ClusterView, QueueInfo


def violations(view: ClusterView, processes: Mapping[str, Sequence[HostProcess]]) -> list[str]:
    """One line per violation. processes: by host, what its operating system runs."""
    found = [text for info in view.queues if info.record.running for text in _queue(info)]
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


def _wanted(view: ClusterView) -> dict[str, list[str]]:
    """Names of processes by host, from the records alone."""
    wanted: dict[str, list[str]] = {}
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
