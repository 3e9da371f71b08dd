"""What messages ask of groups, on a real cluster: a priority, an end; and how many messages a group has before it.

Not covered: each rule of it (tests/unit/test_groups_expiry.py), interleavings with crashes (tests/model/test_groups.py).
"""

from __future__ import annotations

import asyncio
import os
import signal
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

import roq
from roq.errors import InvalidHeaders
from roq.wire.assignment import ProcessKind
from roq.workqueue.address import queue_address
from roq.workqueue.master.intake import MESSAGES_MAX

BOUND_SECONDS = 30.0
GROUP = "billing"


@pytest.fixture
async def recorded(client: roq.Cluster) -> AsyncIterator[str]:
    """A fresh recorded queue, removed after the test, and its groups with it."""
    name = f"hdr-{uuid.uuid4().hex[:12]}"
    await client.create_queue(name, overflow="block", record=roq.Record(days=1))
    yield name
    await client.remove_queue(name)


@pytest.fixture
async def group(client: roq.Cluster, recorded: str) -> AsyncIterator[roq.WorkQueue]:
    """A group of it in any order, as a work queue."""
    await client.create_group(recorded, GROUP, order="none")
    async with roq.open_queue(queue_address(client.zookeeper, f"{recorded}@{GROUP}")) as queue:
        yield queue


async def until(condition: Callable[[], Awaitable[object]]) -> None:
    async with asyncio.timeout(BOUND_SECONDS):
        while not await condition():  # what another process does has no event here
            await asyncio.sleep(0.05)


async def status_is(queue: roq.WorkQueue, **wanted: int) -> bool:
    status = await queue.status()
    return all(getattr(status, name) == value for name, value in wanted.items())


async def kill_master(client: roq.Cluster, group: str) -> None:
    record = (await client.work_queue(group)).record
    (master,) = [
        process
        for host in (await client.view()).hosts
        if host.report is not None and host.host == record.master_host
        for process in host.report.processes
        if process.kind is ProcessKind.MASTER and process.queue == record.name
    ]
    os.kill(master.pid, signal.SIGKILL)


@pytest.mark.quick
async def test_a_higher_priority_goes_first_and_what_is_over_is_counted(
    client: roq.Cluster, recorded: str, group: roq.WorkQueue
) -> None:
    async with client.publisher(recorded, confirm="stored") as publisher:
        for number, headers in enumerate(
            ({}, {"roq-priority": "5"}, {"roq-ttl": "0.4"}, {"roq-priority": "-1"}, {"roq-ttl": "600"})
        ):
            await publisher.publish("t", b"%d" % number, headers)
        with pytest.raises(InvalidHeaders, match="-128 to 127"):
            await publisher.publish("t", b"", {"roq-priority": "high"})
        with pytest.raises(InvalidHeaders, match="more than 0"):
            await publisher.publish("t", b"", {"roq-ttl": "0"})
    await until(lambda: status_is(group, ready=4, expired=1, inserted=5, dead=0, behind_ms=0, lag=0))
    tasks = await group.lease(30.0, count=10)
    assert [task.payload for task in tasks] == [b"1", b"0", b"4", b"3"]
    assert [task.headers for task in tasks] == [{"roq-priority": "5"}, {}, {"roq-ttl": "600"}, {"roq-priority": "-1"}]
    assert [task.priority for task in tasks] == [5, 0, 0, -1]
    await group.ack_many(tasks)
    assert await status_is(group, ready=0, leased=0, completed=4, expired=1)


async def test_an_end_comes_also_while_no_master_serves_and_no_lease_is_cut(
    client: roq.Cluster, recorded: str, group: roq.WorkQueue
) -> None:
    async with client.publisher(recorded, confirm="stored") as publisher:
        for number in range(3):
            await publisher.publish("t", b"%d" % number, {"roq-ttl": "2"})
    await until(lambda: status_is(group, ready=3))
    first, second = await group.lease(30.0, count=2)
    await kill_master(client, f"{recorded}@{GROUP}")
    await until(lambda: status_is(group, ready=0, leased=2, expired=1))
    await group.ack(first)
    await group.release(second)
    await until(lambda: status_is(group, ready=0, leased=0, completed=1, expired=2, dead=0))


async def test_a_group_knows_how_many_messages_it_has_before_it(
    client: roq.Cluster, recorded: str, group: roq.WorkQueue
) -> None:
    more, size = 20_000, 100
    async with client.publisher(recorded, confirm="stored") as publisher:
        for begin in range(0, MESSAGES_MAX + more, 10_000):
            await publisher.publish_many("t", [b"%0*d" % (size, n) for n in range(begin, begin + 10_000)])
        await publisher.flush()

    async def is_full() -> bool:
        """Entries that were not taken as a whole are before it: one in its hand, and those that it has read ahead."""
        status = await group.status()
        left = MESSAGES_MAX + more - status.ready
        return status.ready >= MESSAGES_MAX and left <= status.lag <= left + 2 * 1024 * 1024 // size

    await until(is_full)
    taken = Counter[bytes]()
    async with asyncio.timeout(BOUND_SECONDS):
        while taken.total() < MESSAGES_MAX + more:
            tasks = await group.lease(30.0, count=1000, wait_seconds=5.0)
            assert await group.ack_many(tasks) == []
            if taken.total() == 0:  # what was fed and acked together is read from the log again
                await kill_master(client, f"{recorded}@{GROUP}")
            taken.update(task.payload for task in tasks)
    assert set(taken.values()) == {1}, "once acked, one never comes again"
    assert len(taken) == MESSAGES_MAX + more
    await until(lambda: status_is(group, ready=0, lag=0, behind_ms=0))
    await client.create_group(recorded, "late", start="now")
    async with roq.open_queue(queue_address(client.zookeeper, f"{recorded}@late")) as late:
        await until(lambda: status_is(late, lag=0, behind_ms=0, inserted=0))
