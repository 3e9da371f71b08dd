"""The Monitor's membership machine: what one that takes over does not know yet, who is not waited for, and bounds of waits.
Random order of everything: tests/model/test_membership.py.
"""

from __future__ import annotations

import pytest

from roq.errors import DeadlineExceeded, NotReady
from roq.monitor.former import FormerLives
from roq.monitor.membership import EXCHANGE_SILENT_SECONDS, NEWCOMER_SECONDS, NOBODY_SECONDS, REJOIN_SECONDS, Membership
from roq.monitor.orders import ACTIVE_ANSWER_SECONDS, DRAIN_ANSWER_SECONDS, MOVE_ANSWER_SECONDS
from roq.monitor.proofs import PROVING_SECONDS, PROVING_SILENT_SECONDS
from roq.monitor.records import ExchangeState
from roq.wire import monitor as wire
from roq.wire.assignment import FormerProcess
from tests.unit.small_queue import USE, Queue, S, T, notices, replies

OLD = FormerProcess("exchange/q/old", "h1", "old", lease_seconds=12.0)
ANOTHER = FormerProcess("exchange/q/another", "h1", "another", lease_seconds=12.0)


def taken_over(*exchanges: str, expected: frozenset[int] | None = None, former: FormerLives | None = None) -> Queue:
    queue = Queue()
    queue.machine = Membership(3, USE, expected, queue.now, former)
    for id in exchanges:
        queue.exchange(id)
    return queue


# --- who subscribes ---------------------------------------------------------------------------------------------------


def test_no_exchange_becomes_active_because_nobody_is_known_to_subscribe() -> None:
    queue = taken_over("A")
    assert queue.state("A") is ExchangeState.STARTING
    queue.tick(REJOIN_SECONDS, "A")
    assert queue.state("A") is ExchangeState.STARTING, "nobody has come back: they may only be slow"
    queue.tick(NOBODY_SECONDS - REJOIN_SECONDS, "A")
    assert queue.state("A") is ExchangeState.ACTIVE


def test_a_new_publisher_waits_for_the_subscribers_of_the_monitor_before() -> None:
    queue = taken_over("A")
    queue.subscribe()
    queue.proves("A/1")
    queue.tick(REJOIN_SECONDS, "A")
    assert queue.state("A") is ExchangeState.ACTIVE
    with pytest.raises(NotReady, match="taken over"):
        queue.join()
    queue.tick(NEWCOMER_SECONDS - REJOIN_SECONDS, "A")
    assert queue.join().exchange.id == "A"


def test_a_publisher_that_has_a_path_goes_on_at_once() -> None:
    queue = taken_over("A")
    assert (queue.join(path=4, exchange="A").path, queue.state("A")) == (4, ExchangeState.STARTING)


def test_an_activated_backup_serves_new_publishers_once_everybody_is_back() -> None:
    queue = taken_over("A", expected=frozenset({S}))
    with pytest.raises(NotReady):
        queue.join()
    queue.subscribe()
    queue.proves("A/1")
    assert queue.join().path == 1


def test_the_first_monitor_of_a_queue_waits_for_nobody() -> None:
    assert Queue("A").join().path == 1


# --- who is ready -----------------------------------------------------------------------------------------------------


def heard(queue: Queue, *tokens: str) -> wire.Heard:
    found = notices(queue.proves(*tokens), wire.Heard)
    assert isinstance(found[-1], wire.Heard)
    return found[-1]


def test_nobody_new_is_ready_before_every_exchange_had_time_to_report() -> None:
    queue = taken_over("A")
    queue.subscribe()
    first = heard(queue, "A/1")
    assert not first.ready
    assert "Exchanges that may not have reported" in first.waits[0]
    queue.tick(NEWCOMER_SECONDS, "A")
    assert heard(queue, "A/1") == wire.Heard(3, True)


def test_nobody_new_is_ready_while_a_life_of_a_lost_host_may_carry_messages() -> None:
    queue = taken_over("A", former=FormerLives([OLD], 100.0))
    queue.subscribe()
    queue.tick(NEWCOMER_SECONDS, "A")
    assert heard(queue, "A/1") == wire.Heard(3, False, ("Exchange old of the lost host h1, which may go on for 7 s",))
    queue.machine.former.gone("old")
    assert notices(queue.tick(0.0, "A"), wire.Heard) == [wire.Heard(3, True)], "it is told at once"
    assert notices(queue.tick(0.0, "A"), wire.Heard) == []


def test_a_life_whose_lease_has_run_out_is_not_waited_for() -> None:
    queue = taken_over("A", former=FormerLives([OLD], 100.0))
    queue.subscribe()
    queue.tick(12.0, "A")
    assert heard(queue, "A/1").ready


def test_a_life_of_a_host_that_is_back_is_not_waited_for() -> None:
    lives = FormerLives([OLD, ANOTHER], 100.0)
    lives.keep({"another"})
    assert [words.split(" of ")[0] for words in lives.left(101.0)] == ["Exchange another"]


def test_a_life_that_reports_is_proved_like_any_other() -> None:
    queue = taken_over("A", former=FormerLives([OLD], 100.0))
    queue.exchange("old")
    queue.subscribe()
    queue.join(path=4, exchange="old")
    queue.tick(NEWCOMER_SECONDS, "A", "old")
    assert heard(queue, "A/1") == wire.Heard(3, False)
    assert heard(queue, "A/1", "old/1").ready


