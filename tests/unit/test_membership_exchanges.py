"""The Monitor's membership machine: draining, restarts and silence. Joining and moving: test_membership.py."""

from __future__ import annotations

import pytest

from roq.errors import ExchangeNotFound, LastExchange, NotReady
from roq.pubsub.monitor.membership import (
    EXCHANGE_SILENT_SECONDS,
    LINK_SECONDS,
    PUBLISHER_SILENT_SECONDS,
    SUBSCRIBER_SILENT_SECONDS,
    Membership,
)
from roq.pubsub.monitor.records import JOINING_SECONDS, AnswerDue, ExchangeState, Retire, Unwatch, WatchExchange
from roq.pubsub.monitor.takeover import HEARD_SECONDS, KNOWN_SECONDS, REJOIN_SECONDS, HeardSubscribers, Takeover
from roq.wire import monitor as wire
from tests.unit.small_queue import USE, P, Queue, S, T, address, notices, replies

# --- being heard ------------------------------------------------------------------------------------------------------


def test_nobody_publishes_through_an_exchange_before_the_monitor_hears_it() -> None:
    """It would miss the publisher's OPEN, its first MARK, and the FIN of one that closes at once."""
    queue = Queue()
    queue.reports("A")
    with pytest.raises(NotReady):
        queue.join()
    queue.machine.exchange_heard("A/2", queue.now)
    assert queue.state("A") is ExchangeState.STARTING, "another life"
    queue.machine.exchange_heard("A/1", queue.now)
    assert queue.join().exchange.id == "A"


# --- draining ---------------------------------------------------------------------------------------------------------


def test_draining_moves_then_retires_then_ends() -> None:
    queue = Queue("A", "B")
    queue.subscribe()
    queue.proves("A/1", "B/1")
    queue.join()
    instructions = queue.drain("A")
    assert notices(instructions, wire.Relocate) == [wire.Relocate(3, 2, address("B"))]
    assert Retire(address("A")) not in instructions, "its FIN has not come through"
    queue.opened(2, "B")
    assert Retire(address("A")) not in queue.at(2, "B", leaving=1)
    assert Retire(address("A")) in queue.fin(1, "A")
    assert queue.machine.retiring() == [Retire(address("A"))]
    assert replies(queue.proves("A/1", "B/1")) == []
    done = queue.proves("B/1")
    assert replies(done) == [wire.Drained()]
    assert Unwatch(address("A")) in done
    assert notices(done, wire.Exchanges)[-1].exchanges == (address("B"),)


def test_a_publisher_that_comes_back_to_a_drained_exchange_is_moved_until_it_is_away() -> None:
    queue = Queue("A", "B")
    assert queue.join().exchange.id == "A"
    queue.tick(PUBLISHER_SILENT_SECONDS + 1.0, "A", "B")
    queue.drain("A")
    assert queue.state("A") is ExchangeState.DRAINED, "the silent publisher is forgotten"
    assert queue.join(path=1, exchange="A").exchange.id == "B"
    queue.at(1, "A")
    queue.tick(EXCHANGE_SILENT_SECONDS + 1.0, "A")
    assert queue.place() == (1, "A", ""), "B died before it came there"
    assert notices(queue.exchange("B", 2), wire.Relocate) == [wire.Relocate(3, 2, address("B", 2))]


def test_draining_what_is_not_there_or_the_last() -> None:
    queue = Queue("A")
    with pytest.raises(ExchangeNotFound):
        queue.drain("B")
    with pytest.raises(LastExchange):
        queue.drain("A")


def test_an_exchange_that_only_starts_does_not_count_as_another() -> None:
    queue = Queue("A")
    queue.subscribe()
    queue.proves("A/1")
    queue.exchange("B")
    with pytest.raises(LastExchange):
        queue.drain("A")
    assert replies(queue.drain("B")) == [wire.Drained()], "nothing ever passed through B"
    assert queue.state("B") is ExchangeState.DRAINED


