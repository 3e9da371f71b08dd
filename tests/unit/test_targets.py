"""Targets: when another Exchange is asked for, when it can't help, and what is said then."""

from __future__ import annotations

from typing import Any, NoReturn

import pytest

from roq.pubsub.scaling.decide import (
    CALM_SECONDS,
    IN_VAIN,
    LESS_EACH_TIME,
    OVER_RECORDS,
    REFUTED_MAX,
    STRAIN_SECONDS,
    VERDICT_SECONDS,
)
from roq.pubsub.scaling.groups import OLD_SECONDS, GroupWatch
from roq.pubsub.scaling.what_if import replay
from roq.wire.kpi import GroupKpi
from roq.wire.policy import Bounds, ExchangeRule, GroupRule, Policy, TargetRule
from tests.unit.test_decide import Loads, Run

P99 = Policy(target=TargetRule(max_latency_p99_seconds=0.02))
TEN = Policy(target=P99.target, bounds=Bounds(max_exchanges=10))
LATE, IN_TIME = [0.05, 0.06, 0.055], [0.005, 0.006, 0.004]
VERDICT = int(VERDICT_SECONDS)


def test_a_missed_latency_adds_one_exchange_and_says_why() -> None:
    (decision,) = Run(P99).see({"a": [400, 300, 200]}, 10, latencies=LATE)
    assert decision.action == "scale-out"
    assert decision.cause == "p99 latency is 60 ms, 3 of 3 subscribers exceed 20 ms; new Exchange 1 of 1"
    assert decision.moves == ((1, "new"),)  # 400 beside 500


def test_one_record_is_not_enough_and_nobody_who_gets_nothing_is_late() -> None:
    run = Run(P99)
    for _ in range(5):
        assert run.see({"a": [400, 300]}, OVER_RECORDS - 1, latencies=LATE) == []
        assert run.see({"a": [400, 300]}, 1, latencies=IN_TIME) == []
    assert run.see({"a": [0, 0]}, 20, latencies=LATE) == []


def test_a_few_slow_subscribers_are_slow_themselves() -> None:
    run = Run(P99)
    (told,) = run.see({"a": [400, 300]}, 200, latencies=[0.005, 3.0, 0.006])
    assert told.action == "hold"
    assert told.cause == (
        "p99 latency is 3,000 ms, 1 of 3 subscribers exceed 20 ms; "
        "most of them are in time, so these are slow themselves, not the Exchanges"
    )
    assert [each.action for each in run.see({"a": [40], "b": [30]}, 20, latencies=[0.005, 3.0, 0.006])] == ["scale-in"]


def test_a_publisher_alone_on_its_exchange_gains_nothing_from_another_one() -> None:
    (told,) = Run(P99).see({"a": [400], "b": [300]}, 100, latencies=LATE)
    assert (told.action, told.cause.endswith("no Exchange has two publishers that could be parted")) == ("hold", True)


def test_an_exchange_in_vain_is_the_last_one_and_that_is_told_once() -> None:
    run = Run(P99)
    assert [each.action for each in run.see({"a": [400, 300, 200]}, 2, latencies=LATE)] == ["scale-out"]
    assert run.see({"b": [400], "a": [300, 200]}, VERDICT - 1, latencies=LATE) == []
    (told,) = run.see({"b": [400], "a": [300, 200]}, 600, latencies=LATE)
    assert told.cause.endswith("another Exchange did not help last time, so it is not the Exchanges")
    assert run.see({"b": [400, 400], "a": [300.0, 300, 300]}, 5, latencies=[4 * each for each in LATE])[0].action == "scale-out"


def test_one_that_helped_is_followed_by_another_until_the_target_is_met() -> None:
    run = Run(P99)
    run.see({"a": [200] * 4}, 2, latencies=LATE)
    two: Loads = {"b": [200] * 2, "a": [200] * 2}
    assert run.see(two, VERDICT - 1, latencies=[0.03] * 3) == []
    assert [each.action for each in run.see(two, 2, latencies=[0.03] * 3)] == ["scale-out"]
    assert run.see({"c": [200], "b": [200], "a": [200] * 2}, 100, latencies=IN_TIME) == []


def test_load_that_outruns_the_new_exchange_does_not_wait_for_the_verdict() -> None:
    run = Run(P99)
    run.see({"a": [200] * 4}, 2, latencies=LATE)
    more = run.see({"b": [400] * 2, "a": [400] * 2}, 9, latencies=[0.2] * 3)
    assert [each.action for each in more] == ["scale-out"]


def test_uneven_load_is_evened_out_first() -> None:
    (decision,) = Run(P99).see({"a": [300, 300, 200], "b": [10]}, 2, latencies=LATE)
    assert (decision.action, decision.moves) == ("rebalance", ((1, "b"),))


