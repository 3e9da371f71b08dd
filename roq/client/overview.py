"""The query layer: what `roq status`, `roq top`, `roq queue ls|show` and later a web console show, as plain structs.

Field names are stable: they are what `--json` prints. Rates are per second, lags and latencies in seconds, memory in
bytes, fractions 0..1. A queue whose Monitor does not answer is listed with `problem`, never left out.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import TypeVar

import msgspec

from roq.client.cluster import Cluster
from roq.errors import CallError, RoqError
from roq.ids import GROUP_MARK
from roq.runtime.rpc import RpcPool
from roq.wire import master
from roq.wire.assignment import Leaving, ProcessState
from roq.wire.gcm import ClusterView, HostInfo, QueueInfo, WorkQueueInfo
from roq.wire.kpi import Decision, QueueKpi
from roq.wire.monitor import QueueView
from roq.wire.policy import Policy
from roq.wire.recording import Record
from roq.wire.task import Status
from roq.wire.work_queue import GroupOrder, GroupSource

MONITORS_ASKED_AT_ONCE = 32
MONITOR_SECONDS = 2.0  # a Monitor that needs longer is shown as not answering
MASTER_SECONDS = 2.0  # the same of the master of a group
MONITORS_SILENT_MAX = 64  # no more are asked then: thousands that hang cost three times MONITOR_SECONDS, not hundreds
COUNTS = (*("leased", "dead", "delayed", "completed", "inserted", "expired"), *("missed", "oldest_seconds", "behind_seconds"))
NOT_ASKED = "its Monitor was not asked: too many others do not answer"
R = TypeVar("R", bound=msgspec.Struct)


class HostRow(msgspec.Struct, frozen=True):
    """One host. card_expires: seconds since 1970; 0: it has no card. leaving: what goes to other hosts: "", "processes" or
    "everything". stopping: it is about to end, and hands over."""

    host: str
    address: str
    alive: bool
    draining: bool
    exchanges: int
    exchanges_max: int
    monitors: int
    processes: int
    failed: int
    restarts: int
    cpu_fraction: float
    memory_fraction: float
    card_expires: float = 0.0
    leaving: Leaving = Leaving.NOTHING
    stopping: bool = False


class ExchangeRow(msgspec.Struct, frozen=True):
    """One Exchange."""

    queue: str
    exchange: str
    host: str
    address: str
    state: str
    publishers: int
    attached: int
    messages_per_second: float
    bytes_per_second: float
    bytes_out_per_second: float
    cpu_fraction: float
    memory_bytes: int


class MemberRow(msgspec.Struct, frozen=True):
    """One publisher or subscriber. id: 16 hexadecimal digits."""

    queue: str
    id: str
    role: str
    ready: bool
    exchanges: tuple[str, ...]
    path: int
    silent_seconds: float
    messages_per_second: float
    bytes_per_second: float
    blocked_fraction: float
    dropped: int
    lag_seconds: float
    latency_p99_seconds: float
    lost: int
    duplicated: int


class QueueRow(msgspec.Struct, frozen=True):
    """One queue. lag_seconds, latency_p99_seconds: of its slowest subscriber. From `messages` on: since its Monitor started,
    see QueueTotals. Where it does not answer, all that only it knows is 0."""

    queue: str
    running: bool
    ready: bool
    replication: int
    overflow: str
    monitor_host: str
    exchanges: int
    publishers: int = 0
    subscribers: int = 0
    messages_per_second: float = 0.0
    bytes_per_second: float = 0.0
    delivered_per_second: float = 0.0
    lag_seconds: float = 0.0
    lost: int = 0
    problem: str = ""
    latency_p99_seconds: float = 0.0
    messages: int = 0
    bytes: int = 0
    delivered: int = 0
    dropped: int = 0
    missed: int = 0


class FailedProcess(msgspec.Struct, frozen=True):
    """A process its HCM gave up, and why."""

    host: str
    process: str
    restarts: int
    error: str


class WorkQueueRates(msgspec.Struct, frozen=True):
    """A work queue, or a group: `queue` is its recorded queue, else "". ready: its master serves. waiting: tasks that nobody
    leases. completed_per_second: between two looks. oldest_seconds: age of the oldest that may be leased, None if none may.
    lag: messages not in the group yet, None if that is not known; missed: gaps in what came into it. problem: why its master
    did not say; then what only it knows is as it was told last."""

    name: str
    queue: str
    ready: bool
    master: str
    waiting: int = 0
    leased: int = 0
    dead: int = 0
    completed: int = 0
    completed_per_second: float = 0.0
    oldest_seconds: float | None = None
    lag: int | None = None
    problem: str = ""
    missed: int = 0


class Overview(msgspec.Struct, frozen=True):
    """The cluster at one moment. time: seconds since 1970. work_queues: groups among them, see rolling.py; empty where nobody
    asked their masters."""

    time: float
    leader: str
    epoch: int
    hosts: tuple[HostRow, ...]
    queues: tuple[QueueRow, ...]
    exchanges: tuple[ExchangeRow, ...]
    failed: tuple[FailedProcess, ...]
    work_queues: tuple[WorkQueueRates, ...] = ()


class GroupRow(msgspec.Struct, frozen=True):
    """A group of a recorded queue. name: as a work queue. start: of its beginning. ready: its master serves. waiting: messages
    in it that nobody leases, `delayed` of them for later; completed, expired, missed (gaps): since it was made. oldest_seconds:
    age of the oldest that may be leased, None if none may. behind_seconds: how long ago the next message for it was written;
    lag: messages on the tapes behind those in it, of whatever topics; None if not known. problem: why its master did not say;
    then what only it knows is 0."""

    queue: str
    group: str
    name: str
    topics: tuple[str, ...]
    order: GroupOrder
    start: str
    where: str
    ready: bool
    master: str
    waiting: int = 0
    leased: int = 0
    dead: int = 0
    completed: int = 0
    behind_seconds: float | None = None
    problem: str = ""
    lag: int | None = None
    expired: int = 0
    delayed: int = 0
    oldest_seconds: float | None = None
    missed: int = 0


class QueueDetail(msgspec.Struct, frozen=True):
    """Everything about one queue. `policy` as its TOML tables; `decisions` oldest first. record: how its messages are kept, if
    it was ever recorded; recorded: whether it is now; groups: see with_groups."""

    summary: QueueRow
    max_frame_bytes: int
    created: float
    term: int
    monitors: tuple[str, ...]
    exchanges: tuple[ExchangeRow, ...]
    members: tuple[MemberRow, ...]
    decisions: tuple[Decision, ...]
    policy: dict[str, dict[str, float | None]]
    counters: dict[str, int]
    record: Record | None = None
    recorded: bool = False
    groups: tuple[GroupRow, ...] = ()


async def read_overview(cluster: Cluster, view: ClusterView | None = None) -> Overview:
    """The cluster with every running queue's Monitor asked, unless too many hang. view: what was just read of it; None: it is
    read. Raises RoqError only if no GCM answers."""
    view = view or await cluster.view()
    found = list(zip(view.queues, await _ask_monitors(cluster, view.queues), strict=True))
    return Overview(
        time=view.time,
        leader=view.leader,
        epoch=view.epoch,
        hosts=host_rows(view.hosts),
        queues=tuple(sorted((queue_row(info, answer) for info, answer in found), key=lambda row: row.queue)),
        exchanges=tuple(row for _, answer in found if isinstance(answer, QueueView) for row in _exchange_rows(answer)),
        failed=failed_processes(view),
    )


async def read_queue(cluster: Cluster, name: str) -> QueueDetail:
    """One queue; raises QueueNotFound. A Monitor that does not answer leaves its parts empty and `problem` filled."""
    info = await cluster.queue(name)
    answer = await _ask_monitor(cluster, info, _Asking())
    view = answer if isinstance(answer, QueueView) else None
    return QueueDetail(
        summary=queue_row(info, answer),
        max_frame_bytes=info.record.settings.max_frame_bytes,
        created=info.record.created,
        term=view.term if view else info.record.term,
        monitors=tuple(f"{monitor.host} {monitor.clients_endpoint()}" for monitor in info.monitors),
        exchanges=_exchange_rows(view) if view else (),
        members=_member_rows(view) if view else (),
        decisions=view.decisions if view else (),
        policy=policy_tables(info.policy),
        counters=view.counters if view else {},
        record=info.record.record,
        recorded=info.record.recorded,
    )


async def read_rows(cluster: Cluster, infos: Iterable[QueueInfo]) -> tuple[QueueRow, ...]:
    """These queues, in their order, each Monitor asked as for an Overview."""
    found = list(infos)
    return tuple(queue_row(info, answer) for info, answer in zip(found, await _ask_monitors(cluster, found), strict=True))


async def with_groups(cluster: Cluster, detail: QueueDetail) -> QueueDetail:
    """With its groups."""
    if detail.record is None:
        return detail
    try:
        return msgspec.structs.replace(detail, groups=await read_groups(cluster, detail.summary.queue))
    except CallError:  # no right to them, or a GCM of before there were any
        return detail


async def read_groups(cluster: Cluster, queue: str) -> tuple[GroupRow, ...]:
    """The groups of a queue, by name, each master asked what is in it. Raises QueueNotFound."""
    infos = await cluster.groups(queue)
    masters, gate = RpcPool(master.Reply, MASTER_SECONDS), asyncio.Semaphore(MONITORS_ASKED_AT_ONCE)

    async def status(info: WorkQueueInfo) -> Status | str:
        if not info.masters or not info.masters[0].active:
            return "no master serves"
        async with gate:
            try:
                found = await masters.request(info.masters[0].endpoint(), master.GetStatus(), master.MasterStatus)
                return found.counts()
            except RoqError as error:
                return str(error)

    try:
        found = await asyncio.gather(*(status(info) for info in infos))
    finally:
        masters.close()
    return tuple(group_row(info, one) for info, one in zip(infos, found, strict=True))


def group_row(info: WorkQueueInfo, status: Status | str = "") -> GroupRow:
    """status: of its master, or why there is none."""
    record, source = info.record, info.record.spec.source or GroupSource("")
    group = record.name.removeprefix(source.queue + GROUP_MARK)
    row = GroupRow(
        *(source.queue, group, record.name, source.topics, source.order, source.start, source.where),
        *(info.ready, record.master_host),
        problem=status if isinstance(status, str) else "",
    )
    return row if isinstance(status, str) else with_counts(row, status)


def with_counts(row: R, status: Status) -> R:
    """The row of a work queue or a group with what its master says, as far as it has fields for that. Pure."""
    said = {name: getattr(status, name) for name in COUNTS if name in row.__struct_fields__}
    said |= {"waiting": status.ready + status.delayed, "lag": status.lag if status.lag >= 0 else None}
    return msgspec.structs.replace(row, **said)


def policy_tables(policy: Policy) -> dict[str, dict[str, float | None]]:
    """A policy as its TOML tables, defaults included; None: the rule is off."""
    return {name: msgspec.structs.asdict(part) for name, part in msgspec.structs.asdict(policy).items()}


class _Asking:
    """Of many Monitors, a few at a time. silent: how many have not answered."""

    def __init__(self) -> None:
        self.gate = asyncio.Semaphore(MONITORS_ASKED_AT_ONCE)
        self.silent = 0


async def _ask_monitors(cluster: Cluster, infos: Sequence[QueueInfo]) -> list[QueueView | str]:
    """What each says, or why it does not. Thousands may be stopped: no task is made for those."""
    asking, asked = _Asking(), [info for info in infos if info.record.running]
    answers = iter(await asyncio.gather(*(_ask_monitor(cluster, info, asking) for info in asked)))
    return [next(answers) if info.record.running else "" for info in infos]


async def _ask_monitor(cluster: Cluster, info: QueueInfo, asking: _Asking) -> QueueView | str:
    """The Monitor's view, or why there is none."""
    if not info.record.running:
        return ""
    if not info.monitors:
        return "no Monitor serves"
    async with asking.gate:
        if asking.silent >= MONITORS_SILENT_MAX:
            return NOT_ASKED
        try:
            async with asyncio.timeout(MONITOR_SECONDS):
                return await cluster.inspect(info.record.name)
        except TimeoutError:
            asking.silent += 1
            return "its Monitor does not answer"
        except RoqError as error:
            return str(error)


