"""Leases of what a transaction acks: renewed until it ends, whoever leased it and however long its commit takes.

The queue is one in memory that is taken for a cluster's; what commits is told what to answer. Not covered: a real cluster
(tests/integration/test_transactions.py).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest

import roq
from roq import blocking
from roq.client.blocking_transaction import Transaction as PlainTransaction
from roq.client.transaction import Transaction
from roq.errors import CallError, DeadlineExceeded, Overloaded, RoqError, TransactionAborted
from roq.workqueue.transaction import CollectedTransaction, Failure
from tests.unit.test_transactions_client import Hub

ADDRESS = f"roq://{Hub.zookeeper}/w"
LEASE_SECONDS = 0.6


class Committer:
    """See Committing. answers: by destination, or done. tries: destinations that were asked for."""

    def __init__(self, patience_seconds: float = 30.0, **answers: list[RoqError]) -> None:
        self.patience_seconds, self.answers = patience_seconds, answers
        self.tries: list[str] = []

    def pause(self, seconds: float) -> None:
        """See Committing."""
        time.sleep(seconds)

    def commit(self, transactions: Sequence[CollectedTransaction], tokens: Sequence[list[str]]) -> list[Failure]:
        """See Committing."""
        queues = [next(iter(one.outgoing), "") for one in transactions]
        self.tries += queues
        return [self.answers[queue].pop(0) if self.answers.get(queue) else None for queue in queues]


def taken_for_a_clusters(queue: Any, committer: Committer) -> None:
    queue.address = ADDRESS
    queue._opened.transactions = committer


@pytest.fixture
async def queue() -> AsyncIterator[roq.WorkQueue]:
    async with roq.open_queue("memory:") as opened:
        await opened.put_many([b"1", b"2"])
        yield opened


def begun() -> Transaction:
    return Transaction(Hub())  # type: ignore[arg-type]


async def test_a_queue_without_room_holds_up_no_other_transaction_and_no_renewal(queue: roq.WorkQueue) -> None:
    taken_for_a_clusters(queue, committer := Committer(full=[Overloaded("later")] * 1000))
    one, other = await queue.lease(LEASE_SECONDS, 2)

    async def commit(to: str, task: roq.Task) -> None:
        async with begun() as transaction:
            await transaction.publish(to, "t", b"")
            await transaction.ack(task)

    waiting = asyncio.create_task(commit("full", one))
    await commit("free", other)
    assert other.settled
    assert not waiting.done(), "it is tried again"
    await asyncio.sleep(2 * LEASE_SECONDS)
    assert not one.lost
    committer.answers.clear()
    await waiting
    assert one.settled
    assert 4 < committer.tries.count("full") < 60, "with pauses"


async def test_a_queue_without_room_is_asked_until_patience_is_over(queue: roq.WorkQueue) -> None:
    taken_for_a_clusters(queue, committer := Committer(0.3, full=[Overloaded("later")] * 1000))
    (task, _), began = await queue.lease(60.0, 2), time.monotonic()
    async with begun() as transaction:
        await transaction.publish("full", "t", b"")
        await transaction.ack(task)
        with pytest.raises(Overloaded):
            await transaction.commit()
        transaction.rollback()
    assert time.monotonic() - began < 2.0
    assert len(committer.tries) > 1


def test_plain_code_asks_again_too() -> None:
    with blocking.open_queue("memory:") as queue:
        queue.put(b"1")
        taken_for_a_clusters(queue, committer := Committer(full=[Overloaded("later")] * 3))
        (task,) = queue.lease(60.0)
        transaction = PlainTransaction(None, Hub())  # type: ignore[arg-type]
        with transaction:
            transaction._collect("full", "t", b"", None, 1000)
            transaction.ack(task)
        assert task.settled
        assert committer.tries == ["full"] * 4


async def test_what_lease_gave_is_renewed_until_the_transaction_ends(queue: roq.WorkQueue) -> None:
    taken_for_a_clusters(queue, Committer())
    task, _ = await queue.lease(LEASE_SECONDS, 2)
    async with begun() as transaction:
        await transaction.ack(task)
        await asyncio.sleep(2 * LEASE_SECONDS)
        assert not task.lost
        transaction.rollback()
    await asyncio.sleep(2 * LEASE_SECONDS)
    assert task.lost, "as before"


async def test_what_is_undecided_is_no_other_transactions_until_its_block_is_left(queue: roq.WorkQueue) -> None:
    taken_for_a_clusters(queue, Committer(q=[DeadlineExceeded("silence")] * 2))
    task, _ = await queue.lease(LEASE_SECONDS, 2)
    first = await begun().__aenter__()
    await first.publish("q", "t", b"")
    await first.ack(task)
    with pytest.raises(DeadlineExceeded):
        await first.commit()
    async with begun() as other:
        with pytest.raises(CallError, match="or by another transaction"):
            await other.ack(task)
    await asyncio.sleep(2 * LEASE_SECONDS)
    assert not task.lost, "it is renewed"
    with pytest.raises(DeadlineExceeded):
        await first.__aexit__(None, None, None)
    async with begun() as other:
        await other.ack(task)
        other.rollback()
    await first.commit()
    assert task.settled


async def test_the_next_transaction_keeps_what_an_aborted_one_has_left(queue: roq.WorkQueue) -> None:
    taken_for_a_clusters(queue, Committer(q=[TransactionAborted("lost")]))
    leases = queue.leases(LEASE_SECONDS)
    task = await anext(leases)
    async with begun() as first, begun() as second:
        await first.publish("q", "t", b"")
        await first.ack(task)
        await anext(leases)
        with pytest.raises(TransactionAborted):
            await first.commit()
        await second.ack(task)
        await first.__aexit__(None, None, None)
        await asyncio.sleep(2 * LEASE_SECONDS)
        assert not task.lost
        with pytest.raises(CallError, match="or by another transaction"):
            async with begun() as third:
                await third.ack(task)
    assert task.settled
    await leases.aclose()