def test_the_load_at_which_it_was_missed_is_remembered() -> None:
    run = Run(P99)
    run.see({"a": [200] * 4}, 2, latencies=LATE)  # 800 per Exchange is too much
    run.see({"b": [200] * 2, "a": [200] * 2}, 12, latencies=IN_TIME)
    assert run.see({"b": [150] * 2, "a": [150] * 2}, 300, latencies=IN_TIME) == []  # 600 > 800 less 30 %
    (decision,) = run.see({"b": [130] * 2, "a": [130] * 2}, 20, latencies=IN_TIME)
    assert decision.action == "scale-in"
    again = run.see({"b": [800] * 4}, 10, latencies=LATE)
    assert [each.action for each in again] == ["scale-out"] * 3  # 3,200 / (0.9 · 800) = 4.4, of at most 4
    later = Run(P99)
    later.see({"a": [200] * 4}, 2, latencies=LATE)
    later.see({"b": [200] * 2, "a": [200] * 2}, 12, latencies=IN_TIME)
    found = later.see({"b": [150] * 2, "a": [150] * 2}, int(STRAIN_SECONDS), latencies=IN_TIME)
    assert [each.action for each in found] == ["scale-in"]  # for an hour


def test_what_was_cured_once_is_seen_coming() -> None:
    run = Run(P99)
    run.see({"a": [200] * 4}, 2, latencies=LATE)
    run.see({"b": [200] * 2, "a": [200] * 2}, 12, latencies=IN_TIME)  # 800 was too much, and 400 is not
    assert run.see({"b": [300] * 2, "a": [300] * 2}, 100, latencies=IN_TIME) == []
    (decision,) = run.see({"b": [370] * 2, "a": [370] * 2}, 5, latencies=IN_TIME)
    assert decision.action == "scale-out"
    assert decision.cause == "740 messages/s per Exchange, and at 800 a target was missed; new Exchange 1 of 1"
    assert run.memory.strain == 800


def test_what_became_well_because_the_load_fell_is_not_seen_coming() -> None:
    run = Run(P99)
    run.see({"a": [200] * 4}, 2, latencies=LATE)
    run.see({"b": [100] * 2, "a": [100] * 2}, 12, latencies=IN_TIME)
    assert run.see({"b": [390] * 2, "a": [390] * 2}, 100, latencies=IN_TIME) == []


def test_no_scale_in_while_the_latency_is_near_its_target() -> None:
    assert Run(P99).see({"a": [10, 10], "b": [10]}, 60, latencies=[0.015] * 3) == []
    assert Run(P99).see({"a": [10, 10], "b": [10]}, 60, latencies=[0.013] * 3)[0].action == "scale-in"


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        (TargetRule(min_messages_per_second=1000), "the queue takes in 700 messages/s and 2 of 2 publishers are held up"),
        (TargetRule(min_messages_per_second_per_publisher=350), "0000000000000002 gets 300 messages/s through (target 350)"),
    ],
)
def test_least_throughput_counts_only_who_is_held_up(rule: TargetRule, words: str) -> None:
    assert Run(Policy(target=rule)).see({"a": [400, 300]}, 60, blocked=0.1) == []
    (decision,) = Run(Policy(target=rule)).see({"a": [400, 300]}, 10, blocked=0.5)
    assert decision.action == "scale-out"
    assert words in decision.cause
    met = msgspec_replaced(rule)
    assert Run(Policy(target=met)).see({"a": [400, 300]}, 60, blocked=0.5) == []


def msgspec_replaced(rule: TargetRule) -> TargetRule:
    """The same rule, at a third."""
    least, each = rule.min_messages_per_second, rule.min_messages_per_second_per_publisher
    return TargetRule(
        min_messages_per_second=least / 3 if least else None, min_messages_per_second_per_publisher=each / 3 if each else None
    )


def test_a_group_that_lags_is_told_once_for_each_reason_and_scales_nothing() -> None:
    run = Run(Policy(group=GroupRule(max_lag_messages=1000, max_behind_seconds=60, max_ready_seconds=30)))
    behind = (GroupKpi("billing", 0, 5000, 61.0), GroupKpi("mail", 7, 0, 0.0, 45.0), GroupKpi("fine", 7, 10, 1.0, 2.0))
    decisions = run.see({"a": [400, 300], "b": [1]}, 300, groups=behind)
    assert [each.action for each in decisions] == ["hold", "hold"]
    assert decisions[0].cause == (
        "group billing is 5,000 messages behind (at most 1,000) and is 61 s behind (at most 60); "
        "another Exchange would not help: its master takes in no more, or gets nothing"
    )
    assert decisions[1].cause == (
        "group mail has a message that has waited for 45 s (at most 30); "
        "another Exchange would not help: its workers are too few or too slow"
    )
    assert run.see({"a": [400, 300]}, int(CALM_SECONDS) + 1) == []
    assert len(run.see({"a": [400, 300]}, 3, groups=behind)) == 2  # after a calm time it is news again


