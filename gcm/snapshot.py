"""Reading the cluster from ZooKeeper: the decoders of its znodes, and one whole read at the start of a reign.

A znode that can't be read is logged. It never stops a leader: see Snapshot for what becomes of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import msgspec

from gcm.cluster import ClientTransaction, ClusterState, Host, HostRecovery, HostRegistration
from roq.coordination import paths
from roq.coordination.registration import parse_instance
from roq.coordination.session import Node, Session
from roq.errors import FrameError
from roq.runtime.observe import logger
from roq.wire.assignment import Assignment, HostReport, QueueRecord, from_json
from roq.wire.hcm import HostPayload
from roq.wire.policy import Policy
from roq.wire.work_queue import WorkQueueRecord

READS_AT_ONCE = 100

T = TypeVar("T", bound=msgspec.Struct)
V = TypeVar("V")
log = logger(__name__)


@dataclass(frozen=True)
class ClusterSnapshot:
    """The cluster, and paths of unreadable policies and transactions, to be deleted (unreadable queue records are kept)."""

    cluster: ClusterState
    unreadable: tuple[str, ...]


async def read_snapshot(session: Session, epoch: int) -> ClusterSnapshot:
    """Everything, as of now or later. Call it after the epoch was taken: no older leader changes anything meanwhile."""
    unreadable: list[str] = []
    queues = await _table(session, paths.QUEUES, QueueRecord, [])
    work_queues = await _table(session, paths.WORK_QUEUES, WorkQueueRecord, [])
    policies = await _table(session, paths.POLICIES, Policy, unreadable)
    transactions: dict[str, ClientTransaction] = {}
    for kind in (paths.TransactionKind.QUEUE, paths.TransactionKind.EXCHANGE):
        transactions |= await _table(session, paths.transactions(kind), ClientTransaction, unreadable)
    recoveries = await _table(session, paths.transactions(paths.TransactionKind.HOST), HostRecovery, unreadable)
    names = {*await session.children(paths.HOST_STATES), *await session.children(paths.HOSTS)}
    hosts = await _each(sorted(names), lambda name: read_host(session, name))
    shuffles = frozenset(await session.children(paths.SHUFFLES))
    known = {host.name: host for host in hosts}
    cluster = ClusterState(epoch, known, queues, work_queues, policies, transactions, recoveries, shuffles)
    return ClusterSnapshot(cluster, tuple(unreadable))


async def read_host(session: Session, name: str) -> Host:
    """One host, and the folder of its state made if it is missing. A report older than the registration is of an earlier life:
    it tells of processes that the host has stopped, or is gone with."""
    await session.ensure_path(paths.host_state(name))
    assigned, report, registration = await asyncio.gather(
        session.get(paths.assignment(name)), session.get(paths.running(name)), session.get(paths.host(name))
    )
    current = registration is not None and report is not None and report.mzxid > registration.czxid
    told = decode_report(name, report) if current or registration is None else None
    host = Host(name, decode_registration(name, registration), report=told if current else None)
    if registration is None:
        host = replace(host, last_report=told)
    if assigned is None:
        return host
    wanted = _decode(paths.assignment(name), assigned.data, Assignment)
    if wanted is None:  # written anew by the next change; the revision must grow all the same
        return replace(host, revision=assigned.version + 1)
    processes = {spec.name: spec for spec in wanted.processes}
    return replace(host, assigned=processes, draining_wanted=wanted.draining, revision=max(wanted.revision, 1))


def decode_registration(name: str, node: Node | None) -> HostRegistration | None:
    """What a live HCM says of itself; None if there is none or it can't be understood."""
    if node is None:
        return None
    try:
        instance = parse_instance(node.data)
        return HostRegistration(instance.address or "", instance.port or 0, instance.payload_as(HostPayload), node.czxid)
    except FrameError as error:
        log.error("registration is unreadable", extra={"fields": {"host": name, "reason": str(error)}})
        return None


def decode_report(name: str, node: Node | None) -> HostReport | None:
    """What runs on the host; None if it has not said so, or not so that it can be understood."""
    return _decode(paths.running(name), node.data, HostReport) if node is not None and node.data else None


def _decode(path: str, data: bytes, kind: type[T]) -> T | None:
    try:
        return from_json(data, kind)
    except FrameError as error:
        log.error("znode is unreadable", extra={"fields": {"path": path, "reason": str(error)}})
        return None


async def _table(session: Session, folder: str, kind: type[T], unreadable: list[str]) -> dict[str, T]:
    names = await session.children(folder)
    nodes = await _each(names, lambda name: session.get(f"{folder}/{name}"))
    table = {}
    for name, node in zip(names, nodes, strict=True):
        value = _decode(f"{folder}/{name}", node.data, kind) if node is not None else None
        if value is not None:
            table[name] = value
        elif node is not None:
            unreadable.append(f"{folder}/{name}")
    return table


async def _each(names: Sequence[str], read: Callable[[str], Awaitable[V]]) -> list[V]:
    """All of them, READS_AT_ONCE at a time: every single read has a deadline that counts from its call."""
    values: list[V] = []
    for first in range(0, len(names), READS_AT_ONCE):
        values += await asyncio.gather(*(read(name) for name in names[first : first + READS_AT_ONCE]))
    return values
