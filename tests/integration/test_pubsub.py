"""Publish and subscribe end to end on a real cluster."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest

import roq
from roq.errors import Closed, InvalidTopic, MessagesLost, PayloadTooLarge, QueueNotFound
from tests.integration.running import RunningCluster


async def take(subscriber: roq.Subscriber, count: int, timeout_seconds: float = 20.0) -> list[roq.Message]:
    """The next `count` messages."""
    async with asyncio.timeout(timeout_seconds):
        return [await anext(subscriber) for _ in range(count)]


@pytest.mark.quick
async def test_messages_arrive_in_order_with_their_attributes(client: roq.Cluster, queue: str) -> None:
    before = time.time_ns()
    async with client.subscriber(queue) as subscriber, client.publisher(queue) as publisher:
        for number in range(1000):
            await publisher.publish(f"topic.{number % 7}", b"%d" % number)
        messages = await take(subscriber, 1000)
    assert [message.payload for message in messages] == [b"%d" % number for number in range(1000)]
    assert [message.topic for message in messages] == [f"topic.{number % 7}" for number in range(1000)]
    assert [message.sequence for message in messages] == list(range(1, 1001))
    assert {message.publisher for message in messages} == {publisher.id}
    assert all(before <= message.timestamp <= time.time_ns() for message in messages)


@pytest.mark.quick
async def test_topics_prefixes_and_wildcards(client: roq.Cluster, queue: str) -> None:
    filters = {"eu.paris": 2, "eu.*": 3, "eu.>": 4, ">": 6, "*.paris": 2, "us": 1}
    subscribers = {pattern: client.subscriber(queue, pattern) for pattern in filters}
    for subscriber in subscribers.values():
        await subscriber.open()
    async with client.publisher(queue) as publisher:
        for topic in ("eu.paris", "eu.paris-sud", "eu.rome", "eu.rome.north", "us.paris", "asia"):
            await publisher.publish(topic, topic.encode())
        await publisher.publish("eu.paris.end", b"")
        await publisher.flush()
    got = {}
    for pattern, subscriber in subscribers.items():
        got[pattern] = [message.topic for message in await take(subscriber, filters[pattern])]
    assert got["eu.paris"] == ["eu.paris", "eu.paris-sud"]
    assert got["eu.*"] == ["eu.paris", "eu.paris-sud", "eu.rome"]
    assert got["eu.>"] == ["eu.paris", "eu.paris-sud", "eu.rome", "eu.rome.north"]
    assert got["*.paris"] == ["eu.paris", "us.paris"]
    assert got["us"] == ["us.paris"]


async def test_several_filters_deliver_each_message_once(client: roq.Cluster, queue: str) -> None:
    async with client.subscriber(queue, "a", "a.b", ">", "a.*") as subscriber, client.publisher(queue) as publisher:
        await publisher.publish_many("a.b", [b"1", b"2", b"3"])
        await publisher.publish("z", b"4")
        assert [message.payload for message in await take(subscriber, 4)] == [b"1", b"2", b"3", b"4"]


async def test_large_small_and_empty_payloads(client: roq.Cluster, queue: str) -> None:
    payloads = [b"", b"x" * 500_000, b"y", b"z" * 70_000, bytearray(b"array"), memoryview(b"view"), b"e" * (1024 * 1024 - 512)]
    async with client.subscriber(queue) as subscriber, client.publisher(queue) as publisher:
        for payload in payloads:
            await publisher.publish("t", payload)  # type: ignore[arg-type]
        await publisher.publish_many("t", payloads)  # type: ignore[arg-type]
        messages = await take(subscriber, 2 * len(payloads))
    assert [message.payload for message in messages] == [bytes(payload) for payload in payloads] * 2


async def test_refused_input_changes_nothing(client: roq.Cluster, queue: str) -> None:
    async with client.subscriber(queue) as subscriber, client.publisher(queue) as publisher:
        await publisher.publish("good", b"1")
        for topic in ("", "a\0b", "x" * 256, "ü" * 128):
            with pytest.raises(InvalidTopic):
                await publisher.publish(topic, b"")
        with pytest.raises(InvalidTopic):
            await publisher.publish(5, b"")  # type: ignore[arg-type]
        with pytest.raises(TypeError):
            await publisher.publish("good", "text")  # type: ignore[arg-type]
        with pytest.raises(TypeError):
            await publisher.publish_many("good", [b"2", 7])  # type: ignore[list-item]
        with pytest.raises(PayloadTooLarge):
            await publisher.publish("good", b"x" * (1024 * 1024))
        await publisher.publish("good", b"3")
        assert [message.payload for message in await take(subscriber, 3)] == [b"1", b"2", b"3"]
    with pytest.raises(Closed):
        await publisher.publish("good", b"4")
    with pytest.raises(InvalidTopic):
        client.subscriber(queue, "a.>.b")


async def test_unknown_queue_is_told(client: roq.Cluster) -> None:
    with pytest.raises(QueueNotFound):
        await client.publisher("nowhere").open()
    with pytest.raises(QueueNotFound):
        await client.subscriber("nowhere").open()


async def test_batches_and_iteration_share_one_stream(client: roq.Cluster, queue: str) -> None:
    async with client.subscriber(queue) as subscriber, client.publisher(queue) as publisher:
        await publisher.publish_many("t", [b"%d" % number for number in range(100)])
        first = (await take(subscriber, 1))[0]
        got = [first.payload]
        async for batch in subscriber.batches():
            got += [message.payload for message in batch]
            if len(got) >= 100:
                break
    assert got == [b"%d" % number for number in range(100)]


async def test_flush_means_forwarded_and_close_ends_iteration(client: roq.Cluster, queue: str) -> None:
    subscriber = await client.subscriber(queue).open()
    async with client.publisher(queue) as publisher:
        await publisher.publish_many("t", [b"x" * 1000] * 5000)
        await publisher.flush()
    assert len(await take(subscriber, 5000)) == 5000
    closing = asyncio.get_running_loop().create_task(anext(subscriber, None))
    await asyncio.sleep(0)
    await subscriber.close()
    async with asyncio.timeout(2):
        assert await closing is None
    assert [message async for message in subscriber] == []


async def test_block_waits_for_the_slowest_and_loses_nothing(client: roq.Cluster, queue: str) -> None:
    total = 60_000
    fast = await client.subscriber(queue).open()
    slow = await client.subscriber(queue).open()

    async def read(subscriber: roq.Subscriber, pause_seconds: float) -> list[int]:
        numbers: list[int] = []
        async for batch in subscriber.batches():
            numbers += [message.sequence for message in batch]
            if len(numbers) == total:
                return numbers
            await asyncio.sleep(pause_seconds)
        return numbers

    async def publish() -> float:
        async with client.publisher(queue) as publisher:
            for _ in range(total):
                await publisher.publish("t", b"x" * 1000)
            await publisher.flush(60)
            return publisher.blocked_seconds

    async with asyncio.timeout(60):
        one, two, blocked = await asyncio.gather(read(fast, 0), read(slow, 0.002), publish())
    assert one == two == list(range(1, total + 1))
    assert fast.lost == slow.lost == 0
    assert blocked > 0
    await fast.close()
    await slow.close()


@pytest.mark.quick
async def test_drop_tells_every_gap(client: roq.Cluster) -> None:
    name = "drops, told"
    await client.create_queue(name, overflow="drop")
    told: list[MessagesLost] = []
    total = 150_000
    progress = asyncio.Event()

    def tell(event: MessagesLost) -> None:
        told.append(event)
        progress.set()

    try:
        subscriber = await client.subscriber(name, on_lost=tell).open()
        async with client.publisher(name) as publisher:
            for _ in range(total):  # the subscriber reads nothing meanwhile: its buffers overflow
                await publisher.publish("t", b"x" * 1000)
            await publisher.flush(30)
        received: list[int] = []

        async def read() -> None:
            async for batch in subscriber.batches():
                received.extend(message.sequence for message in batch)
                progress.set()

        reader = asyncio.get_running_loop().create_task(read())
        async with asyncio.timeout(30):
            while len(received) + sum(event.count for event in told) < total:
                await progress.wait()
                progress.clear()
        assert received == sorted(set(received))
        assert told, "nothing was dropped: the test shows nothing"
        assert len(received) + sum(event.count for event in told) == total
        missing = set(range(1, total + 1)) - set(received)
        assert missing == {number for event in told for number in range(event.first, event.last + 1)}
        assert subscriber.lost == len(missing)
        await subscriber.close()
        await reader
    finally:
        await client.remove_queue(name)


@pytest.mark.quick
async def test_exchange_killed_is_back_and_nothing_is_lost(client: roq.Cluster, queue: str) -> None:
    told: list[MessagesLost] = []
    info = await client.queue(queue)
    exchange = next(iter(info.record.exchanges))
    host = next(one for one in await client.hosts() if one.host == info.record.monitor_host)
    assert host.report is not None
    process = next(one for one in host.report.processes if one.exchange == exchange)
    async with client.subscriber(queue, on_lost=told.append) as subscriber, client.publisher(queue) as publisher:
        await publisher.publish("t", b"before")
        await take(subscriber, 1)
        os.kill(process.pid, signal.SIGKILL)
        received: list[int] = []
        number = 1
        async with asyncio.timeout(20):
            while not received or received[-1] < 50:
                number += 1
                await publisher.publish("t", b"%d" % number)
                try:
                    async with asyncio.timeout(0.05):
                        received.append((await anext(subscriber)).sequence)
                except TimeoutError:
                    continue
        assert received == list(range(2, received[-1] + 1))
        assert told == []
        async with asyncio.timeout(10):
            while not subscriber.health().ready:
                await asyncio.sleep(0.02)
        assert publisher.health().ready
        assert publisher.replays == 1


async def test_interpreter_exits_at_once_with_unsent_data(cluster: RunningCluster, queue: str) -> None:
    program = textwrap.dedent(
        """
        import asyncio, sys, roq
        async def main():
            cluster = await roq.connect(sys.argv[1]).__aenter__()
            publisher = await cluster.publisher(sys.argv[2]).open()
            for _ in range(20000):
                await publisher.publish("t", b"x" * 1000)
            print("published", flush=True)
        asyncio.run(main())
        """
    )
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", program, cluster.zookeeper, queue, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    async with asyncio.timeout(20):
        assert await process.stdout.readline() == b"published\n"
    started = time.monotonic()
    async with asyncio.timeout(5):
        await process.wait()
    assert time.monotonic() - started < 1.0


@pytest.mark.quick
def test_blocking_mirror(cluster: RunningCluster) -> None:
    with roq.blocking.connect(cluster.zookeeper) as connected:
        connected.create_queue("plain code", overflow="block")
        try:
            with connected.subscriber("plain code") as subscriber, connected.publisher("plain code") as publisher:
                for number in range(5000):
                    publisher.publish("t", b"%d" % number)
                publisher.flush()
                publisher.publish_many("t", [b"a", b"b"])
                received = []
                for message in subscriber:
                    received.append(message.payload)
                    if len(received) == 5002:
                        break
            assert received == [b"%d" % number for number in range(5000)] + [b"a", b"b"]
            with connected.publisher("plain code") as publisher:
                publisher.publish("", b"")
                with pytest.raises(InvalidTopic):
                    publisher.flush()
        finally:
            connected.remove_queue("plain code")
