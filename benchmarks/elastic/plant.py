"""A queue as control theory sees it: load in, latency and throughput out, Exchanges to be changed. One step a second.

An Exchange with a capacity of `capacity` messages/s is a queue with one server: with a share u of it in use, the 99th
percentile of the latency is BASE_SECONDS · (1 + 4.6 · u / (1 - u)), at most FULL_SECONDS (overflow "block"); publishers get at
most the capacity through and are held up for the rest. Every subscriber reads from every Exchange, so each sees the slowest of
them; what it reports is the worst of the last WINDOW_SECONDS, as a real one's percentile is of its last batches. Decisions take
effect `delay` seconds later. Not modelled: crashes, and subscribers that slow publishers down.
"""

from __future__ import annotations

import itertools
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from roq.pubsub.scaling.decide import Memory, decide
from roq.wire.kpi import Decision, ExchangeKpi, HostKpi, PublisherKpi, QueueKpi, SubscriberKpi
from roq.wire.policy import Policy

BASE_SECONDS, FULL_SECONDS = 0.002, 2.0
WINDOW_SECONDS = 8
BYTES = 100  # per message
START = 1e9  # seconds since 1970 of second 0
Shape = Callable[[int], float]  # second → factor
Forecast = Callable[[QueueKpi], QueueKpi]  # a record with the load that is expected


@dataclass
class Plant:
    """One queue. rates: messages/s that each publisher offers at factor 1. slow: subscribers that are slow themselves, in
    seconds. neighbours: what other programs leave of an Exchange's capacity, by second and Exchange's number."""

    policy: Policy
    rates: dict[int, float]
    shape: Shape
    chance: random.Random
    capacity: float = 1000.0
    noise: float = 0.05
    delay: int = 2
    subscribers: int = 3
    slow: dict[int, float] = field(default_factory=dict)
    neighbours: Callable[[int, int], float] = lambda second, exchange: 1.0
    forecast: Forecast = lambda kpi: kpi
    now: int = 0
    exchanges: dict[str, str] = field(default_factory=dict)  # → state
    at: dict[int, str] = field(default_factory=dict)
    memory: Memory = field(default_factory=Memory)
    log: list[Decision] = field(default_factory=list)
    records: list[QueueKpi] = field(default_factory=list)
    latencies: list[float] = field(default_factory=list)  # true p99 of every second
    counts: list[int] = field(default_factory=list)
    _names: itertools.count[int] = field(default_factory=itertools.count)
    _due: list[tuple[int, Decision]] = field(default_factory=list)
    _window: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW_SECONDS))

    def __post_init__(self) -> None:
        self.at = dict.fromkeys(self.rates, self._create())

    def run(self, seconds: int) -> Plant:
        """So many seconds more; itself."""
        for _ in range(seconds):
            self.now += 1
            due = [each for when, each in self._due if when <= self.now]
            self._due = [each for each in self._due if each[0] > self.now]
            for decision in due:
                self._apply(decision)
            record = self._record()
            self.records.append(record)
            decisions, self.memory = decide(self.forecast(record), self.policy, self.memory)
            self.log += decisions
            self._due += [(self.now + self.delay, each) for each in decisions]
            self.counts.append(len(self.exchanges))
        return self

    def changes(self, since: int = 0) -> list[str]:
        """Scale-outs and scale-ins from this second on; those of one record are one."""
        found = {each.time: each.action for each in self.log if each.action.startswith("scale") and each.time >= START + since}
        return list(found.values())

    def turns(self) -> list[str]:
        """Changes of direction."""
        return [action for action, _ in itertools.groupby(self.changes())]

    def _create(self) -> str:
        name = f"x{next(self._names)}"
        self.exchanges[name] = "active"
        return name

    def _apply(self, decision: Decision) -> None:
        target = self._create() if decision.action == "scale-out" else ""
        for publisher, to in decision.moves:
            self.at[publisher] = target or to
        if decision.action == "scale-in":
            del self.exchanges[decision.exchange]

    def _record(self) -> QueueKpi:
        factor = self.shape(self.now)
        offered = {each: rate * factor * self._jitter() for each, rate in self.rates.items()}
        shares, worst = {}, 0.0
        for name in self.exchanges:
            capacity = self.capacity * self.neighbours(self.now, int(name[1:]))
            load = sum(offered[each] for each, home in self.at.items() if home == name)
            shares[name] = min(1.0, capacity / load) if load else 1.0
            busy = load / capacity
            slow = BASE_SECONDS * (1 + 4.6 * busy / (1 - busy)) if busy < 1 else FULL_SECONDS
            worst = max(worst, min(FULL_SECONDS, slow)) if load else worst
        self.latencies.append(worst)
        self._window.append(worst * self._jitter())
        publishers = tuple(
            PublisherKpi(each, home, offered[each] * shares[home], offered[each] * shares[home] * BYTES, 1 - shares[home], 0)
            for each, home in self.at.items()
        )
        exchanges = tuple(self._exchange(name, publishers) for name in self.exchanges)
        total = sum(each.messages_per_second for each in publishers)
        p99 = max(self._window)
        subscribers = tuple(
            SubscriberKpi(1000 + each, True, total, total * BYTES, worst, p99 / 2, max(p99, self.slow.get(each, 0.0)), 0, 0)
            for each in range(self.subscribers)
        )
        hosts = tuple(HostKpi(each.host, each.cpu_fraction, 0.3, 1, 8) for each in exchanges)
        sums = (total, total * BYTES, total * self.subscribers, 0)
        return QueueKpi("q", START + self.now, 1, *sums, exchanges, publishers, subscribers, hosts)

    def _exchange(self, name: str, publishers: tuple[PublisherKpi, ...]) -> ExchangeKpi:
        own = [each for each in publishers if each.exchange == name]
        messages = sum(each.messages_per_second for each in own)
        cpu = min(1.0, messages / self.capacity)
        out = messages * BYTES * self.subscribers
        return ExchangeKpi(name, f"h{name}", self.exchanges[name], len(own), messages, messages * BYTES, out, cpu, 0)

    def _jitter(self) -> float:
        return 1 + self.noise * self.chance.uniform(-1, 1)


def rise_plateau_fall(low: float = 0.05, rise: int = 60, top: int = 300, seconds: int = 600) -> Shape:
    """From `low` to 1 within `rise` seconds, so long at 1, back as it came; again every `seconds`."""

    def shape(second: int) -> float:
        at = second % seconds
        return low + (1 - low) * max(0.0, min(1.0, at / rise, (2 * rise + top - at) / rise))

    return shape


def flash_crowd(low: float = 0.2, seconds: int = 600, half_life: int = 60) -> Shape:
    """`low`, and every `seconds` from one second to the next 1, which halves every `half_life` seconds."""

    def shape(second: int) -> float:
        since = second % seconds - seconds // 4
        return low if since < 0 else low + float((1 - low) * 0.5 ** (since / half_life))

    return shape


def sawtooth(low: float = 0.2, seconds: int = 60) -> Shape:
    """Half of the time it climbs from `low` to 1, the other half it is low."""
    return lambda second: low + (1 - low) * (second % seconds) / (seconds / 2) if second % seconds < seconds / 2 else low


def diurnal(low: float = 0.1, seconds: int = 1800) -> Shape:
    """A day of so many seconds: most of it low, a broad peak in the middle."""

    def shape(second: int) -> float:
        at = second % seconds / seconds
        return low + (1 - low) * max(0.0, 1 - (abs(at - 0.5) / 0.3) ** 2)

    return shape
