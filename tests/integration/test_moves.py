"""Planned moves under load: scale-out, rebalance and scale-in while everybody publishes flat out, counted by sequence."""

from __future__ import annotations

import asyncio
import os
import random

import pytest

import roq
from roq.errors import ExchangeNotFound, LastExchange, MessagesLost

PUBLISHERS, SUBSCRIBERS = 4, 3
ROUNDS = int(os.environ.get("MOVE_ROUNDS", "3"))  # each: scale out, rebalance, scale in


class Counted:
    """What one subscriber got, checked as it comes: per publisher the numbers must be 1, 2, 3 …"""

    def __init__(self) -> None:
        self.last: dict[int, int] = {}
        self.wrong: list[str] = []
        self.told: list[MessagesLost] = []

    async def read(self, subscriber: roq.Subscriber) -> None:
        async for batch in subscriber.batches():
            publisher, expected = batch[0].publisher, self.last.get(batch[0].publisher, 0) + 1
            numbers = [message.sequence for message in batch]
            if numbers != list(range(expected, expected + len(batch))):
                self.wrong.append(f"publisher {publisher:x}: expected {expected}, got {numbers[0]}..{numbers[-1]}")
            self.last[publisher] = numbers[-1]


async def publish(publisher: roq.Publisher, stop: asyncio.Event) -> None:
    topics = [f"load.{number}" for number in range(3)]
    payload = os.urandom(100)
    while not stop.is_set():
        for topic in topics:
            for _ in range(200):
                await publisher.publish(topic, payload)


@pytest.mark.quick
async def test_moves_lose_duplicate_and_reorder_nothing(client: roq.Cluster, queue: str) -> None:
    chance = random.Random(7)
    publishers = [await client.publisher(queue).open() for _ in range(PUBLISHERS)]
    counts = [Counted() for _ in range(SUBSCRIBERS)]
    subscribers = [await client.subscriber(queue, on_lost=one.told.append).open() for one in counts]
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    readers = [loop.create_task(one.read(subscriber)) for one, subscriber in zip(counts, subscribers, strict=True)]
    writers = [loop.create_task(publish(publisher, stop)) for publisher in publishers]
    moves = 0
    async with asyncio.timeout(50):
        for _ in range(ROUNDS):
            created = await client.create_exchange(queue)
            await client.exchange_active(queue, created.exchange)
            chosen = chance.sample(publishers, 2)
            moved = await client.move(queue, [(one.id, created.exchange) for one in chosen])
            assert (moved.refused, moved.moved) == ((), 2)
            seen = (await client.inspect(queue)).exchanges
            exchanges = [one.exchange.id for one in seen if one.state == "active"]
            moved = await client.move(queue, [(one.id, chance.choice(exchanges)) for one in publishers])
            assert moved.refused == ()
            moves += 2 + moved.moved
            await client.remove_exchange(queue, chance.choice(exchanges))
        stop.set()
        await asyncio.gather(*writers)
        for publisher in publishers:
            await publisher.flush()
        sent = {publisher.id: publisher.messages for publisher in publishers}
        while any(one.last != sent for one in counts) and not any(one.wrong for one in counts):
            await asyncio.sleep(0.05)
    for subscriber in subscribers:
        await subscriber.close()
    await asyncio.gather(*readers)
    for publisher in publishers:
        await publisher.close()
    assert moves >= 2 * ROUNDS
    assert [one.wrong for one in counts] == [[]] * SUBSCRIBERS
    assert [one.told for one in counts] == [[]] * SUBSCRIBERS
    assert [subscriber.duplicated for subscriber in subscribers] == [0] * SUBSCRIBERS
    assert all(one.last == sent for one in counts)
    assert min(sent.values()) > 1000


async def test_a_subscriber_joining_amid_moves_starts_anywhere_but_has_no_hole(client: roq.Cluster, queue: str) -> None:
    publisher = await client.publisher(queue).open()
    created = await client.create_exchange(queue)
    exchanges = [created.exchange, next(iter((await client.queue(queue)).record.exchanges))]
    stop = asyncio.Event()
    writer = asyncio.get_running_loop().create_task(publish(publisher, stop))
    async with asyncio.timeout(50):
        for turn in range(6):
            joining = asyncio.get_running_loop().create_task(client.subscriber(queue).open())
            await client.exchange_active(queue, exchanges[turn % 2])
            await client.move(queue, [(publisher.id, exchanges[turn % 2])])
            subscriber = await joining
            numbers: list[int] = []
            async for batch in subscriber.batches():
                numbers += [message.sequence for message in batch]
                if len(numbers) > 5000:
                    break
            assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
            assert subscriber.lost == 0
            await subscriber.close()
        stop.set()
        await writer
    await publisher.close()


async def test_impossible_moves_are_refused(client: roq.Cluster, queue: str) -> None:
    only = next(iter((await client.queue(queue)).record.exchanges))
    async with client.publisher(queue) as publisher:
        moved = await client.move(queue, [(publisher.id, "nowhere"), (5, only), (publisher.id, only)])
        assert moved.moved == 0
        assert len(moved.refused) == 2
        with pytest.raises(LastExchange):
            await client.drain_exchange(queue, only)
        with pytest.raises(ExchangeNotFound):
            await client.drain_exchange(queue, "nowhere")
