"""The scaling decision for its scenarios: a policy, and records of the KPI stream, one a second.

`record a=600,500 b=20` is an Exchange `a` with two publishers of 600 and 500 messages/s, and `b` with one; publishers are
numbered through. Exchange x is on host hx. `x.state`, `x.cpu` (of the host) and `x.own` (of the Exchange) may be told.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from roq.pubsub.scaling.decide import Memory, decide
from roq.wire.kpi import Decision, ExchangeKpi, HostKpi, PublisherKpi, QueueKpi
from roq.wire.policy import Policy


class Machine:
    """A queue that begins with the default policy."""

    def __init__(self) -> None:
        self._policy, self._memory, self._now = Policy(), Memory(), 1000.0

    def check(self) -> None:
        """Its clock never goes back, and nothing is pending for ever."""
        pending = self._memory.pending
        assert pending is None or pending.until <= self._memory.clock + 60, "a decision is pending for too long"

    def policy(self, **rules: float) -> None:
        """Rules as in TOML: `exchange.max_messages_per_second=1000`."""
        tables: dict[str, dict[str, float]] = {}
        for rule, value in rules.items():
            table, name = rule.split(".")
            tables.setdefault(table, {})[name] = value
        self._policy = msgspec.convert(tables, Policy).check()

    def record(self, seconds: int = 1, **told: str | float) -> Iterator[Decision]:
        """The same record for so many seconds."""
        for _ in range(seconds):
            self._now += 1
            decisions, self._memory = decide(self._kpi(told), self._policy, self._memory)
            yield from (msgspec.structs.replace(one, time=self._now - 1000) for one in decisions)

    def _kpi(self, told: dict[str, str | float]) -> QueueKpi:
        publishers: list[PublisherKpi] = []
        exchanges, hosts = [], []
        for id in [name for name in told if "." not in name]:
            rates = [float(rate) for rate in str(told[id]).split(",") if rate]
            for rate in rates:
                publishers.append(PublisherKpi(len(publishers) + 1, id, rate, 10 * rate, 0.0, 0))
            state, own = str(told.get(f"{id}.state", "active")), float(told.get(f"{id}.own", 0.5))
            exchanges.append(ExchangeKpi(id, f"h{id}", state, len(rates), sum(rates), 10 * sum(rates), 0.0, own, 0))
            hosts.append(HostKpi(f"h{id}", float(told.get(f"{id}.cpu", 0.1)), 0.1, 1, 8))
        total = sum(one.messages_per_second for one in publishers)
        return QueueKpi("q", self._now, 1, total, 10 * total, 0.0, 0, tuple(exchanges), tuple(publishers), (), tuple(hosts))
