"""Conversation with the Global Configuration Manager (leader's ROUTER ↔ DEALER), and its topology broadcast.

Every request that changes something carries the client's `transaction` id: the same request again (after a lost answer,
or at the next leader) gets the same answer. A standby answers NotLeader with the leader's address.
What may be more than a message is told in parts: roq/wire/parts.py.
The broadcast is a PUB socket at port `broadcast`: parts [b"topology", msgpack ClusterView], every few seconds and on change.
"""

from __future__ import annotations

import msgspec

from roq.wire.access import AccessInfo, GetAccess, SetAccess
from roq.wire.assignment import HostReport, Leaving, MonitorAddress, QueueRecord, QueueSettings
from roq.wire.durables import DurablePosition, Durables, ForgetDurable, KeepPosition, ListDurables, OpenDurable
from roq.wire.fleet import FleetInfo, GetFleet, SetFleet
from roq.wire.hosts import DescribeRemains, HostRemains
from roq.wire.options import CreateMissing, GetOptions, OptionsInfo, SetRebalance, SetTemplate
from roq.wire.parts import PartRequest
from roq.wire.policy import Policy, Rules, joined
from roq.wire.producers import ForgetProducer, KeepProducer, ListProducers, OpenProducer, ProducerGrant, Producers
from roq.wire.recording import Record
from roq.wire.shards import SetShards
from roq.wire.shuffle import Description, Range, Receipt, RunSample, Spec
from roq.wire.work_queue import GroupSource, MasterAddress, TaskSettings, WorkQueueRecord

BROADCAST_TOPIC = b"topology"


class LeaderAddress(msgspec.Struct, frozen=True):
    """JSON of `gcm/leader`."""

    epoch: int
    host: str  # IP address or DNS name
    port: int
    broadcast: int


