"""The Monitor's membership machine: what one that takes over does not know yet, and who is not waited for.
Random order of everything: tests/model/test_membership.py.
"""

from __future__ import annotations

import msgspec
import pytest

from roq.errors import NotReady
from roq.pubsub.monitor.membership import EXCHANGE_SILENT_SECONDS
from roq.pubsub.monitor.records import PROVING_SECONDS, PROVING_SILENT_SECONDS, ExchangeState
from roq.pubsub.monitor.takeover import (
    EXPECTED_SECONDS,
    LIVING_SECONDS,
    NEWCOMER_SECONDS,
    NOBODY_SECONDS,
    REJOIN_SECONDS,
    ExpectedSubscribers,
    FormerExchanges,
)
from roq.wire import monitor as wire
from roq.wire.assignment import FormerProcess
from roq.wire.process import Named
from tests.unit.small_queue import Queue, S, T, notices, taken_over

OLD = FormerProcess("exchange/q/old", "h", "old", lease_seconds=12.0)
ANOTHER = FormerProcess("exchange/q/another", "h", "another", lease_seconds=12.0)


# --- who subscribes ---------------------------------------------------------------------------------------------------


def test_no_exchange_becomes_active_because_nobody_is_known_to_subscribe() -> None:
    queue = taken_over("A")
    assert queue.state("A") is ExchangeState.STARTING
    queue.tick(REJOIN_SECONDS, "A")
    assert queue.state("A") is ExchangeState.STARTING, "nobody has come back: they may only be slow"
    queue.tick(NOBODY_SECONDS - REJOIN_SECONDS, "A")
    assert queue.state("A") is ExchangeState.ACTIVE


@pytest.mark.parametrize(
    ("found", "active"), [(0.1, REJOIN_SECONDS + 0.1), (3.1, REJOIN_SECONDS + 3.1), (4.0, EXPECTED_SECONDS)]
)
def test_who_has_to_look_for_the_monitor_has_the_time_since_the_first_one_had_found_it(found: float, active: float) -> None:
    queue = taken_over("A", sought=True)
    queue.subscribe()  # a stranger: it says nothing about those of the time before
    queue.proves("A/1")
    queue.tick(found, "A")
    with pytest.raises(NotReady):
        queue.join(path=3, exchange="B")
    queue.tick(active - found - 0.1, "A")
    assert queue.state("A") is ExchangeState.STARTING, "another one may look for it"
    queue.tick(0.2, "A")
    assert queue.state("A") is ExchangeState.ACTIVE


def test_the_time_in_which_nobody_could_be_heard_does_not_count() -> None:
    expected = ExpectedSubscribers(None, 100.0, sought=True)
    expected.returns(103.0, None, None)
    expected.stood_still(0.4)
    assert expected.until(REJOIN_SECONDS, 100.4) == pytest.approx(103.4 + REJOIN_SECONDS)


def test_who_was_named_is_known_wherever_it_looks() -> None:
    queue = taken_over("A", expected={S: 100.0}, sought=True)
    queue.subscribe()
    queue.proves("A/1")
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


def test_a_subscriber_that_has_reported_and_is_not_back_yet_is_waited_for() -> None:
    queue = taken_over("A")
    queue.tick(NOBODY_SECONDS - 0.1, "A")
    assert notices(queue.proves("A/1"), wire.Rejoin)
    queue.tick(NEWCOMER_SECONDS - NOBODY_SECONDS + 0.1, "A")
    assert queue.state("A") is ExchangeState.STARTING, "it lives, and publishers would go on without it"
    with pytest.raises(NotReady, match="taken over"):
        queue.join()
    queue.subscribe()
    queue.proves("A/1")
    assert (queue.state("A"), queue.join().path) == (ExchangeState.ACTIVE, 1)


def test_a_subscriber_that_reports_and_never_comes_back_stops_nobody_for_long() -> None:
    queue = taken_over("A")
    queue.proves("A/1")
    for _ in range(4):
        queue.tick(EXPECTED_SECONDS / 5, "A")
        queue.proves("A/1")
    assert queue.state("A") is ExchangeState.STARTING
    queue.tick(EXPECTED_SECONDS / 5, "A")
    assert (queue.state("A"), queue.join().path) == (ExchangeState.ACTIVE, 1)


def test_a_publisher_that_has_a_path_goes_on_at_once() -> None:
    queue = taken_over("A")
    assert (queue.join(path=4, exchange="A").path, queue.state("A")) == (4, ExchangeState.STARTING)


def test_an_activated_backup_serves_new_publishers_once_everybody_is_back() -> None:
    queue = taken_over("A", expected={S: 100.0})
    with pytest.raises(NotReady):
        queue.join()
    queue.subscribe()
    queue.proves("A/1")
    assert queue.join().path == 1


