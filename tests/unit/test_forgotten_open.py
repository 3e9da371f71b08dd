"""What was made and not opened says so at once, whatever is asked of it: the `with` was forgotten."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

import roq
from roq.errors import Closed

NOWHERE = "127.0.0.1:1"  # nothing listens there, and nobody is asked


async def first(messages: Any) -> None:
    async for _ in messages:
        return


MEMBERS: dict[str, Callable[[roq.Cluster], Awaitable[Any]]] = {
    "publish": lambda cluster: cluster.publisher("q").publish("t", b"x"),
    "publish_many": lambda cluster: cluster.publisher("q").publish_many("t", [b"x"]),
    "flush": lambda cluster: cluster.publisher("q").flush(),
    "async for": lambda cluster: first(cluster.subscriber("q")),
    "anext": lambda cluster: anext(cluster.subscriber("q")),
    "batches": lambda cluster: first(cluster.subscriber("q").batches()),
    "next_batch": lambda cluster: cluster.subscriber("q").next_batch(),
    "ready": lambda cluster: cluster.subscriber("q").ready(),
}


@pytest.mark.parametrize("name", MEMBERS)
async def test_a_publisher_or_subscriber(name: str) -> None:
    with pytest.raises(Closed, match=r"open this (publisher|subscriber) first: async with"):
        await asyncio.wait_for(MEMBERS[name](roq.connect(NOWHERE)), 5)


TASKS: dict[str, Callable[[roq.WorkQueue], Awaitable[Any]]] = {
    "put": lambda tasks: tasks.put(b"x"),
    "put_many": lambda tasks: tasks.put_many([b"x"]),
    "lease": lambda tasks: tasks.lease(),
    "leases": lambda tasks: first(tasks.leases()),
    "status": lambda tasks: tasks.status(),
    "peek": lambda tasks: tasks.peek(),
    "release_all": lambda tasks: tasks.release_all(),
    "purge": lambda tasks: tasks.purge(),
    "dead": lambda tasks: tasks.dead(),
    "requeue_dead": lambda tasks: tasks.requeue_dead(),
    "remove_dead": lambda tasks: tasks.remove_dead(),
}


@pytest.mark.parametrize("name", TASKS)
async def test_a_work_queue(name: str) -> None:
    with pytest.raises(Closed, match="open this work queue first: async with"):
        await asyncio.wait_for(TASKS[name](roq.open_queue("memory:")), 5)


def test_plain_code() -> None:
    cluster = roq.blocking.connect(NOWHERE)
    try:
        with pytest.raises(Closed, match="open this publisher first: with"):
            cluster.publisher("q").publish("t", b"x")
        with pytest.raises(Closed, match="open this subscriber first"):
            next(iter(cluster.subscriber("q")))
    finally:
        cluster.close()
    with pytest.raises(Closed, match="open this work queue first: with"):
        roq.blocking.open_queue("memory:").put(b"x")
