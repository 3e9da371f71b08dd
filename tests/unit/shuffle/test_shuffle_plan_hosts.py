"""The leader's machine of one shuffle when hosts come and go, time passes, and data is gone. Whatever dies when:
tests/model/test_shuffle.py."""

from __future__ import annotations

import math

import msgspec
import pytest

from roq.errors import AttemptNotFound, NotReady
from roq.shuffle.events import Answered, Ask, AttemptReported, Commit, Rebalance, Refuse, Remove, Touched, Wake
from roq.shuffle.plan import ABANDONED, GATHER_SECONDS, KEEP_SECONDS, PATIENCE_SECONDS, RETRY_SECONDS, ShufflePlan
from roq.shuffle.ranges import Placement, table_of
from roq.shuffle.record import FollowerHosts, ShuffleRecord, Stage, follow_hosts, with_holders
from roq.wire import shuffle as wire
from roq.wire.shuffle import Position, ShuffleState, Spec
from tests.unit.shuffle.test_shuffle_plan import GOOD, HOSTS, Leader, sample

EARLY = 0.001  # seconds: as some loops' timers are


def joining(one: Leader, members: str, joins: str) -> None:
    """These hosts run, and the latter are no members yet."""
    one.feed(FollowerHosts(frozenset(members + joins), frozenset(members), joining=frozenset(joins)))


def asked(one: Leader, kind: type[wire.Request]) -> set[str]:
    return {ask.host for ask in one.asked if isinstance(ask.request, kind)}


def wakes(one: Leader) -> list[float]:
    return [each.seconds for each in one.told if isinstance(each, Wake)]


def test_a_shuffle_of_an_earlier_version_stays_where_it_is() -> None:
    """What it wrote says nothing of its placement. A leader that looked at it in its own way would move nearly all."""
    hosts = frozenset(f"host{number}" for number in range(10))
    made = ShuffleRecord("s", "id", Spec(("k",), b"s", 2, 0), 0.0, "t", ShuffleState.SEALED, Stage.NONE, 1)
    borders = [Position(bytes([number]), 0, 0, 0) for number in range(1, 100)]
    made = msgspec.structs.replace(made, table=with_holders(made, table_of(borders), hosts))
    written = {key: value for key, value in msgspec.to_builtins(made).items() if key != "placement"}
    read = msgspec.convert(written, ShuffleRecord)
    assert read == made
    assert follow_hosts(read, FollowerHosts(hosts, hosts)) is read
    anew = follow_hosts(msgspec.structs.replace(read, placement=Placement.RING), FollowerHosts(hosts, hosts))
    assert anew.stage is Stage.MOVING


# --- who joins --------------------------------------------------------------------------------------------------------


def test_who_is_about_to_join_is_not_told_to_forget_what_it_came_back_with() -> None:
    one = Leader().sealed()
    one.hosts("a", "b")
    one.answer(wire.FetchInterval, wire.CountRows)
    one.wait(KEEP_SECONDS)
    one.answer(wire.KeepIntervals)
    assert one.stage() is Stage.NONE
    joining(one, "ab", "c")
    assert not one.asked
    one.hosts("a", "b", "c")
    assert asked(one, wire.FetchInterval) == {"c"}
    one.answer(wire.FetchInterval, wire.CountRows)
    one.wait(KEEP_SECONDS)
    assert asked(one, wire.KeepIntervals) == {*HOSTS}


def test_who_drains_is_told_to_forget_but_not_while_another_copy_is_about_to_come() -> None:
    one = Leader().sealed()
    one.feed(FollowerHosts(frozenset("ab"), frozenset("a")))  # b drains, c is lost
    one.answer(wire.FetchInterval, wire.CountRows)
    assert all(each.holders == ("a",) for each in one.record.table)
    one.feed(FollowerHosts(frozenset("abd"), frozenset("a"), joining=frozenset("d")))
    one.wait(KEEP_SECONDS)
    assert not one.asked, "there are to be two copies, and b has the other one"
    one.feed(FollowerHosts(frozenset("abd"), frozenset("ad")))
    one.answer(wire.FetchInterval, wire.CountRows)
    one.wait(KEEP_SECONDS)
    assert asked(one, wire.KeepIntervals) == {"a", "b", "d"}


