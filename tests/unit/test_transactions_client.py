"""Transactions in a client: what is sent again, under which number, and what its user is told.

Not covered: leases of what it acks (test_transactions_leases.py), a real cluster (tests/integration/test_transactions.py),
masters (test_transactions.py).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import pytest

from roq.client.transaction import Transaction, TransactionHub, _is_of
from roq.errors import (
    AccessDenied,
    CallError,
    Closed,
    DeadlineExceeded,
    FrameError,
    IncompatibleVersion,
    Overloaded,
    RoqError,
    Unavailable,
    WorkQueueNotFound,
)
from roq.wire import master as wire
from roq.wire.master import TRANSACTIONS
from roq.workqueue.commit_sender import REPEAT_SECONDS, CommitSender
from roq.workqueue.transaction import CollectedTransaction


class Link:
    """A master that answers as it is told. sent: numbers, by request; patience: what each was given."""

    name, patience_seconds = "w", 0.2

    def __init__(self, *answers: list[wire.TransactionOutcome] | RoqError, again: int = 0) -> None:
        self.answers, self.again = list(answers), again
        self.sent: list[list[tuple[int, int]]] = []
        self.patience: list[float] = []

    def ask(
        self, make: Callable[[int], wire.CommitAll], expect: type[wire.Committed], patience_seconds: float
    ) -> wire.Committed:
        """See MasterLink."""
        self.patience.append(patience_seconds)
        for again in range(self.again + 1):
            request = make(min(again, 1))
        self.sent.append([(one.producer, one.sequence) for one in request.transactions])
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, RoqError):
            raise answer
        return wire.Committed(answer)

    def pause(self, seconds: float) -> None:
        """See MasterLink."""


def collected(count: int = 1) -> list[CollectedTransaction]:
    made = [CollectedTransaction() for _ in range(count)]
    for one in made:
        one.publish("q", "t", b"")
        one.deadline = time.monotonic() + Link.patience_seconds
    return made


def send(link: Link, ones: list[CollectedTransaction]) -> list[RoqError | None]:
    return CommitSender(link).commit(ones, [[] for _ in ones])  # type: ignore[arg-type]


FULL = wire.TransactionOutcome(error=("Overloaded", "later"))


def test_a_destination_without_room_is_told_so_at_once() -> None:
    link = Link([wire.TransactionOutcome(), FULL, wire.TransactionOutcome()])
    first, refused, last = send(link, collected(3))
    assert (first, last) == (None, None)
    assert isinstance(refused, Overloaded)
    assert len(link.sent) == 1, "the others wait for it no longer"


def test_what_was_refused_for_want_of_room_has_a_new_number_the_next_time_unless_it_may_have_taken_effect() -> None:
    for again, numbers in ((0, 2), (1, 1)):
        link, ones = Link([FULL], [wire.TransactionOutcome()], again=again), collected()
        sender = CommitSender(link)  # type: ignore[arg-type]
        (refused,) = sender.commit(ones, [[]])
        assert isinstance(refused, Overloaded)
        assert sender.commit(ones, [[]]) == [None]
        assert len({number for (number,) in link.sent}) == numbers


def test_each_is_sent_again_until_its_own_deadline() -> None:
    link, (old, new) = Link(Unavailable("silence"), [wire.TransactionOutcome()]), collected(2)
    new.deadline = time.monotonic() + 60.0
    failure, done = send(link, [old, new])
    assert isinstance(failure, DeadlineExceeded)
    assert done is None
    assert link.sent[1] == [link.sent[0][1]], "the other one, under the same number"
    assert link.patience == [pytest.approx(0.5), pytest.approx(60.0, abs=1.0)]


def test_a_call_that_was_cut_off_and_took_effect_is_no_other_programs() -> None:
    link, (one,) = Link(Closed(), [wire.TransactionOutcome(repeated=True)]), collected()
    sender = CommitSender(link)  # type: ignore[arg-type]
    with pytest.raises(Closed):
        sender.commit([one], [[]])
    assert sender.commit([one], [[]]) == [None]
    assert link.sent == [link.sent[0]] * 2, "under a new number it would take effect twice"


def test_a_number_that_the_master_may_have_forgotten_is_not_sent_again() -> None:
    link, (late, fresh) = Link(Unavailable("silence"), [wire.TransactionOutcome()]), collected(2)
    sender = CommitSender(link)  # type: ignore[arg-type]
    assert isinstance(sender.commit([late], [[]])[0], DeadlineExceeded)
    late.first_sent -= REPEAT_SECONDS
    failure, done = sender.commit([late, fresh], [[], []])
    assert isinstance(failure, CallError)
    assert "might take effect twice" in str(failure)
    assert done is None
    assert len(link.sent[1]) == 1


def test_an_outcome_that_is_not_known_is_told_so_and_asked_under_the_same_number() -> None:
    link, (one,) = Link(Unavailable("silence"), [wire.TransactionOutcome(repeated=True)]), collected()
    sender = CommitSender(link)  # type: ignore[arg-type]
    (failure,) = sender.commit([one], [[]])
    assert isinstance(failure, DeadlineExceeded)
    assert "unknown" in str(failure)
    assert sender.commit([one], [[]]) == [None]
    assert link.sent[0] == link.sent[1]


def test_a_number_that_somebody_else_used_is_replaced() -> None:
    """A program that was forked has its parent's numbers: its transactions must not be taken for repeats."""
    link = Link([wire.TransactionOutcome(repeated=True)], [wire.TransactionOutcome()])
    assert send(link, collected()) == [None]
    assert link.sent[0] != link.sent[1]
    again = Link([wire.TransactionOutcome(repeated=True)], again=1)
    assert send(again, collected()) == [None]
    assert len(again.sent) == 1, "sent twice, it is our own"


