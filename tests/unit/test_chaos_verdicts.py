"""The verdicts on a work queue, a recorded queue and shuffles, on histories made up to hold each kind of violation."""

from __future__ import annotations

import tracemalloc
from itertools import count as counter

import pytest

from roq.tools.chaos.history import GapReported, Sent, SubscriberHistory
from roq.tools.chaos.ledger import SETTLED_KEPT, LeaseLedger
from roq.tools.chaos.promises import TopicOrder
from roq.tools.chaos.recorded_load import DurableCounts, RecordedFindings, recorded_verdict
from roq.tools.chaos.shuffle_load import shuffle_verdict
from roq.tools.chaos.shuffle_work import AttemptAccount, ShuffleAccount, ShuffleBooks, differences
from roq.tools.chaos.task_load import task_verdict
from roq.tools.chaos.verdict import LoadOutcome, LoadVerdict, Numbers
from roq.tools.chaos.worker import (
    BIG_EVERY,
    WorkerEvent,
    WorkerEventKind,
    identify,
    message_payload,
    message_topic,
    task_payload,
)
from roq.wire.shuffle import Receipt
from roq.wire.task import Status

TOOK, SETTLES, SETTLED = WorkerEventKind.TOOK, WorkerEventKind.SETTLES, WorkerEventKind.SETTLED
LOST, UNSURE, ENDED = WorkerEventKind.LOST, WorkerEventKind.UNSURE, WorkerEventKind.ENDED
LEASE = 4.0


class Scene:
    """A ledger, and workers that do things one after the other, a second each."""

    def __init__(self, handed_over: int = 9, *, ordered: bool = False, clocks_move: bool = False) -> None:
        self.ledger = LeaseLedger(lambda _: handed_over, ordered=ordered, clocks_move=clocks_move)
        self.clock = counter(1)
        self._at: dict[str, WorkerEvent] = {}

    def take(self, worker: str, number: int, order: int, *, id: str = "", topic: str = "", publisher: int = 0) -> None:
        now = float(next(self.clock))
        event = WorkerEvent(TOOK, worker, now, "", publisher, number, order, now + LEASE, topic, id or f"t{number}")
        self._at[worker] = event
        self.ledger.take(event)

    def tell(self, worker: str, kind: WorkerEventKind, what: str = "ack") -> None:
        at = self._at[worker]
        about = at.publisher, at.number, at.order, at.ends, at.topic, at.id
        self.ledger.take(WorkerEvent(kind, worker, float(next(self.clock)), what, *about))

    def settle(self, worker: str, what: str = "ack", answer: WorkerEventKind = SETTLED) -> None:
        self.tell(worker, SETTLES, what)
        self.tell(worker, answer, what)

    def ack(self, worker: str, number: int, order: int) -> None:
        self.take(worker, number, order)
        self.settle(worker)

    def later(self, seconds: int) -> None:
        for _ in range(seconds):
            next(self.clock)


def status(ready: int = 0, leased: int = 0, completed: int = 9, inserted: int = 9, behind_ms: int = 0) -> Status:
    return Status(ready, 0, leased, 0, completed, inserted, -1, behind_ms)


def all_done(first: int = 1, last: int = 9) -> Scene:
    scene = Scene()
    for number in range(first, last + 1):
        scene.ack("a", number, number)
    return scene


def verdict(scene: Scene, found: Status | None = None, confirmed: int = 9) -> LoadVerdict:
    return task_verdict(scene.ledger, Numbers([(1, confirmed)]), 9, found or status())


# --- tasks ------------------------------------------------------------------------------------------------------------


def test_all_is_well() -> None:
    scene = all_done(2)
    scene.take("a", 1, 20)
    scene.settle("a", "extend")
    scene.settle("a", "release")
    scene.take("b", 1, 21)
    scene.later(5)  # it runs out
    scene.take("a", 1, 22)
    scene.settle("a", answer=UNSURE)
    scene.later(5)
    scene.take("c", 1, 23)
    scene.settle("c")
    found = verdict(scene)
    assert (found.outcome, found.problems, found.undecided) == (LoadOutcome.PASSED, (), ())
    assert (found.counts["acked"], found.counts["leases"], found.counts["leased again"]) == (9, 12, 3)


