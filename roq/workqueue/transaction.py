"""A transaction on its way to the master that commits it, for both faces of a work queue: acks of its tasks, and messages to
recorded queues. Not covered: what its user sees (roq/client/transaction.py), what the master does (fold.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol, cast

from roq.errors import CallError, InvalidConfiguration, LeaseLost, Overloaded, RoqError, TransactionTooLarge
from roq.runtime.backoff import delays
from roq.wire import master as wire
from roq.workqueue.contract import Backend
from roq.workqueue.lease_keeper import DONE, LeaseKeeper
from roq.workqueue.outbox import message_bytes
from roq.workqueue.prefetch import QueuedTask, Steps, TaskSource

Failure = RoqError | None


def came_from(task: QueuedTask) -> str:
    """Address of the task's work queue."""
    return task._queue.address


class CollectedTransaction:
    """What one transaction is to do. number: its producer and number, once it was sent: sent again it is the same, unless it
    is certain that nothing was done. repeated: it was sent before, so that it may have taken effect then. first_sent,
    deadline: monotonic seconds; the deadline is of the call under way."""

    def __init__(self) -> None:
        self.tasks: list[QueuedTask] = []
        self._claims: list[QueuedTask] = []  # no other transaction may ack them, and they are renewed
        self.outgoing: dict[str, list[tuple[str, bytes]]] = {}
        self.bytes = self.messages = 0
        self.number: tuple[int, int] | None = None
        self.repeated = False
        self.first_sent = self.deadline = 0.0

    def __bool__(self) -> bool:
        """Whether there is anything to do."""
        return bool(self.tasks or self.outgoing)

    def ack(self, task: QueuedTask) -> None:
        """Its lease is renewed until `let_go`. Raises CallError, LeaseLost, TransactionTooLarge, Closed, InvalidConfiguration:
        it is of another queue than those before."""
        if self.tasks and task._queue is not self.tasks[0]._queue:
            raise InvalidConfiguration(
                "a transaction acks messages of one member of one group: it has one that came from "
                f"{came_from(self.tasks[0])}, this one came from {came_from(task)}: ack it in a transaction of its own"
            )
        if task.settled or task.claimed:
            raise CallError(f"task {task.id} is acked, released or rejected already, or by another transaction")
        if task.lost:
            raise LeaseLost(f"the lease of task {task.id} ended before: another worker may have it, or has done it")
        if len(self.tasks) >= wire.TRANSACTION_ACKS_MAX:
            raise TransactionTooLarge(f"a transaction acks at most {wire.TRANSACTION_ACKS_MAX} messages: commit more often")
        task._queue._keeper.keep(task)
        self.tasks.append(task)
        self._claims.append(task)
        task.claimed = True

    def let_go(self) -> None:
        """Other transactions may ack its tasks; what no loop is at any more is not renewed any longer."""
        claims, self._claims = self._claims, []
        for task in claims:
            task.claimed = False
            if task._prefetch is None or not task._prefetch.works_on(task):
                task._queue._keeper.let_go(task)

    def commit(self, queue: TaskSource | None = None) -> Any:
        """Through this work queue, or that of its tasks, as its face does: one that is asynchronous gives what is to be
        awaited. Raises TransactionAborted, DeadlineExceeded, Overloaded, CallError."""
        return (queue or self.tasks[0]._queue)._commit(self)

    def publish(self, queue: str, topic: str, stored: bytes) -> None:
        """stored: the payload behind its headers. Raises TransactionTooLarge."""
        size = self.bytes + message_bytes((topic, stored))
        if size > wire.TRANSACTION_BYTES_MAX or self.messages >= wire.TRANSACTION_MESSAGES_MAX:
            limits = f"{wire.TRANSACTION_MESSAGES_MAX} messages and {wire.TRANSACTION_BYTES_MAX} bytes"
            raise TransactionTooLarge(f"a transaction publishes at most {limits}: commit more often")
        if queue not in self.outgoing and len(self.outgoing) >= wire.TRANSACTION_QUEUES_MAX:
            raise TransactionTooLarge(f"a transaction publishes to at most {wire.TRANSACTION_QUEUES_MAX} queues")
        self.outgoing.setdefault(queue, []).append((topic, stored))
        self.bytes, self.messages = size, self.messages + 1


class Committing(Protocol):
    """What commits: see CommitSender (commit_sender.py)."""

    @property
    def patience_seconds(self) -> float:
        """How long a transaction is sent again."""

    def pause(self, seconds: float) -> None:
        """Raises Closed when the queue is closed meanwhile."""

    def commit(self, transactions: Sequence[CollectedTransaction], tokens: Sequence[list[str]]) -> list[Failure]:
        """Commit each; why not."""


class TransactionalBackend(Protocol):
    """A backend that commits transactions: that of a cluster's work queue."""

    @property
    def transactions(self) -> Committing:
        """Who does it."""


def committing(backend: Backend) -> Committing:
    """Of a cluster's work queue; tasks of others are in no transaction."""
    return cast(TransactionalBackend, backend).transactions


def commit_steps(
    transaction: CollectedTransaction, patience_seconds: float, send: Callable[[], Any], pause: Callable[[float], Any]
) -> Steps[None]:
    """The commit of one, of both faces (see prefetch.py). send: one try, which gives [why not]. A queue without room is asked
    again; between two tries others have theirs, and leases are renewed. Raises the last try's failure."""
    transaction.deadline, pauses = time.monotonic() + patience_seconds, delays(0.02, 0.5)
    while True:
        (failure,) = yield send()
        if failure is None:
            return
        seconds = next(pauses)
        if not isinstance(failure, Overloaded) or time.monotonic() + seconds >= transaction.deadline:
            raise failure
        yield pause(seconds)


def commit_all(keeper: LeaseKeeper, backend: Backend, transactions: Sequence[CollectedTransaction]) -> list[Failure]:
    """In a thread that may wait: commit these, each by itself, and say what went wrong. Leases of those that did not take
    effect are renewed as before."""
    wanted = [[(task, DONE) for task in one.tasks] for one in transactions]
    settlements = [keeper.begin(some) for some in wanted]
    asked = time.monotonic()
    try:
        outcomes = committing(backend).commit(transactions, [[one.token for one in some] for some in settlements])
    except BaseException:
        for some in wanted:
            keeper.abandon(some)
        raise
    for some, settled, outcome in zip(wanted, settlements, outcomes, strict=True):
        if outcome is None:
            keeper.finish(some, settled, [""] * len(some), asked)
        else:
            keeper.abandon(some)
    return outcomes
