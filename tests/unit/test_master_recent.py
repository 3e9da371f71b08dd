"""What a master remembers of deliveries that ended lately."""

from __future__ import annotations

from roq.master.recent import KEPT, Recent
from roq.workqueue.effects import Settled
from roq.workqueue.records import Complete, Requeue


def test_recent_forgets_the_oldest_only() -> None:
    recent = Recent()
    for delivery in range(2 * KEPT):
        recent.note(Complete(1, delivery, 1), (Settled(True),))
    recent.note(Complete(1, -1, 1), (Settled(False),))
    recent.note(Requeue(1, -2, 1, due=5), (Settled(True),))
    assert 2 * KEPT - 1 in recent
    assert KEPT in recent
    assert -1 not in recent
    assert -2 not in recent, "it ran out: its holder did not end it"