@pytest.mark.parametrize(("silent", "waits"), [(LIVING_SECONDS, EXPECTED_SECONDS), (LIVING_SECONDS + 0.1, REJOIN_SECONDS)])
def test_an_activated_backup_waits_longer_for_who_reported_a_moment_ago(silent: float, waits: float) -> None:
    queue = taken_over("A", expected={S: 100.0, T: 100.0 - silent})
    queue.subscribe(S)
    queue.proves("A/1", id=S)
    queue.tick(waits - 0.1, "A")
    assert queue.state("A") is ExchangeState.STARTING
    queue.proves("A/1", id=S)
    queue.tick(0.1, "A")
    assert queue.state("A") is ExchangeState.ACTIVE


def test_the_first_monitor_of_a_queue_waits_for_nobody() -> None:
    assert Queue("A").join().path == 1


def test_a_fenced_monitor_names_those_that_it_had_told_that_they_are_ready() -> None:
    queue = Queue("A")
    for subscriber in (S, T):
        queue.subscribe(subscriber)
    queue.proves("A/1")
    queue.tick(1.5, "A")
    assert queue.machine.named(queue.now) == Named({S: 1.5}, True)


def test_a_fenced_monitor_that_took_over_itself_may_not_know_all_of_them() -> None:
    queue = taken_over("A")
    queue.subscribe()
    queue.proves("A/1")
    assert queue.machine.named(queue.now) == Named({}, False)
    queue.tick(NEWCOMER_SECONDS, "A")
    assert queue.machine.named(queue.now) == Named({S: NEWCOMER_SECONDS}, True)


def test_a_replay_waits_for_those_that_the_monitor_before_named_but_not_for_ever() -> None:
    queue = taken_over("A")
    queue.subscribe(S)
    queue.proves("A/1", id=S)
    queue.tick(REJOIN_SECONDS - 0.1, "A")
    queue.machine.takeover.expect(Named({S: 1.0, T: LIVING_SECONDS}, True), queue.now)
    named = queue.now
    while queue.now < named + EXPECTED_SECONDS:
        assert queue.state("A") is ExchangeState.STARTING, queue.now
        with pytest.raises(NotReady):
            queue.join(path=4, exchange="gone")
        queue.proves("A/1", id=S)
        queue.tick(0.5, "A")
    assert queue.join(path=4, exchange="gone").path == 5


def test_what_was_active_before_they_were_named_is_waited_for_too() -> None:
    queue = taken_over("A")
    queue.tick(NEWCOMER_SECONDS, "A")
    assert queue.state("A") is ExchangeState.ACTIVE
    queue.machine.takeover.expect(Named({S: 0.0}, True), queue.now)
    for path in (0, 4):
        with pytest.raises(NotReady, match="come back"):
            queue.join(path=path, exchange="gone")
    queue.subscribe()
    queue.proves("A/1")
    assert queue.join(path=4, exchange="gone").path == 5


def test_with_those_back_that_are_named_there_may_be_others() -> None:
    """Named by a Monitor that was not the last one before this, or had only just taken over itself."""
    queue = taken_over("A")
    queue.machine.takeover.expect(Named({S: 0.0}, False), queue.now)
    queue.subscribe(S)
    queue.proves("A/1", id=S)
    assert queue.state("A") is ExchangeState.STARTING
    queue.tick(REJOIN_SECONDS, "A")
    assert queue.state("A") is ExchangeState.ACTIVE
    with pytest.raises(NotReady, match="taken over"):
        queue.join()


def test_all_that_were_named_by_several_are_waited_for() -> None:
    queue = taken_over("A", expected={S: 100.0})
    queue.machine.takeover.expect(Named({T: 0.0}, False), queue.now)
    queue.subscribe(S)
    queue.proves("A/1", id=S)
    with pytest.raises(NotReady, match="taken over"):
        queue.join()
    queue.subscribe(T)
    queue.proves("A/1", id=T)
    assert queue.join().path == 1


@pytest.mark.parametrize("why", ["silent for long", "has left"])
def test_who_will_hardly_come_back_is_not_waited_for(why: str) -> None:
    queue = taken_over("A")
    silent = LIVING_SECONDS + 0.1 if why == "silent for long" else 0.0
    queue.machine.takeover.expect(Named({S: 0.0, T: silent}, True), queue.now)
    queue.subscribe(S)
    queue.proves("A/1", id=S)
    if why == "has left":
        queue.did(queue.machine.leave(T, queue.now))
        assert queue.join().path == 1, "all are back"
    else:
        with pytest.raises(NotReady, match="taken over"):
            queue.join()
    queue.tick(REJOIN_SECONDS, "A")
    assert queue.state("A") is ExchangeState.ACTIVE


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
    queue = taken_over("A", former=FormerExchanges([OLD], 100.0))
    queue.subscribe()
    queue.tick(NEWCOMER_SECONDS, "A")
    assert heard(queue, "A/1") == wire.Heard(3, False, ("Exchange old of the lost host h, which may go on for 7 s",))
    queue.machine.takeover.former.gone("old", "h")
    assert notices(queue.tick(0.0, "A"), wire.Heard) == [wire.Heard(3, True)], "it is told at once"
    assert notices(queue.tick(0.0, "A"), wire.Heard) == []


