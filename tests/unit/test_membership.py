"""The Monitor's membership machine: joining and moving. Draining, restarts and silence: test_membership_exchanges.py.
Random order of everything: tests/model/test_membership.py.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from roq.errors import NotReady
from roq.pubsub.monitor.membership import MOVE_SECONDS
from roq.pubsub.monitor.records import JOINING_SECONDS, ExchangeState, Notify, SubscriberRecord, WatchExchange
from roq.pubsub.monitor.takeover import REJOIN_SECONDS
from roq.wire import monitor as wire
from roq.wire.assignment import Overflow
from tests.unit.small_queue import P, Queue, S, T, address, notices, replies

# --- joining ----------------------------------------------------------------------------------------------------------


def test_without_subscribers_an_exchange_is_active_at_once() -> None:
    queue = Queue()
    with pytest.raises(NotReady):
        queue.join()
    assert WatchExchange(address("A")) in queue.exchange("A")
    assert queue.state("A") is ExchangeState.ACTIVE
    assert queue.join() == wire.PublisherWelcome(3, 1, address("A"), Overflow.BLOCK, 4096, (), "", wire.PROTOCOL)


def test_publishers_spread_over_the_exchanges() -> None:
    queue = Queue("A", "B")
    assert [queue.join(id).exchange.id for id in range(1, 6)] == ["A", "B", "A", "B", "A"]


def test_a_subscriber_is_ready_when_it_has_proved_all() -> None:
    queue = Queue("A", "B")
    assert queue.subscribe().exchanges == (address("A"), address("B"))
    assert notices(queue.proves("A/1"), wire.Heard) == [wire.Heard(3, False)]
    assert notices(queue.proves("A/1", "B/1"), wire.Heard) == [wire.Heard(3, True)]


def test_subscribers_that_were_there_before_the_first_exchange_are_told_at_once_that_they_are_ready() -> None:
    queue = Queue()
    queue.subscribe(S)
    queue.subscribe(S + 1)
    queue.exchange("A")
    assert queue.state("A") is ExchangeState.STARTING
    assert notices(queue.proves("A/1"), wire.Heard) == [wire.Heard(3, False)]
    assert notices(queue.proves("A/1", id=S + 1), wire.Heard) == [
        wire.Heard(3, False),  # the answer to the report
        wire.Heard(3, True),  # and what follows from it, to each of them
        wire.Heard(3, True),
    ]
    assert queue.state("A") is ExchangeState.ACTIVE


def test_a_new_exchange_takes_publishers_only_when_proved() -> None:
    queue = Queue("A")
    queue.subscribe()
    queue.proves("A/1")
    assert notices(queue.exchange("B"), wire.Exchanges) == [wire.Exchanges(3, 3, (address("A"), address("B")))]
    queue.join()
    assert queue.state("B") is ExchangeState.STARTING
    assert queue.place() == (1, "A", "")
    [answer] = replies(queue.move("B"))
    assert (answer.moved, len(answer.refused)) == (0, 1)
    assert "no active Exchange 'B'" in answer.refused[0]
    assert queue.machine.await_active("B", "waiter", queue.now) == []
    assert replies(queue.proves("A/1", "B/1")) == [wire.Recorded()]
    assert queue.state("B") is ExchangeState.ACTIVE


def test_a_new_exchange_waits_for_who_is_just_joining_but_not_for_ever() -> None:
    queue = Queue("A")
    queue.subscribe()
    queue.exchange("B")
    assert queue.state("B") is ExchangeState.STARTING
    queue.tick(JOINING_SECONDS + 0.1, "A", "B")
    assert queue.state("B") is ExchangeState.ACTIVE
    assert not queue.machine.subscribers[S].ready


def test_who_reports_without_joining_is_asked_to_join() -> None:
    queue = Queue("A")
    assert queue.at(1, "A") == [Notify(b"p11", wire.Rejoin(3))]
    assert queue.proves("A/1") == [Notify(b"s21", wire.Rejoin(3))]


def test_an_old_list_is_renewed() -> None:
    queue = Queue("A")
    queue.subscribe()
    assert notices(queue.proves(version=1), wire.Exchanges) == [wire.Exchanges(3, 2, (address("A"),))]
    assert notices(queue.proves(version=2), wire.Exchanges) == []


def test_a_rejoining_publisher_stays_where_it_is() -> None:
    queue = Queue("A", "B")
    welcome = queue.join(P, 4, "B")
    assert (welcome.path, welcome.exchange.id) == (4, "B")


def test_a_publisher_whose_exchange_is_gone_gets_another_path() -> None:
    queue = Queue("A")
    with pytest.raises(NotReady):
        queue.join(P, 4, "gone")  # it may only not have reported to this Monitor yet
    queue.now += REJOIN_SECONDS
    request = wire.JoinPublisher(P, 4, "gone", "gone/1")
    welcome = queue.machine.join_publisher(request, b"p1", queue.now)
    assert (welcome.path, welcome.exchange.id, welcome.abandon) == (5, "A", "gone/1"), "it replays there"


def test_a_publisher_that_rejoins_from_a_retiring_exchange_is_moved_with_fin() -> None:
    queue = Queue("A", "B")
    queue.subscribe()
    queue.proves("A/1", "B/1")
    queue.drain("B")
    assert queue.state("B") is ExchangeState.RETIRING
    welcome = queue.join(P, 4, "B")
    assert (welcome.path, welcome.exchange.id) == (5, "A")
    assert queue.place() == (4, "B", "A")


def test_a_publisher_that_joins_twice_is_where_it_says() -> None:
    """The second request overtook the first answer: the Monitor's guess yields to the publisher's word."""
    queue = Queue("A", "B")
    queue.join()
    queue.join(12)
    assert queue.join().path == 2
    queue.at(1, "A")
    queue.at(2, "B")
    assert queue.place() == (2, "B", "")
    queue.machine.publishers[P].exchange = "A"
    queue.at(2, "B", leaving=1)
    assert queue.place() == (2, "A", ""), "while a FIN is on its way the report proves nothing"
    queue.at(2, "B")
    assert queue.place() == (2, "B", "")


def test_where_a_publisher_may_have_come_by_joining_twice_is_not_retired() -> None:
    queue = Queue("A", "B")
    queue.join()
    queue.machine.publishers[P].path = 1
    welcome = queue.join()
    other = "B" if welcome.exchange.id == "A" else "A"
    queue.machine.publishers[P].offer(other, 1)
    queue.drain(other)
    assert queue.state(other) is ExchangeState.DRAINING
    queue.at(2, welcome.exchange.id)
    assert queue.state(other) is ExchangeState.DRAINED


# --- moves ------------------------------------------------------------------------------------------------------------


def test_a_move_is_over_when_its_fin_came_out() -> None:
    queue = Queue("A", "B")
    queue.join()
    instructions = queue.move("B")
    assert instructions == [Notify(b"p11", wire.Relocate(3, 2, address("B")))]
    assert notices(queue.at(1, "A"), wire.Relocate) == [wire.Relocate(3, 2, address("B"))], "repeated until it is obeyed"
    assert notices(queue.at(2, "B", leaving=1), wire.Relocate) == []
    assert queue.fin(1, "B") == [], "not out of the Exchange it was on"
    assert replies(queue.fin(1, "A")) == [wire.Moved(1)]
    assert queue.place() == (2, "B", "")


def test_control_frames_of_strangers_change_nothing() -> None:
    queue = Queue("A")
    queue.join()
    assert queue.fin(1, "A", id=99) == queue.opened(1, "A", id=99) == []


def test_moves_that_are_refused_say_why() -> None:
    queue = Queue("A", "B")
    queue.join()
    [nobody] = replies(queue.move("B", id=99))
    assert "no publisher" in nobody.refused[0]
    [nowhere] = replies(queue.move("C"))
    assert "no active Exchange" in nowhere.refused[0]
    assert replies(queue.move("A")) == [wire.Moved(0)]
    queue.move("B")
    [twice] = replies(queue.did(queue.machine.move([(P, "B")], "again", queue.now)))
    assert "already on its way" in twice.refused[0]


def test_a_move_that_takes_too_long_is_not_counted() -> None:
    queue = Queue("A", "B")
    queue.join()
    queue.move("B")
    for _ in range(int(MOVE_SECONDS)):
        queue.at(1, "A")
        assert replies(queue.tick(1.0, "A", "B")) == []
    queue.at(1, "A")
    [answer] = replies(queue.tick(1.0, "A", "B"))
    assert (answer.moved, len(answer.refused)) == (0, 1)


def test_a_publisher_that_leaves_ends_its_move() -> None:
    queue = Queue("A", "B")
    queue.join()
    queue.move("B")
    [answer] = replies(queue.did(queue.machine.leave(P, queue.now)))
    assert (answer.moved, len(answer.refused)) == (0, 1)


def test_a_fin_that_the_monitor_missed() -> None:
    """The publisher gave up on it after its bound; its report says that nothing is under way any more."""
    queue = Queue("A", "B")
    queue.join()
    queue.move("B")
    queue.opened(2, "B")
    queue.at(2, "B", leaving=1)
    assert queue.place() == (1, "A", "B")
    assert replies(queue.at(2, "B")) == [wire.Moved(1)]
    assert queue.place() == (2, "B", "")


def test_a_publisher_that_went_to_the_first_of_two_targets() -> None:
    """Found by the model: the move to B was given up, C was named, and then it turned out that B had been reached."""
    queue = Queue("A", "B", "C")
    queue.join()
    queue.move("B")
    for _ in range(int(MOVE_SECONDS) + 1):
        queue.at(1, "A")
        queue.tick(1.0, "A", "B", "C")
    queue.did(queue.machine.move([(P, "C")], "second", queue.now))
    queue.drain("B")
    assert queue.state("B") is ExchangeState.DRAINING, "the publisher may be there"
    queue.opened(2, "B")
    assert queue.place() == (1, "A", "B")
    queue.fin(1, "A")
    assert queue.place()[:2] == (2, "B")
    assert queue.state("B") is ExchangeState.DRAINING
    queue.fin(2, "B")
    assert queue.state("B") is ExchangeState.DRAINED


def test_moves_and_joining_subscribers_wait_for_each_other() -> None:
    queue = Queue("A", "B")
    queue.join()
    queue.subscribe()
    assert queue.move("B") == []
    assert notices(queue.proves("A/1", "B/1"), wire.Relocate) == [wire.Relocate(3, 2, address("B"))]
    with pytest.raises(NotReady):
        queue.subscribe(T)
    queue.fin(1, "A")
    with pytest.raises(NotReady):
        queue.subscribe(T)
    queue.opened(2, "B")
    queue.subscribe(T)


def test_a_subscriber_that_never_gets_ready_stops_nothing() -> None:
    queue = Queue("A", "B")
    queue.join()
    queue.subscribe()
    queue.move("B")
    queue.at(1, "A")
    assert len(notices(queue.tick(JOINING_SECONDS + 0.1, "A", "B"), wire.Relocate)) == 1


# --- thousands of subscribers -------------------------------------------------------------------------------------------

MANY = 200


class Counted(dict[int, SubscriberRecord]):
    """Subscribers, and how many of them were looked at one after the other."""

    looked_at = 0

    def values(self) -> Iterator[SubscriberRecord]:  # type: ignore[override]
        for one in super().values():
            self.looked_at += 1
            yield one


def crowd() -> tuple[Queue, Counted]:
    """A queue with two Exchanges, a publisher, and MANY subscribers that are ready for a while."""
    queue = Queue("A", "B")
    queue.join()
    queue.opened(1, "A")
    for id in range(S, S + MANY):
        queue.subscribe(id)
        queue.proves("A/1", "B/1", id=id)
    queue.tick(JOINING_SECONDS, "A", "B")
    counted = queue.machine.subscribers = Counted(queue.machine.subscribers)
    return queue, counted


def test_a_report_that_changes_nothing_costs_the_same_with_many_subscribers() -> None:
    queue, counted = crowd()
    report = wire.SubscriberReport(S, 99, ("A/1", "B/1"), 0, 0, 0, 0, 0.0, 0.0, 0.0)
    for _ in range(MANY):
        assert queue.machine.subscriber_report(report, b"s21", queue.now) == [Notify(b"s21", wire.Heard(3, True))]
    assert counted.looked_at == 0


def test_what_waits_for_a_report_is_seen_at_once() -> None:
    """An Exchange in its next life, its publisher's replay and who waits for it, all of which the last report releases."""
    queue, counted = crowd()
    queue.exchange("A", 2)
    assert queue.machine.await_active("A", "waiter", queue.now) == []
    for id in range(S, S + MANY - 1):
        assert notices(queue.proves("A/2", "B/1", id=id), wire.Relocate) == []
    assert queue.state("A") is ExchangeState.STARTING
    last = queue.proves("A/2", "B/1", id=S + MANY - 1)
    assert queue.state("A") is ExchangeState.ACTIVE
    assert replies(last) == [wire.Recorded()]
    queue.at(2, "A")
    counted.looked_at = 0
    queue.machine.subscriber_report(wire.SubscriberReport(S, 99, ("A/2", "B/1"), 0, 0, 0, 0, 0.0, 0.0, 0.0), b"", queue.now)
    assert counted.looked_at == 0