def test_draining_two_leaves_the_last() -> None:
    queue = Queue("A", "B")
    queue.join()
    queue.drain("A")
    with pytest.raises(LastExchange):
        queue.drain("B")


def test_draining_waits_while_the_only_other_one_dies() -> None:
    queue = Queue("A", "B")
    queue.join()
    queue.drain("A")
    queue.at(1, "A")
    queue.tick(EXCHANGE_SILENT_SECONDS + 0.1, "A")
    assert queue.place() == (1, "A", "")
    assert queue.state("A") is ExchangeState.DRAINING
    assert notices(queue.exchange("C"), wire.Relocate) == [wire.Relocate(3, 2, address("C"))]


def test_a_draining_exchange_gets_no_publishers() -> None:
    queue = Queue("A", "B")
    queue.subscribe()
    queue.proves("A/1", "B/1")
    queue.drain("A")
    assert [queue.join(id).exchange.id for id in (1, 2)] == ["B", "B"]


def test_draining_twice_is_answered_twice() -> None:
    queue = Queue("A", "B")
    queue.join()
    queue.drain("A")
    queue.did(queue.machine.drain("A", "again", queue.now))
    assert [one.waiter for one in queue.fin(1, "A") if isinstance(one, AnswerDue)] == ["drain", "again"]


def test_whoever_is_gone_is_not_answered() -> None:
    queue = Queue("A", "B")
    queue.join()
    queue.drain("A")
    queue.machine.forget("drain")
    assert replies(queue.fin(1, "A")) == []


# --- restarts and silence ---------------------------------------------------------------------------------------------


def test_a_restarted_exchange_has_to_be_proved_again() -> None:
    queue = Queue("A")
    queue.subscribe()
    queue.proves("A/1")
    queue.join()
    instructions = queue.exchange("A", 2)
    assert instructions[:2] == [Unwatch(address("A")), WatchExchange(address("A", 2))]
    assert notices(instructions, wire.Exchanges)[0].exchanges == (address("A", 2),)
    assert queue.state("A") is ExchangeState.STARTING, "nobody may send through it before it is proved"
    assert notices(queue.proves("A/1"), wire.Relocate) == []
    proved = queue.proves("A/2")
    assert queue.state("A") is ExchangeState.ACTIVE
    assert notices(proved, wire.Relocate) == [wire.Relocate(3, 2, address("A", 2), "A/1")], "its publisher replays there"
    queue.opened(2, "A", replayed=True)
    assert (queue.machine.publishers[P].path, queue.machine.publishers[P].lost) == (2, "")


def test_while_one_is_proved_again_another_is_not_taken_for_proved() -> None:
    queue = Queue("A")
    queue.subscribe()
    queue.proves("A/1")
    queue.exchange("B")
    queue.exchange("A", 2)
    assert queue.state("B") is ExchangeState.STARTING
    queue.proves("A/2", "B/1")
    assert queue.state("B") is ExchangeState.ACTIVE


@pytest.mark.parametrize("proved", [("A/1", "B/1"), ("B/1",)])
def test_an_exchange_that_restarts_while_it_retires_stays_out(proved: tuple[str, ...]) -> None:
    queue = Queue("A", "B")
    queue.subscribe()
    queue.proves("A/1", "B/1")
    queue.drain("A")
    queue.proves(*proved)
    queue.exchange("A", 2)
    queue.proves("B/1", "A/2")
    queue.proves("B/1")
    assert queue.state("A") is ExchangeState.DRAINED


def test_an_exchange_that_comes_back_with_publishers_on_it_is_not_retired_at_once() -> None:
    queue = Queue("A", "B")
    queue.subscribe()
    queue.proves("A/1", "B/1")
    queue.join()
    queue.exchange("A", 2)
    assert queue.state("A") is ExchangeState.STARTING
    with pytest.raises(NotReady):
        queue.drain("A")