def test_a_life_whose_lease_has_run_out_is_not_waited_for() -> None:
    queue = taken_over("A", former=FormerExchanges([OLD], 100.0))
    queue.subscribe()
    queue.tick(12.0, "A")
    assert heard(queue, "A/1").ready


def test_a_life_of_a_host_that_is_back_is_not_waited_for() -> None:
    lives = FormerExchanges([OLD, ANOTHER], 100.0)
    lives.keep({("another", "h")})
    assert [words.split(" of ")[0] for words in lives.left(101.0)] == ["Exchange another"]


def test_a_life_that_reports_is_proved_like_any_other() -> None:
    queue = taken_over("A", former=FormerExchanges([OLD], 100.0))
    queue.exchange("old")
    queue.subscribe()
    queue.join(path=4, exchange="old")
    queue.tick(NEWCOMER_SECONDS, "A", "old")
    assert heard(queue, "A/1") == wire.Heard(3, False)
    assert heard(queue, "A/1", "old/1").ready


def test_an_exchange_of_the_same_name_elsewhere_is_not_the_life_that_was_left_behind() -> None:
    """It was being created when its host was lost, and is created on another one."""
    queue = taken_over(former=FormerExchanges([msgspec.structs.replace(OLD, host="lost")], 100.0))
    queue.exchange("old")
    queue.subscribe()
    queue.tick(NEWCOMER_SECONDS, "old")
    assert not heard(queue, "old/1").ready


def test_who_was_ready_before_is_told_at_once() -> None:
    queue = taken_over("A", former=FormerExchanges([OLD], 100.0))
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


def test_an_exchange_is_proved_by_those_only_who_know_that_it_is_listed() -> None:
    queue = taken_over()
    queue.subscribe()
    queue.proves("A/1", version=1)  # kept for a while, though this Monitor did not list it
    queue.tick(REJOIN_SECONDS)
    listed = notices(queue.exchange("A"), wire.Exchanges)
    assert queue.state("A") is ExchangeState.STARTING, "it may be about to leave it"
    queue.proves("A/1", version=1)
    assert queue.state("A") is ExchangeState.STARTING, "sent before it heard of the list"
    queue.proves("A/1", version=listed[-1].version)
    assert queue.state("A") is ExchangeState.ACTIVE


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
    assert notices(queue.at(1, "A"), wire.Heard) == [wire.Heard(3, True, protocol=wire.PROTOCOL)], "its Exchange is not lost"
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
    assert notices(queue.proves("A/1", id=T), wire.Heard)[0] == wire.Heard(3, False, passed_by=1), (
        "it learns of it with its next report"
    )
    assert notices(queue.proves("A/2", id=T), wire.Heard)[0] == wire.Heard(3, True, passed_by=1)


def test_a_subscriber_that_was_passed_by_is_told_so_though_it_has_proved_everything_by_then() -> None:
    """Its word reached it before it reported; what the Exchange had carried until then did not."""
    queue = Queue("A")
    queue.subscribe(S)
    queue.subscribe(T)
    assert notices(queue.proves("A/1", id=S), wire.Heard)[0].passed_by == 0, "new: what came before it was ready is not its own"
    queue.proves("A/1", id=T)
    queue.exchange("A", 2)
    queue.now += PROVING_SILENT_SECONDS + 0.1
    queue.proves("A/2", id=S)
    assert notices(queue.proves("A/2", id=S), wire.Heard)[0] == wire.Heard(3, True)
    assert notices(queue.proves("A/2", id=T), wire.Heard)[0] == wire.Heard(3, True, passed_by=1)


def test_one_that_was_ready_once_is_told_that_it_was_passed_by_though_it_had_just_been_told_that_it_is_not() -> None:
    """An Exchange that may carry messages comes back: whoever has not proved it is not ready until it has."""
    queue = taken_over("A")
    queue.subscribe()
    queue.tick(NEWCOMER_SECONDS + 0.1, "A")
    assert heard(queue, "A/1").ready
    queue.exchange("B")
    queue.join(path=4, exchange="B")
    assert not heard(queue, "A/1").ready
    queue.tick(PROVING_SILENT_SECONDS + 0.1, "A", "B")
    assert queue.state("B") is ExchangeState.ACTIVE, "the silent are not waited for"
    assert heard(queue, "A/1", "B/1") == wire.Heard(3, True, passed_by=1)


@pytest.mark.parametrize(("attached", "passed_by"), [("A/1", 0), ("A/0", 1)])
def test_a_subscriber_that_comes_back_without_what_may_have_carried_messages_is_told_so(attached: str, passed_by: int) -> None:
    queue = taken_over("A")
    queue.machine.join_subscriber(wire.JoinSubscriber(S, (">",), True), b"s21", queue.now)
    assert notices(queue.proves(attached), wire.Heard)[0].passed_by == passed_by
    assert notices(queue.proves("A/1"), wire.Heard)[0].passed_by == passed_by, "said once, of this time"


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
