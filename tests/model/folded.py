"""States of the work queue's fold as numbers, so that a search can keep many.

Each is reached through a dump and a load of the one before, and must equal what all records from the start lead to.
"""

from __future__ import annotations

from typing import NamedTuple

from roq.workqueue.fold import Fold, RecordRefused, Settled, TasksDelivered
from roq.workqueue.ready import StoredTask
from roq.workqueue.records import Record, TaskKey
from roq.workqueue.state import State
from tests.model.moves import Breach


def forget(fold: Fold) -> None:
    """Nobody uses it any more. It and its handlers are a cycle, and during a search nobody looks for cycles."""
    fold._handlers.clear()


class Replay(NamedTuple):
    """What a record does to a state."""

    after: int
    delivered: tuple[TasksDelivered, ...]
    applied: bool
    refused: bool
    changed: bool


class Content(NamedTuple):
    """What can be seen in a state."""

    tasks: tuple[StoredTask, ...]  # ready and dead ones have no delivery
    ready: tuple[int, ...]  # their orders
    waiting: tuple[int, ...]  # positions of Pops
    leased: tuple[StoredTask, ...]
    dead: frozenset[TaskKey]


class Folded:
    """All states seen so far. contents: of each of them."""

    def __init__(self, fold: type[State], *, checked: bool) -> None:
        self._fold, self._checked = fold, checked
        self._dumps: list[bytes] = []
        self._numbers: dict[bytes, int] = {}
        self._records: list[tuple[Record, ...]] = []  # one way to each dump, from the start
        self._replays: dict[tuple[int, Record], Replay] = {}
        self.contents: list[Content] = []

    def start(self, records: tuple[Record, ...]) -> int:
        """The state after these records."""
        state = self._fold()
        for record in records:
            state.apply(record)
        number = self._number(state, records)
        forget(state.fold)
        return number

    def _number(self, state: State, records: tuple[Record, ...]) -> int:
        dump = state.dump()
        number = self._numbers.get(dump)
        if number is None:
            number = self._numbers[dump] = len(self._dumps)
            self._dumps.append(dump)
            self._records.append(records)
            leased = tuple(state.fold.leased.values())
            tasks = (*state.fold.ready, *leased, *state.fold.dead.values())
            waiting = tuple(one.position for one in state.waiters.values())
            orders = tuple(task.order for task in state.fold.ready)
            self.contents.append(Content(tasks, orders, waiting, leased, frozenset(state.fold.dead)))
            self._replayed_in_full(dump, records)
        return number

    def _replayed_in_full(self, dump: bytes, records: tuple[Record, ...]) -> None:
        whole = self._fold()
        for record in records:
            whole.apply(record)
        dumped = whole.dump()
        forget(whole.fold)
        if dumped != dump:
            raise Breach("I5: a snapshot and the records after it lead elsewhere than all records")

    def apply(self, before: int, record: Record) -> Replay:
        """What this record does to this state."""
        found = self._replays.get((before, record))
        if found is None:
            state = self._fold.load(self._dumps[before])
            effects = state.apply(record)
            if self._checked:
                state.check()
            after = self._number(state, (*self._records[before], record))
            state.fold.position -= 1
            found = self._replays[before, record] = Replay(
                after,
                tuple(effect for effect in effects if isinstance(effect, TasksDelivered)),
                any(isinstance(effect, Settled) and effect.applied for effect in effects),
                any(isinstance(effect, RecordRefused) for effect in effects),
                state.dump() != self._dumps[before],
            )
            forget(state.fold)
        return found
