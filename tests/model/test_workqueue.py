"""Work queues over a shared log: the promises hold in any interleaving; each rule of the fold is needed.

The model, its bounds and what it does not cover: shared_log.py. Run with `--log-cli-level=info` to see the sizes of the
searches and, for every rule that is switched off, the shortest way to harm.
"""

from __future__ import annotations

import logging
import re
from typing import Self

import pytest

from roq.workqueue.fold import Effect, Effects, Fold, TasksDelivered
from roq.workqueue.ready import StoredTask
from roq.workqueue.records import Cancel, InstanceDead, Pop, Push, Record, Requeue, Senders, Tick
from roq.workqueue.state import State
from tests.harness.tiers import but_long
from tests.model.search import Found, explore
from tests.model.shared_log import Config, SharedLog

log = logging.getLogger(__name__)
STATES_MIN = 5_000  # that each healthy search visits
ONE = Config(messages=(1,), lag=2)
TWO = Config(messages=(1, 1), lag=2)
HEALTHY = {
    "three messages of two producers": Config(messages=(2, 1), lag=1),
    "a lease runs out early, two messages": TWO._replace(requeues=1),
    "two leases run out early, far behind": ONE._replace(requeues=2, lag=3),
    "three instances, a lease runs out early": ONE._replace(instances=3, requeues=1),
    "a crash, far behind": ONE._replace(crashes=1, lag=3),
    "a crash and a lease that runs out early": ONE._replace(crashes=1, requeues=1),
    "a crash that nobody is told of": ONE._replace(crashes=1, requeues=1, told=False),
    "a record is written twice": TWO._replace(repeats=1),
    "a record is written twice, and a crash": ONE._replace(repeats=1, crashes=1),
    "two records are written twice, a lease runs out early": ONE._replace(repeats=2, requeues=1),
    "a wait is given up": TWO._replace(cancels=1),
    "a wait is given up, a lease runs out early": ONE._replace(cancels=1, requeues=1),
    "the living are declared dead": ONE._replace(slanders=1, requeues=1),
    "a lease is extended while monitors end it": ONE._replace(extensions=1, requeues=2),
    "appends return late": ONE._replace(returns=True, requeues=2),
    "at most two attempts": ONE._replace(max_attempts=2, requeues=2, extensions=1),
}
LONG = ("a crash and a lease that runs out early", "a record is written twice, and a crash")  # what each is made of is quick


class PushesHaveNoNumbers(Fold):
    def _push(self, record: Push) -> Effects:
        self.producers.known.pop(record.producer, None)
        return super()._push(record)


class PopsHaveNoNumbers(State):
    def apply(self, record: Record) -> Effects:
        if isinstance(record, Pop) and (record.instance, record.nonce) not in self.waiters:
            self.fold.instances.known.pop(record.instance, None)
        return super().apply(record)


class RequeuesServeNobody(State):
    unserved_after: type[Record] = Requeue

    def apply(self, record: Record) -> Effects:
        serves, self.serves = self.serves, not isinstance(record, self.unserved_after)
        try:
            return super().apply(record)
        finally:
            self.serves = serves

    serves = True

    def _serve(self) -> list[Effect]:
        return super()._serve() if self.serves else []


class DeathsServeNobody(RequeuesServeNobody):
    unserved_after = InstanceDead


class RequeuedGoLast(Fold):
    def _give_back(self, task: StoredTask, error: str, delay_ms: int, *, may_die: bool) -> None:
        self._end(task)
        self.ready.push(task)


class NobodyDies(Fold):
    def _give_back(self, task: StoredTask, error: str, delay_ms: int, *, may_die: bool) -> None:
        super()._give_back(task, error, delay_ms, may_die=False)


class CancelDoesNothing(State):
    def _ended(self, record: Record) -> list[TasksDelivered]:
        return [] if isinstance(record, Cancel) else super()._ended(record)


class DeathDoesNothing(State):
    def apply(self, record: Record) -> Effects:
        return super().apply(Tick(record.now) if isinstance(record, InstanceDead) else record)


class TheDeadMayPop(Fold):
    def _instance_dead(self, record: InstanceDead) -> Effects:
        effects = super()._instance_dead(record)
        self.instances.of(record.instance, self.clock).ended = False
        return effects


