"""RabbitMQ streams through rstream: send_batch with confirmations, subscribe by offset. A stream has no groups with acks."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from typing import Any, cast
from urllib.parse import urlsplit

import uvloop
from rstream import AMQPMessage, Consumer, ConsumerOffsetSpecification, MessageContext, OffsetType, Producer

from benchmarks.recorded.clients.client import WAIT_SECONDS, Clients, Run
from benchmarks.recorded.workload import WINDOW

logging.getLogger("rstream").setLevel(logging.WARNING)


def _where(address: str) -> dict[str, Any]:
    url = urlsplit(address)
    return {"host": url.hostname, "port": url.port, "username": url.username, "password": url.password}


async def _prepare(address: str, queue: str) -> None:
    async with Producer(**_where(address)) as producer:
        await producer.create_stream(queue, exists_ok=True)


def prepare(address: str, queue: str) -> None:
    """Make the stream."""
    uvloop.run(_prepare(address, queue))


class Confirming:
    """Counts confirmations, and wakes who waits for a number of them."""

    def __init__(self) -> None:
        self.confirmed = 0
        self._wanted = 0
        self._reached = asyncio.Event()

    def __call__(self, status: Any) -> None:
        if not status.is_confirmed:
            raise RuntimeError(f"RabbitMQ refused a message: {status.response_code}")
        self.confirmed += 1
        if self.confirmed >= self._wanted:
            self._reached.set()

    async def reach(self, count: int) -> None:
        """Return once so many are confirmed."""
        if self.confirmed < count:
            self._wanted = count
            self._reached.clear()
            await asyncio.wait_for(self._reached.wait(), WAIT_SECONDS)


def publish(run: Run) -> int:
    """send_batch of half a window while the other half is unconfirmed."""

    async def body() -> int:
        async with Producer(**_where(run.address)) as producer:
            confirming, sent, half = Confirming(), 0, WINDOW // 2
            run.begin()
            for window in run.timed():
                for part in (window[:half], window[half:]):
                    if part:
                        await confirming.reach(sent - half)
                        await producer.send_batch(run.queue, part, on_publish_confirm=confirming)
                        sent += len(part)
            await confirming.reach(sent)
            run.end()
            return confirming.confirmed

    return uvloop.run(body())


def one_by_one(run: Run) -> list[int]:
    """send_wait."""

    async def body() -> list[int]:
        latencies, clock = list[int](), time.monotonic_ns
        async with Producer(**_where(run.address)) as producer:
            run.begin()
            for window in run.timed():
                for payload in window:
                    before = clock()
                    await producer.send_wait(run.queue, payload)
                    latencies.append(clock() - before)
            run.end()
        return latencies

    return uvloop.run(body())


async def _subscribe(consumer: Consumer, queue: str, offset: int, take: Any) -> None:
    await consumer.subscribe(
        queue, take, offset_specification=ConsumerOffsetSpecification(OffsetType.OFFSET, offset), decoder=bytes
    )


def replay(run: Run) -> list[bytes]:
    """From offset 0."""

    async def body() -> list[bytes]:
        taken, done = list[bytes](), asyncio.Event()

        def take(message: AMQPMessage | bytes, context: MessageContext) -> None:
            taken.append(cast(bytes, message))
            if len(taken) == run.count:
                run.end()
                done.set()

        consumer = Consumer(**_where(run.address))
        await consumer.start()
        run.begin()
        await _subscribe(consumer, run.queue, 0, take)
        await asyncio.wait_for(done.wait(), WAIT_SECONDS)
        await consumer.close()
        return taken

    return uvloop.run(body())


class StreamReader:
    """See client.Reader. position: the next offset."""

    def __init__(self, address: str, queue: str, position: object) -> None:
        self._loop = uvloop.new_event_loop()
        self._come: deque[tuple[bytes, int]] = deque()
        self._next = cast(int, position) or 0
        self._there = asyncio.Event()
        self._consumer: Any = None
        self._loop.run_until_complete(self._open(address, queue))

    async def _open(self, address: str, queue: str) -> None:
        self._consumer = Consumer(**_where(address))
        await self._consumer.start()
        await _subscribe(self._consumer, queue, self._next, self._take)

    def _take(self, message: AMQPMessage | bytes, context: MessageContext) -> None:
        self._come.append((cast(bytes, message), context.offset))
        self._there.set()

    def next(self) -> list[bytes]:
        """See client.Reader."""
        if not self._come:
            self._there.clear()
            self._loop.run_until_complete(asyncio.wait_for(self._there.wait(), WAIT_SECONDS))
        taken = [self._come.popleft() for _ in range(len(self._come))]
        self._next = taken[-1][1] + 1
        return [payload for payload, _ in taken]

    def position(self) -> object:
        """The next offset."""
        return self._next

    def close(self) -> None:
        """See client.Reader."""
        self._loop.run_until_complete(self._consumer.close())
        self._loop.close()


class StreamWriter:
    """See client.Writer."""

    def __init__(self, address: str, queue: str) -> None:
        self._loop, self._queue = uvloop.new_event_loop(), queue
        self._confirming, self._sent = Confirming(), 0
        self._producer: Any = Producer(**_where(address))
        self._loop.run_until_complete(self._producer.start())

    def send(self, payloads: list[bytes]) -> None:
        """See client.Writer."""
        self._sent += len(payloads)
        self._loop.run_until_complete(self._producer.send_batch(self._queue, payloads, on_publish_confirm=self._confirming))

    def rest(self, seconds: float) -> None:
        """See client.Writer."""
        self._loop.run_until_complete(asyncio.sleep(seconds))

    def finish(self) -> None:
        """See client.Writer."""
        self._loop.run_until_complete(self._confirming.reach(self._sent))
        self._loop.run_until_complete(self._producer.close())
        self._loop.close()


def unsettled(address: str, queue: str, group: str) -> int:
    """There are no groups."""
    return 0


CLIENTS = Clients(
    prepare=prepare,
    publish={"send_batch, 1,000 unconfirmed": publish},
    one_by_one={"send_wait": one_by_one},
    replay={"subscribe from offset 0": replay},
    member={},
    member_singly={},
    unsettled=unsettled,
    reader=StreamReader,
    writer=StreamWriter,
)
