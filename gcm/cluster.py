"""The whole cluster as one frozen value, and questions to it. Every decision of the GCM is made from such a value.

Desired state (queues, policies, transactions, assignments) is the leader's own; reports and registrations come from the
hosts. Not covered: reading it from ZooKeeper (snapshot.py) and changing it (transactions.py, reconcile.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from itertools import compress
from operator import is_not
from typing import TypeVar

import msgspec

from roq.coordination.paths import TransactionKind
from roq.wire.assignment import (
    WORK,
    Assignment,
    HostReport,
    Leaving,
    MonitorAddress,
    MonitorRole,
    ProcessKind,
    ProcessSpec,
    ProcessState,
    QueueRecord,
    RunningProcess,
    work_subject,
)
from roq.wire.fleet import FleetRecord, MachineRecord, MachineState
from roq.wire.gcm import ClusterView, HostInfo, QueueInfo, WorkQueueInfo
from roq.wire.hcm import HostPayload
from roq.wire.options import ClusterOptions
from roq.wire.policy import Policy, split
from roq.wire.shards import is_shard, queue_of
from roq.wire.work_queue import MasterAddress, WorkQueueRecord

Record = QueueRecord | WorkQueueRecord
STORE_NAME = str(ProcessKind.STORE)  # process name; a host has at most one
DEFAULT_OPTIONS = ClusterOptions()
PROCESSES_MAX = 1_500  # of one host: its assignment and its report are one znode each, and ZooKeeper takes 1 MB
V = TypeVar("V")


class Action(StrEnum):
    """What a transaction is about."""

    CREATE_QUEUE = "create-queue"
    REMOVE_QUEUE = "remove-queue"
    CREATE_EXCHANGE = "create-exchange"
    REMOVE_EXCHANGE = "remove-exchange"
    CREATE_WORK_QUEUE = "create-work-queue"
    REMOVE_WORK_QUEUE = "remove-work-queue"


class ClientTransaction(msgspec.Struct, frozen=True):
    """JSON of `transactions/{queue,exchange}/<id>`: a request under way, so that the next leader can finish it.

    hosts: those that must act. A removal stays for a while after it is done: its repetition gets the same answer. log: of a
    work queue that is removed. tapes: what the names of the tapes begin with of a recorded queue that is removed. groups: of
    it, or shards of a work queue, log by name. former: the queue that is removed, told from later ones of its name.
    """

    id: str
    action: Action
    queue: str
    hosts: tuple[str, ...]
    created: float  # seconds since 1970
    exchange: str = ""
    log: str = ""
    tapes: str = ""
    groups: dict[str, str] = {}
    former: str = ""

    @property
    def subject(self) -> str:
        """The queue, work queue or Exchange's queue it is about (roq.wire.assignment.subject_of)."""
        about_work = self.action in (Action.CREATE_WORK_QUEUE, Action.REMOVE_WORK_QUEUE)
        return work_subject(self.queue) if about_work else self.queue

    @property
    def subjects(self) -> tuple[str, ...]:
        """`subject`, and the groups that go with their queue."""
        return (self.subject, *map(work_subject, self.groups))

    @property
    def kind(self) -> TransactionKind:
        """The folder of its znode."""
        about_exchange = self.action in (Action.CREATE_EXCHANGE, Action.REMOVE_EXCHANGE)
        return TransactionKind.EXCHANGE if about_exchange else TransactionKind.QUEUE


class HostRecovery(msgspec.Struct, frozen=True):
    """JSON of `transactions/host/<host>`: a lost host some of whose processes are not replaced yet."""

    host: str
    epoch: int  # of the term that saw it lost
    created: float  # seconds since 1970


@dataclass(frozen=True)
class HostRegistration:
    """What a live HCM says of itself. generation: one life of its registration; 0 if that does not matter."""

    address: str
    port: int  # of its own interface
    payload: HostPayload
    generation: int = 0


