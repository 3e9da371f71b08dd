"""Deliveries that their holders ended lately. Pure.

A settlement whose answer was lost is sent again, and finds its delivery gone. Whoever has read the same log knows from here
that it took effect then. Not part of the state: a standby has it as far as it has followed the log, and what is forgotten costs
a worker no more than being told that its lease was lost.
"""

from __future__ import annotations

from collections.abc import Iterable

from roq.workqueue.effects import Effect, Settled
from roq.workqueue.fold import APPLIED
from roq.workqueue.records import Complete, DeadLetter, Record, Requeue

KEPT = 100_000  # many more than are settled while a request is on its way


class Recent:
    """The newest KEPT of them, at least."""

    def __init__(self) -> None:
        self._new: set[int] = set()
        self._old: set[int] = set()

    def note(self, record: Record, effects: Iterable[Effect]) -> None:
        """A record was applied, with these effects."""
        kind = type(record)
        ends = kind is Complete or kind is DeadLetter or (kind is Requeue and not record.due)  # type: ignore[union-attr]
        if ends and (effects is APPLIED or any(type(effect) is Settled and effect.applied for effect in effects)):
            self._new.add(record.delivery)  # type: ignore[union-attr]
            if len(self._new) >= KEPT:
                self._old, self._new = self._new, set()

    def __contains__(self, delivery: int) -> bool:
        return delivery in self._new or delivery in self._old
