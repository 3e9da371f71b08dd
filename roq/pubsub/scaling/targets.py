"""How a queue stands to its policy's targets: what its members see, and what its groups keep to. Pure; nothing is decided here.

A limit is arithmetic: another Exchange takes its share of the load. Whether it helps a target nobody can know beforehand, but
sometimes it is plain that it can't:
- Every subscriber reads from every Exchange. So an Exchange that is late makes all of them late; when most subscribers are
  in time, those that are not are slow themselves. What counts of a latency is therefore the middle subscriber's.
- A publisher that is held up gains nothing from an Exchange nobody could move to.
- A group's messages pass one master, however many Exchanges write the tapes; and what waits there waits for workers.
For all else the way is: try one, look (decide.py).
"""

from __future__ import annotations

from collections.abc import Sequence

from roq.pubsub.scaling.load import Scope, Violation
from roq.wire.kpi import GroupKpi, PublisherKpi, QueueKpi
from roq.wire.policy import Policy

HELD_UP = 0.2  # of its time: a publisher waits at times anyway
LEVEL_MAX = 100.0  # a publisher that gets nothing through
SLOW_SELF = "most of them are in time, so these are slow themselves, not the Exchanges"
NOT_KNOWN = "whether it keeps its rules is not known meanwhile"
ALONE = "no Exchange has two publishers that could be parted"


def missed(kpi: QueueKpi, policy: Policy) -> list[Violation]:
    """Every target that this record misses."""
    return _latency(kpi, policy) + _throughput(kpi, policy) + _groups(kpi, policy)


def level(kpi: QueueKpi, policy: Policy) -> float:
    """The worst of the targets that Exchanges have to do with: 1.0 is just met, 2.0 twice as slow as it may be; 0.0 if there
    is none."""
    target, found = policy.target, [0.0]
    latencies, waiting = _latencies(kpi), held_up(kpi)
    if target.max_latency_p99_seconds is not None and latencies:
        found.append(_middle(latencies) / target.max_latency_p99_seconds)
    if target.min_messages_per_second is not None and waiting:
        found.append(_short(kpi.messages_per_second, target.min_messages_per_second))
    if target.min_messages_per_second_per_publisher is not None and waiting:
        least = min(each.messages_per_second for each in waiting)
        found.append(_short(least, target.min_messages_per_second_per_publisher))
    return max(found)


def work(kpi: QueueKpi) -> float:
    """What an active Exchange takes in and sends on average, in messages/s."""
    active = sum(each.state == "active" for each in kpi.exchanges)
    return kpi.messages_per_second * (1 + len(kpi.subscribers)) / max(1, active)


def _latencies(kpi: QueueKpi) -> list[float]:
    """99th percentiles of the subscribers that get messages, the shortest first."""
    return sorted(each.latency_p99_seconds for each in kpi.subscribers if each.ready and each.messages_per_second > 0)


def _middle(ordered: Sequence[float]) -> float:
    """The median; of an even number the lower one."""
    return ordered[(len(ordered) - 1) // 2]


def held_up(kpi: QueueKpi) -> list[PublisherKpi]:
    """Publishers that wait for a good part of their time to get something through."""
    return [each for each in kpi.publishers if each.blocked_fraction >= HELD_UP]


def _short(rate: float, least: float) -> float:
    return min(LEVEL_MAX, least / rate) if rate > 0 else LEVEL_MAX


def _latency(kpi: QueueKpi, policy: Policy) -> list[Violation]:
    limit, latencies = policy.target.max_latency_p99_seconds, _latencies(kpi)
    if limit is None or not latencies or latencies[-1] <= limit:
        return []
    late = sum(each > limit for each in latencies)
    words = f"p99 latency is {latencies[-1] * 1000:,.0f} ms, {late} of {len(latencies)} subscribers exceed {limit * 1000:,g} ms"
    if _middle(latencies) <= limit:
        return [Violation(Scope.TARGET, "", words, SLOW_SELF, blocks=False)]
    return [Violation(Scope.TARGET, "", words, _alone(kpi))]


def _throughput(kpi: QueueKpi, policy: Policy) -> list[Violation]:
    target, waiting, found = policy.target, held_up(kpi), []
    told = f"{len(waiting)} of {len(kpi.publishers)} publishers are held up"
    least = target.min_messages_per_second
    if least is not None and waiting and kpi.messages_per_second < least:
        words = f"the queue takes in {kpi.messages_per_second:,.0f} messages/s and {told} (target {least:,g})"
        found.append(Violation(Scope.TARGET, "", words, _alone(kpi)))
    least = target.min_messages_per_second_per_publisher
    slowest = min(waiting, key=lambda each: (each.messages_per_second, each.id), default=None)
    if least is not None and slowest is not None and slowest.messages_per_second < least:
        words = f"{told}, {slowest.id:016x} gets {slowest.messages_per_second:,.0f} messages/s through (target {least:,g})"
        found.append(Violation(Scope.TARGET, "", words, _alone(kpi)))
    return found


def _alone(kpi: QueueKpi) -> str:
    """Why nobody could move to another Exchange; "" if somebody could."""
    active = {each.id for each in kpi.exchanges if each.state == "active"}
    homes = [each.exchange for each in kpi.publishers if each.exchange in active and each.messages_per_second > 0]
    return "" if len(homes) > len(set(homes)) else ALONE


def _groups(kpi: QueueKpi, policy: Policy) -> list[Violation]:
    rule, found = policy.group, []
    for each in kpi.groups if policy.watches_groups() else ():
        if each.silent_seconds:
            words = f"group {each.name}: its master has said nothing for {each.silent_seconds:,.0f} s"
            found.append(Violation(Scope.GROUP, each.name, words, NOT_KNOWN, blocks=False))
        said = []
        if rule.max_lag_messages is not None and each.lag > rule.max_lag_messages:
            said.append(f"is {each.lag:,} messages behind (at most {rule.max_lag_messages:,g})")
        if rule.max_behind_seconds is not None and each.behind_seconds > rule.max_behind_seconds:
            said.append(f"is {each.behind_seconds:,.0f} s behind (at most {rule.max_behind_seconds:,g})")
        if rule.max_ready_seconds is not None and each.oldest_seconds > rule.max_ready_seconds:
            said.append(f"has a message that has waited for {each.oldest_seconds:,.0f} s (at most {rule.max_ready_seconds:,g})")
        if said:
            words = f"group {each.name} {' and '.join(said)}"
            found.append(Violation(Scope.GROUP, each.name, words, _why(each), blocks=False))
    return found


def _why(group: GroupKpi) -> str:
    """Why Exchanges don't help it."""
    where = "its workers are too few or too slow" if group.waiting > 0 else "its master takes in no more, or gets nothing"
    return f"another Exchange would not help: {where}"
