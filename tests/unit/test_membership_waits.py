"""The Monitor's membership machine: whoever asks for something, or waits for others, does not wait for ever.
Random order of everything: tests/model/test_membership.py.
"""

from __future__ import annotations

import contextlib

from roq.errors import DeadlineExceeded, NotReady
from roq.pubsub.monitor.membership import ACTIVE_ANSWER_SECONDS, DRAIN_ANSWER_SECONDS, JOINING_ALL_SECONDS, MOVE_ANSWER_SECONDS
from roq.pubsub.monitor.records import JOINING_SECONDS, PROVING_SECONDS, ExchangeState
from roq.pubsub.monitor.takeover import REJOIN_SECONDS
from roq.wire import monitor as wire
from tests.unit.small_queue import P, Queue, notices, replies


def test_an_exchange_that_never_comes_is_not_awaited_for_ever() -> None:
    queue = Queue("A")
    queue.machine.await_active("B", "waiter", queue.now)
    assert replies(queue.tick(ACTIVE_ANSWER_SECONDS - 0.1, "A")) == []
    [late] = replies(queue.tick(0.1, "A"))
    assert isinstance(late, DeadlineExceeded)
    assert "Exchange 'B' is not known" in str(late)
    assert replies(queue.tick(60.0, "A")) == []


def just_joined_and_gone(queue: Queue, number: int) -> None:
    """A consumer that crashes at once and is started again: it joins, and is not heard of any more."""
    queue.subscribe(1000 + number)


def test_a_relocation_waits_for_those_who_join_but_not_for_one_after_the_other() -> None:
    queue = Queue("A", "B")
    queue.join()
    queue.opened(1, "A")
    just_joined_and_gone(queue, 0)
    asked = queue.now
    assert notices(queue.move("B"), wire.Relocate) == []
    told: list[wire.Relocate] = []
    while not told:
        assert queue.now <= asked + JOINING_ALL_SECONDS, "it waits for ever"
        queue.at(1, "A")
        told = notices(queue.tick(0.5, "A", "B"), wire.Relocate)
        with contextlib.suppress(NotReady):  # it has to wait for the move now
            just_joined_and_gone(queue, int(queue.now * 2))
    assert queue.now >= asked + JOINING_ALL_SECONDS


def test_a_later_relocation_is_held_for_those_who_join_again() -> None:
    queue = Queue("A", "B")
    for path, at, to in ((1, "A", "B"), (2, "B", "A")):
        queue.tick(JOINING_ALL_SECONDS, "A", "B")
        queue.join(path=path if path > 1 else 0, exchange=at if path > 1 else "")
        queue.opened(path, at)
        just_joined_and_gone(queue, path)
        assert notices(queue.move(to), wire.Relocate) == []
        queue.at(path, at)
        assert len(notices(queue.tick(JOINING_SECONDS, "A", "B"), wire.Relocate)) == 1
        queue.fin(path, at)
        queue.opened(path + 1, to)


def test_a_replay_waits_for_those_who_join_but_not_for_one_after_the_other() -> None:
    """Of many publishers, each has its turn."""
    queue = Queue("A")
    first, waiting = queue.now, {P, P + 1}
    while waiting:
        assert queue.now <= first + REJOIN_SECONDS + JOINING_ALL_SECONDS, "it waits for ever"
        just_joined_and_gone(queue, int(queue.now * 2))
        for id in sorted(waiting):
            with contextlib.suppress(NotReady):
                assert queue.join(id, path=4, exchange="gone").path == 5
                waiting.discard(id)
        queue.tick(0.5, "A")


def test_an_exchange_is_proved_although_one_joins_after_the_other() -> None:
    queue = Queue()
    just_joined_and_gone(queue, 0)
    queue.exchange("A")
    began = queue.now
    while queue.state("A") is ExchangeState.STARTING:
        assert queue.now <= began + PROVING_SECONDS + 1.0, "it waits for ever"
        just_joined_and_gone(queue, int(queue.now - 99))
        queue.tick(1.0, "A")


def test_a_drain_waits_for_a_publisher_that_never_goes_but_not_for_ever() -> None:
    queue = Queue("A", "B")
    queue.join()
    assert replies(queue.drain("A")) == []
    for second in range(1, int(DRAIN_ANSWER_SECONDS) + 1):
        queue.at(1, "A")
        found = replies(queue.tick(1.0, "A", "B"))
        assert bool(found) == (second == DRAIN_ANSWER_SECONDS), second
    assert isinstance(found[0], DeadlineExceeded)


def test_a_move_is_answered_when_its_time_is_over() -> None:
    queue = Queue("A", "B")
    queue.join()
    queue.move("B")
    queue.machine.publishers[P].deadline = queue.now + 2 * MOVE_ANSWER_SECONDS
    for second in range(1, int(MOVE_ANSWER_SECONDS) + 1):
        queue.at(1, "A")
        found = replies(queue.tick(1.0, "A", "B"))
        assert bool(found) == (second == MOVE_ANSWER_SECONDS), second
    assert isinstance(found[0], DeadlineExceeded)
    assert "not all moved" in str(found[0])