def test_a_group_that_lags_stands_in_the_way_of_nothing_else() -> None:
    rules = Policy(exchange=ExchangeRule(max_messages_per_second=1000), group=GroupRule(max_lag_messages=1000))
    behind = (GroupKpi("billing", 0, 5000),)
    run = Run(rules)
    assert [each.action for each in run.see({"a": [600, 600]}, 2, groups=behind)] == [
        "scale-out",
    ]
    run.see({"b": [600], "a": [600]}, 12, groups=behind)
    assert "scale-in" in [each.action for each in run.see({"b": [60], "a": [60]}, 20, groups=behind)]


def test_unmet_at_the_maximum_is_told_once() -> None:
    policy = Policy(target=P99.target, bounds=Bounds(max_exchanges=1))
    (told,) = Run(policy).see({"a": [400, 300]}, 100, latencies=LATE)
    assert told.cause.endswith("already 1 Exchanges (at most 1)")


def test_other_targets_forget_what_was_learnt_about_the_former_ones() -> None:
    run = Run(P99)
    run.see({"a": [200] * 4}, 2, latencies=LATE)
    run.see({"b": [200] * 2, "a": [200] * 2}, 12, latencies=IN_TIME)
    assert run.memory.strain == 800
    run.policy = Policy(target=TargetRule(max_latency_p99_seconds=0.5))
    run.see({"b": [200] * 2, "a": [200] * 2}, latencies=IN_TIME)
    assert (run.memory.strain, run.memory.trial) == (0.0, None)


def test_it_replays() -> None:
    run = Run(P99)
    run.see({"a": [200] * 4}, 30, latencies=LATE)
    run.see({"b": [200] * 2, "a": [200] * 2}, 60, latencies=IN_TIME)
    run.see({"a": [20] * 2, "b": [20] * 2}, 60, latencies=IN_TIME)
    assert len(run.log) >= 3
    assert replay(run.records, P99) == run.log


def in_vain(policy: Policy, load: float = 90.0, **what: Any) -> Run:
    """A queue of so many messages/s for which an Exchange was added, to no avail; that was told."""
    run = Run(policy)
    assert "scale-out" in [each.action for each in run.see({"a": [load / 3] * 3}, 2, latencies=LATE, **what)]
    told = run.see({"b": [load / 3], "a": [load / 3] * 2}, 60, latencies=LATE, **what)
    assert [IN_VAIN in each.cause for each in told if "p99" in each.cause] == [True]
    return run


def test_what_did_not_help_says_nothing_about_how_many_would() -> None:
    run = in_vain(TEN)
    run.see({"b": [30], "a": [30] * 2}, 90, latencies=IN_TIME)
    more = run.see({"b": [250] * 2, "a": [250] * 2}, 4, latencies=LATE)
    assert [each.action for each in more] == ["scale-out"]  # and not 8 of them because 90 was too much once


def test_a_group_that_always_lags_changes_nothing_about_targets() -> None:
    behind = (GroupKpi("billing", 0, 5000),)
    policy = Policy(target=P99.target, group=GroupRule(max_lag_messages=1000))
    runs = [in_vain(P99), in_vain(policy, groups=behind)]
    for run, groups in zip(runs, ((), behind), strict=True):
        two: Loads = {"b": [30], "a": [30] * 2}
        (told,) = run.see(two, int(CALM_SECONDS) + 1, latencies=IN_TIME, groups=groups) + run.see(
            two, 30, latencies=LATE, groups=groups
        )
        assert told.cause.endswith(IN_VAIN)  # again: it was in time for a while
        assert run.see(two, int(STRAIN_SECONDS) + 1, latencies=[0.019] * 3, groups=groups) == []
        assert (run.memory.trial, run.memory.strain) == (None, 0.0)
        assert [each.action for each in run.see(two, 2, latencies=LATE, groups=groups)] == ["scale-out"]


def test_bursts_of_lateness_get_one_exchange() -> None:
    run = in_vain(TEN)
    two: Loads = {"b": [30], "a": [30] * 2}
    for burst in range(20):
        decaying = [[level] * 3 for level in (0.05, 0.045, 0.04, 0.03, 0.025)]
        run.see(two, 90, latencies=IN_TIME)
        found = run.see(two, 60 + burst, latencies=LATE)
        for latencies in decaying:
            found += run.see(two, 3, latencies=latencies)
        assert [each.action for each in found] == ["hold"], burst
    assert run.see(two, int(STRAIN_SECONDS) - 100, latencies=IN_TIME) == []
    assert [each.action for each in run.see(two, 120, latencies=IN_TIME)] == ["scale-in"]


