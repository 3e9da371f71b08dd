"""Transactions on a real cluster: messages and acks that take effect together, or not at all.

Not covered: every interleaving (tests/model/transactions.py), processes that are killed (test_transactions_killed.py), rights
(test_secured_transactions.py).
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

import roq
from roq import blocking
from roq.errors import (
    CallError,
    Closed,
    InvalidConfiguration,
    InvalidHeaders,
    InvalidName,
    InvalidTopic,
    LeaseLost,
    NotRecorded,
    PayloadTooLarge,
    QueueNotFound,
    TransactionAborted,
    TransactionTooLarge,
)
from roq.wire.master import TRANSACTION_BYTES_MAX, TRANSACTION_MESSAGES_MAX, TRANSACTIONS
from roq.workqueue.address import queue_address
from roq.workqueue.master.committing import DESTINATION_MESSAGES_MAX
from tests.harness.documented import block, run
from tests.integration.running import RunningCluster

BOUND_SECONDS = 30.0
GROUP = "workers"


@pytest.fixture
async def queues(client: roq.Cluster) -> AsyncIterator[tuple[str, str]]:
    """Two fresh recorded queues, removed after the test."""
    names = tuple(f"tx-{uuid.uuid4().hex[:12]}" for _ in range(2))
    for name in names:
        await client.create_queue(name, overflow="block", record=roq.Record(days=1))
    yield names[0], names[1]
    for name in names:
        await client.remove_queue(name)


async def store(client: roq.Cluster, queue: str, count: int, topics: int = 1) -> None:
    async with client.publisher(queue, confirm="stored") as publisher:
        for number in range(count):
            await publisher.publish(f"t.{number % topics}", b"%d" % number, {"n": str(number)})


async def read(client: roq.Cluster, queue: str, count: int) -> list[roq.Message]:
    """So many stored messages, and what else is stored by then."""
    found = list[roq.Message]()
    async with asyncio.timeout(BOUND_SECONDS), client.subscriber(queue, start="earliest", follow="stored") as messages:
        while len(found) < count:
            batch = await messages.next_batch()
            assert batch is not None
            found += batch
    async with client.subscriber(queue, start="earliest", follow=False) as messages:
        assert [(m.topic, m.payload) async for m in messages] == [(m.topic, m.payload) for m in found]
    return found


@pytest.mark.quick
async def test_messages_and_an_ack_take_effect_together(client: roq.Cluster, queues: tuple[str, str]) -> None:
    source, result = queues
    await store(client, source, 30, topics=3)
    async with asyncio.timeout(BOUND_SECONDS), client.subscriber(source, group=GROUP) as member:
        for _ in range(30):
            message = await anext(member)
            async with client.transaction() as transaction:
                await transaction.publish(result, message.topic, message.payload + b"!", message.headers)
                await transaction.publish(result, "all", message.payload)
                await transaction.ack(message)
            assert message.settled
        assert (await member.queue.status()).completed == 30
    found = await read(client, result, 60)
    assert sorted(int(one.payload) for one in found if one.topic == "all") == list(range(30))
    for topic in range(3):
        mine = [one for one in found if one.topic == f"t.{topic}"]
        assert [one.payload for one in mine] == [b"%d!" % number for number in range(topic, 30, 3)]
        assert [one.headers for one in mine] == [{"n": str(number)} for number in range(topic, 30, 3)]


async def test_what_acks_nothing_goes_to_several_queues(client: roq.Cluster, queues: tuple[str, str]) -> None:
    async def one(number: int) -> None:
        async with client.transaction() as transaction:
            for queue in queues:
                await transaction.publish(queue, "t", b"%d" % number)

    await asyncio.gather(*(one(number) for number in range(50)))
    for queue in queues:
        assert sorted(int(message.payload) for message in await read(client, queue, 50)) == list(range(50))
    assert TRANSACTIONS in [info.record.name for info in await client.work_queues()]


async def test_an_exception_or_a_rollback_undoes_all_of_it(client: roq.Cluster, queues: tuple[str, str]) -> None:
    source, result = queues
    await store(client, source, 1)
    async with asyncio.timeout(BOUND_SECONDS), client.subscriber(source, group=GROUP) as member:
        message = await anext(member)

        async def fail() -> None:
            async with client.transaction() as transaction:
                await transaction.publish(result, "t", b"never")
                await transaction.ack(message)
                raise ValueError("no such customer")

        with pytest.raises(ValueError, match="customer"):
            await fail()
        assert not message.settled
        async with client.transaction() as transaction:
            await transaction.publish(result, "t", b"never")
            await transaction.ack(message)
            transaction.rollback()
        async with client.transaction() as transaction:
            await transaction.publish(result, "t", b"once")
            await transaction.ack(message)
            await transaction.commit()
    with pytest.raises(Closed, match="has ended"):
        await transaction.publish(result, "t", b"late")
    with pytest.raises(Closed, match="has ended"):
        await transaction.commit()
    assert [one.payload for one in await read(client, result, 1)] == [b"once"]


async def test_a_lost_lease_aborts_it(client: roq.Cluster, queues: tuple[str, str]) -> None:
    source, result = queues
    await store(client, source, 2, topics=2)
    await client.create_group(source, GROUP)
    async with (
        asyncio.timeout(BOUND_SECONDS),
        roq.open_queue(queue_address(client.zookeeper, f"{source}@{GROUP}")) as queue,
        client.subscriber(source, group=GROUP) as other,
    ):
        while (await queue.status()).ready < 2:  # a lease takes what its master has read by then
            await asyncio.sleep(0.05)
        kept, lost = await queue.lease(60.0, 2)
        assert await queue.release_all() == 2
        again = await anext(other)
        async with client.transaction() as transaction:
            await transaction.publish(result, "t", b"never")
            await transaction.ack(kept)
            await transaction.ack(lost)
            with pytest.raises(TransactionAborted, match=f"{kept.id} and 1 more was lost before: nothing was published"):
                await transaction.commit()
        assert kept.lost
        assert lost.lost
        with pytest.raises(LeaseLost):
            async with client.transaction() as refused:
                await refused.ack(lost)
        async with client.transaction() as second:
            await second.publish(result, "t", b"once")
            await second.ack(again)
    assert [one.payload for one in await read(client, result, 1)] == [b"once"]


async def test_what_is_wrong_is_refused_at_once(client: roq.Cluster, queues: tuple[str, str], queue: str) -> None:
    source, result = queues
    await store(client, source, 2, topics=2)
    transaction = client.transaction()
    with pytest.raises(Closed, match="enter this transaction first"):
        await transaction.publish(result, "t", b"")
    async with transaction:
        with pytest.raises(CallError, match="entered once"):
            await transaction.__aenter__()
        with pytest.raises(NotRecorded, match="no transaction can publish to it"):
            await transaction.publish(queue, "t", b"")
        with pytest.raises(QueueNotFound):
            await transaction.publish("no-such-queue", "t", b"")
        with pytest.raises(InvalidTopic):
            await transaction.publish(result, "", b"")
        with pytest.raises(InvalidHeaders):
            await transaction.publish(result, "t", b"", {"": "x"})
        with pytest.raises(PayloadTooLarge, match="takes at most"):
            await transaction.publish(result, "t", bytes(1024 * 1024))
        for _ in range(2):
            await transaction.publish(result, "t", bytes(900_000))
        with pytest.raises(TransactionTooLarge, match=f"{TRANSACTION_BYTES_MAX} bytes: commit more often"):
            await transaction.publish(result, "t", bytes(900_000))
        transaction.rollback()
    async with (
        asyncio.timeout(BOUND_SECONDS),
        client.subscriber(source, group="one") as one,
        client.subscriber(source, group="two") as two,
        roq.open_queue("memory:") as strange,
    ):
        await strange.put(b"")
        (task,) = await strange.lease()
        mine, other = await anext(one), await anext(two)
        async with client.transaction() as transaction:
            await transaction.ack(mine)
            with pytest.raises(InvalidConfiguration, match="acks messages of one member of one group"):
                await transaction.ack(other)
            with pytest.raises(InvalidConfiguration, match="not of memory:"):
                await transaction.ack(task)
            with pytest.raises(CallError, match="or by another transaction"):
                await transaction.ack(mine)
            with pytest.raises(CallError, match="or by another transaction"):
                async with client.transaction() as second:
                    await second.ack(mine)
        assert (mine.settled, other.settled) == (True, False)


async def test_the_work_queue_of_transactions_is_the_clusters_own(client: roq.Cluster, queues: tuple[str, str]) -> None:
    with pytest.raises(InvalidName, match=r"names that begin with _roq\. are the cluster's own"):
        await client.create_work_queue("_roq.mine")
    with pytest.raises(InvalidName, match=r"names that begin with _roq\. are the cluster's own"):
        client.publisher(queues[0], producer="_roq.outbox.x")
    async with roq.open_queue(queue_address(client.zookeeper, TRANSACTIONS)) as queue:
        with pytest.raises(CallError, match="it takes no tasks"):
            await queue.put(b"x")
    await client.remove_work_queue(TRANSACTIONS)
    with pytest.raises(InvalidConfiguration, match="the first transaction makes it"):
        await client.create_work_queue(TRANSACTIONS, standbys=0)
    for number in range(2):
        async with client.transaction() as transaction:
            await transaction.publish(queues[0], "t", b"%d" % number)
        if not number:
            await read(client, queues[0], 1)
            await client.remove_work_queue(TRANSACTIONS)
    assert [message.payload for message in await read(client, queues[0], 2)] == [b"0", b"1"]


async def test_a_work_queues_task_and_an_empty_transaction(client: roq.Cluster, queues: tuple[str, str]) -> None:
    name = f"tx-{uuid.uuid4().hex[:12]}"
    async with roq.open_queue(queue_address(client.zookeeper, name)) as queue:
        await queue.put_many([b"1", b"2" * 100_000])  # the second's payload is with the stores

        async def handle(task: roq.Task) -> None:
            async with client.transaction() as transaction:
                await transaction.publish(queues[0], "t", b"%d" % len(task.payload))
                await transaction.ack(task)

        work = await queue.run(handle, wait_seconds=0.5, handle_signals=False)
        assert work.done == 2
        assert (await queue.status()).completed == 2
    async with client.transaction():
        pass
    assert [one.payload for one in await read(client, queues[0], 2)] == [b"1", b"100000"]
    await client.remove_work_queue(name)


async def test_a_loop_that_goes_on_keeps_the_leases_of_its_open_transaction(
    client: roq.Cluster, queues: tuple[str, str]
) -> None:
    source, result = queues
    await store(client, source, 3, topics=3)
    async with asyncio.timeout(BOUND_SECONDS), client.subscriber(source, group=GROUP, lease_seconds=1.0) as member:
        async with client.transaction() as transaction:
            for _ in range(3):
                message = await anext(member)
                await transaction.publish(result, "t", message.payload)
                await transaction.ack(message)
            await asyncio.sleep(2.5)  # more than two leases
        assert (await member.queue.status()).completed == 3
    assert [one.payload for one in await read(client, result, 3)] == [b"0", b"1", b"2"]


async def test_a_queue_that_is_removed_or_not_recorded_holds_up_no_other(client: roq.Cluster, queues: tuple[str, str]) -> None:
    stopped, other = queues
    gone = f"tx-{uuid.uuid4().hex[:12]}"
    await client.create_queue(gone, record=roq.Record(days=1))
    async with client.transaction() as transaction:
        await transaction.publish(stopped, "t", b"later")
        await transaction.publish(gone, "t", b"early")
        await transaction.publish(other, "t", b"now")
        await client.remove_queue(gone)
        await client.record_queue(stopped, None)
    assert [one.payload for one in await read(client, other, 1)] == [b"now"]
    await client.record_queue(stopped, roq.Record(days=1))
    assert [one.payload for one in await read(client, stopped, 1)] == [b"later"]
    await client.create_queue(gone, record=roq.Record(days=1))
    async with client.transaction() as transaction:
        await transaction.publish(gone, "t", b"anew")
    found = list[bytes]()
    async with asyncio.timeout(BOUND_SECONDS), client.subscriber(gone, start="earliest", follow="stored") as messages:
        async for message in messages:
            found.append(message.payload)
            if message.payload == b"anew":
                break
    assert found in ([b"early", b"anew"], [b"anew"]), "for a while what was on its way goes to the one created anew"
    await client.remove_queue(gone)


async def test_a_queue_without_room_is_waited_for_and_holds_up_no_other(client: roq.Cluster, queues: tuple[str, str]) -> None:
    full, other = queues

    async def commit(queue: str, count: int) -> None:
        async with client.transaction() as transaction:
            for _ in range(count):
                await transaction.publish(queue, "t", b"x")

    async with asyncio.timeout(BOUND_SECONDS):
        await commit(other, 1)  # its settings are known, and so are those of `full`, while it is not recorded
        await commit(full, 1)
        await client.record_queue(full, None)
        for _ in range(DESTINATION_MESSAGES_MAX // TRANSACTION_MESSAGES_MAX):
            await commit(full, TRANSACTION_MESSAGES_MAX)
        waiting = asyncio.create_task(commit(full, 1))
        await asyncio.sleep(1.0)
        await asyncio.wait_for(commit(other, 1), 5.0)
        assert not waiting.done(), "it is tried again"
        await client.record_queue(full, roq.Record(days=1))
        await waiting
    assert len(await read(client, other, 2)) == 2


def test_plain_code_has_it_too(cluster: RunningCluster) -> None:
    with blocking.connect(cluster.zookeeper) as connected:
        source, result = (f"tx-{uuid.uuid4().hex[:12]}" for _ in range(2))
        for name in (source, result):
            connected.create_queue(name, record=roq.Record(days=1))
        try:
            with connected.publisher(source, confirm="stored") as publisher:
                publisher.publish_many("t", [b"%d" % number for number in range(5)])
            with connected.subscriber(source, group=GROUP) as member:
                for message in member:
                    with connected.transaction() as transaction:
                        transaction.publish(result, "t", message.payload, {"a": "b"})
                        transaction.ack(message)
                    if message.payload == b"4":
                        break
                assert member.queue.status().completed == 5
            with connected.transaction() as transaction:
                transaction.publish(result, "t", b"never")
                transaction.rollback()
            with connected.transaction() as transaction:
                transaction.publish(result, "t", b"5")
            found = list[bytes]()
            with connected.subscriber(result, start="earliest", follow="stored") as messages:
                for one in messages:
                    found.append(one.payload)
                    if len(found) == 6:
                        break
            assert sorted(found) == [b"%d" % number for number in range(6)]
        finally:
            for name in (source, result):
                connected.remove_queue(name)


def test_what_the_document_shows(cluster: RunningCluster, tmp_path: Path) -> None:
    source = block("docs/transactions.md", "Transactions").replace("127.0.0.1:2181", cluster.zookeeper)
    try:
        shown = run(source, tmp_path).splitlines()
        assert sorted(shown) == sorted(f"customer.{number % 2} invoice {number}" for number in range(5))
        assert [line for line in shown if "customer.0" in line] == [f"customer.0 invoice {number}" for number in (0, 2, 4)]
    finally:
        with blocking.connect(cluster.zookeeper) as connected:
            for name in ("purchases", "invoices", "journal"):
                connected.remove_queue(name)