def test_who_was_ready_before_is_told_at_once() -> None:
    queue = taken_over("A", former=FormerLives([OLD], 100.0))
    queue.machine.join_subscriber(wire.JoinSubscriber(S, (">",), True), b"s21", queue.now)
    queue.tick(REJOIN_SECONDS, "A")
    assert heard(queue, "A/1") == wire.Heard(3, True)


def test_an_exchange_on_which_a_publisher_went_on_has_to_be_proved_although_it_starts() -> None:
    queue = taken_over("A", "B")
    queue.subscribe()
    queue.join(path=4, exchange="B")
    queue.tick(NEWCOMER_SECONDS, "A", "B")
    assert not heard(queue, "A/1").ready
    assert heard(queue, "A/1", "B/1").ready


def test_an_exchange_that_nobody_claims_to_be_on_is_no_reason_to_wait() -> None:
    queue = taken_over("A", "B")
    queue.subscribe()
    for _ in range(int(NEWCOMER_SECONDS) + 1):
        assert not heard(queue, "A/1").ready
        queue.exchange("B")
        queue.tick(1.0, "A", "B")
    queue.machine.exchanges["B"].state = ExchangeState.STARTING
    assert heard(queue, "A/1").ready


# --- who is not waited for --------------------------------------------------------------------------------------------


def test_a_monitor_that_stood_still_calls_nobody_silent_for_it() -> None:
    queue = Queue("A")
    queue.subscribe()
    queue.proves("A/1")
    queue.join()
    queue.opened(1, "A")
    queue.now += 60.0
    queue.machine.stood_still(60.0, queue.now)
    queue.tick(0.0)
    assert [one.state for one in queue.machine.exchanges.values()] == [ExchangeState.ACTIVE]
    assert notices(queue.at(1, "A"), wire.Heard) == [wire.Heard(3, True)], "its Exchange is not lost"
    assert S in queue.machine.subscribers
    queue.tick(EXCHANGE_SILENT_SECONDS + 0.1)
    assert notices(queue.at(1, "A"), wire.Heard)[0].gone == "A/1", "from then on silence counts"


def test_a_dead_subscriber_holds_up_nobody_and_is_not_ready_when_it_comes_back() -> None:
    queue = Queue("A")
    for subscriber in (S, T):
        queue.subscribe(subscriber)
    for subscriber in (S, T):
        queue.proves("A/1", id=subscriber)
    queue.join()
    queue.exchange("A", 2)
    queue.now += PROVING_SILENT_SECONDS
    assert notices(queue.proves("A/2"), wire.Relocate) == [], "two reports may be late"
    queue.now += 0.1
    assert len(notices(queue.proves("A/2"), wire.Relocate)) == 1
    assert not queue.machine.subscribers[T].ready
    assert notices(queue.proves("A/1", id=T), wire.Heard)[0] == wire.Heard(3, False), "it learns of it with its next report"
    assert notices(queue.proves("A/2", id=T), wire.Heard)[0] == wire.Heard(3, True)


def test_who_reports_but_never_reads_holds_up_the_others_for_a_bounded_time_only() -> None:
    queue = Queue("A")
    for subscriber in (S, T):
        queue.subscribe(subscriber)
    for subscriber in (S, T):
        queue.proves("A/1", id=subscriber)
    queue.exchange("A", 2)
    for second in range(int(PROVING_SECONDS) + 1):
        queue.proves("A/1", id=T)
        assert queue.state("A") is ExchangeState.STARTING, second
        queue.tick(1.0, "A")
    queue.proves("A/1", id=T)
    assert queue.state("A") is ExchangeState.STARTING, "nobody else has proved it: nothing is known to come through"
    queue.proves("A/2")
    assert queue.state("A") is ExchangeState.ACTIVE


# --- bounds of orders -------------------------------------------------------------------------------------------------


def test_an_exchange_that_never_comes_is_not_awaited_for_ever() -> None:
    queue = Queue("A")
    queue.machine.await_active("B", "waiter", queue.now)
    assert replies(queue.tick(ACTIVE_ANSWER_SECONDS - 0.1, "A")) == []
    [late] = replies(queue.tick(0.1, "A"))
    assert isinstance(late, DeadlineExceeded)
    assert "Exchange 'B' is not known" in str(late)
    assert replies(queue.tick(60.0, "A")) == []


@pytest.mark.parametrize(("order", "bound"), [("move", MOVE_ANSWER_SECONDS), ("drain", DRAIN_ANSWER_SECONDS)])
def test_neither_a_move_nor_a_drain_waits_for_ever(order: str, bound: float) -> None:
    """Somebody is always just joining, so that nobody is moved."""
    queue = Queue("A", "B")
    queue.join()
    queue.subscribe(1000)
    assert (queue.move("B") if order == "move" else queue.drain("A")) == []
    for second in range(1, int(bound) + 1):
        queue.at(1, "A")
        queue.subscribe(1000 + second)
        found = replies(queue.tick(1.0, "A", "B"))
        assert bool(found) == (second == bound), second
    assert isinstance(found[0], DeadlineExceeded)