class DeliveriesAreNamedByTheirPush(Fold):
    def hand(self, instance: int, nonce: int, position: int, lease_ms: int, count: int) -> TasksDelivered:
        assert count == 1
        name = self.ready.oldest()
        assert name is not None
        return super().hand(instance, nonce, name.order, lease_ms, count)

    def _current(self, delivery: int, instance: int) -> StoredTask | None:
        return self.leased.get(delivery)


class SnapshotsForgetNumbers(State):
    @classmethod
    def load(cls, data: bytes) -> Self:
        state = super().load(data)
        state.fold.producers = Senders()
        return state


class ExpiriesNameNoEnd(Fold):
    def _requeue(self, record: Requeue) -> Effects:
        task = self._current(record.delivery, record.instance)
        return super()._requeue(Requeue(record.now, record.delivery, record.instance, task.due if task else 0))


def over(fold: type[Fold]) -> type[State]:
    """States whose tasks follow these rules."""

    class Altered(State):
        def __init__(self) -> None:
            super().__init__(fold())

    return Altered


HARMFUL: dict[str, tuple[Config, str]] = {
    "Pushes carry the producer's number": (
        ONE._replace(repeats=1, fold=over(PushesHaveNoNumbers)),
        "I1: a task is there twice",
    ),
    "Pops carry a nonce": (TWO._replace(repeats=1, fold=PopsHaveNoNumbers), "I3: Pop .* is given a second task"),
    "a Pop's owner is known by its nonce, not its LSN": (ONE._replace(returns=True, owner_by_nonce=False), "L1: "),
    "a Requeue hands its task to a Pop in line": (ONE._replace(requeues=1, fold=RequeuesServeNobody), "I4: "),
    "so does the death of an instance": (ONE._replace(crashes=1, fold=DeathsServeNobody), "I4: "),
    "a Requeue puts its task where it was pushed": (
        TWO._replace(requeues=1, fold=over(RequeuedGoLast)),
        "I7: a task is handed out",
    ),
    "attempts are counted and end": (ONE._replace(requeues=2, max_attempts=2, fold=over(NobodyDies)), "leased 3 times"),
    "Cancel ends a wait": (ONE._replace(cancels=1, fold=CancelDoesNothing), "the log says that nobody waits"),
    "InstanceDead ends leases and waits": (ONE._replace(crashes=1, fold=DeathDoesNothing), "the log says"),
    "the dead may not Pop": (ONE._replace(slanders=1, fold=over(TheDeadMayPop)), "the log says"),
    "a delivery is named by its Pop": (ONE._replace(requeues=2, fold=over(DeliveriesAreNamedByTheirPush)), "I6: "),
    "a snapshot keeps the numbers": (ONE._replace(fold=SnapshotsForgetNumbers), "I5: "),
    "an expiry names the end it saw": (
        ONE._replace(requeues=1, extensions=1, fold=over(ExpiriesNameNoEnd)),
        "I6: Requeue",
    ),
}


def show(name: str, found: Found) -> str:
    return "\n    ".join((f"{name}: {found.states} states, {found.ends} ends, {found.depth} steps deep", *found.trail))


@pytest.mark.parametrize("name", but_long(HEALTHY, *LONG))
def test_every_interleaving_keeps_the_promises(name: str) -> None:
    found = explore(SharedLog(HEALTHY[name]))
    log.info(show(name, found))
    assert not found.trail, show(name, found)
    assert found.ends, "no search came to an end"
    assert found.states >= STATES_MIN


@pytest.mark.parametrize("rule", HARMFUL)
def test_without_this_rule_a_promise_is_broken(rule: str) -> None:
    config, harm = HARMFUL[rule]
    found = explore(SharedLog(config._replace(checked=False)))
    assert found.trail, f"nothing is harmed without the rule: {rule}"
    log.info(show(f"without {rule} ({len(found.trail) - 1} steps)", found))
    assert re.search(harm, found.trail[-1]), show(rule, found)


CONTROLS = {config._replace(fold=State, owner_by_nonce=True): rule for rule, (config, _) in HARMFUL.items()}


@pytest.mark.parametrize("config", [config for config in CONTROLS if config not in HEALTHY.values()], ids=CONTROLS.get)
def test_with_all_rules_the_same_search_finds_nothing(config: Config) -> None:
    found = explore(SharedLog(config))
    assert not found.trail, show(CONTROLS[config], found)
