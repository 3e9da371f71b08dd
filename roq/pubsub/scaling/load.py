"""Load of a queue's Exchanges under its policy: what is over its limit, and who would have to move where. Pure, deterministic;
nothing is decided here.

Loads are compared as fractions of a limit (`LoadScale`): 1.0 is full. Publishers are packed on Exchanges as EQS does (thesis
figure 6.1), and never split. A move is planned only if
- the Exchange it goes to stays within its limit, and either below MARGIN of it or GAIN less loaded than the one it leaves,
- and the fuller of the two becomes less full than the one it leaves was. (So a plan can't undo itself.)
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from enum import StrEnum
from heapq import nlargest
from typing import NamedTuple

from roq.wire.kpi import ExchangeKpi, PublisherKpi, QueueKpi
from roq.wire.policy import Policy

OWN_CPU_MIN = 0.1  # cores: below this the queue's own Exchanges are not what keeps a host busy
VIOLATIONS_NAMED = 3  # in a cause; the others are counted
MARGIN = 0.9  # a remedy leaves an Exchange at most this full
GAIN = 0.2  # or at least this much less loaded
MOVES_MAX = 200  # planned for one Exchange at a time; the next records plan the rest
CANDIDATES = 200  # most productive publishers of an Exchange that are looked at: planning takes milliseconds, never seconds
NOT_OURS = "this queue's Exchanges are not what keeps it busy"
NEW = "new"  # stands for the Exchange that a scale-out creates

Moves = list[tuple[int, str]]


# --- what is over its limit --------------------------------------------------------------------------------------------


class Scope(StrEnum):
    """Which kind of rule is broken; it says which remedies can help."""

    EXCHANGE = "exchange"
    HOST = "host"
    QUEUE = "queue"
    TARGET = "target"
    GROUP = "group"


class Violation(NamedTuple):
    """One limit that is exceeded, or target that is missed. hopeless: why no other Exchange helps, "" if it may. blocks: while
    it lasts no Exchange is given back."""

    scope: Scope
    subject: str  # Exchange id, name of a host or group, or "" for the queue
    words: str
    hopeless: str = ""
    blocks: bool = True


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
    messages = policy.queue.max_messages_per_second_per_exchange
    if messages is not None and kpi.messages_per_second > messages * count:
        average = kpi.messages_per_second / count
        words = f"{average:,.0f} messages/s per Exchange on average over {count} (limit {messages:,.0f})"
        found.append(Violation(Scope.QUEUE, "", words))
    for what, members, limit in (
        ("publishers", len(kpi.publishers), policy.queue.max_publishers_per_exchange),
        ("subscribers", len(kpi.subscribers), policy.queue.max_subscribers_per_exchange),
    ):
        if limit is not None and members > limit * count:
            words = f"{members / count:,.1f} {what} per Exchange on average over {count} (limit {limit:,g})"
            found.append(Violation(Scope.QUEUE, "", words))
    return found


def _host_violations(kpi: QueueKpi, policy: Policy) -> list[Violation]:
    found = []
    cpu, memory = policy.host.max_cpu_fraction, policy.host.max_memory_fraction
    for host in kpi.hosts:
        if cpu is not None and host.cpu_fraction > cpu:
            own = sum(each.cpu_fraction for each in kpi.exchanges if each.host == host.host)
            words = f"host {host.host} uses {host.cpu_fraction:.0%} of its CPU (limit {cpu:.0%})"
            found.append(Violation(Scope.HOST, host.host, words, NOT_OURS if own < OWN_CPU_MIN else ""))
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


# --- who moves where ---------------------------------------------------------------------------------------------------


class Bin:
    """One Exchange and what it carries, as planned."""

    __slots__ = ("bytes", "host", "id", "messages", "publishers")

    def __init__(self, id: str, host: str) -> None:
        self.id, self.host = id, host
        self.messages = self.bytes = 0.0
        self.publishers: dict[int, PublisherKpi] = {}

    def level(self, scale: LoadScale) -> float:
        """How full it is."""
        return max(self.messages * scale.message, self.bytes * scale.byte, len(self.publishers) * scale.publisher)

    def level_with(self, publisher: PublisherKpi, scale: LoadScale) -> float:
        """How full it would be with `publisher` in addition."""
        return max(
            (self.messages + publisher.messages_per_second) * scale.message,
            (self.bytes + publisher.bytes_per_second) * scale.byte,
            (len(self.publishers) + 1) * scale.publisher,
        )

    def level_without(self, publisher: PublisherKpi, scale: LoadScale) -> float:
        """How full it would be without its `publisher`."""
        return max(
            (self.messages - publisher.messages_per_second) * scale.message,
            (self.bytes - publisher.bytes_per_second) * scale.byte,
            (len(self.publishers) - 1) * scale.publisher,
        )

    def add(self, publisher: PublisherKpi) -> None:
        """Put a publisher on it."""
        self.publishers[publisher.id] = publisher
        self.messages += publisher.messages_per_second
        self.bytes += publisher.bytes_per_second

    def remove(self, publisher: PublisherKpi) -> None:
        """Take a publisher away."""
        del self.publishers[publisher.id]
        self.messages -= publisher.messages_per_second
        self.bytes -= publisher.bytes_per_second


def bins_of(kpi: QueueKpi) -> list[Bin]:
    """The active Exchanges as they are, in a fixed order."""
    bins = {each.id: Bin(each.id, each.host) for each in sorted(kpi.exchanges, key=lambda e: e.id) if each.state == "active"}
    for publisher in kpi.publishers:
        home = bins.get(publisher.exchange)
        if home is not None:
            home.add(publisher)
    return list(bins.values())


def worst(bins: Iterable[Bin], scale: LoadScale) -> float:
    """How full the fullest is."""
    return max((each.level(scale) for each in bins), default=0.0)


def relieve(
    sources: Sequence[Bin],
    targets: Sequence[Bin],
    scale: LoadScale,
    hard: LoadScale,
    goal: float,
    settled: Collection[int] = (),
) -> Moves:
    """Move publishers (not those in `settled`) from the fullest source to the emptiest target until every source is at most
    `goal` full, or no move helps. An Exchange with one publisher can't be relieved. Changes the bins."""
    moves: Moves = []
    candidates = {
        each: nlargest(CANDIDATES, (one for one in each.publishers.values() if one.id not in settled), _productivity)
        for each in sources
    }
    while len(moves) < MOVES_MAX and targets:
        candidates = {each: own for each, own in candidates.items() if len(each.publishers) > 1 and each.level(scale) > goal}
        if not candidates:
            break
        source = max(candidates, key=lambda each: each.level(scale))
        others = [each for each in targets if each is not source]
        target = min(others, key=lambda each: each.level(scale), default=None)
        publisher = _best(source, candidates[source], target, scale, hard) if target is not None else None
        if publisher is None or target is None:
            del candidates[source]
            continue
        candidates[source].remove(publisher)
        source.remove(publisher)
        target.add(publisher)
        moves.append((publisher.id, target.id))
    return moves


