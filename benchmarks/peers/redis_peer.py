"""redis-py (with hiredis) on a Redis server, output buffer limit off: one PUBLISH per call, and 100 in a pipeline."""

from __future__ import annotations

from functools import partial

import redis
from redis.client import PubSub

from benchmarks.peers.peer import Handle, Peer, ReadyCall, payloads
from roq.tools.bench.protocol import PublishOrder, SubscribeOrder

PIPELINE = 100


def _connect(address: str) -> redis.Redis:
    host, _, port = address.partition(":")
    return redis.Redis(host=host, port=int(port), socket_timeout=None)


def subscribe(order: SubscribeOrder, handle: Handle, ready: ReadyCall) -> None:
    """See benchmarks.peers."""
    channel: PubSub = _connect(order.address).pubsub()  # type: ignore[no-untyped-call]
    channel.subscribe(*order.load.patterns_of(order.index))
    messages = channel.listen()  # type: ignore[no-untyped-call]
    next(messages)  # the subscription's confirmation
    ready()
    for message in messages:
        if handle(message["data"]):
            return


def publish(order: PublishOrder, ready: ReadyCall, pipeline: int) -> int:
    """See benchmarks.peers."""
    client = _connect(order.address)
    client.ping()
    (topic,) = order.load.topics_of(order.index)
    ready()
    sent = 0
    batch = client.pipeline(transaction=False)
    for payload in payloads(order.load, order.index):
        if payload is not None:
            sent += 1
            if not pipeline:
                client.publish(topic, payload)
                continue
            batch.publish(topic, payload)
        if len(batch) >= pipeline or (payload is None and len(batch)):
            batch.execute()
    return sent


PEER = Peer("redis", subscribe, partial(publish, pipeline=0))
PIPELINED = Peer("redis", subscribe, partial(publish, pipeline=PIPELINE))