def test_a_verdict_takes_more_than_a_moment() -> None:
    run = Run(P99)
    run.see({"a": [30] * 3}, 2, latencies=LATE)
    two: Loads = {"b": [30], "a": [30] * 2}
    run.see(two, VERDICT - 1, latencies=[0.03] * 3)
    assert run.see(two, 5, latencies=LATE) == []  # fewer than it takes
    assert [each.action for each in run.see(two, 2, latencies=[0.03] * 3)] == ["scale-out"]  # it did help


def test_cures_that_do_not_last_come_to_an_end() -> None:
    run, names, causes = Run(TEN), "abcdef", list[str]()
    for burst in range(6):
        count = min(burst, REFUTED_MAX + 1) + 1  # Exchanges, if each burst up to then got one
        loads: Loads = {name: [120.0 / count / 2] * 2 for name in names[:count]}
        causes += [each.action + each.cause[-len(LESS_EACH_TIME) :] for each in run.see(loads, 3, latencies=LATE)]
        more = min(count, REFUTED_MAX + 1) + 1
        assert run.see({name: [120.0 / more / 2] * 2 for name in names[:more]}, 90, latencies=IN_TIME) == []
    assert [each.startswith("scale-out") for each in causes] == [True] * (1 + REFUTED_MAX) + [False] * 3
    assert causes[-1] == "hold" + LESS_EACH_TIME
    again = run.see({"a": [60.0] * 5, "b": [60.0] * 5, "c": [60.0] * 5, "d": [60.0] * 5}, 3, latencies=LATE)
    assert [each.action for each in again] == ["scale-out"]  # with more to do than ever it may help


def test_each_group_is_news_again_after_its_own_calm_time() -> None:
    run = Run(Policy(group=GroupRule(max_lag_messages=1000)))
    always, now_and_then = GroupKpi("billing", 0, 5000), GroupKpi("mail", 0, 5000)
    assert len(run.see({"a": [1]}, 30, groups=(always, now_and_then))) == 2
    assert run.see({"a": [1]}, int(CALM_SECONDS) + 1, groups=(always,)) == []
    (told,) = run.see({"a": [1]}, 100, groups=(always, now_and_then))
    assert told.cause.startswith("group mail is 5,000 messages behind")


def test_a_change_is_no_reason_to_tell_of_a_group_again() -> None:
    run = Run(Policy(exchange=ExchangeRule(max_messages_per_second=1000), group=GroupRule(max_lag_messages=1000)))
    behind = (GroupKpi("billing", 0, 5000),)
    assert [each.action for each in run.see({"a": [300, 300]}, 30, groups=behind)] == ["hold"]
    assert [each.action for each in run.see({"a": [600, 600]}, 2, groups=behind)] == ["scale-out"]
    assert run.see({"b": [600], "a": [600]}, 100, groups=behind) == []


def test_a_group_whose_master_is_silent_is_told_once() -> None:
    run = Run(Policy(group=GroupRule(max_lag_messages=1000)))
    found = [
        decision
        for second in range(300)
        for decision in run.see({"a": [1]}, groups=(GroupKpi("billing", -1, silent_seconds=21.0 + second),))
    ]
    (told,) = found
    assert (told.action, told.cause) == (
        "hold",
        "group billing: its master has said nothing for 22 s; whether it keeps its rules is not known meanwhile",
    )
    assert run.see({"a": [1]}, int(CALM_SECONDS) + 1, groups=(GroupKpi("billing", 0, 10),)) == []
    assert len(run.see({"a": [1]}, 100, groups=(GroupKpi("billing", -1, silent_seconds=21.0),))) == 1
    unruled = Run(P99)
    assert unruled.see({"a": [1]}, 10, groups=(GroupKpi("billing", -1, silent_seconds=21.0),)) == []


def test_what_is_known_of_groups_by_age() -> None:
    clock = [100.0]
    watch = GroupWatch("q", connect=unconnected, clock=lambda: clock[0])
    watch.note({"billing", "mail"}, [GroupKpi("billing", 7, 10)])
    assert watch.newest() == (GroupKpi("billing", 7, 10), GroupKpi("mail", -1))
    clock[0] += OLD_SECONDS
    watch.note({"billing", "mail", "new"}, [])
    assert watch.newest() == (GroupKpi("billing", 7, 10), GroupKpi("mail", -1), GroupKpi("new", -1))
    clock[0] += 1
    silent = OLD_SECONDS + 1
    assert watch.newest() == (
        GroupKpi("billing", -1, silent_seconds=silent),
        GroupKpi("mail", -1, silent_seconds=silent),
        GroupKpi("new", -1),
    )
    watch.note({"mail"}, [GroupKpi("mail", 1)])
    assert watch.newest() == (GroupKpi("mail", 1),)


def unconnected() -> NoReturn:
    raise AssertionError("nothing is asked here")