def test_ranges_that_are_filled_get_as_many_holders_as_there_can_be() -> None:
    one = Leader()
    one.hosts("a")
    one.table()
    assert all(each.holders == ("a",) for each in one.record.table)
    one.hosts("a", "d", "e")
    assert (one.record.state, one.stage(), one.record.epoch) == (ShuffleState.FILLING, Stage.MOVING, 2)
    assert all(len(each.holders) == 2 and "a" in each.holders for each in one.record.table)
    one.answer(wire.TableChanged)
    assert asked(one, wire.FetchInterval) <= {"d", "e"}
    one.answer(wire.FetchInterval)
    assert (one.stage(), one.record.former) == (Stage.NONE, ())
    one.hosts("a", "d", "e", "f")
    assert one.record.epoch == 2, "nobody else is needed"


# --- time -------------------------------------------------------------------------------------------------------------


def test_ranges_that_are_filled_stay_with_those_who_have_them_when_these_are_lost_one_after_the_other() -> None:
    """The simulation found this one: a new holder that had fetched nothing was taken for one that has all."""
    one = Leader()
    one.hosts("a", "b")
    one.table()
    one.hosts("a", "d", "e")
    assert (one.stage(), {host for each in one.record.table for host in each.holders}) == (Stage.MOVING, {"a", "d", "e"})
    moving = one.record.table
    one.asked.clear()
    one.hosts("d", "e")
    one.answer(wire.TableChanged, wire.FetchInterval)
    assert one.record.table == moving
    assert {host for each in one.record.former for host in each.holders} == {"a", "b"}
    one.wait(RETRY_SECONDS)
    assert (one.record.state, one.stage()) == (ShuffleState.FILLING, Stage.MOVING)
    one.asked.clear()
    one.hosts("b", "d", "e")
    one.answer(wire.TableChanged)
    assert asked(one, wire.FetchInterval) == {"d", "e"}
    assert all(ask.request.sources == ["b"] for ask in one.asked if isinstance(ask.request, wire.FetchInterval))
    one.answer(wire.FetchInterval)
    assert (one.stage(), one.record.former) == (Stage.NONE, ())


def test_an_early_tick_is_followed_by_another_one() -> None:
    one = Leader()
    one.feed(AttemptReported((sample(),), (), wanted=True))
    one.wait(GATHER_SECONDS - EARLY)
    assert one.record.epoch == 0
    assert wakes(one) == pytest.approx([GATHER_SECONDS, EARLY])
    one.wait(2 * EARLY)
    assert one.record.epoch == 1


def test_a_pause_and_keeping_end_after_an_early_tick_too() -> None:
    one = Leader().sealed()
    missing = one.record.table[1].interval
    one.counted = {missing: 20}
    one.hosts("a", "b")
    one.answer(wire.FetchInterval)
    one.answer(wire.CountRows)
    one.told.clear()
    one.wait(RETRY_SECONDS - EARLY)
    assert wakes(one) == pytest.approx([EARLY])
    one.counted = {}
    one.wait(2 * EARLY)
    one.answer(wire.FetchInterval, wire.CountRows)
    assert one.stage() is Stage.KEEPING
    assert wakes(one)[-1] == pytest.approx(KEEP_SECONDS)
    one.told.clear()
    for _ in range(5):  # what happens meanwhile asks for no further ticks
        one.feed(AttemptReported((), (), wanted=False))
    assert not one.told
    one.wait(KEEP_SECONDS - EARLY)
    assert wakes(one) == pytest.approx([EARLY])
    one.wait(2 * EARLY)
    assert asked(one, wire.KeepIntervals) == {"a", "b"}


def test_a_shuffle_nobody_goes_on_filling_is_removed() -> None:
    one = Leader()
    one.plan = ShufflePlan(ShuffleRecord("s", "id", Spec(("k",), b"s", 2, 4), 0.0, "t"), 1, abandoned_seconds=1000.0)
    one.hosts(*HOSTS)
    assert wakes(one) == [1000.0]
    one.wait(900)
    one.feed(AttemptReported((), (), wanted=False))
    one.wait(900)
    one.feed(Touched())
    one.wait(900)
    one.hosts("a", "b")
    assert one.record.state is ShuffleState.FILLING
    one.wait(100 - EARLY)
    assert one.record.state is ShuffleState.FILLING
    one.wait(2 * EARLY)
    assert (one.record.state, one.record.removal) == (ShuffleState.REMOVED, ABANDONED)
    assert asked(one, wire.ForgetShuffle) == {"a", "b"}