@dataclass(frozen=True)
class Host:
    """One host: what it shall run (`assigned`, by process name), whether it lives, and what it says runs.

    revision: of the last assignment written, 0 if none was.
    """

    name: str
    registration: HostRegistration | None = None
    assigned: Mapping[str, ProcessSpec] = field(default_factory=dict)
    draining_wanted: bool = False
    leaving: Leaving = Leaving.NOTHING  # only if draining is wanted
    revision: int = 0
    report: HostReport | None = None
    last_report: HostReport | None = None  # of a host that is lost: what may live on there

    @property
    def alive(self) -> bool:
        """An HCM is registered."""
        return self.registration is not None

    @property
    def draining(self) -> bool:
        """Nothing new is placed here."""
        return self.draining_wanted or (self.registration is not None and self.registration.payload.draining) or self.stopping

    @property
    def stopping(self) -> bool:
        """It ends soon, and waits a while for what it runs to leave it."""
        return self.registration is not None and self.registration.payload.stopping

    @property
    def reported_revision(self) -> int:
        """The assignment the host has taken in, 0 if none."""
        return self.report.revision if self.report is not None else 0

    @property
    def exchanges_max(self) -> int:
        """Exchange slots; 0 while the host is away."""
        return self.registration.payload.exchanges_max if self.registration is not None else 0

    @cached_property
    def exchanges(self) -> int:
        """Exchanges assigned."""
        return sum(spec.kind is ProcessKind.EXCHANGE for spec in self.assigned.values())

    @cached_property
    def monitors(self) -> int:
        """Monitors assigned."""
        return sum(spec.kind is ProcessKind.MONITOR for spec in self.assigned.values())

    @cached_property
    def masters(self) -> int:
        """Masters and standbys assigned."""
        return sum(spec.kind is ProcessKind.MASTER for spec in self.assigned.values())

    @cached_property
    def assigned_by_subject(self) -> Mapping[str, Mapping[str, ProcessSpec]]:
        """What it shall run of each queue, work queue, and the STORES, by process name."""
        found: dict[str, dict[str, ProcessSpec]] = {}
        for name, spec in self.assigned.items():
            found.setdefault(spec.subject, {})[name] = spec
        return found

    @cached_property
    def takes_more(self) -> bool:
        """One more Monitor, master or store may be placed here."""
        return self.alive and not self.draining and len(self.assigned) < PROCESSES_MAX

    @cached_property
    def slots_used(self) -> int:
        """The less Exchange slots are free, the higher; 0: none is."""
        return self.exchanges - self.exchanges_max

    @cached_property
    def running(self) -> Mapping[str, RunningProcess]:
        """Processes the host reports, by name, in whatever state."""
        return {process.name: process for process in self.report.processes} if self.report is not None else {}

    @cached_property
    def subjects_reported(self) -> frozenset[str]:
        """Queues and work queues of which any process is reported."""
        return frozenset(process.subject for process in self.running.values())

    def assignment(self, epoch: int) -> Assignment:
        """The znode's value."""
        return Assignment(self.name, epoch, self.revision, tuple(self.assigned.values()), self.draining_wanted, self.leaving)


