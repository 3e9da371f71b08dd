"""The other course of a recorded queue: decisions take effect, loads add up, and nothing changes where nothing is decided."""

from __future__ import annotations

from roq.pubsub.scaling.what_if import ABSENT_SECONDS, WhatIfStep, what_if
from roq.wire.kpi import ExchangeKpi, HostKpi, PublisherKpi, QueueKpi
from roq.wire.policy import Bounds, ExchangeRule, HostRule, Policy

NEVER = Policy()
RATE = Policy(exchange=ExchangeRule(max_messages_per_second=1000), bounds=Bounds(max_exchanges=4, cooldown_seconds=2))


def record(second: float, loads: dict[str, list[float]], *, cpu: float = 0.2) -> QueueKpi:
    """Publishers are numbered through; Exchange x is on host hx."""
    publishers, exchanges, hosts, number = [], [], [], 0
    for id, rates in loads.items():
        publishers += [PublisherKpi(number + place, id, rate, 10 * rate, 0.0, 0) for place, rate in enumerate(rates, 1)]
        number += len(rates)
        exchanges.append(ExchangeKpi(id, f"h{id}", "active", len(rates), sum(rates), 10 * sum(rates), sum(rates), cpu, 2**20))
        hosts.append(HostKpi(f"h{id}", cpu + 0.1, 0.3, 1, 8))
    total = sum(each.messages_per_second for each in publishers)
    return QueueKpi("q", second, 1, total, 10 * total, 0.0, 0, tuple(exchanges), tuple(publishers), (), tuple(hosts))


def course(policy: Policy, *phases: tuple[int, dict[str, list[float]]], cpu: float = 0.2) -> list[WhatIfStep]:
    loads = [load for seconds, load in phases for _ in range(seconds)]
    return list(what_if((record(1e9 + second, load, cpu=cpu) for second, load in enumerate(loads)), policy))


def by_exchange(kpi: QueueKpi) -> dict[str, int]:
    return {each.id: round(each.messages_per_second) for each in kpi.exchanges}


def test_without_decisions_it_is_what_was_recorded() -> None:
    recorded = [record(1e9 + second, {"a": [10.0, 20.0], "b": [5.0]}) for second in range(5)]
    steps = list(what_if(recorded, NEVER))
    for step, real in zip(steps, recorded, strict=True):
        assert step.decisions == ()
        assert step.kpi.publishers == real.publishers
        assert [(each.id, each.host, each.messages_per_second) for each in step.kpi.exchanges] == [
            ("a", "ha", 30),
            ("b", "hb", 5),
        ]
        assert abs(sum(each.cpu_fraction for each in step.kpi.exchanges) - 0.4) < 1e-9
    one = [record(1e9, {"a": [10.0, 20.0]})]
    assert next(what_if(one, NEVER)).kpi == one[0]


def test_a_scale_out_takes_effect_and_relieves() -> None:
    steps = course(RATE, (20, {"a": [600.0, 700.0, 300.0]}))
    assert [each.action for step in steps for each in step.decisions] == ["scale-out"]
    assert len(steps[-1].kpi.exchanges) == 2
    assert max(by_exchange(steps[-1].kpi).values()) <= 1000
    assert sum(by_exchange(steps[-1].kpi).values()) == 1600
    assert all(step.recorded_over for step in steps)
    assert [step.over for step in steps].index(False) <= 3
    assert not steps[-1].over


def test_it_scales_in_when_the_load_goes() -> None:
    steps = course(RATE, (20, {"a": [600.0, 700.0]}), (40, {"a": [10.0, 20.0]}))
    assert [each.action for step in steps for each in step.decisions] == ["scale-out", "scale-in"]
    assert len(steps[-1].kpi.exchanges) == 1
    assert {each.exchange for each in steps[-1].kpi.publishers} == {each.id for each in steps[-1].kpi.exchanges}


def test_what_the_real_queue_did_is_left_out() -> None:
    steps = course(NEVER, (3, {"a": [600.0, 700.0]}), (3, {"a": [600.0], "b": [700.0]}))
    assert by_exchange(steps[-1].kpi) == {"a": 1300}


def test_a_new_publisher_joins_the_emptiest_exchange() -> None:
    steps = course(NEVER, (2, {"a": [50.0], "b": [10.0]}), (2, {"a": [50.0], "b": [10.0, 7.0]}))
    assert by_exchange(steps[-1].kpi) == {"a": 50, "b": 17}
    steps = course(NEVER, (2, {"a": [50.0]}), (2, {"a": [50.0], "c": [10.0]}))
    assert by_exchange(steps[-1].kpi) == {"a": 60}


def test_it_begins_with_the_first_active_exchange_and_bears_an_empty_record() -> None:
    empty = QueueKpi("q", 1e9, 1, 0.0, 0.0, 0.0, 0, (), (), (), ())
    first, later = record(1e9 + 1, {"a": [5.0], "b": [6.0]}), record(1e9 + 3, {"b": [6.0], "a": [5.0]})
    later = QueueKpi(**{**{f: getattr(later, f) for f in later.__struct_fields__}, "publishers": first.publishers})
    silent = QueueKpi("q", 1e9 + 2, 1, 0.0, 0.0, 0.0, 0, (), (), (), ())
    steps = list(what_if([empty, first, silent, later], NEVER))
    assert [by_exchange(step.kpi) for step in steps] == [{"a": 5, "b": 6}, {"a": 0, "b": 0}, {"a": 5, "b": 6}]


def test_a_publisher_that_was_away_for_long_is_placed_anew() -> None:
    short, long = ABSENT_SECONDS / 2, ABSENT_SECONDS * 2
    both = {"a": [100.0, 50.0], "b": []}
    for away, expected in ((short, {"a": 150, "b": 0}), (long, {"a": 100, "b": 50})):
        records = [record(1e9, both), record(1e9 + away, {"a": [100.0], "b": []}), record(1e9 + away + 1, both)]
        assert by_exchange(list(what_if(records, NEVER))[-1].kpi) == expected


def test_a_busy_host_gets_relief() -> None:
    policy = Policy(host=HostRule(max_cpu_fraction=0.6), bounds=Bounds(max_exchanges=3, cooldown_seconds=2))
    steps = course(policy, (30, {"a": [400.0, 400.0]}), cpu=0.7)
    assert (steps[0].over, steps[-1].over) == (True, False)
    assert [each.action for step in steps for each in step.decisions] == ["scale-out"]
    assert {each.host for each in steps[-1].kpi.hosts} == {"ha", "new-host-1"}
