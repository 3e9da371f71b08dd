"""CPU seconds of the processes a load goes through, by kind. Only processes of this machine can be asked.

Exchanges, Monitors and ScalingProcesses of the queue are found in the hosts' reports; HCMs are the processes they descend
from; GCMs and ZooKeeper are found by their command lines, or named by whoever started them.
"""

from __future__ import annotations

import ipaddress
import time
from collections.abc import Iterable

import psutil

from roq.wire.assignment import ProcessKind
from roq.wire.gcm import ClusterView

KINDS = (ProcessKind.EXCHANGE, ProcessKind.MONITOR, ProcessKind.SCALING)
ZOOKEEPER_CLASSES = ("org.apache.zookeeper.server",)  # every way to start it names a class of this package

Pids = dict[str, set[int]]  # process ids by kind


class CpuMeter:
    """CPU seconds since the meter was made."""

    def __init__(self, pids: Pids) -> None:
        self._began = {kind: {pid: _cpu_seconds(pid) for pid in found} for kind, found in pids.items()}

    def seconds(self) -> dict[str, float]:
        """By kind. A process that has ended meanwhile counts as far as it was seen, which is 0."""
        return {
            kind: round(sum(max(0.0, _cpu_seconds(pid) - began) for pid, began in found.items()), 3)
            for kind, found in self._began.items()
        }


class MachineMeter:
    """What the whole machine did since the meter was made, to tell what other programs took."""

    def __init__(self) -> None:
        self._busy, self._began = _machine_seconds(), time.monotonic()

    def foreign_cores(self, own_seconds: float) -> float:
        """Cores kept busy, on average, by anything but `own_seconds` of CPU time."""
        elapsed = time.monotonic() - self._began
        return round(max(0.0, _machine_seconds() - self._busy - own_seconds) / elapsed, 2) if elapsed > 0 else 0.0


def _machine_seconds() -> float:
    times = psutil.cpu_times()
    return float(times.user + times.nice + times.system + times.irq + times.softirq + times.steal)


def _cpu_seconds(pid: int) -> float:
    try:
        times = psutil.Process(pid).cpu_times()
    except psutil.Error:
        return 0.0
    return float(times.user + times.system)


def queue_pids(view: ClusterView, queue: str) -> Pids:
    """Processes of one queue on this machine's hosts, and these hosts' HCMs with their fork servers."""
    pids: Pids = {kind: set() for kind in (*map(str, KINDS), "hcm")}
    for host in view.hosts:
        if host.report is None or not _is_here(host.address):
            continue
        for process in host.report.processes:
            if process.queue == queue and psutil.pid_exists(process.pid):
                pids[str(process.kind)].add(process.pid)
                pids["hcm"] |= _hcm_of(process.pid)
    return pids


def _is_here(address: str) -> bool:
    try:
        if ipaddress.ip_address(address).is_loopback:
            return True
    except ValueError:
        return False
    return any(address == found.address for interface in psutil.net_if_addrs().values() for found in interface)


def _hcm_of(pid: int) -> set[int]:
    """The fork server the process was forked from and the HCM above it; empty once the HCM has been restarted."""
    try:
        return {parent.pid for parent in psutil.Process(pid).parents() if _names(parent, ("roq-hcm", "hcm"))}
    except psutil.Error:
        return set()


def _names(process: psutil.Process, modules: Iterable[str]) -> bool:
    try:
        command = process.cmdline()
    except psutil.Error:
        return False
    return any(part.rpartition("/")[2] in modules for part in command[:4])


def daemon_pids(zookeeper: str) -> Pids:
    """GCMs of the cluster at this address, and ZooKeepers, among this machine's processes."""
    pids: Pids = {"gcm": set(), "zookeeper": set()}
    for process in psutil.process_iter():
        try:
            command = process.cmdline()
        except psutil.Error:
            continue
        if any(part.rpartition("/")[2] in ("roq-gcm", "gcm") for part in command[:4]) and zookeeper in command:
            pids["gcm"].add(process.pid)
        elif any(part.startswith(ZOOKEEPER_CLASSES) for part in command):
            pids["zookeeper"].add(process.pid)
    return pids
