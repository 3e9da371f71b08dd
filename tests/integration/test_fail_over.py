"""A host is lost while messages flow: a backup Monitor leads, Exchanges are replaced, clients find them by themselves."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

import roq
from roq.errors import MessagesLost
from roq.pubsub.membership import SILENT_SECONDS
from tests.integration.running import RunningCluster

SESSION_SECONDS = 2.0
FLOWING_SECONDS = SESSION_SECONDS + 4.0  # bound of the test; benchmarks measure how long it takes


@pytest.fixture
def three_hosts(tmp_path: Path) -> Iterator[RunningCluster]:
    """A cluster of its own for each test: hosts are lost here."""
    running = RunningCluster(tmp_path, gcms=1, hosts=3, session_seconds=SESSION_SECONDS)
    yield running
    running.stop()


class Flow:
    """One publisher at a steady pace, one subscriber, everything counted by sequence."""

    def __init__(self) -> None:
        self.received: list[int] = []
        self.told: list[MessagesLost] = []
        self.stop = asyncio.Event()
        self.news = asyncio.Condition()

    async def publish(self, publisher: roq.Publisher) -> None:
        while not self.stop.is_set():
            await publisher.publish("flow", b"x")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.005):
                    await self.stop.wait()

    async def read(self, subscriber: roq.Subscriber) -> None:
        async for message in subscriber:
            async with self.news:
                self.received.append(message.sequence)
                self.news.notify_all()

    async def until_received(self, number: int, timeout_seconds: float) -> float:
        """Seconds until a message of at least this number has come."""
        started = time.monotonic()
        async with asyncio.timeout(timeout_seconds), self.news:
            await self.news.wait_for(lambda: bool(self.received) and self.received[-1] >= number)
        return time.monotonic() - started

    def check(self) -> None:
        """In order, once, and every gap told."""
        assert self.received == sorted(set(self.received))
        missing = set(range(self.received[0], self.received[-1] + 1)) - set(self.received)
        assert missing <= {number for event in self.told for number in range(event.first, event.last + 1)}


async def test_the_monitors_host_is_stopped(three_hosts: RunningCluster) -> None:
    """It says so: nobody has to find out by its silence, and nobody is waited for but those that there were."""
    flows, loop = [Flow(), Flow()], asyncio.get_running_loop()
    async with roq.connect(three_hosts.zookeeper) as client, AsyncExitStack() as subscribers:
        await client.create_queue("flow", overflow="block")
        publisher = client.publisher("flow")
        reading = []
        for flow in flows:
            subscriber = client.subscriber("flow", on_lost=flow.told.append)
            reading.append(loop.create_task(flow.read(await subscribers.enter_async_context(subscriber))))
        await publisher.open()
        writing = loop.create_task(flows[0].publish(publisher))
        for flow in flows:
            await flow.until_received(50, 5)
        host = (await client.queue("flow")).record.monitor_host
        await asyncio.to_thread(three_hosts.call, three_hosts.local.stop_host(host))
        sent = publisher.messages
        waited = max([await flow.until_received(sent + 50, FLOWING_SECONDS) for flow in flows])
        assert waited < SILENT_SECONDS, "they have looked for their Monitor because it did not answer"
        flows[0].stop.set()
        await writing
        await publisher.flush()
        for flow in flows:
            await flow.until_received(publisher.messages, 5)
            assert flow.received == list(range(1, publisher.messages + 1))
        await publisher.close()
        for one in reading:
            one.cancel()


@pytest.mark.parametrize("replication", [1, 2])
async def test_the_monitors_host_is_lost(three_hosts: RunningCluster, replication: int) -> None:
    flow = Flow()
    loop = asyncio.get_running_loop()
    async with roq.connect(three_hosts.zookeeper) as client:
        await client.create_queue("flow", overflow="block", replication=replication)
        info = await client.queue("flow")
        assert len(info.monitors) == replication
        async with client.subscriber("flow", on_lost=flow.told.append) as subscriber:
            publisher = await client.publisher("flow").open()
            reading = loop.create_task(flow.read(subscriber))
            writing = loop.create_task(flow.publish(publisher))
            await flow.until_received(50, 5)
            three_hosts.call(three_hosts.local.lose_host(info.record.monitor_host))
            sent = publisher.messages
            await flow.until_received(sent + 50, FLOWING_SECONDS)
            after = await client.queue("flow")
            assert after.record.monitor_host != info.record.monitor_host
            assert after.record.term > info.record.term
            assert not after.record.exchanges.keys() & info.record.exchanges.keys()
            assert subscriber.health().ready
            flow.stop.set()
            await writing
            await flow.until_received(publisher.messages, 5)
            await publisher.close()
            await subscriber.close()
            await reading
    flow.check()
    assert flow.told == [], "the outage was shorter than what the replay buffer keeps"


@pytest.mark.quick
async def test_a_backup_monitors_host_is_lost_and_no_message_with_it(three_hosts: RunningCluster) -> None:
    flow = Flow()
    loop = asyncio.get_running_loop()
    async with roq.connect(three_hosts.zookeeper) as client:
        await client.create_queue("flow", overflow="block", replication=2)
        info = await client.queue("flow")
        async with client.subscriber("flow", on_lost=flow.told.append) as subscriber:
            publisher = await client.publisher("flow").open()
            reading = loop.create_task(flow.read(subscriber))
            writing = loop.create_task(flow.publish(publisher))
            await flow.until_received(20, 5)
            three_hosts.call(three_hosts.local.lose_host(info.record.backups[0]))
            async with asyncio.timeout(SESSION_SECONDS + 5):
                while (after := await client.queue("flow")).record.backups == info.record.backups or len(after.monitors) < 2:
                    await asyncio.sleep(0.05)
            assert after.record.monitor_host == info.record.monitor_host
            flow.stop.set()
            await writing
            await flow.until_received(publisher.messages, 5)
            await publisher.close()
            await subscriber.close()
            await reading
    flow.check()
    assert flow.told == []
