"""The leader of a shuffle keeps its promises whatever dies when; and each safeguard is needed: without it the search finds how
one is broken."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest

from roq.shuffle import queries, record
from roq.shuffle.events import Event, Instruction, RecordWritten
from roq.shuffle.plan import Alarm, ShufflePlan, StageStep
from roq.wire.shuffle import ShuffleState
from tests.model.search import explore
from tests.model.shuffle import Model
from tests.model.shuffle_world import Limits

QUIET = Limits()
FOUR = ("a", "b", "c", "d")
TWO = ("a", "b")
SITUATIONS = {
    "nothing happens": QUIET,
    "cut anew": Limits(ranges=3),
    "uneven at first": Limits(borders=(1,), leaders_killed=1),
    "a leader dies at every step": Limits(ranges=3, leaders_killed=1),
    "one copy": Limits(ranges=4, replicas=1, hosts=FOUR, leaders_killed=1),
    "two leaders die": Limits(leaders_killed=2, forgetful=1),
    "a follower dies": Limits(ranges=3, followers_killed=1),
    "a follower dies, then the leader, or before": Limits(followers_killed=1, leaders_killed=1, can_leave=("a",)),
    "a follower joins": Limits(ranges=1, joins=1),
    "a follower joins, a leader dies": Limits(joins=1, leaders_killed=1, hosts=TWO),
    "one joins, one dies": Limits(joins=1, followers_killed=1, can_leave=("a",)),
    "a holder lacks rows": Limits(forgetful=2, leaders_killed=1),
    "answers are lost, and told twice": Limits(ranges=3, answers_lost=1, answers_twice=1),
    "three copies": Limits(ranges=1, replicas=3, hosts=FOUR, followers_killed=1),
    "one is away and comes back with its data": Limits(aways=1, can_leave=("c",)),
    "of two hosts one is away and comes back": Limits(aways=1, hosts=TWO, can_leave=("a",)),
    "ticks are early": Limits(ranges=3, early_ticks=2),
    "filled by one host, and another joins": Limits(filled=True, hosts=("a",), joins=1),
}


@pytest.mark.parametrize("name", SITUATIONS)
def test_sealed_data_can_be_read_and_ends_where_it_belongs(name: str) -> None:
    found = explore(Model(SITUATIONS[name]), 300_000)
    assert not found.trail, "\n".join(found.trail)
    assert found.ends


class ForgetsEarly(ShufflePlan):
    """Former holders forget while new ones still fetch."""

    def _fetch(self) -> bool:
        asks = queries.fetch(self.record, self._epoch, self._hosts.running) if self.record.former else []
        if self.record.state is ShuffleState.SEALED and asks:
            return self._ask(StageStep.FETCH, [*asks, *queries.keep(self.record, self._epoch, self._hosts.running)])
        return super()._fetch()

    def check(self) -> None:
        """Of course it is broken."""


class ActsUnwritten(ShufflePlan):
    """Does what a record says before it is written."""

    def handle(self, event: Event, now: float) -> list[Instruction]:
        if isinstance(event, RecordWritten):
            return []
        out = super().handle(event, now)
        while isinstance(self.writing, msgspec.Struct):
            out += super().handle(RecordWritten(), now)
        return out

    def check(self) -> None:
        """Of course it is broken."""


class TrustsHolders(ShufflePlan):
    """Takes the table as whole without counting."""

    def _count(self) -> bool:
        table = self.record.table
        if self.record.state is ShuffleState.SEALING:
            counts = {each.number: (self.record.rows, 0) if each.number == 0 else (0, 0) for each in table}
            rows = (msgspec.structs.replace(each, rows=counts[each.number][0], size=0) for each in table)
            self._write(record.complete(self.record, tuple(rows), self._hosts.members))
            return True
        return super()._count()


class DoesNotWaitForForgetting(ShufflePlan):
    """Moves data while followers may still be forgetting."""

    def _advance(self) -> bool:
        if self.step is StageStep.KEEP and self._rebalance_wanted is not None:
            self._round.begin(StageStep.IDLE)
        return super()._advance()


class TellsThoseWhoJoin(ShufflePlan):
    """Has hosts forget what will be theirs when they are members."""

    def _keep(self) -> bool:
        seen, self._hosts = self._hosts, replace(self._hosts, joining=frozenset())
        try:
            return super()._keep()
        finally:
            self._hosts = seen


class WakesOnce(ShufflePlan):
    """Takes it that ticks are never early."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._alarm = _RingsOnce()


class _RingsOnce(Alarm):
    def rang(self) -> None:
        """Of course it is broken."""


class LeavesRangesShort(ShufflePlan):
    """Gives ranges that are being filled new holders only in place of lost ones."""

    def _follow_hosts(self) -> bool:
        live = self._hosts.running | self._hosts.members
        if self.record.state is ShuffleState.FILLING and all(live.issuperset(each.holders) for each in self.record.table):
            self._look = False
            return False
        return super()._follow_hosts()


def test_forgetting_by_a_former_table_is_refused_whoever_asks_for_it() -> None:
    """Late orders of the same leader, or of one before it: without the number of the table both are broken, see below."""
    for limits in (
        Limits(ranges=3, hosts=FOUR, machine=DoesNotWaitForForgetting),
        Limits(ranges=3, hosts=FOUR, leaders_killed=1, fenced=False),
    ):
        found = explore(Model(limits), 300_000)
        assert not found.trail, "\n".join(found.trail)


CONTROLS = {
    "who is about to join forgets": Limits(aways=1, hosts=TWO, machine=TellsThoseWhoJoin),
    "an early tick is the last one": Limits(ranges=3, early_ticks=1, machine=WakesOnce),
    "only lost holders are replaced": Limits(filled=True, hosts=("a",), joins=1, machine=LeavesRangesShort),
    "former holders forget too early": Limits(joins=1, replicas=1, borders=(1, 2, 3), machine=ForgetsEarly),
    "a record is not written first": Limits(ranges=4, replicas=1, leaders_killed=1, machine=ActsUnwritten),
    "what holders have is not counted": Limits(forgetful=1, machine=TrustsHolders),
    "followers obey former leaders": Limits(ranges=3, hosts=FOUR, leaders_killed=1, fenced=False, tables=False),
    "forgetting is not waited for": Limits(ranges=3, hosts=FOUR, machine=DoesNotWaitForForgetting, tables=False),
}


@pytest.mark.parametrize("name", CONTROLS)
def test_without_the_safeguard_a_promise_is_broken(name: str) -> None:
    found = explore(Model(CONTROLS[name]), 300_000)
    assert found.trail, f"{found.states} states and no breach"
    assert found.trail[-1].startswith("==> ")
