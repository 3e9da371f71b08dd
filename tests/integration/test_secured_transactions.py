"""Transactions of a secured cluster: the master publishes by its host's card what its client's card allows, and nothing else.

Not covered: which request needs which right (tests/unit/test_rights.py, tests/unit/test_transactions.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

import roq
from roq.errors import AccessDenied
from roq.wire.card import Grant, Right
from roq.wire.master import TRANSACTIONS
from tests.harness.cards import as_holder
from tests.integration.secured_rig import Cluster, started

WAIT_SECONDS = 20.0


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with started(tmp_path_factory.mktemp("secured-transactions"), "--hosts", "2") as made:
        with as_holder(made.owner):
            asyncio.run(prepare(made))
        yield made


async def prepare(cluster: Cluster) -> None:
    async with roq.connect(cluster.zookeeper) as connected:
        for name in ("orders", "invoices", "secret"):
            await connected.create_queue(name, record=roq.Record())
        await connected.create_group("orders", "billing")
        async with connected.publisher("orders", confirm="stored") as publisher:
            await publisher.publish_many("t", [b"0", b"1"])


async def taken(cluster: Cluster, queue: str, count: int) -> list[bytes]:
    found = list[bytes]()
    with as_holder(cluster.owner):
        async with (
            roq.connect(cluster.zookeeper) as connected,
            asyncio.timeout(WAIT_SECONDS),
            connected.subscriber(queue, start="earliest", follow="stored") as messages,
        ):
            while len(found) < count:
                found += [message.payload for message in await messages.next_batch() or []]
    return found


async def test_a_transaction_publishes_where_its_client_may(cluster: Cluster) -> None:
    worker = cluster.card(
        "worker", Grant(Right.LEASE, "orders@billing"), Grant(Right.PUBLISH, "invoices"), Grant(Right.DESCRIBE, "secret")
    )
    with as_holder(worker):
        async with (
            roq.connect(cluster.zookeeper) as connected,
            asyncio.timeout(WAIT_SECONDS),
            connected.subscriber("orders", group="billing") as member,
        ):
            message = await anext(member)
            async with connected.transaction() as refused:
                await refused.publish("invoices", "t", b"never")
                await refused.publish("secret", "t", b"never")
                await refused.ack(message)
                with pytest.raises(AccessDenied, match="worker needs the right `publish` to 'secret'"):
                    await refused.commit()
            async with connected.transaction() as transaction:
                await transaction.publish("invoices", "t", b"billed")
                await transaction.ack(message)
    assert await taken(cluster, "invoices", 1) == [b"billed"]


async def test_who_may_publish_needs_nothing_more_for_transactions(cluster: Cluster) -> None:
    writer = cluster.card("writer", Grant(Right.PUBLISH, "invoices"))
    reader = cluster.card("reader", Grant(Right.SUBSCRIBE, "invoices"))
    with as_holder(writer):
        async with roq.connect(cluster.zookeeper) as connected:
            async with connected.transaction() as transaction:
                await transaction.publish("invoices", "t", b"alone")
            with pytest.raises(AccessDenied, match="`admin`"):
                await connected.remove_work_queue(TRANSACTIONS)
    with as_holder(reader):
        async with roq.connect(cluster.zookeeper) as connected, connected.transaction() as transaction:
            await transaction.publish("invoices", "t", b"never")
            with pytest.raises(AccessDenied):
                await transaction.commit()
    assert b"alone" in await taken(cluster, "invoices", 2)
