"""A publisher's loops, flat out and paced. They know the SDK only as two awaitables, so peers can be driven alike."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from itertools import cycle, islice, repeat

from roq.tools.bench.load import STAMP, TICK_SECONDS, Load, Pace

CLOCK_EVERY = 1_000  # messages between two looks at the clock of a load bounded by time

Publish = Callable[[str, bytes], Awaitable[object]]
PublishMany = Callable[[str, list[bytes]], Awaitable[object]]


async def flat_out(load: Load, index: int, publish: Publish) -> int:
    """One awaited publish per message as fast as it goes; how many."""
    topics = load.topics_of(index)
    turns = repeat(topics[0]) if len(topics) == 1 else cycle(topics)
    payload = bytes(load.size)
    sent = 0
    deadline = _deadline(load)
    while (count := _chunk(load, sent, deadline)) > 0:
        for topic in islice(turns, count):
            await publish(topic, payload)
        sent += count
    return sent


async def flat_out_many(load: Load, index: int, publish_many: PublishMany) -> int:
    """Batches of load.batch payloads, each to the next topic, as fast as it goes; how many messages."""
    topics = cycle(load.topics_of(index))
    payloads = [bytes(load.size)] * load.batch
    sent = 0
    deadline = _deadline(load)
    while (count := _chunk(load, sent, deadline)) > 0:
        while count > 0:
            batch = payloads if count >= load.batch else payloads[:count]
            await publish_many(next(topics), batch)
            count -= len(batch)
            sent += len(batch)
    return sent


async def paced(load: Load, index: int, publish: Publish, publish_many: PublishMany | None = None) -> int:
    """load.rate messages/s, each stamped if there is room, until the load's end; how many. What is due is sent every
    millisecond, message by message, or per topic at once with load.batch."""
    topics = load.topics_of(index)
    padding = bytes(load.size - STAMP.size) if load.stamped else bytes(load.size)
    pack = STAMP.pack if load.stamped else None
    started = time.monotonic_ns()
    deadline = _deadline(load)
    pace = Pace(load.rate, load.messages, started)
    sent = 0
    many: dict[str, list[bytes]] = {}
    while not pace.finished and time.monotonic_ns() < deadline:
        for _ in range(pace.due(time.monotonic_ns())):
            number, topic = divmod(sent, len(topics))
            payload = pack(index, topic, number + 1, time.monotonic_ns()) + padding if pack else padding
            sent += 1
            if load.batch and publish_many:
                many.setdefault(topics[topic], []).append(payload)
            else:
                await publish(topics[topic], payload)
        for name, payloads in many.items():
            if publish_many:
                await publish_many(name, payloads)
        many.clear()
        await asyncio.sleep(TICK_SECONDS)
    return sent


def _deadline(load: Load) -> int:
    return time.monotonic_ns() + int(load.duration * 1e9) if load.duration else 1 << 63


def _chunk(load: Load, sent: int, deadline: int) -> int:
    """Messages to send before the next look at the clock, 0 at the end."""
    if load.duration and time.monotonic_ns() >= deadline:
        return 0
    whole = load.messages - sent if load.messages else CLOCK_EVERY
    return min(CLOCK_EVERY, whole) if load.duration else whole
