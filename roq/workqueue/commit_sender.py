"""How a client has transactions committed: by numbers of its own, sent again until they are answered. Not covered: what one
collects (transaction.py), which master (master_link.py).
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Sequence

from roq.errors import (
    CallError,
    DeadlineExceeded,
    FrameError,
    IncompatibleVersion,
    Overloaded,
    RoqError,
    TemporaryError,
    TransactionAborted,
    from_wire,
)
from roq.ids import new_id
from roq.wire import master as wire
from roq.workqueue.master_link import MasterLink
from roq.workqueue.transaction import CollectedTransaction, Failure

SEND_SECONDS_MIN = 0.5  # of one request: deadlines that are no further apart are met together
REPEAT_SECONDS = 1800.0  # after that a number is not sent again: half of the time for which a master remembers it
Outcome = wire.TransactionOutcome | RoqError | None  # None: no answer, and there is time to ask again


class CommitSender:
    """Of one open queue. Any thread."""

    def __init__(self, link: MasterLink) -> None:
        self._link = link
        self._producer = new_id()
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()

    def _number(self, taken: int = 0) -> tuple[int, int]:
        """Of one that is new. taken: a producer that somebody else is, too."""
        with self._lock:
            if self._producer == taken:
                self._producer, self._numbers = new_id(), itertools.count(1)
            return self._producer, next(self._numbers)

    @property
    def patience_seconds(self) -> float:
        """Of the queue's opening: how long a transaction is sent again."""
        return self._link.patience_seconds

    def pause(self, seconds: float) -> None:
        """Raises Closed when the queue is closed meanwhile."""
        self._link.pause(seconds)

    def commit(self, transactions: Sequence[CollectedTransaction], tokens: Sequence[list[str]]) -> list[Failure]:
        """Commit each; why not. Each is sent again until it is answered or its deadline is over. One that is refused for want
        of room is told so at once: others travel with it."""
        found = {place: _too_late(one) for place, one in enumerate(transactions)}
        left = [place for place, failure in found.items() if failure is None]
        while left:
            again: list[int] = []
            outcomes = self._send([transactions[place] for place in left], [tokens[place] for place in left])
            for place, outcome in zip(left, outcomes, strict=True):
                if outcome is None:
                    again.append(place)
                    continue
                found[place] = failure = self._outcome(transactions[place], outcome)
                if isinstance(failure, _TakenNumber) and time.monotonic() < transactions[place].deadline:
                    again.append(place)
            left = again
        return [found[place] for place in range(len(transactions))]

    def _send(self, transactions: list[CollectedTransaction], tokens: list[list[str]]) -> list[Outcome]:
        """One request. One that is refused as a whole, for what is wrong with one of them, is sent one by one."""
        now = time.monotonic()
        for one in transactions:
            if one.number is None:
                one.number, one.first_sent = self._number(), now
        request = wire.CommitAll([_on_wire(*pair) for pair in zip(transactions, tokens, strict=True)])

        def make(again: int) -> wire.CommitAll:
            for one in transactions:
                one.repeated = one.repeated or again > 0
            return request

        patience = max(SEND_SECONDS_MIN, min(one.deadline for one in transactions) - now)
        try:
            return list[Outcome](self._link.ask(make, wire.Committed, patience_seconds=patience).outcomes)
        except (CallError, FrameError) as error:
            if len(transactions) > 1:
                return [self._send([one], [some])[0] for one, some in zip(transactions, tokens, strict=True)]
            if isinstance(error, FrameError):
                text = f"the master of work queue {self._link.name!r} can't commit transactions: upgrade the cluster ({error})"
                return [IncompatibleVersion(text)]
            return [error]
        except TemporaryError as error:
            for one in transactions:
                one.repeated = True
            soon = time.monotonic() + SEND_SECONDS_MIN
            return [None if one.deadline > soon else _unknown(error) for one in transactions]

    def _outcome(self, one: CollectedTransaction, outcome: wire.TransactionOutcome | RoqError) -> Failure:
        if isinstance(outcome, RoqError):
            return outcome
        if outcome.error[0]:
            error = from_wire(*outcome.error)
            if isinstance(error, Overloaded) and not one.repeated:
                one.number = None  # nothing was done under it; kept for long, it would be too old to be taken
            return _unknown(error) if isinstance(error, TemporaryError) and not isinstance(error, Overloaded) else error
        if outcome.lost:
            lost = [one.tasks[place] for place in outcome.lost]
            for task in lost:
                task.mark_lost()
            others = f" and {len(lost) - 1} more" if len(lost) > 1 else ""
            return TransactionAborted(
                f"the lease of message {lost[0].id}{others} was lost before: nothing was published and nothing acked"
            )
        if outcome.repeated and not one.repeated:  # a program that was forked with its queue open has our numbers, too
            assert one.number is not None
            one.number = self._number(taken=one.number[0])
            return _TakenNumber("somebody else commits under this number")
        return None


class _TakenNumber(TemporaryError):
    """It was another transaction's: sent again under a new one."""


def _too_late(one: CollectedTransaction) -> Failure:
    """Of one that may have been sent before: whether it must not be sent again."""
    if one.number is None:
        return None
    one.repeated = True  # a call that was cut off does not say what became of it
    if time.monotonic() - one.first_sent <= REPEAT_SECONDS:
        return None
    return CallError(
        "whether this transaction took effect is unknown, and it is not sent again: the first time was more than "
        f"{REPEAT_SECONDS / 60:.0f} minutes ago, so it might take effect twice. Look for its messages in its queues; "
        "if it did not take effect, what it acks is redelivered"
    )


def _unknown(error: RoqError) -> DeadlineExceeded:
    return DeadlineExceeded(
        f"whether the transaction took effect is unknown, `commit()` asks once more under the same number: {error}"
    )


def _on_wire(one: CollectedTransaction, tokens: list[str]) -> wire.TransactionToCommit:
    assert one.number is not None
    outgoing = [wire.OutgoingMessages(queue, messages) for queue, messages in one.outgoing.items()]
    return wire.TransactionToCommit(*one.number, tokens, outgoing)
