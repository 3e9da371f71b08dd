"""What is over its limit in one KPI record, in numbers and in words. Pure; nothing is decided here."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import NamedTuple

from roq.wire.kpi import ExchangeKpi, QueueKpi
from roq.wire.policy import Policy

OWN_CPU_MIN = 0.1  # cores: below this the queue's own Exchanges are not what keeps a host busy
VIOLATIONS_NAMED = 3  # in a cause; the others are counted


class Scope(StrEnum):
    """Which kind of rule is broken; it says which remedies can help."""

    EXCHANGE = "exchange"
    HOST = "host"
    QUEUE = "queue"


class Violation(NamedTuple):
    """One limit that is exceeded. `ours` is False for a host that is busy with something else than this queue."""

    scope: Scope
    subject: str  # Exchange id, host name, or "" for the queue
    words: str
    ours: bool = True


class LoadScale(NamedTuple):
    """Turns a load into a fraction of its limit: what one message/s, one byte/s and one publisher weigh. 0: no limit."""

    message: float
    byte: float
    publisher: float


def weight(limit: float | None) -> float:
    """What one unit weighs under `limit`."""
    return 1 / limit if limit is not None else 0.0


def hard_scale(policy: Policy) -> LoadScale:
    """Fractions of what one Exchange may carry at most."""
    return LoadScale(weight(policy.exchange.max_messages_per_second), weight(policy.exchange.max_bytes_per_second), 0.0)


def balance_scale(policy: Policy, kpi: QueueKpi) -> LoadScale:
    """Fractions by which Exchanges are compared with each other: by every limit there is, otherwise by their share."""
    hard = hard_scale(policy)
    scale = LoadScale(
        max(hard.message, weight(policy.queue.max_messages_per_second_per_exchange)),
        hard.byte,
        weight(policy.queue.max_publishers_per_exchange),
    )
    if any(scale):
        return scale
    if kpi.messages_per_second > 0 and kpi.bytes_per_second > 0:
        return LoadScale(1 / kpi.messages_per_second, 1 / kpi.bytes_per_second, 0.0)
    return LoadScale(0.0, 0.0, 1 / max(1, len(kpi.publishers)))


def has_rules(policy: Policy) -> bool:
    """False for the default policy, which only keeps min_exchanges."""
    return any(
        limit is not None
        for limit in (
            policy.exchange.max_messages_per_second,
            policy.exchange.max_bytes_per_second,
            policy.host.max_cpu_fraction,
            policy.host.max_memory_fraction,
            policy.queue.max_messages_per_second_per_exchange,
            policy.queue.max_publishers_per_exchange,
        )
    )


def violations(kpi: QueueKpi, policy: Policy, active: Sequence[ExchangeKpi]) -> list[Violation]:
    """Every limit that is exceeded in this record."""
    if not active:
        return []
    return _exchange_violations(policy, active) + _queue_violations(kpi, policy, len(active)) + _host_violations(kpi, policy)


def _exchange_violations(policy: Policy, active: Sequence[ExchangeKpi]) -> list[Violation]:
    found = []
    messages, size = policy.exchange.max_messages_per_second, policy.exchange.max_bytes_per_second
    for each in active:
        if messages is not None and each.messages_per_second > messages:
            words = f"Exchange {each.id} takes in {each.messages_per_second:,.0f} messages/s (limit {messages:,.0f})"
            found.append(Violation(Scope.EXCHANGE, each.id, words))
        elif size is not None and each.bytes_per_second > size:
            words = f"Exchange {each.id} takes in {each.bytes_per_second:,.0f} bytes/s (limit {size:,.0f})"
            found.append(Violation(Scope.EXCHANGE, each.id, words))
    return found


def _queue_violations(kpi: QueueKpi, policy: Policy, count: int) -> list[Violation]:
    found = []
    messages, publishers = policy.queue.max_messages_per_second_per_exchange, policy.queue.max_publishers_per_exchange
    if messages is not None and kpi.messages_per_second > messages * count:
        average = kpi.messages_per_second / count
        words = f"{average:,.0f} messages/s per Exchange on average over {count} (limit {messages:,.0f})"
        found.append(Violation(Scope.QUEUE, "", words))
    if publishers is not None and len(kpi.publishers) > publishers * count:
        average = len(kpi.publishers) / count
        words = f"{average:,.1f} publishers per Exchange on average over {count} (limit {publishers:,g})"
        found.append(Violation(Scope.QUEUE, "", words))
    return found


def _host_violations(kpi: QueueKpi, policy: Policy) -> list[Violation]:
    found = []
    cpu, memory = policy.host.max_cpu_fraction, policy.host.max_memory_fraction
    for host in kpi.hosts:
        if cpu is not None and host.cpu_fraction > cpu:
            own = sum(each.cpu_fraction for each in kpi.exchanges if each.host == host.host)
            words = f"host {host.host} uses {host.cpu_fraction:.0%} of its CPU (limit {cpu:.0%})"
            found.append(Violation(Scope.HOST, host.host, words, own >= OWN_CPU_MIN))
        elif memory is not None and host.memory_fraction > memory:
            words = f"host {host.host} uses {host.memory_fraction:.0%} of its memory (limit {memory:.0%})"
            found.append(Violation(Scope.HOST, host.host, words))
    return found


def hosts_above(kpi: QueueKpi, policy: Policy, share: float) -> set[str]:
    """Hosts that use more than `share` of what the host rule allows."""
    cpu, memory = weight(policy.host.max_cpu_fraction), weight(policy.host.max_memory_fraction)
    return {each.host for each in kpi.hosts if max(each.cpu_fraction * cpu, each.memory_fraction * memory) > share}


def hottest_host(kpi: QueueKpi, policy: Policy) -> float:
    """How much of what the host rule allows the busiest host uses (1.0: all of it)."""
    cpu, memory = weight(policy.host.max_cpu_fraction), weight(policy.host.max_memory_fraction)
    return max((max(each.cpu_fraction * cpu, each.memory_fraction * memory) for each in kpi.hosts), default=0.0)


def in_words(found: Sequence[Violation]) -> str:
    """The violations as one phrase."""
    named = "; ".join(each.words for each in found[:VIOLATIONS_NAMED])
    return f"{named}; and {len(found) - VIOLATIONS_NAMED} more" if len(found) > VIOLATIONS_NAMED else named
