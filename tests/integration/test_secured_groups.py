"""Groups of a secured cluster: who may make one, who may take from it, and that its master gets to the tapes at all.

Not covered: which request needs which right (tests/unit/test_rights.py, tests/unit/test_groups.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

import roq
from roq.errors import AccessDenied
from roq.wire.card import Grant, Right
from tests.harness.cards import as_holder
from tests.integration.secured_rig import Cluster, started

WAIT_SECONDS = 15.0


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with started(tmp_path_factory.mktemp("secured-groups"), "--hosts", "2") as made:
        with as_holder(made.owner):
            asyncio.run(prepare(made))
        yield made


async def prepare(cluster: Cluster) -> None:
    async with roq.connect(cluster.zookeeper) as connected:
        await connected.create_queue("kept", record=roq.Record())
        async with connected.publisher("kept", confirm="stored") as publisher:
            await publisher.publish_many("t", [b"0", b"1"])


async def take(connected: roq.Cluster, group: str) -> bytes:
    async with asyncio.timeout(WAIT_SECONDS), connected.subscriber("kept", group=group) as member:
        message = await anext(member)
        await message.ack()
        return message.payload


async def test_who_makes_a_group_who_takes_from_it_and_who_does_neither(cluster: Cluster) -> None:
    maker = cluster.card("maker", Grant(Right.ADMIN, "kept@*"), Grant(Right.READ, "kept"))
    steward = cluster.card("steward", Grant(Right.ADMIN, "kept@*"))
    worker = cluster.card("worker", Grant(Right.LEASE, "kept@billing"))
    reader = cluster.card("reader", Grant(Right.SUBSCRIBE, "kept"))
    with as_holder(steward):
        async with roq.connect(cluster.zookeeper) as connected:
            with pytest.raises(AccessDenied, match="steward needs the right `subscribe` or `read` to 'kept'"):
                await connected.create_group("kept", "billing")
    with as_holder(worker):
        async with roq.connect(cluster.zookeeper) as connected:
            with pytest.raises(AccessDenied, match="worker needs the right `admin` to 'kept@billing'"):
                await take(connected, "billing")
    with as_holder(maker):
        async with roq.connect(cluster.zookeeper) as connected:
            await connected.create_group("kept", "billing")
            with pytest.raises(AccessDenied, match="maker needs the right `lease` to 'kept@billing'"):
                await take(connected, "billing")
            assert [info.record.name for info in await connected.groups("kept")] == ["kept@billing"]
    with as_holder(worker):
        async with roq.connect(cluster.zookeeper) as connected:
            assert [await take(connected, "billing") for _ in range(2)] == [b"0", b"1"]
            with pytest.raises(AccessDenied, match="any right to 'kept@other'"):
                await take(connected, "other")
            with pytest.raises(AccessDenied, match="to 'kept'"):
                await connected.groups("kept")
            with pytest.raises(AccessDenied, match="`admin`"):
                await connected.remove_group("kept", "billing")
    with as_holder(reader):
        async with roq.connect(cluster.zookeeper) as connected:
            with pytest.raises(AccessDenied, match="reader needs any right to 'kept@billing'"):
                await take(connected, "billing")
    with as_holder(steward):
        async with roq.connect(cluster.zookeeper) as connected:
            await connected.remove_group("kept", "billing")