class CreateQueue(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Create and start; `host` empty: placed by load. Answered when the queue serves."""

    name: str
    transaction: str
    settings: QueueSettings = QueueSettings()
    host: str = ""
    policy: Policy | None = None
    record: Record | None = None  # None: not recorded; an existing queue may be or not


class RemoveQueue(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Stop and forget, its tapes and groups included. Answered when no process of them is left."""

    name: str
    transaction: str


class StartQueue(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Run a stopped queue again."""

    name: str
    transaction: str


class StopQueue(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Stop its processes, keep its metadata."""

    name: str
    transaction: str


class QueueExists(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Is there a queue of this name?"""

    name: str


class DescribeQueue(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Metadata and addresses of one queue (also how clients find its Monitors)."""

    name: str


class ListQueues(PartRequest, frozen=True, tag=True, array_like=True):
    """All queues, in parts."""


class CreateExchange(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """One more Exchange; the transaction id is the client's. `host` empty: the host with most free slots."""

    queue: str
    transaction: str
    host: str = ""


class RemoveExchange(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Stop an Exchange that its Monitor has drained."""

    queue: str
    exchange: str
    transaction: str


class ListHosts(PartRequest, frozen=True, tag=True, array_like=True):
    """All hosts, in parts."""


class DrainHost(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Place nothing new there (draining True), or take part again (False). leaving: what shall go to other hosts."""

    host: str
    draining: bool
    transaction: str
    leaving: Leaving = Leaving.NOTHING


class SetPolicy(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Scaling policy of a queue from now on; None: back to the default, which never scales by itself."""

    queue: str
    policy: Policy | None
    transaction: str


class RecordQueue(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Record the queue from now on, kept like this; None: record it no longer, what is on its tapes stays until it expires.
    Answered when it is written and on its way to the Exchanges."""

    queue: str
    record: Record | None
    transaction: str


class RecordHistory(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Keep every queue's KPIs and decisions from now on, like this (HISTORY_QUEUES); None: no longer, what was kept goes."""

    record: Record | None
    transaction: str


class DescribeTapes(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The tapes of a queue, and where the stores are that hold them. after: those whose logs are named behind that, as many as
    fit into a message, in order; None: all of them, as older programs ask."""

    queue: str
    after: str | None = None


class GetPolicy(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Scaling policy of a queue."""

    queue: str


class CreateWorkQueue(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Create a work queue, answered when its masters run. Where nothing is said, an existing one may be any, and a new one gets
    the default: write_quorum 3 stores, or as many as there are hosts; ack_quorum the majority of them; INLINE_BYTES; one shard.
    asked: settings, and fields of the source, that an existing one must have; None: all. source: of a group, `<queue>@<group>`,
    whose `tapes` the GCM fills in. shards None: asked by a program that gets no queue of several."""

    name: str
    transaction: str
    settings: TaskSettings | None = None
    write_quorum: int = 0
    ack_quorum: int = 0
    standbys: int | None = None  # 1
    inline_bytes: int = 0
    asked: tuple[str, ...] | None = None
    source: GroupSource | None = None
    shards: int | None = None


class RemoveWorkQueue(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Stop and forget, its tasks included. Answered when no process of it is left."""

    name: str
    transaction: str


class DescribeWorkQueue(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """One work queue and where it serves."""

    name: str


class ListWorkQueues(PartRequest, frozen=True, tag=True, array_like=True):
    """All work queues, in parts."""


class ListGroups(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The groups of one queue, as work queues."""

    queue: str


class CreateShuffle(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Idempotent; with another spec ShuffleConflict."""

    name: str
    transaction: str
    spec: Spec


class RemoveShuffle(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Forget it and its data."""

    name: str
    transaction: str


class DescribeShuffle(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """One shuffle and its followers."""

    name: str


class ListShuffles(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """All shuffles, without their ranges and committed attempts."""


class NameReceipts(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Some receipts of a commit that comes, too many for one message; remembered for a while. number: of this part, from 0."""

    name: str
    transaction: str
    number: int
    receipts: list[Receipt]


class CommitShuffle(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Name the committed attempts and seal. Answered when readers may read; the same receipts again get the same answer. parts:
    those of as many NameReceipts of the same transaction are meant too; NotReady: tell them (again)."""

    name: str
    transaction: str
    receipts: list[Receipt]
    parts: int = 0


class RebalanceShuffle(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Cut a sealed shuffle anew, into `ranges` (0: as many as it has). Answered when the data has moved."""

    name: str
    transaction: str
    ranges: int


class ReportRuns(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A follower's buffer role tells what it has taken since its last report, and asks for the table. wanted: it can't go on
    without one. samples may be told again after silence. epoch: of the table it has, whose ranges need not be told again."""

    name: str
    shuffle: str
    host: str
    samples: list[RunSample]
    stored: list[Receipt]
    wanted: bool
    epoch: int = 0


class GetCluster(PartRequest, frozen=True, tag=True, array_like=True):
    """The whole cluster, as the broadcast shows it, in parts."""


class Done(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """It is so now."""


class Exists(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Answer to QueueExists."""

    exists: bool


class QueueInfo(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """One queue. monitors: the active one, then the backups that run; empty while no active one serves. ready: active
    Monitor, ScalingProcess and every Exchange run. common, rules: its policy, split."""

    record: QueueRecord
    monitors: tuple[MonitorAddress, ...]
    ready: bool
    common: Policy
    rules: Rules = ()

    @property
    def policy(self) -> Policy:
        """Its scaling policy."""
        return joined(self.common, self.rules)


class Queues(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Answer to ListQueues."""

    queues: tuple[QueueInfo, ...]
    snapshot: str = ""
    more: bool = False


class TapeView(msgspec.Struct, frozen=True, array_like=True):
    """One tape. log: its id. exchange: that writes or wrote it. live: the queue has this Exchange. meta: JSON of its log."""

    log: str
    exchange: str
    live: bool
    meta: bytes


class Tapes(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Answer to DescribeTapes. tapes: the queue's part of their names. stores: endpoint by host. made_by: the transaction that
    created the queue, for wire.store.Read. since: when recording was switched on last after the queue was created (milliseconds
    since 1970), or 0. more: there are others behind the last one."""

    tapes: str
    record: Record
    recorded: bool
    views: tuple[TapeView, ...]
    stores: dict[str, str]
    made_by: str = ""
    since: int = 0
    more: bool = False


class WorkQueueInfo(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """One work queue. masters: that run, the active one first; ready: it runs, and that of each shard. shards: all but this."""

    record: WorkQueueRecord
    masters: tuple[MasterAddress, ...]
    ready: bool
    shards: tuple[WorkQueueInfo, ...] = ()


class WorkQueues(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Answer to ListWorkQueues and ListGroups."""

    work_queues: tuple[WorkQueueInfo, ...]
    snapshot: str = ""
    more: bool = False


class ShuffleInfo(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Answer to all that ask for one shuffle. followers: host → endpoint, of those that run. members: hosts that ranges are
    placed on; who has just joined is not yet among them."""

    description: Description
    followers: dict[str, str]
    members: tuple[str, ...] = ()


class ShuffleList(msgspec.Struct, frozen=True, tag="Shuffles", array_like=True):
    """Answer to ListShuffles."""

    shuffles: tuple[Description, ...]


class TableInfo(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Answer to ReportRuns. epoch 0: no table yet, ask again. ranges: empty if the follower has them. committed: of a sealed
    shuffle, else empty."""

    epoch: int
    ranges: tuple[Range, ...]
    followers: dict[str, str]
    replicas: int
    committed: dict[int, str]


class ExchangeCreated(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The Exchange runs."""

    exchange: str
    host: str


class HostInfo(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """One registered host."""

    host: str
    address: str
    port: int  # of its HCM's own interface
    alive: bool
    draining: bool
    exchanges: int
    exchanges_max: int
    monitors: int
    cpu_fraction: float
    memory_fraction: float
    report: HostReport | None
    leaving: Leaving = Leaving.NOTHING
    stopping: bool = False  # it is about to end, and hands over


class Hosts(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Answer to ListHosts."""

    hosts: tuple[HostInfo, ...]
    snapshot: str = ""
    more: bool = False


class PolicyInfo(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Answer to GetPolicy: the policy, split."""

    common: Policy
    rules: Rules = ()

    @property
    def policy(self) -> Policy:
        """The policy."""
        return joined(self.common, self.rules)


class ClusterView(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The cluster at one moment, or a part of it. time: seconds since 1970."""

    epoch: int
    leader: str
    time: float
    hosts: tuple[HostInfo, ...]
    queues: tuple[QueueInfo, ...]
    work_queues: tuple[WorkQueueInfo, ...] = ()
    snapshot: str = ""
    more: bool = False


Request = (
    CreateQueue
    | RemoveQueue
    | StartQueue
    | StopQueue
    | QueueExists
    | DescribeQueue
    | ListQueues
    | CreateExchange
    | RemoveExchange
    | ListHosts
    | DrainHost
    | DescribeRemains
    | CreateMissing
    | SetTemplate
    | SetRebalance
    | GetOptions
    | SetPolicy
    | RecordQueue
    | RecordHistory
    | DescribeTapes
    | OpenDurable
    | KeepPosition
    | ListDurables
    | ForgetDurable
    | OpenProducer
    | KeepProducer
    | ListProducers
    | ForgetProducer
    | GetPolicy
    | CreateWorkQueue
    | SetShards
    | RemoveWorkQueue
    | DescribeWorkQueue
    | ListWorkQueues
    | ListGroups
    | CreateShuffle
    | RemoveShuffle
    | DescribeShuffle
    | ListShuffles
    | NameReceipts
    | CommitShuffle
    | RebalanceShuffle
    | ReportRuns
    | GetCluster
    | SetAccess
    | GetAccess
    | SetFleet
    | GetFleet
)
Reply = (
    Done
    | Exists
    | QueueInfo
    | Queues
    | Tapes
    | DurablePosition
    | Durables
    | ProducerGrant
    | Producers
    | WorkQueueInfo
    | WorkQueues
    | ShuffleInfo
    | ShuffleList
    | TableInfo
    | ExchangeCreated
    | Hosts
    | HostRemains
    | OptionsInfo
    | PolicyInfo
    | ClusterView
    | AccessInfo
    | FleetInfo
)
