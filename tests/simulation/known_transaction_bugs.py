"""Bugs of transactions that RoQ's model switches on, put back one at a time."""

from __future__ import annotations

from functools import partial

from roq.tools.simulation.run import What
from roq.workqueue.fold import Fold
from roq.workqueue.master.outgoing import OutgoingOutbox
from tests.simulation.known_bugs import Known, put


def _none(one: Fold, deliveries: object) -> list[int]:
    """A transaction takes effect although another member has its message."""
    return []


async def _as_it_was(one: OutgoingOutbox, queue: str, tapes: str, stored: int) -> None:
    """What the producer has stored since it was written down is not asked."""
    if (there := one._of(queue)) is not None:
        one._record(queue, tapes, there.sent, stored)
        await one.prove()


BUGS: dict[str, Known] = {
    "a lost lease aborts nothing": Known(partial(put, (Fold, "lost", _none)), 0, What.TRANSACTIONS),
    "a producer's number is not read": Known(partial(put, (OutgoingOutbox, "attach", _as_it_was)), 1, What.TRANSACTIONS),
}