def test_one_transactions_mistake_is_its_own() -> None:
    denied = AccessDenied("no")
    link = Link(denied, [wire.TransactionOutcome()], denied, [wire.TransactionOutcome()])
    assert send(link, collected(3)) == [None, denied, None]
    assert [len(one) for one in link.sent] == [3, 1, 1, 1]


def test_a_master_of_before_is_named_as_such() -> None:
    (failure,) = send(Link(FrameError("undecodable request")), collected())
    assert isinstance(failure, IncompatibleVersion)
    assert "upgrade the cluster" in str(failure)


class Hub:
    """What has the commits of transactions that ack nothing. failures: of the next ones."""

    zookeeper = "127.0.0.1:2181"

    def __init__(self, *failures: BaseException) -> None:
        self.failures, self.commits = list(failures), list[CollectedTransaction]()

    async def payload_max(self, queue: str) -> int:
        """See TransactionHub."""
        return 1000

    async def commit(self, collected: CollectedTransaction) -> None:
        """See TransactionHub."""
        self.commits.append(collected)
        if self.failures:
            raise self.failures.pop(0)


async def test_who_catches_a_failed_commit_has_it_tried_again_at_the_end() -> None:
    hub = Hub(Overloaded("later"))
    async with Transaction(hub) as one:  # type: ignore[arg-type]
        await one.publish("q", "t", b"")
        with pytest.raises(Overloaded):
            await one.commit()
        with pytest.raises(Closed, match="has ended"):
            await one.publish("q", "t", b"late")
    assert hub.commits == [hub.commits[0]] * 2
    with pytest.raises(Closed, match="has ended"):
        await one.commit()
    refused = Hub(AccessDenied("no"))
    async with Transaction(refused) as other:  # type: ignore[arg-type]
        await other.publish("q", "t", b"")
        with pytest.raises(AccessDenied):
            await other.commit()
    assert len(refused.commits) == 1, "what is certain is not asked again"


@pytest.mark.parametrize(
    ("address", "zookeeper", "same"),
    [
        ("roq://a:1,b:2/q@g", "b:2,c:3", True),
        ("roq://a/RoQ/q", "a:2181", True),
        ("roq://a/other/q", "a", False),
        ("roq://a/q", "b", False),
        ("memory:q", "a", False),
    ],
)
def test_whose_tasks_it_acks(address: str, zookeeper: str, same: bool) -> None:
    assert _is_of(address, zookeeper) is same


async def test_what_may_have_taken_effect_before_its_work_queue_was_removed_is_not_sent_to_the_next_one() -> None:
    class Removed:
        """In the place of a WorkQueue. tries: commits."""

        tries = 0

        async def _commit(self, collected: CollectedTransaction) -> None:
            self.tries += 1
            raise WorkQueueNotFound(TRANSACTIONS)

    hub = TransactionHub(None, Hub.zookeeper)  # type: ignore[arg-type]
    hub._queue = removed = Removed()  # type: ignore[assignment]
    (one,) = collected()
    one.number = (1, 1)
    with pytest.raises(WorkQueueNotFound):
        await hub.commit(one)
    assert removed.tries == 1
    assert hub._queue is removed, "none was made in its place"  # type: ignore[comparison-overlap]


@pytest.mark.parametrize("cut", [asyncio.CancelledError(), KeyboardInterrupt()])
async def test_a_commit_that_was_cut_off_can_be_asked_for_again(cut: BaseException) -> None:
    hub = Hub(cut)
    one = Transaction(hub)  # type: ignore[arg-type]

    async def begin() -> None:
        async with one:
            await one.publish("q", "t", b"")
            await one.commit()

    with pytest.raises(type(cut)):
        await begin()
    await one.commit()
    assert hub.commits == [hub.commits[0]] * 2
    with pytest.raises(Closed, match="has ended"):
        await one.commit()


@pytest.mark.parametrize("sent", [True, False])
async def test_what_was_closed_before_it_was_sent_has_ended(sent: bool) -> None:
    hub = Hub(Closed("w was closed"))
    one = Transaction(hub)  # type: ignore[arg-type]
    one._collected.number = (1, 1) if sent else None
    async with one:
        await one.publish("q", "t", b"")
        with pytest.raises(Closed, match="w was closed"):
            await one.commit()
    assert len(hub.commits) == 1 + sent, "whether it took effect is asked once more"


async def test_an_empty_one_asks_nobody() -> None:
    hub = Hub()
    async with Transaction(hub):  # type: ignore[arg-type]
        pass
    assert not hub.commits
