"""What a master remembers of deliveries that ended lately."""

from __future__ import annotations

import random
import tracemalloc

from roq.workqueue.fold import APPLIED, Settled
from roq.workqueue.master.recent import KEPT, KEPT_BYTES, RUN, Recent
from roq.workqueue.records import POP_SHIFT, Complete, Requeue

SLACK_BYTES = 1024 * 1024  # the newest ones are in a set


def end(recent: Recent, deliveries: list[int]) -> None:
    for delivery in deliveries:
        recent.note(Complete(1, delivery, 1), APPLIED)


def test_recent_forgets_the_oldest_only() -> None:
    recent = Recent()
    end(recent, list(range(KEPT + 3 * RUN)))
    recent.note(Complete(1, -1, 1), (Settled(False),))
    recent.note(Requeue(1, -2, 1, due=5), (Settled(True),))
    assert all(delivery in recent for delivery in range(3 * RUN, KEPT + 3 * RUN, 997))
    assert 3 * RUN in recent
    assert KEPT + 3 * RUN - 1 in recent
    assert KEPT + 3 * RUN not in recent
    assert 0 not in recent, "memory is bounded"
    assert -1 not in recent
    assert -2 not in recent, "it ran out: its holder did not end it"


def test_those_that_ended_in_any_order_are_found_and_no_others() -> None:
    chance = random.Random(7)
    deliveries = [number << POP_SHIFT | chance.randrange(1 << POP_SHIFT) for number in range(1, 5 * RUN)]
    chance.shuffle(deliveries)
    ended = deliveries[::2]
    recent = Recent()
    end(recent, ended)
    assert all(delivery in recent for delivery in ended)
    assert not any(delivery in recent for delivery in deliveries[1::2])


def test_its_memory_is_bounded() -> None:
    recent = Recent()
    tracemalloc.start()
    try:
        end(recent, [(1 << 40) + (number << POP_SHIFT) for number in range(KEPT + 2 * RUN)])
        assert tracemalloc.get_traced_memory()[0] < KEPT_BYTES + SLACK_BYTES
    finally:
        tracemalloc.stop()
