"""aio-pika on RabbitMQ: a fanout exchange, a transient queue per subscriber, no acknowledgements, no confirms."""

from __future__ import annotations

import asyncio

import aio_pika
import uvloop
from aio_pika.abc import AbstractChannel, AbstractConnection, AbstractExchange, AbstractIncomingMessage

from benchmarks.peers.peer import Handle, Peer, ReadyCall
from roq.tools.bench.protocol import PublishOrder, SubscribeOrder
from roq.tools.bench.publish import flat_out, paced


async def _exchange(connection: AbstractConnection, topic: str) -> tuple[AbstractChannel, AbstractExchange]:
    channel = await connection.channel(publisher_confirms=False)
    return channel, await channel.declare_exchange(topic, aio_pika.ExchangeType.FANOUT, durable=False)


def subscribe(order: SubscribeOrder, handle: Handle, ready: ReadyCall) -> None:
    """See benchmarks.peers."""

    async def body() -> None:
        (topic,) = order.load.patterns_of(order.index)
        connection = await aio_pika.connect(order.address)
        channel, exchange = await _exchange(connection, topic)
        queue = await channel.declare_queue("", exclusive=True, durable=False, auto_delete=True)
        await queue.bind(exchange)
        done = asyncio.get_running_loop().create_future()

        async def take(message: AbstractIncomingMessage) -> None:
            if handle(message.body) and not done.done():
                done.set_result(None)

        await queue.consume(take, no_ack=True)
        ready()
        await done

    uvloop.run(body())


def publish(order: PublishOrder, ready: ReadyCall) -> int:
    """See benchmarks.peers."""

    async def body() -> int:
        (topic,) = order.load.topics_of(order.index)
        connection = await aio_pika.connect(order.address)
        _, exchange = await _exchange(connection, topic)
        ready()

        async def send(_: str, payload: bytes) -> None:
            await exchange.publish(aio_pika.Message(payload, delivery_mode=aio_pika.DeliveryMode.NOT_PERSISTENT), "")

        loop = paced if order.load.rate else flat_out
        sent = await loop(order.load, order.index, send)
        await connection.close()  # sends what is still buffered
        return sent

    return uvloop.run(body())


PEER = Peer("rabbitmq", subscribe, publish)
