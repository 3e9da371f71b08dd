"""A real queue follows a scripted load: out while it rises, quiet on the plateau, in when it falls; the record replays."""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import dataclass, field

import pytest

import roq
from roq.pubsub.scaling.what_if import replay
from roq.wire.kpi import QueueKpi

PUBLISHERS = 3
RATE_HIGH, RATE_LOW = 800, 20  # messages/s of each publisher
POLICY = roq.Policy(
    exchange=roq.ExchangeRule(max_messages_per_second=1000),
    bounds=roq.Bounds(min_exchanges=1, max_exchanges=4, cooldown_seconds=1.0),
)
FOLLOWS_SECONDS = 5.0
TICK_SECONDS = 0.01


@dataclass
class Script:
    """What the publishers do just now, and when they stop."""

    rate: float = RATE_LOW
    stop: asyncio.Event = field(default_factory=asyncio.Event)


async def publish(publisher: roq.Publisher, script: Script) -> None:
    """At the script's rate, in ticks."""
    owed, last = 0.0, time.monotonic()
    while not script.stop.is_set():
        now = time.monotonic()
        owed, last = owed + (now - last) * script.rate, now
        for _ in range(int(owed)):
            await publisher.publish("load", b"x" * 100)
        owed -= int(owed)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(TICK_SECONDS):
                await script.stop.wait()


class Record:
    """All KPI records of a queue, and waiting for one of a kind."""

    def __init__(self) -> None:
        self.kpis: list[QueueKpi] = []
        self._news = asyncio.Condition()

    async def write(self, client: roq.Cluster, queue: str) -> None:
        async for kpi in client.kpis(queue):
            async with self._news:
                self.kpis.append(kpi)
                self._news.notify_all()

    async def until_active(self, exchanges: int, timeout_seconds: float) -> float:
        """Seconds until so many Exchanges are active."""
        started = time.monotonic()
        async with asyncio.timeout(timeout_seconds), self._news:
            await self._news.wait_for(lambda: bool(self.kpis) and self.active() == exchanges)
        return time.monotonic() - started

    async def until_longer(self, records: int) -> None:
        """Until there are more records than this."""
        async with self._news:
            await self._news.wait_for(lambda: len(self.kpis) > records)

    def active(self) -> int:
        """Active Exchanges in the newest record."""
        return sum(one.state == "active" for one in self.kpis[-1].exchanges)


@pytest.mark.timeout(150)
@pytest.mark.long
async def test_exchanges_follow_the_load_and_the_record_replays(client: roq.Cluster) -> None:
    queue = "scripted load"
    await client.create_queue(queue, overflow="block", policy=POLICY)
    script, record = Script(), Record()
    loop = asyncio.get_running_loop()
    writing = loop.create_task(record.write(client, queue))
    publishers = [await client.publisher(queue).open() for _ in range(PUBLISHERS)]
    sent = [loop.create_task(publish(publisher, script)) for publisher in publishers]
    received: dict[int, int] = {}
    try:
        async with client.subscriber(queue) as subscriber:

            async def read() -> None:
                async for message in subscriber:
                    assert message.sequence == received.get(message.publisher, message.sequence - 1) + 1
                    received[message.publisher] = message.sequence

            reading = loop.create_task(read())
            await record.until_active(1, 10)
            script.rate = RATE_HIGH  # rise
            rise = await record.until_active(PUBLISHERS, FOLLOWS_SECONDS + 10)
            plateau_from = len(record.kpis)
            async with asyncio.timeout(30):
                for records in range(plateau_from, plateau_from + 8):
                    await record.until_longer(records)
                    assert record.active() == PUBLISHERS
            script.rate = RATE_LOW  # fall
            await record.until_active(1, 60)
            script.stop.set()
            await asyncio.gather(*sent)
            assert not reading.done(), "the reader failed"
            assert subscriber.lost == subscriber.duplicated == 0
            await subscriber.close()
            await reading
        decisions = [one for one in (await client.inspect(queue)).decisions if one.action != "hold"]
        writing.cancel()
        actions = [one.action for one in decisions]
        outs = [index for index, action in enumerate(actions) if action == "scale-out"]
        ins = [index for index, action in enumerate(actions) if action == "scale-in"]
        assert len(outs) == PUBLISHERS - 1
        assert len(ins) == PUBLISHERS - 1
        assert max(outs) < min(ins), f"it oscillated: {actions}"
        assert all(one.cause and not one.outcome.startswith("failed") for one in decisions)
        assert rise < FOLLOWS_SECONDS
        replayed = [one for one in replay(record.kpis, POLICY) if one.action != "hold"]
        assert [(one.time, one.action, one.cause) for one in replayed] == [
            (one.time, one.action, one.cause) for one in decisions
        ]
    finally:
        script.stop.set()
        writing.cancel()
        for publisher in publishers:
            await publisher.close()
        await client.remove_queue(queue)
