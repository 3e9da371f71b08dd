from roq import blocking as blocking
from roq.client.broadcasts import Change, TopologyEvent
from roq.client.cluster import Cluster, connect
from roq.client.events import ClusterEvent, EventKind
from roq.client.group import GroupSubscriber
from roq.client.read import RecordedBatches, read
from roq.client.requests import Reply
from roq.client.responder import Request, Responder
from roq.client.transaction import Transaction
from roq.errors import (
    DurableTaken,
    InvalidFilter,
    LeaseLost,
    MessagesLost,
    NoResponder,
    NotRecorded,
    ProducerFenced,
    RequestFailed,
    ResponderLost,
    RoqError,
    SlowSubscriber,
    TransactionAborted,
    TransactionTooLarge,
)
from roq.pubsub.publisher import Publisher, PublishReceipt
from roq.pubsub.publisher_health import PublisherHealth
from roq.pubsub.subscriber import Subscriber
from roq.pubsub.subscription import Message, SubscriberHealth, log_lost, raise_lost
from roq.wire.assignment import (
    FormerProcess,
    HostReport,
    Leaving,
    MonitorAddress,
    MonitorRole,
    Overflow,
    ProcessKind,
    ProcessState,
    QueueRecord,
    QueueSettings,
    RunningProcess,
)
from roq.wire.durables import DurableView
from roq.wire.fleet import FleetInfo, FleetLimits, MachineState, MachineView
from roq.wire.gcm import ClusterView, ExchangeCreated, HostInfo, QueueInfo, Tapes, TapeView, WorkQueueInfo
from roq.wire.hosts import HostRemains
from roq.wire.kpi import Decision, ExchangeKpi, GroupKpi, HostKpi, PublisherKpi, QueueKpi, QueueTotals, SubscriberKpi
from roq.wire.monitor import ExchangeAddress, ExchangeView, MemberView, Moved, QueueView
from roq.wire.options import ClusterOptions, QueueTemplate
from roq.wire.policy import Bounds, ExchangeRule, GroupRule, HostRule, Policy, QueueRule, TargetRule, policy_from_toml
from roq.wire.producers import ProducerView
from roq.wire.recording import Record, Recording, TapePosition
from roq.wire.shards import ClosingShard, ShardList
from roq.wire.task import NewTask, Status, TaskState, TaskView
from roq.wire.work_queue import GroupOrder, GroupSource, MasterAddress, TaskSettings, WorkQueueRecord, WorkQueueSpec
from roq.workqueue.contract import ClusterSettings
from roq.workqueue.handling import Work
from roq.workqueue.prefetch import Task
from roq.workqueue.queue import WorkQueue, open_queue

__version__: str
__all__ = [
    "Bounds",
    "Change",
    "ClosingShard",
    "Cluster",
    "ClusterEvent",
    "ClusterOptions",
    "ClusterSettings",
    "ClusterView",
    "Decision",
    "DurableTaken",
    "DurableView",
    "EventKind",
    "ExchangeAddress",
    "ExchangeCreated",
    "ExchangeKpi",
    "ExchangeRule",
    "ExchangeView",
    "FleetInfo",
    "FleetLimits",
    "FormerProcess",
    "GroupKpi",
    "GroupOrder",
    "GroupRule",
    "GroupSource",
    "GroupSubscriber",
    "HostInfo",
    "HostKpi",
    "HostRemains",
    "HostReport",
    "HostRule",
    "InvalidFilter",
    "LeaseLost",
    "Leaving",
    "MachineState",
    "MachineView",
    "MasterAddress",
    "MemberView",
    "Message",
    "MessagesLost",
    "MonitorAddress",
    "MonitorRole",
    "Moved",
    "NewTask",
    "NoResponder",
    "NotRecorded",
    "Overflow",
    "Policy",
    "ProcessKind",
    "ProcessState",
    "ProducerFenced",
    "ProducerView",
    "PublishReceipt",
    "Publisher",
    "PublisherHealth",
    "PublisherKpi",
    "QueueInfo",
    "QueueKpi",
    "QueueRecord",
    "QueueRule",
    "QueueSettings",
    "QueueTemplate",
    "QueueTotals",
    "QueueView",
    "Record",
    "RecordedBatches",
    "Recording",
    "Reply",
    "Request",
    "RequestFailed",
    "Responder",
    "ResponderLost",
    "RoqError",
    "RunningProcess",
    "ShardList",
    "SlowSubscriber",
    "Status",
    "Subscriber",
    "SubscriberHealth",
    "SubscriberKpi",
    "TapePosition",
    "TapeView",
    "Tapes",
    "TargetRule",
    "Task",
    "TaskSettings",
    "TaskState",
    "TaskView",
    "TopologyEvent",
    "Transaction",
    "TransactionAborted",
    "TransactionTooLarge",
    "Work",
    "WorkQueue",
    "WorkQueueInfo",
    "WorkQueueRecord",
    "WorkQueueSpec",
    "blocking",
    "connect",
    "log_lost",
    "open_queue",
    "policy_from_toml",
    "raise_lost",
    "read",
]