def _productivity(publisher: PublisherKpi) -> tuple[float, float]:
    return publisher.messages_per_second, publisher.bytes_per_second


def _best(
    source: Bin, candidates: Iterable[PublisherKpi], target: Bin, scale: LoadScale, hard: LoadScale
) -> PublisherKpi | None:
    """The publisher whose move leaves the fuller of the two least full; on ties the most productive one."""
    level = source.level(scale)
    best, best_after = None, level
    for each in candidates:
        after = target.level_with(each, scale)
        if after > level or target.level_with(each, hard) > 1.0 or (after > MARGIN and after > (1 - GAIN) * level):
            continue
        fuller = max(after, source.level_without(each, scale))
        if fuller < best_after:
            best, best_after = each, fuller
    return best


def scale_out(bins: list[Bin], needed: int, hot: Collection[str], room: int, scale: LoadScale, hard: LoadScale) -> list[Moves]:
    """One list of moves (to NEW) per Exchange to create, at most `room`: `needed` whatever happens, one if it relieves `hot`
    hosts, and more while an Exchange is over its limit and a new one would relieve it. Changes the bins and appends the new
    ones."""
    plans: list[Moves] = []
    while len(plans) < room:
        new = Bin(NEW, "")
        over = [each for each in bins if each.level(hard) > (MARGIN if plans else 1.0)]
        moves = relieve(over, [new], hard, hard, 0.0)
        helps = new.level(hard) >= GAIN or (bool(moves) and worst(over, hard) <= 1.0)  # not one publisher alone too much
        if len(plans) < needed:
            moves += relieve(bins, [new], scale, hard, 0.0)
        elif not plans and hot:
            moves += relieve([each for each in bins if each.host in hot], [new], scale, hard, 0.0)
            helps = helps or bool(moves)
        if not helps and len(plans) >= needed:
            break
        bins.append(new)
        planned = {publisher for publisher, _ in moves}
        plans = [[each for each in earlier if each[0] not in planned] for earlier in plans]  # nobody moves twice
        plans.append(last_moves(moves))
    return plans


def last_moves(moves: Moves) -> Moves:
    """Each publisher once, with where it ends up."""
    return list(dict(moves).items())


def drain(bins: Sequence[Bin], scale: LoadScale, hard: LoadScale, ceiling: float) -> tuple[Bin, Moves, float] | None:
    """The least loaded Exchange, where its publishers go, and how full the fullest other one is then; None if they don't
    fit below `ceiling`. Changes the bins."""
    victim = min(bins, key=lambda each: (each.level(scale), len(each.publishers)))
    others = [each for each in bins if each is not victim]
    moves: Moves = []
    for publisher in sorted(victim.publishers.values(), key=lambda p: (-p.messages_per_second, -p.bytes_per_second, p.id)):
        target = min(others, key=lambda each: (each.level(scale), len(each.publishers)))
        target.add(publisher)
        moves.append((publisher.id, target.id))
    fullest = worst(others, hard)
    return (victim, moves, fullest) if others and fullest <= ceiling else None