@dataclass(frozen=True)
class ClusterState:
    """Everything the GCM decides from."""

    epoch: int = 0
    hosts: Mapping[str, Host] = field(default_factory=dict)
    queues: Mapping[str, QueueRecord] = field(default_factory=dict)
    work_queues: Mapping[str, WorkQueueRecord] = field(default_factory=dict)
    policies: Mapping[str, Policy] = field(default_factory=dict)
    transactions: Mapping[str, ClientTransaction] = field(default_factory=dict)
    recoveries: Mapping[str, HostRecovery] = field(default_factory=dict)  # by host
    shuffles: frozenset[str] = frozenset()  # ids; the records: shuffle_store.py
    unreadable: frozenset[str] = frozenset()  # subjects that are there, with records that can't be read
    fleet: FleetRecord | None = None  # what the provider may be asked for
    options: ClusterOptions = DEFAULT_OPTIONS
    machines: Mapping[str, MachineRecord] = field(default_factory=dict)  # it was asked for, by host

    def host(self, name: str) -> Host:
        """The host, an unknown one with nothing on it."""
        return self.hosts.get(name) or Host(name)

    @cached_property
    def shards_by_queue(self) -> Mapping[str, tuple[str, ...]]:
        """The shards that have records, but for first ones."""
        found: dict[str, tuple[str, ...]] = {}
        for name in filter(is_shard, self.work_queues):
            found[queue_of(name)] = (*found.get(queue_of(name), ()), name)
        return found

    @property
    def alive(self) -> int:
        """How many hosts live."""
        return sum(host.alive for host in self.hosts.values())

    def policy(self, queue: str) -> Policy:
        """The queue's scaling policy."""
        return self.policies.get(queue, NO_SCALING)

    def with_host(self, host: Host) -> ClusterState:
        """The same with this host's newest state."""
        return replace(self, hosts={**self.hosts, host.name: host})

    def record(self, subject: str) -> Record | None:
        """The queue or work queue of this subject."""
        if subject.startswith(WORK):
            return self.work_queues.get(subject.removeprefix(WORK))
        return self.queues.get(subject)

    def records(self) -> dict[str, Record]:
        """Queues and work queues by subject."""
        return {**self.queues, **{work_subject(name): record for name, record in self.work_queues.items()}}

    def hosts_of(self, record: Record) -> tuple[str, ...]:
        """Names of the hosts that have a part of the queue, the active Monitor's or master's first."""
        if isinstance(record, WorkQueueRecord):
            return record.hosts
        return tuple(dict.fromkeys((*record.monitor_hosts, *record.exchanges.values())))


NO_SCALING = Policy()


def differing(before: Mapping[str, V], after: Mapping[str, V]) -> list[str]:
    """Keys whose values are not the same objects any more: of tables that share what did not change, what did. Those that are
    gone come last."""
    if before is after:
        return []
    changed = list(compress(after, map(is_not, map(before.get, after), after.values())))
    gone = len(before) + sum(key not in before for key in changed) > len(after)
    return [*changed, *(key for key in before if key not in after)] if gone else changed


def process_names(record: QueueRecord) -> list[tuple[str, str]]:
    """(host, process name) of every process that a running queue needs to serve: all but the backup Monitors."""
    names = [(record.monitor_host, f"{kind}/{record.name}") for kind in (ProcessKind.MONITOR, ProcessKind.SCALING)]
    names += [(host, exchange_name(record.name, id)) for id, host in record.exchanges.items()]
    return names


def monitor_name(queue: str) -> str:
    """Process name of a Monitor; a host has at most one of a queue."""
    return f"{ProcessKind.MONITOR}/{queue}"


def master_name(queue: str) -> str:
    """Process name of a master or standby; a host has at most one of a work queue."""
    return f"{ProcessKind.MASTER}/{queue}"


def exchange_name(queue: str, exchange: str) -> str:
    """Process name of an Exchange."""
    return f"{ProcessKind.EXCHANGE}/{queue}/{exchange}"


def monitor_address(cluster: ClusterState, record: QueueRecord, host_name: str = "") -> MonitorAddress | None:
    """Where the queue's active Monitor, or the one on this host, serves, as its host reports; None while it does not."""
    host = cluster.host(host_name or record.monitor_host)
    process = host.running.get(monitor_name(record.name))
    if process is None or process.state is not ProcessState.RUNNING or host.report is None:
        return None
    clients, kpis = process.ports.get("clients"), process.ports.get("kpis")
    if clients is None or kpis is None:
        return None
    role = MonitorRole.ACTIVE if host.name == record.monitor_host else MonitorRole.BACKUP
    return MonitorAddress(host.name, host.report.address, clients, kpis, record.term, role)


def is_running(cluster: ClusterState, host_name: str, process_name: str) -> bool:
    """A live host reports this process RUNNING."""
    host = cluster.host(host_name)
    process = host.running.get(process_name)
    return host.alive and process is not None and process.state is ProcessState.RUNNING


def running_stores(cluster: ClusterState) -> int:
    """How many stores run."""
    return sum(is_running(cluster, host, STORE_NAME) for host in cluster.hosts)


