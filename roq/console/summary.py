"""The cluster in a few numbers, and lists of it in pages. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import TypeVar

import msgspec

from roq.client.overview import FailedProcess, Overview, QueueRow, failed_processes
from roq.ids import is_reserved
from roq.wire.assignment import ProcessState
from roq.wire.gcm import ClusterView, QueueInfo, WorkQueueInfo

T = TypeVar("T")
SHOWN_MAX = 50  # of problems
BUSIEST = 10  # queues
PAGE_MAX = 200
NAME = attrgetter("record.name")


class HostCounts(msgspec.Struct, frozen=True):
    """How many."""

    total: int
    alive: int
    draining: int


class QueueCounts(msgspec.Struct, frozen=True):
    """How many, without the cluster's own."""

    total: int
    running: int
    ready: int
    recorded: int


class WorkQueueCounts(msgspec.Struct, frozen=True):
    """How many, groups among them."""

    total: int
    ready: int
    groups: int


class ProcessCounts(msgspec.Struct, frozen=True):
    """How many."""

    total: int
    failed: int


class SlotCounts(msgspec.Struct, frozen=True):
    """Exchanges that run, and that may run on hosts that are alive."""

    total: int
    max: int


class ClusterRates(msgspec.Struct, frozen=True):
    """Of all queues that run, added up; lag and latency are the worst of any subscriber. time: when they were asked; silent:
    queues whose Monitor did not answer. lost: messages that were reported to subscribers as lost."""

    time: float
    queues_asked: int
    silent: int
    messages_per_second: float
    bytes_per_second: float
    delivered_per_second: float
    publishers: int
    subscribers: int
    lost: int
    lag_seconds: float
    latency_p99_seconds: float
    busiest: tuple[QueueRow, ...]


class ShownProblem(msgspec.Struct, frozen=True):
    """Something that does not work. queue, host: where, "" for none."""

    text: str
    queue: str = ""
    host: str = ""


class ClusterSummary(msgspec.Struct, frozen=True):
    """time: of the leader, seconds since 1970. rates: None until Monitors were asked."""

    time: float
    leader: str
    epoch: int
    hosts: HostCounts
    queues: QueueCounts
    work_queues: WorkQueueCounts
    processes: ProcessCounts
    exchanges: SlotCounts
    rates: ClusterRates | None
    problems: tuple[ShownProblem, ...]
    failed: tuple[FailedProcess, ...]


def summarize(view: ClusterView, live: Overview | None) -> ClusterSummary:
    """live: what Monitors said, if they were asked."""
    running = [process for host in view.hosts if host.report for process in host.report.processes]
    queues = [one for one in view.queues if not is_reserved(one.record.name)]
    work, alive = view.work_queues, [host for host in view.hosts if host.alive]
    return ClusterSummary(
        time=view.time,
        leader=view.leader,
        epoch=view.epoch,
        hosts=HostCounts(len(view.hosts), len(alive), sum(host.draining for host in view.hosts)),
        queues=QueueCounts(
            len(queues),
            sum(one.record.running for one in queues),
            sum(one.ready for one in queues),
            sum(one.record.recorded for one in queues),
        ),
        work_queues=WorkQueueCounts(
            len(work), sum(one.ready for one in work), sum(one.record.spec.source is not None for one in work)
        ),
        processes=ProcessCounts(len(running), sum(one.state == ProcessState.FAILED for one in running)),
        exchanges=SlotCounts(sum(host.exchanges for host in alive), sum(host.exchanges_max for host in alive)),
        rates=None if live is None else _rates(live),
        problems=tuple(problems(view, live)[:SHOWN_MAX]),
        failed=failed_processes(view)[:SHOWN_MAX],
    )


def _rates(live: Overview) -> ClusterRates:
    running = [row for row in live.queues if row.running]
    answered = [row for row in running if not row.problem]
    users = [row for row in answered if not is_reserved(row.queue) and row.messages_per_second > 0]
    return ClusterRates(
        time=live.time,
        queues_asked=len(running),
        silent=len(running) - len(answered),
        messages_per_second=sum(row.messages_per_second for row in answered),
        bytes_per_second=sum(row.bytes_per_second for row in answered),
        delivered_per_second=sum(row.delivered_per_second for row in answered),
        publishers=sum(row.publishers for row in answered),
        subscribers=sum(row.subscribers for row in answered),
        lost=sum(row.lost for row in answered),
        lag_seconds=max((row.lag_seconds for row in answered), default=0.0),
        latency_p99_seconds=max((row.latency_p99_seconds for row in answered), default=0.0),
        busiest=tuple(sorted(users, key=lambda row: (-row.messages_per_second, row.queue))[:BUSIEST]),
    )


def problems(view: ClusterView, live: Overview | None) -> list[ShownProblem]:
    """What does not work, hosts first."""
    found = [ShownProblem(f"host {one.host} is gone", host=one.host) for one in view.hosts if not one.alive]
    found += [ShownProblem(f"{one.process} was given up: {one.error}", host=one.host) for one in failed_processes(view)]
    silent = {row.queue: row.problem for row in live.queues if row.problem} if live is not None else {}
    for queue in view.queues:
        name = queue.record.name
        if queue.record.running and not queue.ready:
            found.append(ShownProblem(f"queue {name} does not serve yet, or not any more", queue=name))
        elif queue.record.running and name in silent:
            found.append(ShownProblem(f"queue {name}: {silent[name]}", queue=name))
    found += [
        ShownProblem(f"work queue {one.record.name} has no master that serves", queue=one.record.name)
        for one in view.work_queues
        if not one.ready
    ]
    return found


# --- pages --------------------------------------------------------------------------------------------------------------


def page(found: Sequence[T], offset: int, limit: int) -> Sequence[T]:
    """What lies there; nothing behind the end."""
    return found[max(0, offset) : max(0, offset) + max(0, min(limit, PAGE_MAX))]


STATES: dict[str, Callable[[QueueInfo], bool]] = {  # the cluster's own queues are listed only by "own"
    "all": lambda info: True,
    "problem": lambda info: info.record.running and not info.ready,
    "stopped": lambda info: not info.record.running,
    "recorded": lambda info: info.record.recorded,
    "own": lambda info: True,
}
KINDS: dict[str, Callable[[WorkQueueInfo], bool]] = {
    "all": lambda info: True,
    "work": lambda info: info.record.spec.source is None,
    "group": lambda info: info.record.spec.source is not None,
}


def chosen_queues(
    infos: Iterable[QueueInfo], search: str, state: str, rates: dict[str, float] | None, shown: Callable[[str], bool]
) -> list[QueueInfo]:
    """Those of this state whose names have `search` in them, whatever its case, and which may be shown; the busiest first by
    `rates`, else by name."""
    wanted, fits, own = search.casefold(), STATES[state], state == "own"
    infos = [one for one in infos if is_reserved(one.record.name) == own]
    found = [one for one in infos if fits(one) and wanted in one.record.name.casefold() and shown(one.record.name)]
    found.sort(key=NAME)
    if rates:
        found.sort(key=lambda one: -rates.get(one.record.name, 0.0))
    return found


def chosen_work_queues(
    infos: Iterable[WorkQueueInfo], search: str, kind: str, shown: Callable[[str], bool]
) -> list[WorkQueueInfo]:
    """The same of work queues, by name."""
    wanted, fits = search.casefold(), KINDS[kind]
    found = [one for one in infos if fits(one) and wanted in one.record.name.casefold() and shown(one.record.name)]
    return sorted(found, key=NAME)