def test_a_confirmed_task_that_is_gone_is_lost() -> None:
    found = verdict(all_done(2), status(completed=8, inserted=8))
    assert found.outcome is LoadOutcome.FAILED
    assert found.counts["lost"] == 1
    assert any("lost 1..1" in text for text in found.problems)


def test_a_task_that_is_there_still_is_not_decided() -> None:
    found = verdict(all_done(2), status(ready=1, completed=8))
    assert (found.outcome, found.problems) == (LoadOutcome.UNDECIDED, ())
    assert "not empty" in found.undecided[0]


def test_no_answer_and_no_work_are_not_decided() -> None:
    assert task_verdict(all_done().ledger, Numbers([(1, 9)]), 9, None).outcome is LoadOutcome.UNDECIDED
    nothing = task_verdict(LeaseLedger(lambda _: 0), Numbers(), 0, status(completed=0, inserted=0))
    assert nothing.undecided == ("no put was confirmed",)


def test_what_is_wrong_is_failed_though_not_all_is_decided() -> None:
    scene = all_done()
    scene.take("b", 3, 30)
    assert verdict(scene, status(leased=1)).outcome is LoadOutcome.FAILED


def test_an_ack_without_an_answer_may_have_taken_effect() -> None:
    scene = all_done(2)
    scene.take("a", 1, 20)
    scene.settle("a", answer=UNSURE)
    found = verdict(scene)
    assert (found.outcome, found.counts["acks without an answer"]) == (LoadOutcome.PASSED, 1)


def test_the_counts_of_the_queue_must_fit() -> None:
    assert any("completed" in text for text in verdict(all_done(), status(completed=8)).problems)
    assert any("counts 12" in text for text in verdict(all_done(), status(completed=12, inserted=12)).problems)
    dead = Status(0, 0, 0, 1, 8, 9)
    assert verdict(all_done(2), dead).outcome is LoadOutcome.FAILED


@pytest.mark.parametrize("number", [0, 10])
def test_a_task_that_nobody_put_is_invented(number: int) -> None:
    scene = all_done()
    scene.take("a", number, 20)
    scene.settle("a")
    found = verdict(scene)
    assert (found.outcome, found.counts["invented"]) == (LoadOutcome.FAILED, 1)


def test_acked_and_leased_again() -> None:
    scene = all_done()
    scene.take("b", 3, 30)
    assert "was acked by a and leased again by b" in verdict(scene).problems[0]


def test_an_older_lease_that_is_heard_of_late_is_none_again() -> None:
    scene = all_done(2)
    scene.take("b", 1, 20)
    scene.later(5)
    scene.take("a", 1, 21)
    scene.settle("a")
    scene.settle("b", answer=LOST)
    found = verdict(scene)
    assert (found.outcome, found.counts["leases lost"]) == (LoadOutcome.PASSED, 1)


def test_acked_twice() -> None:
    scene = all_done()
    scene.take("b", 3, 30)
    scene.settle("b")
    assert verdict(scene).outcome is LoadOutcome.FAILED


def test_two_workers_in_one_lease() -> None:
    scene = Scene()
    scene.take("a", 1, 20)
    scene.later(5)
    scene.take("b", 1, 20)
    assert "delivered twice in one lease" in verdict(scene).problems[0]


def test_a_lease_that_holds_is_given_to_another() -> None:
    scene = Scene()
    scene.take("a", 1, 20)
    scene.take("b", 1, 21)
    assert "before the lease of a was over" in verdict(scene).problems[0]
    moved = Scene(clocks_move=True)
    moved.take("a", 1, 20)
    moved.take("b", 1, 21)
    assert not moved.ledger.wrong


def test_an_old_lease_is_settled_while_another_one_holds() -> None:
    scene = Scene()
    scene.take("a", 1, 20)
    scene.later(5)
    scene.take("b", 1, 21)
    scene.settle("a", "extend")
    assert "a settled an old lease while b had a newer one" in verdict(scene).problems[0]


def test_one_put_becomes_two_tasks() -> None:
    scene = Scene()
    scene.take("a", 1, 20, id="x")
    scene.later(5)
    scene.take("a", 1, 21, id="y")
    assert "became two tasks: x and y" in verdict(scene).problems[0]


