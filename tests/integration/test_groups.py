"""Groups of recorded queues on a real cluster: each stored message to one member at a time, in order, until it is acked.

Not covered: what the GCM decides (tests/unit/test_groups.py), what fills a group (its model and simulation), the command line
(test_cli_groups.py).
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
import uuid
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import timedelta

import pytest

import roq
from roq import blocking
from roq.errors import (
    CallError,
    Closed,
    GroupNotFound,
    InvalidFilter,
    InvalidPosition,
    NotRecorded,
    QueueNotFound,
    WorkQueueConflict,
)
from roq.wire.assignment import ProcessKind
from roq.workqueue.address import queue_address
from tests.integration.running import RunningCluster

BOUND_SECONDS = 20.0
GROUP = "billing"


@pytest.fixture
async def recorded(client: roq.Cluster) -> AsyncIterator[str]:
    """A fresh recorded queue, removed after the test, and its groups with it."""
    name = f"grp-{uuid.uuid4().hex[:12]}"
    await client.create_queue(name, overflow="block", record=roq.Record(days=1))
    yield name
    await client.remove_queue(name)
    left = [info.record.name for info in await client.work_queues()]
    assert [one for one in left if one.startswith(f"{name}@")] == []


async def store(client: roq.Cluster, queue: str, count: int, topics: int = 1, first: int = 0) -> int:
    """Publish numbers, turn by turn on these topics, until they are stored; the publisher's id."""
    async with client.publisher(queue, confirm="stored") as publisher:
        for number in range(first, first + count):
            await publisher.publish(f"t.{number % topics}", b"%d" % number, {"n": str(number)})
        assert (await publisher.flush()).level == "stored"
        return publisher.id


async def take(member: roq.GroupSubscriber, count: int) -> list[roq.Task]:
    """So many messages, each acked."""
    found = list[roq.Task]()
    async with asyncio.timeout(BOUND_SECONDS):
        while len(found) < count:
            message = await anext(member)
            await message.ack()
            found.append(message)
    return found


async def silent(member: roq.GroupSubscriber) -> bool:
    """Nothing is there for it."""
    return await member.queue.lease(1.0, wait_seconds=0.5) == []


async def until(condition: Callable[[], Awaitable[object]], seconds: float = BOUND_SECONDS) -> None:
    async with asyncio.timeout(seconds):
        while not await condition():  # what another process does has no event here
            await asyncio.sleep(0.05)


def numbers(messages: list[roq.Task]) -> list[int]:
    return [int(message.payload) for message in messages]


# --- members ----------------------------------------------------------------------------------------------------------


@pytest.mark.quick
async def test_each_message_goes_to_one_member_which_acks_it(client: roq.Cluster, recorded: str) -> None:
    publisher = await store(client, recorded, 500, topics=7)
    taken: list[list[roq.Task]] = [[], []]

    async def work(mine: list[roq.Task]) -> None:
        async with client.subscriber(recorded, group=GROUP, order="none", count=10) as member:
            async for message in member:
                mine.append(message)
                await message.ack()
                if sum(map(len, taken)) >= 1000:
                    break

    async with asyncio.timeout(BOUND_SECONDS), asyncio.TaskGroup() as tasks:
        members = [tasks.create_task(work(mine)) for mine in taken]
        await until(lambda: asyncio.sleep(0, sum(map(len, taken)) >= 500))
        assert await store(client, recorded, 500, topics=7, first=500) != publisher, "and what is published meanwhile"
        await until(lambda: asyncio.sleep(0, sum(map(len, taken)) >= 1000))
        for member in members:
            member.cancel()
    both = [message for mine in taken for message in mine]
    assert sorted(numbers(both)) == list(range(1000))
    assert all(taken), "both had some"
    first = min(both, key=lambda message: int(message.payload))
    assert (first.topic, first.payload, first.headers, first.publisher, first.sequence) == (
        "t.0",
        b"0",
        {"n": "0"},
        publisher,
        1,
    )
    assert {message.topic for message in both} == {f"t.{number}" for number in range(7)}
    assert {message.attempt for message in both} == {1}
    assert {message.publisher for message in both if int(message.payload) < 500} == {publisher}
    async with roq.open_queue(queue_address(client.zookeeper, f"{recorded}@{GROUP}")) as tasks_of_it:
        await until(lambda: _is(tasks_of_it, roq.Status(0, 0, 0, 0, 1000, 1000)))


async def _is(queue: roq.WorkQueue, wanted: roq.Status) -> bool:
    status = await queue.status()
    counts = ("ready", "delayed", "leased", "dead", "completed", "inserted")
    return [getattr(status, name) for name in counts] == [getattr(wanted, name) for name in counts]


