"""RoQ: an elastic, highly available message system.

async with roq.connect("127.0.0.1:2181") as cluster:
    await cluster.create_queue("orders")
    async with cluster.publisher("orders") as publisher:
        await publisher.publish("eu.paris", b"...")

async with roq.open_queue("file:///data/tasks") as tasks:
    await tasks.put(b"...")
    async for task in tasks.leases(seconds=60):
        await task.ack()
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__version__ = "0.2.0.dev0"

# Loaded when asked for: a worker of a folder's queue needs no ZooKeeper client, a daemon no publisher. Types: __init__.pyi.
_HOMES = {
    "client.cluster": ("Cluster", "connect"),
    "client.broadcasts": ("Change", "TopologyEvent"),
    "client.events": ("ClusterEvent", "EventKind"),
    "client.group": ("GroupSubscriber",),
    "client.transaction": ("Transaction",),
    "client.read": ("RecordedBatches", "read"),
    "client.requests": ("Reply",),
    "client.responder": ("Request", "Responder"),
    "errors": (
        "DurableTaken",
        "InvalidFilter",
        "LeaseLost",
        "MessagesLost",
        "NoResponder",
        "NotRecorded",
        "ProducerFenced",
        "RequestFailed",
        "ResponderLost",
        "RoqError",
        "SlowSubscriber",
        "TransactionAborted",
        "TransactionTooLarge",
    ),
    "pubsub.publisher": ("Publisher", "PublishReceipt"),
    "pubsub.publisher_health": ("PublisherHealth",),
    "pubsub.subscriber": ("Subscriber",),
    "pubsub.subscription": ("Message", "SubscriberHealth", "log_lost", "raise_lost"),
    "wire.assignment": (
        "FormerProcess",
        "HostReport",
        "Leaving",
        "MonitorAddress",
        "MonitorRole",
        "Overflow",
        "ProcessKind",
        "ProcessState",
        "QueueRecord",
        "QueueSettings",
        "RunningProcess",
    ),
    "wire.durables": ("DurableView",),
    "wire.fleet": ("FleetInfo", "FleetLimits", "MachineState", "MachineView"),
    "wire.gcm": ("ClusterView", "ExchangeCreated", "HostInfo", "QueueInfo", "TapeView", "Tapes", "WorkQueueInfo"),
    "wire.hosts": ("HostRemains",),
    "wire.kpi": ("Decision", "ExchangeKpi", "GroupKpi", "HostKpi", "PublisherKpi", "QueueKpi", "QueueTotals", "SubscriberKpi"),
    "wire.monitor": ("ExchangeAddress", "ExchangeView", "MemberView", "Moved", "QueueView"),
    "wire.options": ("ClusterOptions", "QueueTemplate"),
    "wire.policy": ("Bounds", "ExchangeRule", "GroupRule", "HostRule", "Policy", "QueueRule", "TargetRule", "policy_from_toml"),
    "wire.producers": ("ProducerView",),
    "wire.recording": ("TapePosition", "Record", "Recording"),
    "wire.task": ("NewTask", "Status", "TaskState", "TaskView"),
    "wire.shards": ("ClosingShard", "ShardList"),
    "wire.work_queue": ("GroupOrder", "GroupSource", "MasterAddress", "TaskSettings", "WorkQueueRecord", "WorkQueueSpec"),
    "workqueue.contract": ("ClusterSettings",),
    "workqueue.handling": ("Work",),
    "workqueue.prefetch": ("Task",),
    "workqueue.queue": ("WorkQueue", "open_queue"),
}
_HOME = {name: home for home, names in _HOMES.items() for name in names}
__all__ = sorted([*_HOME, "blocking"])  # noqa: PLE0605 - as in __init__.pyi


def __getattr__(name: str) -> Any:
    if name == "blocking":
        return import_module("roq.blocking")
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = getattr(import_module(f"roq.{_HOME[name]}"), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
