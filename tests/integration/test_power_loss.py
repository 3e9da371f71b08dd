"""A host loses power under a queue with one Exchange: no FIN, no RST, no answer. What the replay buffer holds is not lost.

The host is frozen (SIGSTOP of all it runs): its kernel still takes in what fits its buffers, which is worse for the publisher
than packets that vanish. It is replaced after about POWER_SECONDS, the ZooKeeper session: the default one, unless it is set.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from pathlib import Path

import pytest

import roq
from roq.errors import DeadlineExceeded, MessagesLost
from roq.testing import LoopbackCluster

NO_QUICK_TEST = "a session has to end, and a minute of messages after it"
POWER_SECONDS = float(os.environ.get("POWER_SECONDS", "6"))
MONITORS = ["dies with it", "lives on"] if "POWER_SECONDS" in os.environ else ["dies with it"]
PAUSE_SECONDS = 0.005  # between messages
WAIT_SECONDS = 60.0


class Reader:
    """What one subscriber gets and is told, by number."""

    def __init__(self) -> None:
        self.numbers: list[int] = []
        self.told: list[MessagesLost] = []

    async def read(self, subscriber: roq.Subscriber) -> None:
        """Until it is closed."""
        async for batch in subscriber.batches():
            self.numbers += [message.sequence for message in batch]

    def accounted(self) -> int:
        """How many messages it knows of."""
        return len(self.numbers) + sum(gap.count for gap in self.told)


async def publish(publisher: roq.Publisher, stop: asyncio.Event) -> None:
    while not stop.is_set():
        await publisher.publish("busy", b"x" * 100)
        await asyncio.sleep(PAUSE_SECONDS)


@pytest.mark.parametrize("monitor", MONITORS)
async def test_nothing_is_lost_with_a_host_that_vanishes_without_a_word(tmp_path: Path, monitor: str) -> None:
    reader, confirmed, stop = Reader(), [0], asyncio.Event()
    running = LoopbackCluster(gcms=1, hcms=2, session_seconds=POWER_SECONDS, logs=tmp_path, zookeeper="java")
    async with running as cluster, cluster.connect() as client:
        await client.create_queue("q", overflow="block", host="host-1")
        await cluster.wait_queue_ready("q")
        victim = "host-1"
        if monitor == "lives on":
            victim = "host-2"
            [first] = (await client.queue("q")).record.exchanges
            moved = await client.create_exchange("q", host=victim)
            await client.exchange_active("q", moved.exchange)
            await client.remove_exchange("q", first)
        subscriber = await client.subscriber("q", on_lost=reader.told.append).open()
        publisher = await client.publisher("q").open()
        tasks = [asyncio.create_task(reader.read(subscriber)), asyncio.create_task(publish(publisher, stop))]

        async def flush() -> None:
            while not stop.is_set():
                covered = publisher.messages
                with contextlib.suppress(DeadlineExceeded):
                    await publisher.flush(1.0)
                    confirmed[0] = covered
                await asyncio.sleep(0.1)

        tasks.append(asyncio.create_task(flush()))
        async with asyncio.timeout(WAIT_SECONDS):
            while confirmed[0] < 100:
                await asyncio.sleep(0.01)
            await cluster.pause(victim)
            for _ in range(10):
                await publisher.publish("never used again", b"x" * 100)
            at = publisher.messages
            while confirmed[0] <= at:
                await asyncio.sleep(0.02)
            stop.set()
            await asyncio.gather(*tasks[1:])
            await publisher.flush()
            while reader.accounted() < publisher.messages:
                await asyncio.sleep(0.02)
        await publisher.close()
        await subscriber.close()
        await tasks[0]
    assert publisher.replays >= 1
    assert reader.told == []
    assert reader.numbers == list(range(1, publisher.messages + 1))
