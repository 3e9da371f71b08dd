"""What the GCM wants on a host and what the HCM says runs there: the JSON of two znodes per host.

    hcm-state/<host>/assignment   Assignment, written by the leading GCM only
    hcm-state/<host>/running      HostReport, written by the host's HCM only

Both are whole states, never orders: reading the newest one is always enough.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TypeVar

import msgspec

from roq.errors import FrameError
from roq.wire.decoding import UNDECODABLE
from roq.wire.policy import Policy, Rules, joined
from roq.wire.recording import Record, Recording, tapes_of
from roq.wire.work_queue import WorkQueueSpec, in_words

T = TypeVar("T")


class ProcessKind(StrEnum):
    """What a child process is."""

    MONITOR = "monitor"
    EXCHANGE = "exchange"
    SCALING = "scaling"
    STORE = "store"
    MASTER = "master"


LEASE_UNKNOWN_SECONDS = 15.0  # of a host that did not tell its own: longer than the ordinary one
WORK = "work/"
STORES = "stores/"


def work_subject(queue: str) -> str:
    """Subject of a work queue: what its processes, transactions and waiters have in common. That of a publish/subscribe
    queue is its name, and a name has no "/"."""
    return WORK + queue


def subject_of(kind: ProcessKind, queue: str) -> str:
    """What a process belongs to: a queue, a work queue, or the stores."""
    if kind is ProcessKind.MASTER:
        return WORK + queue
    return STORES if kind is ProcessKind.STORE else queue


class MonitorRole(StrEnum):
    """What a Monitor or a master does: one of a queue is active, the others wait to be."""

    ACTIVE = "active"
    BACKUP = "backup"


class Leaving(StrEnum):
    """What is to leave a host on which nothing new is placed."""

    NOTHING = ""
    PROCESSES = "processes"  # of queues and work queues: it is drained
    EVERYTHING = "everything"  # and what its store keeps: it is evacuated


class Overflow(StrEnum):
    """What happens when a subscriber can't keep up."""

    DROP = "drop"  # its frames are dropped, the gap is reported
    BLOCK = "block"  # publishers wait


class QueueSettings(msgspec.Struct, frozen=True):
    """What a queue is created with; the same for all its processes."""

    replication: int = 1
    overflow: Overflow = Overflow.DROP
    max_frame_bytes: int = 1024 * 1024

    def __str__(self) -> str:
        return in_words(self)


class MonitorAddress(msgspec.Struct, frozen=True, omit_defaults=True):
    """Where a queue's Monitor serves. `clients`: publishers, subscribers, Exchanges, ScalingProcess; `kpis`: StatMonitor."""

    host: str
    address: str  # IP address or DNS name
    clients: int
    kpis: int
    term: int = 1
    role: MonitorRole = MonitorRole.ACTIVE

    def clients_endpoint(self) -> str:
        """ZeroMQ endpoint of the Monitor's request socket."""
        return f"tcp://{self.address}:{self.clients}"

    def kpis_endpoint(self) -> str:
        """ZeroMQ endpoint of the StatMonitor's stream."""
        return f"tcp://{self.address}:{self.kpis}"


class FormerProcess(msgspec.Struct, frozen=True, omit_defaults=True):
    """A Monitor or Exchange that was replaced because its host was lost, and may live on there. port: of its Shutdown Monitor,
    0 if not known; lease_seconds: after that time it has ended by itself. planned: its host lives and is told to end it."""

    name: str
    host: str
    exchange: str = ""
    address: str = ""
    port: int = 0
    lease_seconds: float = LEASE_UNKNOWN_SECONDS
    planned: bool = False