def test_silent_exchanges_and_publishers_are_forgotten() -> None:
    queue = Queue("A")
    queue.subscribe()
    queue.join()
    queue.tick(EXCHANGE_SILENT_SECONDS - 0.1)
    assert queue.machine.publishers[P].lost == ""
    assert notices(queue.tick(0.2), wire.Exchanges) == [], "subscribers keep their place until the publisher has replayed"
    assert queue.machine.publishers[P].lost == "A/1"
    gone = queue.tick(PUBLISHER_SILENT_SECONDS)
    assert queue.machine.publishers == {}
    assert "A" in queue.machine.exchanges
    gone = queue.tick(0.1)
    assert Unwatch(address("A")) in gone
    assert notices(gone, wire.Exchanges)[0].exchanges == ()


def test_a_publisher_learns_that_its_exchange_fell_silent_before_another_is_there() -> None:
    queue = Queue("A")
    queue.join()
    assert notices(queue.at(1, "A"), wire.Heard) == [wire.Heard(3, True, protocol=wire.PROTOCOL)]
    queue.tick(EXCHANGE_SILENT_SECONDS + 0.1)
    assert notices(queue.at(1, "A"), wire.Heard) == [wire.Heard(3, True, gone="A/1", gone_path=1, protocol=wire.PROTOCOL)]
    queue.exchange("B")
    queue.at(2, "B")
    assert notices(queue.at(2, "B"), wire.Heard) == [wire.Heard(3, True, gone_path=1, protocol=wire.PROTOCOL)], (
        "of paths that are over nothing is said"
    )


def test_a_publisher_whose_link_broke_goes_to_another_exchange_at_once() -> None:
    queue = Queue("A", "B")
    queue.subscribe()
    queue.proves("A/1", "B/1")
    queue.join()
    told = notices(queue.at(1, "", lost="A/1"), wire.Relocate)
    assert told == [wire.Relocate(3, 2, address("B"), "A/1")]
    queue.opened(2, "B", replayed=True)
    assert queue.machine.publishers[P].exchange == "B"
    assert queue.machine.publishers[P].lost == ""


def test_only_the_link_broke() -> None:
    """The only Exchange reports on: it is taken again, on the next path, with a replay."""
    queue = Queue("A")
    queue.join()
    assert notices(queue.at(1, "", lost="A/1"), wire.Relocate) == [], "it may be dead"
    queue.now += LINK_SECONDS + 0.1
    queue.exchange("A")
    assert notices(queue.at(1, "", lost="A/1"), wire.Relocate) == [wire.Relocate(3, 2, address("A"), "A/1")]


def test_who_lost_its_exchange_waits_for_a_restarted_monitor_to_know_the_subscribers() -> None:
    queue = Queue("A", "B")
    with pytest.raises(NotReady):
        queue.join(path=4, exchange="")
    queue.now += REJOIN_SECONDS
    assert queue.join(path=4, exchange="").path == 5


def test_an_activated_backup_waits_for_the_subscribers_that_reported_to_it_only() -> None:
    queue = Queue()
    queue.machine = Membership(3, USE, Takeover(None, {S: queue.now, T: queue.now}))
    queue.exchange("A")
    for subscriber in (S, T):
        with pytest.raises(NotReady, match="come back"):
            queue.join(path=4, exchange="")
        queue.subscribe(subscriber)
        with pytest.raises(NotReady, match="come back"):
            queue.join(path=4, exchange="")  # it would not hear what comes through A
        queue.proves("A/1", id=subscriber)
    with pytest.raises(NotReady, match="come back"):
        queue.join(path=4, exchange="elsewhere")  # its link is fine: that Exchange will report
    assert queue.join(path=4, exchange="").path == 5