async def test_a_messages_time_is_when_it_was_published(client: roq.Cluster, recorded: str) -> None:
    await store(client, recorded, 1)
    async with client.subscriber(recorded, start="earliest", follow=False) as past:
        (plain,) = [message async for message in past]
    async with client.subscriber(recorded, group=GROUP) as member:
        (leased,) = await take(member, 1)
    assert leased.timestamp == plain.timestamp // 1_000_000 * 1_000_000
    assert round(leased.inserted * 1000) == leased.timestamp // 1_000_000
    same = ("topic", "payload", "headers", "publisher", "sequence")
    assert [getattr(leased, name) for name in same] == [getattr(plain, name) for name in same]


async def test_of_a_topic_one_at_a_time_and_in_order(client: roq.Cluster, recorded: str) -> None:
    """A message that is given back with a delay holds its topic up, and no other."""
    await store(client, recorded, 300, topics=5)
    seen: dict[str, list[int]] = defaultdict(list)
    under_way: Counter[str] = Counter()
    held = list[tuple[float, int]]()  # when t.3 was given back and came again, and how many others were done by then

    async def work() -> None:
        async with client.subscriber(recorded, group=GROUP, count=3) as member:
            async for message in member:
                under_way[message.topic] += 1
                assert under_way[message.topic] == 1, "nobody else has one of this topic"
                await asyncio.sleep(0)
                under_way[message.topic] -= 1
                if message.topic == "t.3" and len(held) < 2:
                    held.append((time.monotonic(), sum(map(len, seen.values()))))
                    if len(held) == 1:
                        await message.release(1.0, "not now")
                        continue
                    assert (message.payload, message.attempt) == (b"3", 2)
                seen[message.topic].append(int(message.payload))
                await message.ack()

    async with asyncio.TaskGroup() as tasks:
        members = [tasks.create_task(work()) for _ in range(3)]
        await until(lambda: asyncio.sleep(0, sum(map(len, seen.values())) == 300))
        for member in members:
            member.cancel()
    assert seen == {f"t.{number}": list(range(number, 300, 5)) for number in range(5)}
    (given, before), (came, after) = held
    assert came - given > 0.9
    assert after > before, "the other topics went on"


async def test_a_member_that_leaves_gives_back_what_it_has_at_once(client: roq.Cluster, recorded: str) -> None:
    await store(client, recorded, 3)
    taken = list[roq.Task]()

    async def fail() -> None:
        async with client.subscriber(recorded, group=GROUP, lease_seconds=600) as member:
            taken.append(await anext(member))
            raise ValueError("no such customer")

    with pytest.raises(ValueError, match="customer"):
        await fail()
    async with client.subscriber(recorded, group=GROUP) as member:
        (view,) = await member.queue.peek(count=1)
        assert view.error.startswith("ValueError: no such customer\n")
        (first,) = await take(member, 1)
        assert (first.id, first.attempt) == (taken[0].id, 2), "it was worked on, and failed"
        second = await anext(member)
    async with client.subscriber(recorded, group=GROUP) as member:
        again = await anext(member)
        assert again.id == second.id
        await again.ack()
        assert numbers(await take(member, 1)) == [2]


async def test_iteration_ends_when_the_member_or_the_connection_is_closed(client: roq.Cluster, recorded: str) -> None:
    member = client.subscriber(recorded, group=GROUP)
    with pytest.raises(Closed, match="open this work queue first"):
        await anext(member)
    async with member:
        for _ in range(2):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.3):
                    await anext(member)
        await store(client, recorded, 1)
        assert numbers(await take(member, 1)) == [0], "who gave up waiting may wait again"
        waiting = asyncio.create_task(anext(member, None))
        await asyncio.sleep(0.1)
        assert not waiting.done()
        async with asyncio.timeout(BOUND_SECONDS):
            await member.close()
            assert await waiting is None
    assert [message async for message in member] == []
    async with roq.connect(client.zookeeper) as other:
        late = other.subscriber(recorded, group=GROUP)
        await late.open()
    assert late.queue.closed


async def test_an_ack_holds_over_the_death_of_the_master(client: roq.Cluster, recorded: str) -> None:
    """What was acked does not come again; what was leased, and what is stored meanwhile, comes."""
    await store(client, recorded, 200, topics=200)
    async with client.subscriber(recorded, group=GROUP, lease_seconds=2.0) as member:
        done = numbers(await take(member, 100))
        (master,) = [
            process
            for host in (await client.view()).hosts
            if host.report is not None
            for process in host.report.processes
            if process.kind is ProcessKind.MASTER
            and process.queue == f"{recorded}@{GROUP}"
            and host.host == (await client.work_queue(f"{recorded}@{GROUP}")).record.master_host
        ]
        os.kill(master.pid, signal.SIGKILL)
        await store(client, recorded, 100, topics=200, first=200)
        rest = numbers(await take(member, 200))
        assert sorted(done + rest) == list(range(300))
        assert await silent(member)