def test_what_is_sealed_or_kept_for_ever_is_not_abandoned() -> None:
    one = Leader()
    one.plan = ShufflePlan(ShuffleRecord("s", "id", Spec(("k",), b"s", 2, 4), 0.0, "t"), 1, abandoned_seconds=1000.0)
    one.hosts(*HOSTS)
    one.sealed()
    one.wait(10_000)
    assert one.record.state is ShuffleState.SEALED
    two = Leader()
    two.table()
    two.wait(1e9)
    assert two.record.state is ShuffleState.FILLING
    assert math.inf not in wakes(two)


# --- what is gone -----------------------------------------------------------------------------------------------------


def test_winners_whose_last_copies_are_lost_while_data_moves_are_refused() -> None:
    one = Leader(replicas=1)
    one.feed(AttemptReported((sample(rows=8),), (), wanted=True))
    one.wait(GATHER_SECONDS)
    one.feed(Commit((GOOD,)))
    one.answer(wire.CountRows, wire.TellSamples)
    assert (one.record.state, one.stage()) == (ShuffleState.SEALING, Stage.MOVING)
    one.counted = {each.interval: 0 for each in one.record.table}
    one.asked.clear()
    one.hosts("d", "e")  # those who had it are away, perhaps for ever
    one.counted = {each.interval: 0 for each in one.record.table}
    for _ in range(int(PATIENCE_SECONDS / RETRY_SECONDS)):
        one.answer(wire.FetchInterval, wire.CountRows)
        assert not one.asked, "they may have it, and come back"
        one.wait(RETRY_SECONDS)
    one.now += EARLY
    one.answer(wire.FetchInterval, wire.CountRows)
    for ask in list(one.asked):
        assert isinstance(ask.request, wire.TellSamples)
        one.feed(Answered(ask.id, wire.Samples([])))
    (refusal,) = (each for each in one.told if isinstance(each, Refuse))
    assert isinstance(refusal.error, AttemptNotFound)
    assert one.record.state is ShuffleState.FILLING


def test_two_rebalancings_at_once_are_none() -> None:
    one = Leader().sealed()
    one.feed(Rebalance("first", 8))
    with pytest.raises(NotReady):
        one.feed(Rebalance("second", 5))
    one.feed(Rebalance("first", 8))
    one.answer(wire.TellSamples)
    assert one.stage() is Stage.MOVING
    with pytest.raises(NotReady):
        one.feed(Rebalance("second", 5))
    one.answer(wire.FetchInterval, wire.CountRows)
    assert (one.stage(), one.record.rebalanced, len(one.record.table)) == (Stage.KEEPING, "first", 8)
    one.feed(Rebalance("second", 5))
    one.answer(wire.TellSamples, wire.FetchInterval, wire.CountRows)
    assert (one.stage(), one.record.rebalanced, len(one.record.table)) == (Stage.KEEPING, "second", 5)


def test_two_rebalancings_wait_for_forgetting_one_after_the_other() -> None:
    one = Leader()
    one.table()
    one.feed(Commit((GOOD,)))
    one.answer(wire.CountRows)
    assert asked(one, wire.KeepIntervals)
    one.feed(Rebalance("first", 8))
    with pytest.raises(NotReady):
        one.feed(Rebalance("second", 5))


def test_what_is_not_needed_after_the_seal_is_not_held() -> None:
    one = Leader()
    one.feed(AttemptReported((sample(),), (GOOD,), wanted=True))
    one.wait(GATHER_SECONDS)
    assert one.plan.stored
    one.feed(Commit((GOOD,)))
    one.answer(wire.CountRows)
    one.feed(AttemptReported((), (GOOD,), wanted=False))
    assert not one.plan.stored
    one.feed(Remove("x"))
    assert not one.record.receipts


def test_orders_name_the_table_they_are_of() -> None:
    one = Leader().sealed()
    one.hosts("a", "b")
    orders: list[Ask] = one.answer(wire.FetchInterval)
    one.answer(wire.CountRows)
    one.wait(KEEP_SECONDS)
    orders += one.answer(wire.KeepIntervals)
    named = {(type(ask.request), getattr(ask.request, "table_epoch", None)) for ask in orders}
    assert named == {(wire.FetchInterval, 2), (wire.KeepIntervals, 2)}
