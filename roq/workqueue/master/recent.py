"""Deliveries that were ended lately, so that a settlement that is sent again is answered as the first one was. Pure."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable
from itertools import chain, compress

from roq.workqueue.fold import APPLIED, Effect, ManySettled, Settled
from roq.workqueue.records import Complete, CompleteMany, DeadLetter, Record, Requeue

KEPT_BYTES = 4 * 1024 * 1024  # of memory; a queue that is idle holds no more than a busy one
DELIVERY_BYTES = 8
KEPT = KEPT_BYTES // DELIVERY_BYTES
RUN = 4096  # deliveries that are sorted and packed together; the newest ones, fewer than that, are in a set


class Recent:
    """Deliveries that their holders ended lately: the newest KEPT of them, at least.

    A settlement whose answer was lost is sent again, and finds its delivery gone. Whoever has read the same log knows from here
    that it took effect then, and says so once more. What this needs of a request is one number: a delivery is ended once, and
    the fold itself refuses to end it twice.

    A client repeats a request for 30 s (PATIENCE_SECONDS of its MasterLink), in which a master would have to take 17,000
    settlements a second to forget one. One that comes later, or after a take-over to a master that began with a snapshot,
    changes nothing and is answered as a lost lease: the delivery is no longer leased, whatever has become of its task. So this
    is not part of the state, and no snapshot has it.
    """

    def __init__(self) -> None:
        self._new: set[int] = set()
        self._runs: deque[array[int]] = deque(maxlen=KEPT // RUN)  # each ascending

    def note(self, record: Record, effects: Iterable[Effect]) -> None:
        """A record was applied, with these effects."""
        kind = type(record)
        if kind is CompleteMany:
            self._note_all(record, effects)  # type: ignore[arg-type]
            return
        ends = kind is Complete or kind is DeadLetter or (kind is Requeue and not record.due)  # type: ignore[union-attr]
        if ends and (effects is APPLIED or any(type(effect) is Settled and effect.applied for effect in effects)):
            self._new.add(record.delivery)  # type: ignore[union-attr]
            if len(self._new) >= RUN:
                self._runs.append(array("Q", sorted(self._new)))
                self._new.clear()

    def _note_all(self, record: CompleteMany, effects: Iterable[Effect]) -> None:
        applied = (one for effect in effects if type(effect) is ManySettled for one in effect.applied)
        deliveries = chain.from_iterable(range(first, first + count) for first, count in record.runs)
        self._new.update(compress(deliveries, applied))
        if len(self._new) >= RUN:
            self._runs.append(array("Q", sorted(self._new)))
            self._new.clear()

    def __contains__(self, delivery: int) -> bool:
        return delivery in self._new or any(_has(run, delivery) for run in reversed(self._runs))


def _has(run: array[int], delivery: int) -> bool:
    """Deliveries end about in their order, so nearly all runs are passed over by their ends."""
    if not run[0] <= delivery <= run[-1]:
        return False
    return run[bisect_left(run, delivery)] == delivery