def test_a_backup_knows_the_subscribers_once_all_had_time_to_report() -> None:
    roll = HeardSubscribers()
    assert roll.expected(100.0) is None, "nobody has reported: there may be some"
    roll.heard(S, 100.0)
    assert roll.expected(100.0 + KNOWN_SECONDS - 0.1) is None
    roll.heard(T, 101.0)
    assert roll.expected(100.0 + KNOWN_SECONDS) == {S: 100.0, T: 101.0}
    assert roll.expected(100.0 + HEARD_SECONDS + 0.5) == {T: 101.0}, "the other has left, or is not heard by us"
    assert roll.expected(200.0) is None, "nobody at all: it stood still itself"


def test_a_silent_subscriber_is_evicted_and_stops_nobody() -> None:
    queue = Queue("A")
    queue.subscribe()
    queue.proves("A/1")
    queue.exchange("B")
    while S in queue.machine.subscribers:
        last = queue.tick(1.0, "A", "B")
    [evicted] = notices(last, wire.Evicted)
    assert evicted.silent_seconds > SUBSCRIBER_SILENT_SECONDS
    assert queue.state("B") is ExchangeState.ACTIVE


def test_a_subscriber_that_gave_up_is_not_ready_and_breaks_nothing() -> None:
    """SlowSubscriber: it detaches from all and goes on reporting; the invariants must hold on."""
    queue = Queue("A")
    queue.subscribe()
    queue.proves("A/1")
    queue.tick(JOINING_SECONDS, "A")
    assert notices(queue.proves(), wire.Heard) == [wire.Heard(3, False)]
    queue.exchange("B")
    assert queue.state("B") is ExchangeState.ACTIVE


def test_a_target_that_dies_is_given_up() -> None:
    queue = Queue("A", "B")
    queue.join()
    queue.move("B")
    queue.at(1, "A")
    [answer] = replies(queue.tick(EXCHANGE_SILENT_SECONDS + 0.1, "A"))
    assert (answer.moved, len(answer.refused)) == (0, 1)
    assert queue.place() == (1, "A", "")


def lost_under(queue: Queue) -> None:
    """The publisher's path 4 ran on an Exchange that is gone, and it was told to go on as path 5 on B."""
    assert queue.join(path=4, exchange="gone").path == 5
    assert queue.place() == (5, "B", "")


@pytest.mark.parametrize("opened", [False, True])
def test_a_late_report_of_a_loss_that_is_dealt_with_moves_nobody(opened: bool) -> None:
    queue = Queue("B")
    queue.join(T)
    queue.tick(REJOIN_SECONDS, "B")
    lost_under(queue)
    if opened:
        queue.opened(5, "B", replayed=True)
    assert notices(queue.at(4, "", lost="gone/1"), wire.Relocate) == []
    queue.exchange("C")
    assert notices(queue.tick(0.5, "B", "C"), wire.Relocate) == []
    assert (queue.place(), queue.machine.publishers[P].lost) == ((5, "B", ""), "")
    queue.at(5, "B")
    assert queue.place() == (5, "B", "")


def test_a_link_that_breaks_before_the_next_path_has_begun_is_a_loss_of_its_own() -> None:
    queue = Queue("B")
    queue.join(T)
    queue.tick(REJOIN_SECONDS, "B")
    lost_under(queue)
    queue.exchange("C")
    [again] = notices(queue.at(4, "", lost="B/1"), wire.Relocate)
    assert again == wire.Relocate(3, 6, address("C"), "B/1")


# --- invariants -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("member", "field", "value", "words"),
    [
        ("exchanges", "heard", False, "does not hear it"),
        ("publishers", "relocated", True, "and nowhere"),
        ("publishers", "target", "B", "moved to an Exchange that is starting"),
        ("subscribers", "attached", frozenset(), "carries unproved"),
        ("subscribers", "was_told", False, "was never"),
    ],
)
def test_check_sees_what_is_wrong(member: str, field: str, value: object, words: str) -> None:
    queue = Queue("A")
    queue.subscribe()
    queue.proves("A/1")
    queue.join()
    queue.reports("B")
    queue.machine.check()
    setattr(next(iter(getattr(queue.machine, member).values())), field, value)
    with pytest.raises(AssertionError, match=words):
        queue.machine.check()