# --- what a group gets ------------------------------------------------------------------------------------------------


async def _known_as_stored(client: roq.Cluster, queue: str, position: roq.TapePosition | None) -> bool:
    """Stores hear a few ms later what is stored on enough of them."""
    async with client.subscriber(queue, start="live", follow="stored") as here:
        return here.position == position


async def test_where_a_group_begins(client: roq.Cluster, recorded: str) -> None:
    async with client.publisher(recorded, confirm="stored") as publisher:
        receipt = await publisher.publish("t", b"0", confirm="stored")
        assert receipt is not None
        assert receipt.position is not None
        await until(lambda: _known_as_stored(client, recorded, receipt.position))
        for name, start in (("now", "now"), ("behind", receipt.position), ("first", "earliest"), ("ago", timedelta(hours=1))):
            await client.create_group(recorded, name, start=start)
        async with client.subscriber(recorded, group="now") as member:
            await until(lambda: _fed(member.queue))
        await publisher.publish("t", b"1", confirm="stored")
    for name, wanted in (("now", [1]), ("behind", [1]), ("first", [0, 1]), ("ago", [0, 1])):
        async with client.subscriber(recorded, group=name) as member:
            assert numbers(await take(member, len(wanted))) == wanted, name
            assert await silent(member), name
    with pytest.raises(InvalidPosition, match="of another queue"):
        await client.create_group(recorded, "wrong", start=roq.TapePosition("other", {}))


async def _fed(queue: roq.WorkQueue) -> bool:
    """It has reached the present."""
    return (await queue.status()).behind_seconds == 0


async def test_topics_and_conditions(client: roq.Cluster, recorded: str) -> None:
    await client.create_group(recorded, "some", "t.1", "t.2", order="none", where="n > '5'")
    await store(client, recorded, 10, topics=4)
    async with client.subscriber(recorded, group="some") as member:  # as it is
        assert sorted(numbers(await take(member, 2))) == [6, 9]
        assert await silent(member)
    for fields, told in (
        ({"order": "topic"}, "order none, not topic"),
        ({"where": "n > '4'"}, "where"),
    ):
        with pytest.raises(WorkQueueConflict, match=told):
            async with client.subscriber(recorded, group="some", **fields):  # type: ignore[call-overload]
                pass
    with pytest.raises(WorkQueueConflict, match=r"topics t\.1 t\.2, not >"):
        await client.create_group(recorded, "some", order="none", where="n > '5'")
    with pytest.raises(InvalidFilter):
        await client.create_group(recorded, "other", where="n >")


async def test_what_fails_too_often_is_a_dead_letter_and_comes_again_when_asked(client: roq.Cluster, recorded: str) -> None:
    await client.create_group(recorded, GROUP, settings=roq.TaskSettings(max_attempts=2))
    await store(client, recorded, 2)
    async with client.subscriber(recorded, group=GROUP) as member:
        async with asyncio.timeout(BOUND_SECONDS):
            for _ in range(2):
                await (await anext(member)).release(error="bad number")
            second = await anext(member)
            assert int(second.payload) == 1, "the topic goes on"
            await second.reject("never")
        letters = await member.queue.dead()
        assert sorted((letter.payload, letter.error, letter.topic) for letter in letters) == [
            (b"0", "bad number", "t.0"),
            (b"1", "never", "t.0"),
        ]
        assert await member.queue.requeue_dead() == 2
        assert numbers(await take(member, 2)) == [0, 1]


async def test_a_worker_of_work_queues_works_on_a_group(client: roq.Cluster, recorded: str) -> None:
    await store(client, recorded, 50, topics=3)
    address = queue_address(client.zookeeper, f"{recorded}@{GROUP}")
    with pytest.raises(GroupNotFound, match="create_group or `roq queue group create` makes one"):
        await roq.open_queue(address).open()
    await client.create_group(recorded, GROUP)
    seen = list[int]()

    async def handle(message: roq.Task) -> None:
        seen.append(int(message.payload))

    async with roq.open_queue(address) as queue:
        work = await queue.run(handle, concurrency=4, wait_seconds=2.0, handle_signals=False)
    assert work.done == 50
    assert sorted(seen) == list(range(50))


