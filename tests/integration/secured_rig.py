"""What tests of secured clusters do with one."""

from __future__ import annotations

import asyncio

import pytest

import roq
from roq.coordination import paths
from roq.coordination.link import ANY_VERSION
from roq.coordination.locate import read_leader
from roq.coordination.session import Session
from roq.errors import AccessDenied, RoqError

WAIT_SECONDS = 10.0


async def look_around(zookeeper: str) -> None:
    leader = await read_leader(zookeeper)
    assert leader.port
    session = await Session.connect(zookeeper)
    try:
        for denied in (
            lambda: session.get(paths.assignment("host-1")),
            lambda: session.children(paths.QUEUES),
            lambda: session.set(paths.assignment("host-1"), b"{}", ANY_VERSION),
            lambda: session.set(paths.LEADER, b"{}", ANY_VERSION),
            lambda: session.create(paths.ACCESS, b"forged"),
            lambda: session.delete(paths.LEADER),
        ):
            with pytest.raises(AccessDenied, match="ZooKeeper"):
                await denied()
    finally:
        await session.close()


async def use(zookeeper: str) -> None:
    """Until what is restarted serves."""
    while True:
        try:
            async with (
                roq.connect(zookeeper) as connected,
                connected.subscriber("orders") as reads,
                connected.publisher("orders") as writes,
            ):
                await writes.publish("t", b"x")
                await writes.flush(WAIT_SECONDS)
                assert (await anext(aiter(reads))).payload == b"x"
                return
        except RoqError:
            await asyncio.sleep(0.2)