def test_a_task_that_was_acked_long_ago_is_known_still() -> None:
    scene = Scene(2 * SETTLED_KEPT)
    for number in range(1, 2 * SETTLED_KEPT + 1):
        scene.ack("a", number, number)
    assert not scene.ledger.judge()
    scene.take("b", 1, 1)  # its line was late
    assert not scene.ledger.wrong
    scene.take("b", 1, 9 * SETTLED_KEPT)
    assert scene.ledger.wrong == ["task 1 was acked and leased again by b"]


def test_the_ledger_of_an_hour_is_small() -> None:
    """72,000 tasks, as a run of an hour has: 0.6 MB for their places in the log, and the leases of the last ones. What a task
    adds is the same from the first thousands on, so that those after them are reckoned."""
    hour, many, last = 72_000, 4 * SETTLED_KEPT, 10 * SETTLED_KEPT
    ledger = LeaseLedger(lambda _: hour)
    traced: dict[int, int] = {}
    tracemalloc.start()
    try:
        for number in range(1, last + 1):
            for kind, what in ((TOOK, ""), (SETTLES, "ack"), (SETTLED, "ack")):
                ledger.take(WorkerEvent(kind, "a", float(number), what, 0, number, number, number + LEASE, "", f"t{number}"))
            if number in (SETTLED_KEPT, many, last):
                traced[number] = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    each = (traced[last] - traced[many]) / (last - many)
    assert traced[many] - traced[SETTLED_KEPT] + each * (hour - many) < 1_000_000


def test_payloads_say_what_they_are() -> None:
    for number in (1, BIG_EVERY, 12345):
        assert identify(task_payload(number), messages=False) == (0, number)
        assert identify(task_payload(number)[:-1], messages=False) == (0, 0)
        payload, topic = message_payload(1, number), message_topic(number)
        assert identify(payload, messages=True, sequence=number, topic=topic) == (1, number)
        assert identify(payload, messages=True, sequence=number + 1, topic=topic) == (0, 0)
        assert identify(payload, messages=True, sequence=number, topic="x") == (0, 0)
    assert identify(b"", messages=False) == identify(b"", messages=True) == (0, 0)


# --- groups -----------------------------------------------------------------------------------------------------------


def heard(*numbers: int) -> SubscriberHistory:
    found = SubscriberHistory(1)
    for number in numbers:
        found.arrived(0, number)
    return found


def findings(tape: SubscriberHistory | None = None, durable: SubscriberHistory | None = None) -> RecordedFindings:
    counts = DurableCounts([Numbers()])
    counts.end_life(durable or heard(*range(1, 10)))
    return RecordedFindings([Sent(9, 9)], counts, status(), tape or heard(*range(1, 10)), durable_ended=True)


def recorded(scene: Scene, found: RecordedFindings) -> tuple[LoadOutcome, str]:
    judged = recorded_verdict(scene.ledger, found)
    return judged.outcome, "; ".join((*judged.problems, *judged.undecided))


def test_a_recorded_queue_is_well() -> None:
    assert recorded(all_done(), findings()) == (LoadOutcome.PASSED, "")
    twice = findings()
    twice.durable.end_life(heard(8, 9))  # a later life may repeat
    assert recorded(all_done(), twice) == (LoadOutcome.PASSED, "")
    assert twice.durable.repeated == 2


@pytest.mark.parametrize(
    ("found", "says"),
    [
        (findings(tape=heard(*range(1, 9))), "tapes: stored by publisher 0 and not there 9..9"),
        (findings(tape=heard(*range(1, 10), 4)), "tapes: 1 messages duplicated"),
        (findings(tape=heard(1, 2, 4, 3, *range(5, 10))), "tapes: 1 messages reordered"),
        (findings(durable=heard(*range(1, 5), *range(6, 10))), "durable subscriber: stored by publisher 0 and not there 5..5"),
        (findings(durable=heard(*range(1, 10), 9)), "durable subscriber: 1 messages twice in one life"),
        (findings(durable=heard(1, 2, 4, 3, *range(5, 10))), "durable subscriber: 1 messages out of order"),
    ],
)
def test_what_is_wrong_with_readers(found: RecordedFindings, says: str) -> None:
    outcome, text = recorded(all_done(), found)
    assert outcome is LoadOutcome.FAILED
    assert says in text


