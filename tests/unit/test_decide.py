"""Single decisions: which remedy, who moves, what is said, what is remembered."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from roq.pubsub.scaling.decide import (
    BACKOFF_FIRST_SECONDS,
    DOUBLINGS_MAX,
    IN_SECONDS,
    OUT_SECONDS,
    OVER_RECORDS,
    PRICE_MAX_SECONDS,
    RECOVERY_SECONDS,
    TAKEN_BACK,
    UNDER_RECORDS,
    Credit,
    Memory,
    decide,
)
from roq.pubsub.scaling.load import MOVES_MAX, NEW, Bin, LoadScale, bins_of, drain, relieve, scale_out
from roq.pubsub.scaling.what_if import replay
from roq.wire.kpi import Decision, ExchangeKpi, GroupKpi, HostKpi, PublisherKpi, QueueKpi, SubscriberKpi, from_json_line
from roq.wire.policy import Bounds, ExchangeRule, HostRule, Policy, QueueRule

RATE = Policy(exchange=ExchangeRule(max_messages_per_second=1000))
EARNED_RECORDS = 8  # in a row, for a publisher that moves: 2 · (3 s + 0.1 s); the first one begins the time
Loads = dict[str, list[float]]  # Exchange → messages/s of its publishers


def kpi(
    loads: Loads,
    second: float,
    *,
    states: dict[str, str] | None = None,
    term: int = 1,
    latencies: Sequence[float] = (),
    blocked: float = 0.0,
    groups: tuple[GroupKpi, ...] = (),
    **host: float,
) -> QueueKpi:
    """A record; publishers are numbered through. Host of Exchange x is hx, with cpu/memory from `host` (cpu_x=…). latencies:
    p99 of each subscriber."""
    publishers, exchanges, hosts, number = [], [], [], 0
    for id, rates in loads.items():
        for rate in rates:
            number += 1
            publishers.append(PublisherKpi(number, id, rate, rate * 10, blocked, 0))
        state = (states or {}).get(id, "active")
        cpu = host.get(f"own_{id}", 0.5)
        exchanges.append(ExchangeKpi(id, f"h{id}", state, len(rates), sum(rates), sum(rates) * 10, 0.0, cpu, 0))
        hosts.append(HostKpi(f"h{id}", host.get(f"cpu_{id}", 0.1), host.get(f"memory_{id}", 0.1), 1, 8))
    total = sum(each.messages_per_second for each in publishers)
    subscribers = tuple(
        SubscriberKpi(100 + place, True, total, total * 10, p99, p99 / 2, p99, 0, 0) for place, p99 in enumerate(latencies)
    )
    members = tuple(publishers), subscribers
    sums = term, total, total * 10, total * len(latencies), 0
    return QueueKpi("q", second, *sums, tuple(exchanges), *members, tuple(hosts), groups=groups)


class Run:
    """Feeds the same situation second by second."""

    def __init__(self, policy: Policy) -> None:
        self.policy, self.memory, self.now = policy.check(), Memory(), 1e9
        self.records: list[QueueKpi] = []
        self.log: list[Decision] = []

    def see(self, loads: Loads, seconds: int = 1, **what: Any) -> list[Decision]:
        found: list[Decision] = []
        for _ in range(seconds):
            self.now += 1
            record = kpi(loads, self.now, **what)
            self.records.append(record)
            decisions, self.memory = decide(record, self.policy, self.memory)
            found += decisions
        self.log += found
        return found


def test_default_policy_never_scales() -> None:
    run = Run(Policy())
    assert run.see({"a": [1e9, 1e9]}, 30, cpu_a=1.0) == []
    assert run.see({"a": [], "b": [], "c": []}, 60) == []


def test_default_policy_keeps_the_minimum_at_once() -> None:
    run = Run(Policy(bounds=Bounds(min_exchanges=3)))
    decisions = run.see({"a": [10, 10, 10]}, 2)
    assert [each.action for each in decisions] == ["scale-out", "scale-out"]
    assert decisions[0].cause == "1 Exchanges, at least 3 wanted; new Exchange 1 of 2"
    assert [move for each in decisions for move in each.moves] == [(1, NEW), (2, NEW)]


def test_gcm_gets_its_time_to_bring_back_a_vanished_exchange() -> None:
    run = Run(Policy(bounds=Bounds(min_exchanges=2)))
    run.see({"a": [1], "b": [1]}, 5)
    assert run.see({"a": [1, 1]}, int(RECOVERY_SECONDS)) == []
    assert run.see({"a": [1], "b": [1]}, 20) == []
    assert run.see({"a": [1, 1]}, int(RECOVERY_SECONDS) + 1)[0].action == "scale-out"


def test_no_exchange_seen_yet_is_not_below_the_minimum() -> None:
    run = Run(Policy())
    assert run.see({}, int(RECOVERY_SECONDS) - 1) == []
    assert run.see({"a": []}, 5) == []


def test_one_record_over_the_limit_is_not_enough() -> None:
    run = Run(RATE)
    assert run.see({"a": [600, 600]}, OVER_RECORDS - 1) == []
    assert run.see({"a": [300, 300]}, 1) == []
    assert run.see({"a": [600, 600]}, OVER_RECORDS - 1) == []


def test_scale_out_moves_the_most_productive() -> None:
    (decision,) = Run(RATE).see({"a": [100, 700, 400]}, 2)
    assert decision.action == "scale-out"
    assert decision.moves == ((2, NEW),)
    assert "Exchange a takes in 1,200 messages/s (limit 1,000)" in decision.cause


def test_as_many_as_the_load_needs_at_once() -> None:
    decisions = Run(RATE).see({"a": [300.0] * 11}, 2)
    assert [each.action for each in decisions] == ["scale-out"] * 3
    moved = [publisher for each in decisions for publisher, _ in each.moves]
    assert len(moved) == len(set(moved)) == 8
    assert len({each.cause for each in decisions}) == 3  # (time, cause) names a decision


def test_rebalance_if_that_cures_it() -> None:
    run = Run(RATE)
    (decision,) = run.see({"a": [500, 400, 300], "b": [100]}, 2)
    assert (decision.action, decision.moves) == ("rebalance", ((1, "b"),))
    assert "cures" in decision.cause


def test_rebalance_never_overloads_its_target() -> None:
    (decision,) = Run(RATE).see({"a": [500, 500, 400], "b": [800]}, 2)
    assert decision.action == "scale-out"


def test_one_publisher_cannot_be_relieved_and_that_is_told_once() -> None:
    run = Run(RATE)
    (decision,) = run.see({"a": [1500.0]}, 50)
    assert decision.action == "hold"
    assert decision.cause.endswith("no other Exchange could carry what one publisher sends")
    (other,) = run.see({"a": [1500.0], "b": [1], "c": [1], "d": [1]}, 30)
    assert "already 4 Exchanges (at most 4)" in other.cause


def test_at_the_maximum_it_rebalances_if_that_helps() -> None:
    run = Run(Policy(exchange=ExchangeRule(max_messages_per_second=1000), bounds=Bounds(max_exchanges=2)))
    (decision,) = run.see({"a": [500.0] * 4, "b": [400]}, 2)
    assert (decision.action, decision.moves) == ("rebalance", ((1, "b"),))
    assert "already 2 Exchanges (at most 2); moving publishers helps" in decision.cause


def test_queue_averages() -> None:
    policy = Policy(queue=QueueRule(max_publishers_per_exchange=4), bounds=Bounds(max_exchanges=8))
    decisions = Run(policy).see({"a": [1.0] * 10}, 2)
    assert len(decisions) == 2
    assert decisions[0].cause.startswith("10.0 publishers per Exchange on average over 1 (limit 4)")
    policy = Policy(queue=QueueRule(max_subscribers_per_exchange=4), bounds=Bounds(max_exchanges=8))
    run = Run(policy)
    decisions = run.see({"a": [1.0] * 10}, 2, latencies=[0.001] * 11)
    assert len(decisions) == 2
    assert decisions[0].cause.startswith("11.0 subscribers per Exchange on average over 1 (limit 4)")
    assert Run(policy).see({"a": [1.0], "b": [1.0]}, 60, latencies=[0.001] * 3) == []  # 3 > 4 less 30 %
    policy = Policy(queue=QueueRule(max_messages_per_second_per_exchange=100))
    decisions = Run(policy).see({"a": [60.0] * 4, "b": []}, 2)
    assert [each.action for each in decisions] == ["scale-out"]


def test_busy_host_is_relieved_by_a_calm_one_or_a_new_one() -> None:
    policy = Policy(host=HostRule(max_cpu_fraction=0.8))
    (decision,) = Run(policy).see({"a": [100, 90, 80, 70], "b": []}, 2, cpu_a=0.95, cpu_b=0.2)
    assert (decision.action, {to for _, to in decision.moves}) == ("rebalance", {"b"})
    assert decision.cause.startswith("host ha uses 95% of its CPU (limit 80%)")
    (decision,) = Run(policy).see({"a": [100, 90], "b": [50, 60]}, 2, cpu_a=0.95, cpu_b=0.79)
    assert decision.action == "scale-out"
    (decision,) = Run(policy).see({"a": [100, 90]}, 60, cpu_a=0.95, own_a=0.01)
    assert decision.action == "hold"
    assert "not what keeps it busy" in decision.cause
    memory = Policy(host=HostRule(max_memory_fraction=0.5))
    assert Run(memory).see({"a": [100, 90]}, 2, memory_a=0.9)[0].action == "scale-out"


def test_scale_in_needs_spare_for_a_while() -> None:
    run = Run(RATE)
    assert run.see({"a": [300], "b": [200, 150]}, EARNED_RECORDS - 1) == []
    (decision,) = run.see({"a": [300], "b": [200, 150]}, 1)
    assert (decision.action, decision.exchange, decision.host) == ("scale-in", "a", "ha")
    assert decision.moves == ((1, "b"),)
    assert "1 of 2 Exchanges keep every limit with 30% to spare for 7 s (650 messages/s, 3 publishers" in decision.cause
    assert "the fullest would be at 65% of its limit" in decision.cause
    assert Run(RATE).see({"a": [400], "b": [400]}, 60) == []  # 0.8 > 1 - hysteresis


@pytest.mark.parametrize(
    "policy",
    [
        Policy(queue=QueueRule(max_publishers_per_exchange=3)),
        Policy(queue=QueueRule(max_messages_per_second_per_exchange=20)),
        Policy(host=HostRule(max_cpu_fraction=0.6)),
        Policy(exchange=ExchangeRule(max_messages_per_second=1000), bounds=Bounds(min_exchanges=2)),
    ],
)
def test_scale_in_not_if_another_limit_is_near(policy: Policy) -> None:
    assert Run(policy).see({"a": [8, 8], "b": [8]}, 60, cpu_a=0.5, cpu_b=0.2) == []


def test_publishers_that_vanish_together_are_no_reason_to_shrink_at_once() -> None:
    run = Run(RATE)
    run.see({"a": [600], "b": [600]}, 20)
    assert run.see({"a": [], "b": []}, EARNED_RECORDS - 2) == []  # a restarted Monitor waits for its members
    assert run.see({"a": [0], "b": [0]}, 2)[0].action == "scale-in"


def test_scale_out_that_does_not_show_up_is_told_and_not_repeated_soon() -> None:
    run = Run(RATE)
    run.see({"a": [600, 600]}, 2)
    (told,) = run.see({"a": [600, 600]}, int(OUT_SECONDS))
    assert told.action == "hold"
    assert told.cause == "1 of 2 Exchanges are active 15 s after scaling out; no other try for 30 s"
    later = run.see({"a": [600, 600]}, int(BACKOFF_FIRST_SECONDS))
    assert [each.action for each in later] == ["hold", "scale-out"]
    assert later[0].cause.endswith("the last scale-out brought no Exchange")


def test_effects_are_awaited() -> None:
    run = Run(RATE)
    run.see({"a": [600, 600]}, 2)
    assert run.see({"a": [600, 600], "b": []}, 5, states={"b": "starting"}) == []
    assert run.see({"a": [600, 600], "b": []}, 2) == []  # active, but the publisher has not moved yet
    assert run.memory.pending is not None
    run.see({"b": [600], "a": [600]})  # now publisher 1 is on b
    assert run.memory.pending is None


def test_cool_down_and_settling() -> None:
    run = Run(RATE)
    run.see({"a": [600, 600]}, 2)
    run.see({"b": [600], "a": [600]}, 1)
    assert run.see({"a": [600, 600], "b": [900]}, 4) == []  # cool-down of 5 s
    assert run.see({"a": [600, 600], "b": [900]}, 1)[0].action == "scale-out"


def test_scale_in_costs_more_for_many_moves_and_nothing_without_credit() -> None:
    without = Policy(exchange=RATE.exchange, bounds=Bounds(credit=0))
    assert Run(without).see({"a": [300], "b": [200]}, UNDER_RECORDS)[0].action == "scale-in"
    many = {"a": [3.0] * 100, "b": [2.0] * 100}
    assert Run(without).see(many, UNDER_RECORDS)[0].action == "scale-in"
    run = Run(RATE)
    assert run.see(many, 26) == []  # 2 · (3 s + 100 · 0.1 s)
    assert run.see(many, 1)[0].action == "scale-in"


def test_a_scale_in_that_had_to_be_taken_back_makes_the_next_ones_dearer() -> None:
    run = Run(RATE)
    held = []

    def out_and_in() -> float:
        assert [each.action for each in run.see({"b": [600, 600]}, 8)] == ["scale-out"]
        run.see({"a": [600], "b": [600]}, 12)
        before = run.now
        while not run.see({"a": [60], "b": [60]}):
            assert run.now < before + 2 * PRICE_MAX_SECONDS
        return run.now - before

    for _ in range(9):
        held.append(out_and_in())
        run.see({"b": [60, 60]}, 4)
    assert held[:4] == [8, 14, 26, 51]
    assert held[-1] == PRICE_MAX_SECONDS + 1
    assert run.memory.credit.doublings == 8
    often = Credit(doublings=DOUBLINGS_MAX, spent_at=1.0, spent=PRICE_MAX_SECONDS)
    assert often.taken_back(2.0).doublings == DOUBLINGS_MAX
    run.see({"b": [60, 60]}, int(TAKEN_BACK * PRICE_MAX_SECONDS))
    assert out_and_in() == EARNED_RECORDS  # the one before had lasted


def test_forgotten_drain_is_finished() -> None:
    run = Run(RATE)
    decisions = run.see({"a": [600], "b": []}, int(IN_SECONDS) + 1, states={"b": "draining"})
    assert [(each.action, each.exchange, each.moves) for each in decisions] == [("scale-in", "b", ())]
    assert Run(Policy()).see({"a": [600], "b": []}, 200, states={"b": "draining"}) == []


def test_old_terms_and_jumping_clocks() -> None:
    run = Run(RATE)
    run.see({"a": [10]}, 3, term=2)
    before = run.memory
    assert run.see({"a": [900, 900]}, 5, term=1) == []
    assert run.memory is before
    run.now -= 100_000
    assert run.see({"a": [900, 900]}, 3, term=2)[0].action == "scale-out"
    clock = run.memory.clock
    run.now += 1e6
    run.see({"a": [900, 900]}, term=2)
    assert run.memory.clock - clock <= 60


def test_replay_of_a_written_record() -> None:
    run = Run(RATE)
    for loads, seconds in (({"a": [600, 600.5]}, 20), ({"a": [600], "b": [600]}, 10), ({"a": [60], "b": [60]}, 20)):
        run.see(loads, seconds)  # type: ignore[arg-type]
    lines = [msgspec.json.encode(each).decode() for each in run.records]
    assert len(run.log) >= 3
    assert replay(map(from_json_line, lines), RATE) == run.log
    assert replay(run.records, Policy()) == []


def test_plans_are_bounded() -> None:
    record = kpi({"a": [1.0] * 10_000}, 1)
    started = time.perf_counter()
    plans = scale_out(bins_of(record), 0, (), 3, LoadScale(1 / 4000, 0, 0), LoadScale(1 / 4000, 0, 0))
    assert time.perf_counter() - started < 2
    assert all(len(moves) <= MOVES_MAX for moves in plans)


def test_a_plan_is_never_worse_than_what_it_changes() -> None:
    hard = LoadScale(1 / 1000, 0, 0)
    bins = bins_of(kpi({"a": [990, 20], "b": [5]}, 1))
    assert relieve(bins[:1], bins[1:], hard, hard, 0.9) == [(2, "b")]
    assert drain(bins_of(kpi({"a": [500], "b": [300], "c": [100, 100]}, 1)), hard, hard, 0.7) is not None
    assert drain([Bin("a", "h")], hard, hard, 0.7) is None


def test_idle_queue_is_cheap() -> None:
    record, memory = kpi({"a": [0.0, 0.0]}, 1e9), Memory()
    policy = Policy()
    _, memory = decide(record, policy, memory)
    best = 1.0
    for _ in range(5):
        started = time.perf_counter()
        for _ in range(200):
            _, memory = decide(record, policy, memory)
        best = min(best, (time.perf_counter() - started) / 200)
    assert best < 150e-6
