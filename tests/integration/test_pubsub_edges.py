"""Corners of publish and subscribe that are easy to get wrong: crashes of two processes, busy topics, plain code, closing."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import re
import signal
import sys
import time
import weakref

import pytest

import roq
from roq.errors import Closed, MessagesLost
from roq.pubsub.links import BACKLOG_BYTES
from roq.pubsub.path_sender import HELD_SECONDS
from roq.pubsub.replay_buffer import KEPT_BYTES
from roq.testing.freezing import freeze
from roq.wire import monitor as wire
from tests.integration.running import RunningCluster

SMALL_BATCHES = 1_500  # of 20 KB: far more than a publisher keeps; and an Exchange must not stand still for 3 s

SMALL_FRAMES = 3_000  # published while there is no Exchange
BURSTS, BURST_FRAMES = 60, 300


async def pids(client: roq.Cluster, queue: str) -> dict[str, int]:
    """Process id by kind of process."""
    return {
        str(process.kind): process.pid
        for host in await client.hosts()
        for process in (host.report.processes if host.report else ())
        if process.queue == queue
    }


async def test_exchange_and_monitor_are_killed_together_under_load(client: roq.Cluster, queue: str) -> None:
    told: list[MessagesLost] = []
    received: list[int] = []
    stop = asyncio.Event()
    async with client.subscriber(queue, on_lost=told.append) as subscriber:
        publisher = await client.publisher(queue).open()

        async def publish() -> None:
            while not stop.is_set():
                for _ in range(20):
                    await publisher.publish("t", b"x" * 100)
                await asyncio.sleep(0)  # busy: the loop turns, but never rests

        async def read() -> None:
            async for batch in subscriber.batches():
                received.extend(message.sequence for message in batch)

        writing, reading = asyncio.create_task(publish()), asyncio.create_task(read())
        found = await pids(client, queue)
        os.kill(found["exchange"], signal.SIGKILL)
        os.kill(found["monitor"], signal.SIGKILL)
        killed_at = publisher.messages
        async with asyncio.timeout(20):
            while publisher.replays == 0 or not received or received[-1] < killed_at:
                await asyncio.sleep(0.05)
        stop.set()
        await writing
        await publisher.flush()
        async with asyncio.timeout(10):
            while received[-1] < publisher.messages:
                await asyncio.sleep(0.02)
        await publisher.close()
        await subscriber.close()
        await reading
    assert publisher.dropped == 0
    assert received == sorted(set(received))
    missing = set(range(received[0], received[-1] + 1)) - set(received)
    assert missing <= {number for event in told for number in range(event.first, event.last + 1)}


async def test_a_lost_tail_is_told_while_another_topic_stays_busy(client: roq.Cluster) -> None:
    name = "busy elsewhere"
    await client.create_queue(name, overflow="drop")
    told: list[MessagesLost] = []
    try:
        async with client.subscriber(name, "a", on_lost=told.append) as subscriber, client.publisher(name) as publisher:
            for _ in range(100_000):  # nobody reads: the tail of "a" is dropped
                await publisher.publish("a", b"x" * 1000)
            received = 0

            async def read() -> None:
                nonlocal received
                async for batch in subscriber.batches():
                    received += len(batch)

            reading = asyncio.create_task(read())
            async with asyncio.timeout(20):
                while received + sum(event.count for event in told) < 100_000:
                    await publisher.publish("b", b"still here")
                    await asyncio.sleep(0.2)
            assert told, "nothing was dropped: the test shows nothing"
            await subscriber.close()
            await reading
    finally:
        await client.remove_queue(name)


@pytest.mark.parametrize("many", [False, True], ids=["publish", "publish_many"])
@pytest.mark.parametrize("overflow", ["block", "drop"])
async def test_small_batches_do_not_pile_up_before_an_exchange_that_stands(
    client: roq.Cluster, overflow: str, many: bool
) -> None:
    name = f"standing {overflow} {many}"
    await client.create_queue(name, overflow=overflow)
    try:
        async with client.subscriber(name, "t") as subscriber, client.publisher(name) as publisher:
            exchange = (await pids(client, name))["exchange"]

            async def publish() -> None:
                for _ in range(SMALL_BATCHES):
                    if many:
                        await publisher.publish_many("t", [b"x" * 10_000] * 2)
                    else:
                        await publisher.publish("t", b"x" * 10_000)
                        await publisher.publish("t", b"x" * 10_000)
                    await asyncio.sleep(0)  # the batch leaves with this turn of the loop

            freeze(exchange)
            try:
                publishing = asyncio.create_task(publish())
                await asyncio.wait({publishing}, timeout=1 if overflow == "block" else 10)
                assert publisher.health().backlog_bytes < 2 * BACKLOG_BYTES
                assert publishing.done() == (publisher.dropped > 0) == (overflow == "drop")
            finally:
                os.kill(exchange, signal.SIGCONT)
            async with asyncio.timeout(30):
                received = 0
                while overflow == "block" and received < 2 * SMALL_BATCHES:
                    received += len(await subscriber.next_batch() or ())
                await publishing
    finally:
        await client.remove_queue(name)


@pytest.mark.parametrize("kills", [1, 2])
async def test_a_replay_overruns_no_queue(client: roq.Cluster, kills: int) -> None:
    """Thousands of small frames wait for the Exchange that comes back; it queues few for a subscriber, and drops the rest."""
    name = f"replayed {kills}"
    await client.create_queue(name, overflow="drop")
    told: list[MessagesLost] = []
    received: list[int] = []
    try:
        async with client.subscriber(name, on_lost=told.append) as subscriber, client.publisher(name) as publisher:

            async def read() -> None:
                async for batch in subscriber.batches():
                    received.extend(message.sequence for message in batch)

            reading = asyncio.create_task(read())
            await publisher.publish("t0", b"first")
            await publisher.flush()
            async with asyncio.timeout(30):
                for kill in range(kills):
                    replays = publisher.replays
                    found = (await pids(client, name))["exchange"]
                    os.kill(found, signal.SIGKILL)
                    while publisher.health().exchange:
                        await asyncio.sleep(0)
                    for number in range(SMALL_FRAMES):
                        await publisher.publish(f"t{number % 3}", b"x" * 60)  # a frame each: order holds across topics
                    while publisher.replays == replays or (await pids(client, name))["exchange"] == found:
                        await asyncio.sleep(0.01 if kill + 1 < kills else 0.1)
                await publisher.flush()
                while len(received) + sum(gap.count for gap in told) < publisher.messages:
                    await asyncio.sleep(0.02)
            await subscriber.close()
            await reading
        assert told == []
        assert received == list(range(1, 2 + kills * SMALL_FRAMES))
    finally:
        await client.remove_queue(name)


async def test_bursts_of_small_frames_overrun_no_queue(client: roq.Cluster) -> None:
    """A frame per message, hundreds at once: more than an Exchange queues for a subscriber that keeps up."""
    name = "bursts"
    await client.create_queue(name, overflow="drop")
    told: list[MessagesLost] = []
    try:
        async with client.subscriber(name, on_lost=told.append) as subscriber, client.publisher(name) as publisher:
            received = 0

            async def read() -> None:
                nonlocal received
                async for batch in subscriber.batches():
                    received += len(batch)

            reading = asyncio.create_task(read())
            async with asyncio.timeout(30):
                for _ in range(BURSTS):
                    for number in range(BURST_FRAMES):
                        await publisher.publish(f"t{number % 3}", b"x" * 60)
                    while received + sum(gap.count for gap in told) < publisher.messages - BURST_FRAMES:
                        await asyncio.sleep(0.005)
                await publisher.flush()
                while received + sum(gap.count for gap in told) < publisher.messages:
                    await asyncio.sleep(0.005)
            await subscriber.close()
            await reading
        assert told == []
    finally:
        await client.remove_queue(name)


async def test_messages_flow_while_the_monitor_stands_still(client: roq.Cluster) -> None:
    """Nobody confirms, and far more is published than the replay buffer holds: the publisher is held up once, for a moment."""
    name = "unconfirmed"
    await client.create_queue(name, overflow="block")
    try:
        async with client.subscriber(name) as subscriber, client.publisher(name) as publisher:
            received = 0

            async def read() -> None:
                nonlocal received
                async for batch in subscriber.batches():
                    received += len(batch)

            reading = asyncio.create_task(read())
            monitor = (await pids(client, name))["monitor"]
            longest, payload = 0.0, bytes(64 * 1024)
            freeze(monitor)
            try:
                for _ in range(3 * KEPT_BYTES // (2 * len(payload))):
                    began = time.monotonic()
                    await publisher.publish("t", payload)
                    longest = max(longest, time.monotonic() - began)
            finally:
                with contextlib.suppress(ProcessLookupError):  # its host takes one that stands still for 3 s for hung
                    os.kill(monitor, signal.SIGCONT)
            assert longest < HELD_SECONDS / 2
            async with asyncio.timeout(20):
                await publisher.flush(20)
                while received < publisher.messages:
                    await asyncio.sleep(0.02)
            assert (publisher.replays, subscriber.lost) == (0, 0)
            await subscriber.close()
            await reading
    finally:
        await client.remove_queue(name)


async def test_one_that_stood_still_while_an_exchange_died_is_told_that_it_may_have_missed_a_new_publisher(
    client: roq.Cluster, cluster: RunningCluster
) -> None:
    name = "passed by"
    await client.create_queue(name, overflow="block")
    command = [sys.executable, "-m", "roq.cli", "sub", name, "--cluster", cluster.zookeeper]
    frozen = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE)
    assert frozen.stdout is not None
    assert frozen.stderr is not None
    try:
        async with asyncio.timeout(40), client.publisher(name) as known:
            assert b"ready" in await frozen.stderr.readline()
            await known.publish("t", b"known")
            assert await frozen.stdout.readline() == b"known\n"
            freeze(frozen.pid)
            os.kill((await pids(client, name))["exchange"], signal.SIGKILL)
            while not known.replays:
                await asyncio.sleep(0.05)
            async with client.publisher(name) as new:
                for _ in range(5):
                    await new.publish("t", b"missed")
                await new.flush()
                frozen.send_signal(signal.SIGCONT)
                heard = asyncio.ensure_future(frozen.stdout.readline())
                while not heard.done():  # the first of these may be missed, too
                    await new.publish("t", b"next")
                    await asyncio.wait({heard}, timeout=0.2)
                assert heard.result() == b"next\n"
                told = (await frozen.stderr.readline()).decode()  # the Monitor's word may come after the message
            found = re.search(rf"may have lost messages \(nobody knows\) within 1\.\.(\d+) of publisher {new.id:016x}", told)
            assert found is not None, told
            assert int(found[1]) >= 5
            frozen.send_signal(signal.SIGINT)
            assert f"{known.id:016x}" not in (await frozen.stderr.read()).decode()
    finally:
        with contextlib.suppress(ProcessLookupError):
            frozen.kill()
        await frozen.wait()
        await client.remove_queue(name)


async def test_publish_many_ends_when_the_publisher_is_closed(client: roq.Cluster, queue: str) -> None:
    publisher = await client.publisher(queue).open()

    async def publish() -> None:
        await publisher.publish_many("t", (b"x" * 100 for _ in range(50_000_000)))

    publishing = asyncio.create_task(publish())
    while publisher.messages < 10_000:
        await asyncio.sleep(0)
    await publisher.close()
    with pytest.raises(Closed):
        await publishing


async def test_members_that_were_closed_are_forgotten(client: roq.Cluster, queue: str) -> None:
    async with client.publisher(queue) as publisher, client.subscriber(queue) as subscriber:
        await publisher.publish("t", b"x")
        await anext(subscriber)
    gone: list[weakref.ref[object]] = [weakref.ref(publisher), weakref.ref(subscriber)]
    del publisher, subscriber
    async with asyncio.timeout(5):
        while any(one() is not None for one in gone):
            gc.collect()
            await asyncio.sleep(0.05)


async def test_a_cancelled_close_leaves_nothing_running(client: roq.Cluster, queue: str) -> None:
    publisher = await client.publisher(queue).open()
    monitor = (await pids(client, queue))["monitor"]
    before = {task.get_name() for task in asyncio.all_tasks()}
    freeze(monitor)
    try:
        await publisher.publish("t", b"x")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await publisher.close()
    finally:
        os.kill(monitor, signal.SIGCONT)
    await asyncio.sleep(0)
    left = {task.get_name() for task in asyncio.all_tasks() if not task.done()}
    assert f"membership of {queue}" in before
    assert f"membership of {queue}" not in left


async def test_two_tasks_may_share_a_subscriber(client: roq.Cluster, queue: str) -> None:
    async with client.subscriber(queue) as subscriber, client.publisher(queue) as publisher:

        async def count() -> int:
            return len([message async for message in subscriber])

        readers = [asyncio.create_task(count()) for _ in range(2)]
        await asyncio.sleep(0.05)
        await publisher.publish_many("t", [b"x"] * 100)
        await publisher.flush()
        while subscriber.messages < 100:
            await asyncio.sleep(0.01)
        await subscriber.close()
        async with asyncio.timeout(5):
            assert sum(await asyncio.gather(*readers)) == 100


def test_plain_code_may_stop_iterating_and_go_on(cluster: RunningCluster) -> None:
    with roq.blocking.connect(cluster.zookeeper) as connected:
        connected.create_queue("interrupted", overflow="block")
        try:
            with connected.subscriber("interrupted") as subscriber, connected.publisher("interrupted") as publisher:
                publisher.publish_many("t", [b"%d" % number for number in range(100)])
                received = []
                for _ in range(10):
                    for message in subscriber:
                        received.append(message.payload)
                        if len(received) % 10 == 0:
                            break
            assert received == [b"%d" % number for number in range(100)]
        finally:
            connected.remove_queue("interrupted")


def test_plain_code_is_told_of_a_wrong_payload_and_goes_on(cluster: RunningCluster) -> None:
    with roq.blocking.connect(cluster.zookeeper) as connected:
        connected.create_queue("wrong", overflow="block")
        try:
            with connected.subscriber("wrong") as subscriber:
                with connected.publisher("wrong") as publisher:
                    with pytest.raises(TypeError):
                        publisher.publish("t", 5)  # type: ignore[arg-type]
                    publisher.publish("t", b"right")
                assert next(iter(subscriber)).payload == b"right"
        finally:
            connected.remove_queue("wrong")


async def test_a_list_of_exchanges_that_overtakes_the_welcome_does_no_harm(client: roq.Cluster, queue: str) -> None:
    async with client.subscriber(queue):  # its Exchange is known to the Monitor
        view = await client.inspect(queue)
    assert view.exchanges
    subscriber = client.subscriber(queue)
    subscriber.take(wire.Exchanges(view.term, 2, tuple(one.exchange for one in view.exchanges)))
    async with subscriber, client.publisher(queue) as publisher:
        await publisher.publish("t", b"payload")
        async with asyncio.timeout(5):
            assert (await anext(subscriber)).payload == b"payload"