class ProcessSpec(msgspec.Struct, frozen=True, omit_defaults=True):
    """One process the host shall run. `monitor`: the active one; None where it is on the same host: the HCM knows its ports.

    For kind MONITOR: its `role`; `monitors`, the queue's Monitors as far as they are known, the active one first, empty while
    it is the only one; `former`, what lost hosts may still run of the queue. For kind MASTER: its `role`, and `work`. For kind
    STORE: queue is empty.
    """

    kind: ProcessKind
    queue: str
    exchange: str = ""  # id, for kind EXCHANGE
    term: int = 1
    settings: QueueSettings = QueueSettings()
    monitor: MonitorAddress | None = None
    policy: Policy | None = None  # for kind SCALING: its part that every version reads …
    role: MonitorRole = MonitorRole.ACTIVE
    monitors: tuple[MonitorAddress, ...] = ()
    work: WorkQueueSpec | None = None
    former: tuple[FormerProcess, ...] = ()
    recording: Recording | None = None  # for kind EXCHANGE, of a queue that is or was recorded
    history: bool = False  # for kind SCALING: KPIs and decisions are kept, see roq.wire.kpi
    rules: Rules = ()  # … and the rest of it

    @property
    def full_policy(self) -> Policy:
        """For kind SCALING."""
        return joined(self.policy or Policy(), self.rules)

    @property
    def name(self) -> str:
        """Unique on its host for as long as the process is wanted, e.g. `exchange/orders/3f2a…`, `store`."""
        if self.kind is ProcessKind.STORE:
            return str(self.kind)
        return f"{self.kind}/{self.queue}/{self.exchange}" if self.exchange else f"{self.kind}/{self.queue}"

    @property
    def subject(self) -> str:
        """What it belongs to."""
        return subject_of(self.kind, self.queue)


class Assignment(msgspec.Struct, frozen=True):
    """All processes one host shall run. `epoch`: GCM leadership term that wrote it; `revision` grows with every write."""

    host: str
    epoch: int
    revision: int
    processes: tuple[ProcessSpec, ...] = ()
    draining: bool = False  # nothing new is placed here
    leaving: Leaving = Leaving.NOTHING


class ProcessState(StrEnum):
    """How a child process is."""

    STARTING = "starting"
    RUNNING = "running"
    STOPPING = "stopping"
    FAILED = "failed"  # given up; `error` says why


class RunningProcess(msgspec.Struct, frozen=True):
    """One child process as its HCM sees it. ports: port number by role (monitor: clients, kpis, control; exchange: front,
    back, control; scaling: control; store and master: clients, control; store also shuffle, unless it lacks pyarrow)."""

    name: str
    kind: ProcessKind
    queue: str
    exchange: str
    state: ProcessState
    pid: int
    ports: dict[str, int]
    restarts: int = 0
    error: str = ""

    @property
    def subject(self) -> str:
        """What it belongs to."""
        return subject_of(self.kind, self.queue)


class HostReport(msgspec.Struct, frozen=True):
    """What runs on a host, and which assignment it has taken in. lease_seconds: so long after the host is found lost its
    processes may go on; 0 if not told. card_expires: seconds since 1970; 0: it has none. leaving: its store shall get nothing
    new, and what it keeps goes to others."""

    host: str
    address: str
    incarnation: str  # one life of the HCM
    epoch: int
    revision: int
    processes: tuple[RunningProcess, ...] = ()
    lease_seconds: float = 0.0
    card_expires: float = 0.0
    leaving: bool = False


class QueueRecord(msgspec.Struct, frozen=True):
    """JSON of `queues/<q>`: a queue's metadata. `exchanges`: host by Exchange id; `backups`: hosts of its backup Monitors;
    `former`: what was replaced because its host was lost; `record`: how its tapes are kept, if it was ever recorded;
    `recorded`: whether it is now; `recorded_since`: when that was switched on (seconds since 1970), 0: with its creation."""

    name: str
    settings: QueueSettings
    running: bool
    monitor_host: str
    term: int
    exchanges: dict[str, str]
    created: float  # seconds since 1970, for people only
    transaction: str = ""  # id of the request that created it
    backups: tuple[str, ...] = ()
    former: tuple[FormerProcess, ...] = ()
    record: Record | None = None
    recorded: bool = False
    recorded_since: float = 0.0

    @property
    def recording(self) -> Recording | None:
        """What its Exchanges are told; None if it was never recorded."""
        return None if self.record is None else Recording(self.record, tapes_of(self.name, self.transaction), self.recorded)

    @property
    def monitor_hosts(self) -> tuple[str, ...]:
        """Hosts of all its Monitors, the active one's first."""
        return (self.monitor_host, *self.backups)


def to_json(value: msgspec.Struct) -> bytes:
    """Bytes of a znode."""
    return msgspec.json.encode(value)


def from_json(data: bytes, kind: type[T]) -> T:
    """The value in a znode; raises FrameError with the reason if it can't be read."""
    try:
        return msgspec.json.decode(data, type=kind)
    except UNDECODABLE as error:
        raise FrameError(f"unreadable {kind.__name__}: {error}") from None
