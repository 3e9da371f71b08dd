"""What a policy would have decided on a recorded KPI stream, and what that would have done to the queue. Pure.

`replay` (`roq policy replay`): with the policy that was in force it gives the decisions that were taken. With another one, the
record still shows what the real queue did, so a decision never shows an effect.

`what_if`: the other policy's decisions take effect. Publishers send what they sent, but live on the Exchanges that these
decisions would have made. Assumed:
- a publisher's load is the same wherever it is (one that was held up by a full Exchange would have sent more);
- an Exchange's CPU follows its messages, a host's the Exchanges on it (counted as if it had one core: on the safe side);
- a new Exchange is there with the next record, on a host of its own; no Exchange fails; a new publisher joins the emptiest one.
Not modelled: latency and losses; they stay what was recorded.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec
from msgspec.structs import replace

from roq.pubsub.scaling.decide import Memory, decide
from roq.pubsub.scaling.load import NEW, violations
from roq.wire.kpi import Decision, ExchangeKpi, HostKpi, PublisherKpi, QueueKpi
from roq.wire.policy import Policy

ABSENT_SECONDS = 60.0  # a publisher that is back within this time is still where it was (a Monitor may have been replaced)


class PolicyReplay:
    """A policy's decisions, record by record. The first record must be the first that the ScalingProcess saw for an exact
    repetition; later on it remembers less than that did."""

    def __init__(self, policy: Policy) -> None:
        self._policy, self._memory = policy, Memory()
        self.decisions: list[Decision] = []

    def see(self, kpi: QueueKpi) -> None:
        """The next record."""
        found, self._memory = decide(kpi, self._policy, self._memory)
        self.decisions += found


def replay(lines: Iterable[QueueKpi], policy: Policy) -> list[Decision]:
    """All decisions, in order, see PolicyReplay."""
    course = PolicyReplay(policy)
    for kpi in lines:
        course.see(kpi)
    return course.decisions


class WhatIfStep(msgspec.Struct, frozen=True):
    """One record of the other course. over, recorded_over: whether it, and the real one, exceed a limit of the policy."""

    kpi: QueueKpi
    decisions: tuple[Decision, ...]
    over: bool
    recorded_over: bool


class WhatIf:
    """The course of one queue under a policy, record by record in order of time."""

    def __init__(self, policy: Policy) -> None:
        self._policy, self._course, self._memory = policy, _Course(), Memory()

    def see(self, recorded: QueueKpi) -> WhatIfStep | None:
        """The next record. None as long as none had an active Exchange: it begins with that one."""
        if not self._course.exchanges and not self._course.begin(recorded):
            return None
        active = [each for each in recorded.exchanges if each.state == "active"]
        kpi = self._course.see(recorded)
        decisions, self._memory = decide(kpi, self._policy, self._memory)
        for decision in decisions:
            self._course.apply(decision)
        over = bool(violations(kpi, self._policy, kpi.exchanges))
        return WhatIfStep(kpi, tuple(decisions), over, bool(violations(recorded, self._policy, active)))


def what_if(records: Iterable[QueueKpi], policy: Policy) -> Iterator[WhatIfStep]:
    """All steps, in order, see WhatIf."""
    course = WhatIf(policy)
    for recorded in records:
        if (step := course.see(recorded)) is not None:
            yield step


class _Course:
    """Which Exchanges there are, and who is on which."""

    def __init__(self) -> None:
        self.exchanges: dict[str, str] = {}  # → host
        self._homes: dict[int, tuple[str, float]] = {}  # publisher → Exchange, last seen
        self._hosts: dict[str, HostKpi] = {}  # as recorded last
        self._made = 0

    def begin(self, kpi: QueueKpi) -> bool:
        """Everything is as recorded; False if nothing runs yet."""
        self.exchanges = {each.id: each.host for each in kpi.exchanges if each.state == "active"}
        self._homes = {each.id: (each.exchange, kpi.time) for each in kpi.publishers if each.exchange in self.exchanges}
        return bool(self.exchanges)

    def apply(self, decision: Decision) -> None:
        """It takes effect."""
        target = decision.exchange
        if decision.action == "scale-out":
            self._made += 1
            target = f"new-{self._made}"
            self.exchanges[target] = f"new-host-{self._made}"
        elif decision.action == "scale-in":
            del self.exchanges[decision.exchange]
        for publisher, exchange in decision.moves:
            home = target if exchange == NEW else exchange
            if publisher in self._homes and home in self.exchanges:
                self._homes[publisher] = (home, self._homes[publisher][1])

    def see(self, kpi: QueueKpi) -> QueueKpi:
        """The record as it would have been."""
        publishers = self._publishers(kpi)
        exchanges = self._loaded(kpi, publishers)
        return replace(kpi, publishers=publishers, exchanges=exchanges, hosts=self._hosts_under(kpi, exchanges))

    def _publishers(self, kpi: QueueKpi) -> tuple[PublisherKpi, ...]:
        loads = dict.fromkeys(self.exchanges, 0.0)
        strangers = []
        for each in kpi.publishers:
            home = self._homes.get(each.id, ("", 0.0))[0]
            if home in loads:
                loads[home] += each.messages_per_second
                self._homes[each.id] = (home, kpi.time)
            else:
                strangers.append(each)
        for each in strangers:
            home = min(loads, key=lambda id: (loads[id], id))
            loads[home] += each.messages_per_second
            self._homes[each.id] = (home, kpi.time)
        if len(self._homes) > len(kpi.publishers):
            oldest = kpi.time - ABSENT_SECONDS
            self._homes = {id: (home, seen) for id, (home, seen) in self._homes.items() if seen >= oldest}
        return tuple(replace(each, exchange=self._homes[each.id][0]) for each in kpi.publishers)

    def _loaded(self, kpi: QueueKpi, publishers: tuple[PublisherKpi, ...]) -> tuple[ExchangeKpi, ...]:
        """The Exchanges with what their publishers bring; what they cost together is what it did cost together."""
        counts: dict[str, tuple[int, float, float]] = dict.fromkeys(self.exchanges, (0, 0.0, 0.0))
        for each in publishers:
            count, messages, size = counts[each.exchange]
            counts[each.exchange] = (count + 1, messages + each.messages_per_second, size + each.bytes_per_second)
        total = sum(messages for _, messages, _ in counts.values())
        cpu, out = sum(each.cpu_fraction for each in kpi.exchanges), sum(each.bytes_out_per_second for each in kpi.exchanges)
        memory = sum(each.memory_bytes for each in kpi.exchanges) // max(1, len(kpi.exchanges))
        found = []
        for id, host in self.exchanges.items():
            count, messages, size = counts[id]
            share = messages / total if total > 0 else 1 / len(self.exchanges)
            found.append(ExchangeKpi(id, host, "active", count, messages, size, out * share, cpu * share, memory))
        return tuple(found)

    def _hosts_under(self, kpi: QueueKpi, exchanges: tuple[ExchangeKpi, ...]) -> tuple[HostKpi, ...]:
        """Hosts of these Exchanges: what was recorded, less the Exchanges that were there, plus those that are."""
        self._hosts |= {each.host: each for each in kpi.hosts}
        recorded, now = _cpu_by_host(kpi.exchanges), _cpu_by_host(exchanges)
        self._hosts = {host: known for host, known in self._hosts.items() if host in now or host in recorded}
        found = []
        for host, cpu in now.items():
            known = self._hosts.get(host, HostKpi(host, 0.0, 0.0, 1, 1))
            busy = min(1.0, max(0.0, known.cpu_fraction + (cpu - recorded.get(host, 0.0))))
            found.append(replace(known, cpu_fraction=busy))
        return tuple(found)


def _cpu_by_host(exchanges: tuple[ExchangeKpi, ...]) -> dict[str, float]:
    found: dict[str, float] = {}
    for each in exchanges:
        found[each.host] = found.get(each.host, 0.0) + each.cpu_fraction
    return found