def store_endpoints(cluster: ClusterState) -> dict[str, str]:
    """Endpoints of the stores, by host, as the hosts last told them; whether one runs: `is_running`."""
    endpoints = {}
    for host in cluster.hosts.values():
        if (report := host.report or host.last_report) is None:
            continue
        for process in report.processes:
            if process.kind is ProcessKind.STORE and "clients" in process.ports:
                endpoints[host.name] = f"tcp://{report.address}:{process.ports['clients']}"
    return endpoints


def failure(cluster: ClusterState, host_name: str, process_name: str) -> str | None:
    """Why the host gave the process up; None if it did not."""
    process = cluster.host(host_name).running.get(process_name)
    if process is None or process.state is not ProcessState.FAILED:
        return None
    return f"{process_name} on host {host_name}: {process.error or 'given up'}"


def queue_info(cluster: ClusterState, record: QueueRecord) -> QueueInfo:
    """The queue as clients see it."""
    known = [monitor_address(cluster, record, host) for host in record.monitor_hosts] if record.running else [None]
    monitors = tuple(address for address in known if address is not None) if known[0] is not None else ()
    ready = record.running and all(is_running(cluster, host, name) for host, name in process_names(record))
    return QueueInfo(record, monitors, ready, *split(cluster.policy(record.name)))


def work_queue_info(cluster: ClusterState, record: WorkQueueRecord) -> WorkQueueInfo:
    """The work queue as clients see it, with its shards."""
    name, masters = master_name(record.name), list[MasterAddress]()
    for host in record.hosts:
        report = cluster.host(host).report
        if report is not None and is_running(cluster, host, name):
            port = cluster.host(host).running[name].ports.get("clients", 0)
            masters.append(MasterAddress(host, report.address, port, record.term, host == record.master_host))
    named = (cluster.work_queues.get(shard) for shard in record.shard_names)
    shards = tuple(work_queue_info(cluster, one) for one in named if one is not None)
    ready = is_running(cluster, record.master_host, name) and all(shard.ready for shard in shards)
    return WorkQueueInfo(record, tuple(masters), ready, shards)


def work_queue_infos(cluster: ClusterState) -> tuple[WorkQueueInfo, ...]:
    """All work queues, by name; shards are in the infos of their queues."""
    names = sorted(name for name in cluster.work_queues if not is_shard(name))
    return tuple(work_queue_info(cluster, cluster.work_queues[name]) for name in names)


def host_info(host: Host) -> HostInfo:
    """The host as clients see it."""
    at = host.registration
    return HostInfo(
        host=host.name,
        address=at.address if at else host.report.address if host.report else "",
        port=at.port if at else 0,
        alive=host.alive,
        draining=host.draining,
        exchanges=host.exchanges,
        exchanges_max=host.exchanges_max,
        monitors=host.monitors,
        cpu_fraction=at.payload.cpu_fraction if at else 0.0,
        memory_fraction=at.payload.memory_fraction if at else 0.0,
        report=host.report,
        leaving=host.leaving,
        stopping=host.stopping,
    )


def host_infos(cluster: ClusterState) -> tuple[HostInfo, ...]:
    """Live hosts, and lost ones that still have something assigned, by name."""
    return tuple(host_info(host) for _, host in sorted(cluster.hosts.items()) if host_is_shown(cluster, host))


def host_is_shown(cluster: ClusterState, host: Host) -> bool:
    """Whether clients see it."""
    machine = cluster.machines.get(host.name)
    given_back = machine is not None and machine.state in (MachineState.DESTROYING, MachineState.GONE)
    evacuated = host.leaving is Leaving.EVERYTHING and not host.assigned
    return host.alive or (not given_back and not evacuated and (bool(host.assigned) or host.draining_wanted))


def view(cluster: ClusterState, leader: str, now: float) -> ClusterView:
    """What the broadcast shows. now: seconds since 1970."""
    queues = tuple(queue_info(cluster, cluster.queues[name]) for name in sorted(cluster.queues))
    work_queues = work_queue_infos(cluster)
    return ClusterView(cluster.epoch, leader, now, host_infos(cluster), queues, work_queues)