def host_rows(hosts: Iterable[HostInfo]) -> tuple[HostRow, ...]:
    """Hosts by name."""
    return tuple(_host_row(info) for info in sorted(hosts, key=lambda info: info.host))


def _host_row(info: HostInfo) -> HostRow:
    processes = info.report.processes if info.report else ()
    return HostRow(
        host=info.host,
        address=info.address,
        alive=info.alive,
        draining=info.draining,
        exchanges=info.exchanges,
        exchanges_max=info.exchanges_max,
        monitors=info.monitors,
        processes=len(processes),
        failed=sum(process.state == ProcessState.FAILED for process in processes),
        restarts=sum(process.restarts for process in processes),
        cpu_fraction=info.cpu_fraction,
        memory_fraction=info.memory_fraction,
        card_expires=info.report.card_expires if info.report else 0.0,
        leaving=info.leaving,
        stopping=info.stopping,
    )


def failed_processes(view: ClusterView) -> tuple[FailedProcess, ...]:
    """Processes that were given up, on all hosts."""
    return tuple(
        FailedProcess(info.host, process.name, process.restarts, process.error)
        for info in view.hosts
        for process in (info.report.processes if info.report else ())
        if process.state == ProcessState.FAILED
    )


def queue_row(info: QueueInfo, answer: QueueView | str) -> QueueRow:
    """answer: of its Monitor, or why there is none."""
    record = info.record
    row = QueueRow(
        queue=record.name,
        running=record.running,
        ready=info.ready,
        replication=record.settings.replication,
        overflow=str(record.settings.overflow),
        monitor_host=record.monitor_host,
        exchanges=len(record.exchanges),
        problem=answer if isinstance(answer, str) else "",
    )
    if isinstance(answer, str):
        return row
    row = msgspec.structs.replace(
        row,
        publishers=sum(member.role == "publisher" for member in answer.members),
        subscribers=sum(member.role == "subscriber" for member in answer.members),
    )
    if (kpi := answer.kpi) is None:
        return row
    return msgspec.structs.replace(
        row,
        messages_per_second=kpi.messages_per_second,
        bytes_per_second=kpi.bytes_per_second,
        delivered_per_second=kpi.delivered_per_second,
        lag_seconds=max((subscriber.lag_seconds for subscriber in kpi.subscribers), default=0.0),
        lost=kpi.lost,
        latency_p99_seconds=max((subscriber.latency_p99_seconds for subscriber in kpi.subscribers), default=0.0),
        **msgspec.structs.asdict(kpi.totals),
    )


