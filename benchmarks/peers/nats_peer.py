"""nats-py on a NATS server, with pending limits off."""

from __future__ import annotations

import asyncio

import nats
import uvloop
from nats.aio.client import Client
from nats.aio.msg import Msg

from benchmarks.peers.peer import FOREVER, Handle, Peer, ReadyCall
from roq.tools.bench.protocol import PublishOrder, SubscribeOrder
from roq.tools.bench.publish import flat_out, paced

PENDING_BYTES = 8 << 20  # what its client buffers before publish waits
FLUSH_SECONDS = 120


async def _connect(address: str) -> Client:
    return await nats.connect(address, pending_size=PENDING_BYTES)


def subscribe(order: SubscribeOrder, handle: Handle, ready: ReadyCall) -> None:
    """See benchmarks.peers."""

    async def body() -> None:
        client = await _connect(order.address)
        done = asyncio.get_running_loop().create_future()

        async def take(message: Msg) -> None:
            if handle(message.data) and not done.done():
                done.set_result(None)

        (topic,) = order.load.patterns_of(order.index)
        await client.subscribe(topic, cb=take, pending_msgs_limit=FOREVER[0], pending_bytes_limit=FOREVER[1])
        await client.flush()
        ready()
        await done

    uvloop.run(body())


def publish(order: PublishOrder, ready: ReadyCall) -> int:
    """See benchmarks.peers."""

    async def body() -> int:
        client = await _connect(order.address)
        ready()
        loop = paced if order.load.rate else flat_out
        sent = await loop(order.load, order.index, client.publish)
        await client.flush(timeout=FLUSH_SECONDS)
        await client.close()  # its flush overtakes what is still buffered; its close sends that
        return sent

    return uvloop.run(body())


PEER = Peer("nats", subscribe, publish)