def test_plain_code_has_it_too(cluster: RunningCluster) -> None:
    with blocking.connect(cluster.zookeeper) as connected:
        name = f"grp-{uuid.uuid4().hex[:12]}"
        connected.create_queue(name, record=roq.Record(days=1))
        try:
            with connected.publisher(name, confirm="stored") as publisher:
                publisher.publish_many("t", [b"%d" % number for number in range(20)])
            with connected.subscriber(name, group=GROUP) as member:
                for message in member:
                    message.ack()
                    if message.payload == b"9":
                        break
            assert [info.record.name for info in connected.groups(name)] == [f"{name}@{GROUP}"]
            with connected.subscriber(name, group=GROUP) as member:
                assert next(member).payload == b"10"
                assert member.queue.status().completed == 10
            assert list(member) == []
            connected.remove_group(name, GROUP)
            assert connected.groups(name) == []
        finally:
            connected.remove_queue(name)


# --- groups as such ---------------------------------------------------------------------------------------------------


async def test_groups_are_made_once_listed_and_removed(client: roq.Cluster, recorded: str) -> None:
    made = await client.create_group(recorded, GROUP, "eu.>")
    assert made.ready
    again = await client.create_group(recorded, GROUP, "eu.>", start="now")
    assert again.record == made.record
    await client.create_group(recorded, "archive")
    assert [info.record.name for info in await client.groups(recorded)] == [f"{recorded}@archive", f"{recorded}@{GROUP}"]
    await client.remove_group(recorded, GROUP)
    assert [info.record.name for info in await client.groups(recorded)] == [f"{recorded}@archive"]
    with pytest.raises(GroupNotFound, match=f"no group is named '{recorded}@{GROUP}'"):
        await client.remove_group(recorded, GROUP)
    with pytest.raises(QueueNotFound):
        await client.groups("no-such-queue")
    with pytest.raises(QueueNotFound):
        await client.create_group("no-such-queue", GROUP)


async def test_who_works_on_a_group_that_is_removed_is_told(client: roq.Cluster, recorded: str) -> None:
    await store(client, recorded, 2, topics=2)
    async with client.subscriber(recorded, group=GROUP) as member:
        held = await anext(member)
        await client.remove_group(recorded, GROUP)
        with pytest.raises(GroupNotFound, match=f"no group is named '{recorded}@{GROUP}'"):
            async with asyncio.timeout(BOUND_SECONDS):
                await anext(member)
        with pytest.raises(GroupNotFound):
            await held.ack()


async def test_nobody_puts_into_a_group(client: roq.Cluster, recorded: str) -> None:
    await client.create_group(recorded, GROUP)
    async with roq.open_queue(queue_address(client.zookeeper, f"{recorded}@{GROUP}")) as queue:
        with pytest.raises(CallError, match=f"is a group: it gets what is published to queue {recorded}"):
            await queue.put(b"x")
        with pytest.raises(CallError, match="is a group"):
            await queue.put(b"x" * 100_000)
        assert (await queue.status()).inserted == 0


async def test_only_a_recorded_queue_has_groups(client: roq.Cluster, queue: str) -> None:
    with pytest.raises(NotRecorded, match="can't have groups"):
        async with client.subscriber(queue, group=GROUP):
            pass


async def test_a_group_goes_with_its_queue_and_a_new_one_of_its_name_begins_anew(client: roq.Cluster) -> None:
    name = f"grp-{uuid.uuid4().hex[:12]}"
    for life in range(2):
        await client.create_queue(name, record=roq.Record(days=1))
        await store(client, name, 3, first=10 * life)
        async with client.subscriber(name, group=GROUP) as member:
            assert numbers(await take(member, 2)) == [10 * life, 10 * life + 1]
        await client.remove_queue(name)
        with pytest.raises(GroupNotFound):
            await client.work_queue(f"{name}@{GROUP}")
        processes = [p for host in (await client.view()).hosts if host.report for p in host.report.processes]
        assert [process.name for process in processes if process.queue.startswith(name)] == []


async def test_a_group_goes_on_when_its_queue_is_recorded_no_longer(client: roq.Cluster, recorded: str) -> None:
    await store(client, recorded, 3)
    await client.create_group(recorded, GROUP, "t.0")
    await client.record_queue(recorded, None)
    async with client.subscriber(recorded, group=GROUP) as member:
        assert numbers(await take(member, 3)) == [0, 1, 2]
        await client.record_queue(recorded, roq.Record(days=1))
        await until(lambda: _stores(client, recorded))
        await store(client, recorded, 2, first=3)
        assert numbers(await take(member, 2)) == [3, 4]


async def _stores(client: roq.Cluster, queue: str) -> bool:
    """Its Exchanges have heard that it is recorded."""
    async with client.publisher(queue) as publisher:
        try:
            await publisher.publish("probe", b"", confirm="stored")
        except NotRecorded:
            return False
    return True
