"""The two recorded queues in which a cluster keeps its own history (roq/wire/kpi.py): whether it does, and who may not touch
them. Pure.

Who writes there is told by its assignment (reconcile.py).
"""

from __future__ import annotations

from dataclasses import replace

import msgspec

from gcm.cluster import ClusterState, Host
from roq.errors import InvalidName
from roq.ids import RESERVED, is_reserved
from roq.wire.assignment import ProcessKind, ProcessSpec, QueueSettings
from roq.wire.gcm import CreateQueue
from roq.wire.kpi import HISTORY_QUEUES
from roq.wire.recording import RECORDED_FRAME_BYTES_MAX, Record

SETTINGS = QueueSettings(max_frame_bytes=RECORDED_FRAME_BYTES_MAX)  # the KPIs of some 10,000 members


def keeps_history(cluster: ClusterState) -> bool:
    """Whether there is somewhere to write it."""
    found = [cluster.queues.get(name) for name in HISTORY_QUEUES]
    return all(record is not None and record.running and record.recorded for record in found)


def writes_history(kind: ProcessKind, queue: str) -> bool:
    """Whether such a process writes it while there is one: every queue's ScalingProcess, but not those of its own queues."""
    return kind is ProcessKind.SCALING and not is_reserved(queue)


def told_of_history(host: Host, keeps: bool) -> Host:
    """The host with all who write it told that there is one, or none."""

    def told(spec: ProcessSpec) -> ProcessSpec:
        if spec.history == keeps or not writes_history(spec.kind, spec.queue):
            return spec
        return msgspec.structs.replace(spec, history=keeps)

    assigned = {name: told(spec) for name, spec in host.assigned.items()}
    return host if assigned == host.assigned else replace(host, assigned=assigned)


def check_not_reserved(cluster: ClusterState, name: str) -> None:
    """Raises InvalidName: a queue of this name is not for users to create."""
    if is_reserved(name) and name not in cluster.queues:
        hint = ": `roq history on` makes it" if name in HISTORY_QUEUES else ""
        raise InvalidName(f"{name!r} can't name a queue: names that begin with {RESERVED} are the cluster's own{hint}")


def check_removable(name: str) -> None:
    """Raises InvalidName: it goes with the other one."""
    if name in HISTORY_QUEUES:
        raise InvalidName(f"{name!r} is not removed by itself: `roq history off` removes both, and what they kept")


def creation(name: str, transaction: str, record: Record) -> CreateQueue:
    """The request that makes one of them. transaction: of the request to keep history."""
    return CreateQueue(name, part(transaction, name), SETTINGS, record=record)


def part(transaction: str, name: str) -> str:
    """The transaction of one of them."""
    return f"{transaction}-{HISTORY_QUEUES.index(name)}"
