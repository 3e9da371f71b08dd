"""NATS JetStream through nats-py: a file stream with work-queue retention and a durable pull consumer."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any, TypeVar

import nats
import uvloop
from nats.aio.client import Client as NatsClient
from nats.js.api import AckPolicy, ConsumerConfig, RetentionPolicy, StorageType

T = TypeVar("T")
CONSUMER = "workers"
FETCH_SECONDS, WAIT_SECONDS = 20, 60
IN_FLIGHT = 1000


async def _connect(address: str) -> tuple[NatsClient, Any]:
    connection = await nats.connect(address)
    return connection, connection.jetstream(publish_async_max_pending=IN_FLIGHT, timeout=WAIT_SECONDS)


def prepare(address: str, queue: str) -> None:
    """Make the stream and its consumer."""

    async def body() -> None:
        connection, stream = await _connect(address)
        await stream.add_stream(
            name=queue, subjects=[f"{queue}.in"], storage=StorageType.FILE, retention=RetentionPolicy.WORK_QUEUE
        )
        await stream.add_consumer(
            queue, ConsumerConfig(durable_name=CONSUMER, ack_policy=AckPolicy.EXPLICIT, max_ack_pending=50_000)
        )
        await connection.close()

    uvloop.run(body())


class JetStream:
    """See clients.client. Its acknowledgments are not awaited, as its documentation's `ack()`."""

    def __init__(self, address: str, queue: str, index: int) -> None:
        self._loop, self._subject = uvloop.new_event_loop(), f"{queue}.in"
        self._connection, self._stream = self._run(_connect(address))
        self._pull = self._run(self._stream.pull_subscribe_bind(durable=CONSUMER, stream=queue))

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return self._loop.run_until_complete(work)

    def put(self, payload: bytes) -> None:
        self._run(self._stream.publish(self._subject, payload))

    def take(self) -> bytes:
        async def one() -> bytes:
            (message,) = await self._pull.fetch(1, timeout=FETCH_SECONDS)
            await message.ack()
            return bytes(message.data)

        return self._run(one())

    def put_many(self, count: int, payload: bytes, window: int) -> None:
        async def all_of_them() -> None:
            for _ in range(count):
                await self._stream.publish_async(self._subject, payload, wait_stall=WAIT_SECONDS)
            await self._stream.publish_async_completed()

        self._run(all_of_them())

    def take_many(self, count: int, window: int) -> None:
        async def all_of_them() -> None:
            taken = 0
            while taken < count:
                messages = await self._pull.fetch(min(window, count - taken), timeout=FETCH_SECONDS)
                for message in messages:
                    await message.ack()
                taken += len(messages)
            await self._connection.flush(WAIT_SECONDS)

        self._run(all_of_them())

    def close(self) -> None:
        self._run(self._connection.flush(WAIT_SECONDS))
        self._run(self._connection.close())
        self._loop.close()