def _exchange_rows(view: QueueView) -> tuple[ExchangeRow, ...]:
    kpis = {kpi.id: kpi for kpi in view.kpi.exchanges} if view.kpi else {}
    rows = []
    for exchange in view.exchanges:
        kpi = kpis.get(exchange.exchange.id)
        rows.append(
            ExchangeRow(
                queue=view.queue,
                exchange=exchange.exchange.id,
                host=exchange.host,
                address=exchange.exchange.address,
                state=exchange.state,
                publishers=exchange.publishers,
                attached=exchange.attached,
                messages_per_second=kpi.messages_per_second if kpi else 0.0,
                bytes_per_second=kpi.bytes_per_second if kpi else 0.0,
                bytes_out_per_second=kpi.bytes_out_per_second if kpi else 0.0,
                cpu_fraction=kpi.cpu_fraction if kpi else 0.0,
                memory_bytes=kpi.memory_bytes if kpi else 0,
            )
        )
    return tuple(rows)


def _member_rows(view: QueueView) -> tuple[MemberRow, ...]:
    kpi: QueueKpi | None = view.kpi
    publishers = {one.id: one for one in kpi.publishers} if kpi else {}
    subscribers = {one.id: one for one in kpi.subscribers} if kpi else {}
    rows = []
    for member in sorted(view.members, key=lambda member: (member.role, member.id)):
        publisher, subscriber = publishers.get(member.id), subscribers.get(member.id)
        rates = publisher or subscriber
        rows.append(
            MemberRow(
                queue=view.queue,
                id=f"{member.id:016x}",
                role=member.role,
                ready=member.ready,
                exchanges=tuple(sorted(token.partition("/")[0] for token in member.exchanges)),
                path=member.path,
                silent_seconds=member.silent_seconds,
                messages_per_second=rates.messages_per_second if rates else 0.0,
                bytes_per_second=rates.bytes_per_second if rates else 0.0,
                blocked_fraction=publisher.blocked_fraction if publisher else 0.0,
                dropped=publisher.dropped if publisher else 0,
                lag_seconds=subscriber.lag_seconds if subscriber else 0.0,
                latency_p99_seconds=subscriber.latency_p99_seconds if subscriber else 0.0,
                lost=subscriber.lost if subscriber else 0,
                duplicated=subscriber.duplicated if subscriber else 0,
            )
        )
    return tuple(rows)
