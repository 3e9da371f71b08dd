"""Raw pyzmq through a proxy without limits: one frame per message, or 100 messages in one msgpack list.

The least any Python program over ZeroMQ can cost: no joining, no sequence numbers, no back-pressure, no recovery.
"""

from __future__ import annotations

import time

import msgspec
import zmq

from benchmarks.peers.peer import Handle, Peer, ReadyCall, payloads
from roq.tools.bench.protocol import PublishOrder, SubscribeOrder

BATCH = 100
SETTLE_SECONDS = 0.5  # a publisher's connection is up and has the proxy's subscriptions by then
_kept_open: list[zmq.Socket[bytes]] = []  # a publisher closed at once loses its tail: it stays until the process ends


def _publisher(address: str) -> zmq.Socket[bytes]:
    host, front, _ = address.split(":")
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PUB)
    socket.set(zmq.SNDHWM, 0)
    socket.connect(f"tcp://{host}:{front}")
    time.sleep(SETTLE_SECONDS)
    _kept_open.append(socket)
    return socket


def _subscriber(order: SubscribeOrder) -> tuple[zmq.Socket[bytes], bytes]:
    host, _, back = order.address.split(":")
    (topic,) = order.load.patterns_of(order.index)
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.SUB)
    socket.set(zmq.RCVHWM, 0)
    socket.connect(f"tcp://{host}:{back}")
    socket.subscribe(topic.encode())
    return socket, topic.encode()


def subscribe_single(order: SubscribeOrder, handle: Handle, ready: ReadyCall) -> None:
    """See benchmarks.peers."""
    socket, topic = _subscriber(order)
    skip, receive = len(topic), socket.recv
    ready()
    while not handle(receive()[skip:]):
        pass


def publish_single(order: PublishOrder, ready: ReadyCall) -> int:
    """See benchmarks.peers."""
    socket = _publisher(order.address)
    topic, send, sent = order.load.topics_of(order.index)[0].encode(), socket.send, 0
    ready()
    for payload in payloads(order.load, order.index):
        if payload is not None:
            send(topic + payload)
            sent += 1
    return sent


def subscribe_batches(order: SubscribeOrder, handle: Handle, ready: ReadyCall) -> None:
    """See benchmarks.peers."""
    socket, _ = _subscriber(order)
    decode = msgspec.msgpack.Decoder(list[bytes]).decode
    ready()
    done = False
    while not done:
        _, body = socket.recv_multipart()
        for payload in decode(body):
            done = handle(payload)


def publish_batches(order: PublishOrder, ready: ReadyCall) -> int:
    """See benchmarks.peers."""
    socket = _publisher(order.address)
    topic, encode, sent = order.load.topics_of(order.index)[0].encode(), msgspec.msgpack.Encoder().encode, 0
    batch: list[bytes] = []
    ready()
    for payload in payloads(order.load, order.index):
        if payload is not None:
            batch.append(payload)
        if len(batch) >= BATCH or (payload is None and batch):
            socket.send_multipart((topic, encode(batch)))
            sent += len(batch)
            batch.clear()
    return sent


SINGLE = Peer("zmq-proxy", subscribe_single, publish_single)
BATCHES = Peer("zmq-proxy", subscribe_batches, publish_batches)
