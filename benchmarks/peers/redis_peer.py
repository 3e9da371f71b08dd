"""redis-py (with hiredis) on a Redis server, output buffer limit off: one PUBLISH per call, with and without waiting for the
server's answer, and 100 in a pipeline."""

from __future__ import annotations

import threading
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


def publish_unawaited(order: PublishOrder, ready: ReadyCall) -> int:
    """As nats-py and RoQ publish: no call waits for the server's answer to the one before; a thread reads them."""
    connection = _connect(order.address).connection_pool.get_connection()
    (topic,) = order.load.topics_of(order.index)
    sent, answers = 0, threading.Semaphore(0)

    def read() -> None:
        while True:
            answers.acquire()
            connection.read_response()

    threading.Thread(target=read, daemon=True).start()
    ready()
    for payload in payloads(order.load, order.index):
        if payload is not None:
            connection.send_command("PUBLISH", topic, payload)  # type: ignore[no-untyped-call]
            answers.release()
            sent += 1
    return sent


UNAWAITED = Peer("redis", subscribe, publish_unawaited)
PEER = Peer("redis", subscribe, partial(publish, pipeline=0))
PIPELINED = Peer("redis", subscribe, partial(publish, pipeline=PIPELINE))