def test_a_stored_message_that_no_member_is_done_with() -> None:
    outcome, text = recorded(all_done(2), findings())
    assert outcome is LoadOutcome.FAILED
    assert "nobody is done with 1..1" in text


def test_a_foreign_message_and_a_gap() -> None:
    found = findings()
    found.durable.foreign = 1
    life = heard()
    life.reported = [GapReported(0, 3, 5, 0), GapReported(0, 7, 9, 2)]  # the first: it can't know, beginning in the middle
    found.durable.end_life(life)
    says = recorded(all_done(), found)[1]
    assert "1 messages that nobody published" in says
    assert "durable subscriber: reported as lost: 2 messages of 7..9 of publisher 0, in life 2" in says
    assert found.durable.doubted == 1


def test_what_could_not_be_found_out() -> None:
    for name, value in (("tape", None), ("status", None), ("durable_ended", False), ("status", status(ready=2))):
        found = findings()
        setattr(found, name, value)
        assert recorded(all_done(), found)[0] is LoadOutcome.UNDECIDED, name
    behind = findings()
    behind.status = status(behind_ms=700)
    assert recorded(all_done(2), behind)[0] is LoadOutcome.UNDECIDED, "what waits on the tapes may come still"
    behind.sent = [Sent(0, 0)]
    assert "nothing was confirmed as stored" in recorded(Scene(), behind)[1]


def test_order_by_topic() -> None:
    scene = Scene(ordered=True)
    scene.take("a", 1, 1, topic="x")
    scene.take("b", 2, 2, topic="y")
    assert not scene.ledger.wrong
    scene.take("c", 3, 3, topic="x")
    assert scene.ledger.wrong == ["message 3 of publisher 0 came before message 1 of publisher 0, of the same topic, was done"]


def test_order_by_topic_and_publisher() -> None:
    order = TopicOrder()
    assert order.first("x", 1, 5) == []
    order.done("x", 1, 5)
    assert order.first("x", 2, 1) == [], "another publisher's"
    order.done("x", 2, 1)
    assert order.first("x", 1, 4) == ["message 4 of publisher 1 came behind its message 5, of the same topic"]


# --- shuffles ---------------------------------------------------------------------------------------------------------


def shuffle() -> ShuffleAccount:
    job = ShuffleAccount("s1", 2, 30, 2, 2, id="x")
    for number, partition in ((1, 0), (2, 0), (3, 1)):
        job.attempts.append(AttemptAccount(partition, number, "writer", Receipt(partition, f"{number}", 30, 900, 1)))
    job.chosen = {0: job.attempts[1], 1: job.attempts[2]}
    return job


def test_a_shuffle_reads_as_it_was_written() -> None:
    job = shuffle()
    rows = job.expected()
    assert differences(job, rows) == []
    assert {row[3] for row in rows} == {2, 3}, "only of attempts that count"
    other = job.rows_of(job.attempts[0])[0]
    for wrong, says in (
        (rows[1:], "1 are missing"),
        ([*rows, rows[-1]], "1 are repeated"),
        ([other, *rows], "1 are of no committed attempt"),
        ([rows[-1], *rows[:-1]], "not all in order"),
    ):
        assert says in differences(job, wrong)[0]


def test_the_verdict_on_shuffles() -> None:
    books = ShuffleBooks(lambda _: False, lambda _: None, lambda *_: None, jobs=[shuffle()])
    job = books.jobs[0]
    assert shuffle_verdict(books).outcome is LoadOutcome.UNDECIDED, "it was never sealed"
    job.sealed, books.rows_read = True, 60
    assert shuffle_verdict(books).undecided == ("s1 was not read to the end in time",)
    job.read = 1
    assert shuffle_verdict(books).outcome is LoadOutcome.PASSED
    books.wrong.append("s1 reads otherwise than it was written")
    assert shuffle_verdict(books).outcome is LoadOutcome.FAILED
