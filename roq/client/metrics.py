"""Metrics for Prometheus: what clusters and work queues say of themselves, as families of samples (extra `metrics`).

Names are stable. Counters are totals and begin at 0 again when whoever counts does (a Monitor, an HCM), as Prometheus expects;
everything is in base units: seconds, bytes, ratios. No sample names a publisher, subscriber or task, so their number depends on
queues, Exchanges and hosts alone. A source that does not answer has `roq_up` 0 and nothing else.

    cluster     roq_gcm_*, roq_host*, roq_queue_*, roq_messages_*, roq_exchange_*   labels: host; queue; exchange
    work queue  roq_tasks*, roq_oldest_ready_seconds                                labels: queue (its name, or its address)
    group       the same, and roq_group_behind_seconds, roq_group_lag_messages      labels: queue (QUEUE@GROUP)

Not covered: what a host tells of its own processes (hcm/metrics.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeVar

from roq.client.overview import Overview
from roq.runtime.installation import brought_by
from roq.wire.task import Status

with brought_by("metrics", "roq metrics"):
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

Row = TypeVar("Row")


class ScrapedSources(NamedTuple):
    """What was read at one moment. up: by source, whether it answered. overview: of the cluster, if there is one and it
    answered. tasks: by queue."""

    up: Mapping[str, bool]
    overview: Overview | None
    tasks: Mapping[str, Status]


class _Family(NamedTuple):
    """One metric of rows of one kind: name without `_total`, what it says, and its value."""

    name: str
    text: str
    value: Callable[..., float]
    counts: bool = False


HOSTS = (
    _Family("roq_host_up", "Whether the host's HCM is registered.", lambda row: row.alive),
    _Family("roq_host_cordoned", "Whether nothing new is placed on the host.", lambda row: row.draining),
    _Family("roq_host_exchanges", "Exchanges that run on the host.", lambda row: row.exchanges),
    _Family("roq_host_exchanges_max", "Exchanges that may run on the host.", lambda row: row.exchanges_max),
    _Family("roq_host_processes", "Processes that its HCM looks after.", lambda row: row.processes),
    _Family("roq_host_processes_failed", "Processes that its HCM gave up.", lambda row: row.failed),
    _Family("roq_host_process_restarts", "Restarts of the processes that run now.", lambda row: row.restarts),
    _Family("roq_host_cpu_ratio", "Part of the host's processors that is busy.", lambda row: row.cpu_fraction),
    _Family("roq_host_memory_ratio", "Part of the host's memory that is used.", lambda row: row.memory_fraction),
    _Family(
        "roq_host_card_expiry_timestamp_seconds", "When the host's card ends; 0: it has none.", lambda row: row.card_expires
    ),
)
QUEUES = (
    _Family("roq_queue_running", "Whether the queue shall serve.", lambda row: row.running),
    _Family("roq_queue_ready", "Whether the queue serves, and its Monitor answers.", lambda row: row.ready and not row.problem),
    _Family("roq_queue_exchanges", "Exchanges of the queue.", lambda row: row.exchanges),
)
ANSWERING_QUEUES = (  # what their Monitors alone know: zeros instead would be totals that start over
    _Family("roq_queue_publishers", "Publishers that are there.", lambda row: row.publishers),
    _Family("roq_queue_subscribers", "Subscribers that are there.", lambda row: row.subscribers),
    _Family("roq_subscriber_lag_seconds", "How old the last batch was, when taken.", lambda row: row.lag_seconds),
    _Family("roq_delivery_latency_p99_seconds", "Of the subscriber with the longest.", lambda row: row.latency_p99_seconds),
    _Family("roq_messages_published", "Messages that publishers sent.", lambda row: row.messages, counts=True),
    _Family("roq_messages_published_bytes", "Bytes that publishers sent.", lambda row: row.bytes, counts=True),
    _Family("roq_messages_delivered", "Messages that subscribers took, each.", lambda row: row.delivered, counts=True),
    _Family("roq_messages_dropped", "Messages that publishers gave up.", lambda row: row.dropped, counts=True),
    _Family("roq_messages_lost", "Messages that were reported to subscribers as lost.", lambda row: row.missed, counts=True),
)
EXCHANGES = (
    _Family("roq_exchange_active", "Whether it takes publishers.", lambda row: row.state == "active"),
    _Family("roq_exchange_publishers", "Publishers on it or on their way to it.", lambda row: row.publishers),
    _Family("roq_exchange_busy_ratio", "Part of one processor that it uses.", lambda row: row.cpu_fraction),
    _Family("roq_exchange_resident_memory_bytes", "Its resident memory.", lambda row: row.memory_bytes),
)
TASK_STATES = ("ready", "delayed", "leased", "dead")


def families(found: ScrapedSources) -> Iterator[Metric]:
    """All of it."""
    up = GaugeMetricFamily("roq_up", "Whether the source answered.", labels=("source",))
    for source, answered in sorted(found.up.items()):
        up.add_metric((source,), answered)
    yield up
    if found.overview is not None:
        yield from _of_cluster(found.overview)
    yield from _of_tasks(found.tasks)


def _of_cluster(overview: Overview) -> Iterator[Metric]:
    leader = GaugeMetricFamily("roq_gcm_leader_info", "Who leads the cluster.", labels=("leader",))
    leader.add_metric((overview.leader,), bool(overview.leader))
    yield leader
    yield GaugeMetricFamily("roq_gcm_epoch", "How often a GCM has begun to lead.", value=overview.epoch)
    yield from _of(HOSTS, ("host",), [(row, (row.host,)) for row in overview.hosts])
    yield from _of(QUEUES, ("queue",), [(row, (row.queue,)) for row in overview.queues])
    answering = [row for row in overview.queues if row.running and not row.problem]
    yield from _of(ANSWERING_QUEUES, ("queue",), [(row, (row.queue,)) for row in answering])
    exchanges = [(row, (row.queue, row.exchange, row.host)) for row in overview.exchanges]
    yield from _of(EXCHANGES, ("queue", "exchange", "host"), exchanges)


def _of(kinds: Iterable[_Family], labels: tuple[str, ...], rows: Sequence[tuple[Row, tuple[str, ...]]]) -> Iterator[Metric]:
    for kind in kinds:
        made = (CounterMetricFamily if kind.counts else GaugeMetricFamily)(kind.name, kind.text, labels=labels)
        for row, values in rows:
            made.add_metric(values, float(kind.value(row)))
        yield made


def _of_tasks(tasks: Mapping[str, Status]) -> Iterator[Metric]:
    states = GaugeMetricFamily("roq_tasks", "Tasks of the work queue by state.", labels=("queue", "state"))
    oldest = GaugeMetricFamily("roq_oldest_ready_seconds", "Age of the oldest ready task, 0 if none is.", labels=("queue",))
    completed = CounterMetricFamily("roq_tasks_completed", "Tasks that were acked.", labels=("queue",))
    inserted = CounterMetricFamily("roq_tasks_inserted", "Tasks that were put.", labels=("queue",))
    expired = CounterMetricFamily("roq_tasks_expired", "Messages whose time to live was over.", labels=("queue",))
    lag = GaugeMetricFamily("roq_group_lag_messages", "Messages stored that are not in the group.", labels=("queue",))
    missed = CounterMetricFamily("roq_group_missed", "Gaps: what expired before the group had it.", labels=("queue",))
    text = "Age of the message that comes into the group next, 0 if all are in it."
    behind = GaugeMetricFamily("roq_group_behind_seconds", text, labels=("queue",))
    for queue, status in sorted(tasks.items()):
        for state in TASK_STATES:
            states.add_metric((queue, state), getattr(status, state))
        oldest.add_metric((queue,), status.oldest_seconds or 0.0)
        completed.add_metric((queue,), status.completed)
        inserted.add_metric((queue,), status.inserted)
        expired.add_metric((queue,), status.expired)
        if status.lag >= 0:
            lag.add_metric((queue,), status.lag)
        if status.behind_seconds is not None:
            behind.add_metric((queue,), status.behind_seconds)
            missed.add_metric((queue,), status.missed)
    yield from (states, oldest, completed, inserted, expired, behind, lag, missed)
