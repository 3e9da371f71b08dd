"""One client process of a peer: `python -m benchmarks.peer_client`, driven as RoQ's own (roq/tools/bench/protocol.py).

It counts deliveries and, in a paced load, latencies; peers number nothing, so duplicates and reordering are not looked for.
"""

from __future__ import annotations

import importlib
import os
import sys
import threading
import time

import msgspec

from benchmarks.peers.peer import Handle, Peer
from roq.tools.bench.accounting import LatencySamples, thin
from roq.tools.bench.load import STAMP, Load
from roq.tools.bench.protocol import (
    SAMPLES_SENT,
    ClientFailed,
    ClientReady,
    Order,
    PublisherFinished,
    PublishOrder,
    SubscribeOrder,
    SubscriberFinished,
    encode,
)

PEERS = {
    "nats-py": ("nats_peer", "PEER"),
    "redis-py": ("redis_peer", "PEER"),
    "redis-py-pipe100": ("redis_peer", "PIPELINED"),
    "redis-py, not awaited": ("redis_peer", "UNAWAITED"),
    "aio-pika": ("rabbitmq_peer", "PEER"),
    "zmq-proxy": ("zmq_peer", "SINGLE"),
    "zmq-proxy-batch100": ("zmq_peer", "BATCHES"),
}
WATCH_SECONDS = 0.2
_orders: msgspec.json.Decoder[Order] = msgspec.json.Decoder(Order)


def find_peer(name: str) -> Peer:
    """The peer's client; ImportError if its library is not installed."""
    module, attribute = PEERS[name]
    peer = getattr(importlib.import_module(f"benchmarks.peers.{module}"), attribute)
    assert isinstance(peer, Peer)
    return peer


def report(line: msgspec.Struct) -> None:
    """Tell the parent."""
    sys.stdout.buffer.write(encode(line))
    sys.stdout.buffer.flush()


class Count:
    """What arrived at this subscriber so far."""

    def __init__(self, load: Load, index: int) -> None:
        self.expected = load.messages * len(load.heard_by(index))
        self.count = 0
        self.last_ns = 0
        self.cpu = 0.0
        self.samples = LatencySamples()

    def plain(self, payload: bytes) -> bool:
        """One message of a flat-out load."""
        self.count += 1
        return self.count >= self.expected

    def stamped(self, payload: bytes) -> bool:
        """One message of a paced load."""
        now = time.monotonic_ns()
        self.count += 1
        self.samples.add(now - STAMP.unpack_from(payload)[3])
        return self.count >= self.expected

    def start(self) -> None:
        """The start gun."""
        self.cpu = time.process_time()

    def delivered(self) -> SubscriberFinished:
        """The report."""
        cpu = time.process_time() - self.cpu
        return SubscriberFinished(self.count, 0, 0, 0, 0, self.last_ns, cpu, thin(self.samples.settled(), SAMPLES_SENT))


def _watch(count: Count, idle_seconds: float) -> None:
    """Wait for the publishers' end, then for silence, and report what came: a blocking client can't be asked to stop."""
    if not sys.stdin.buffer.readline():
        os._exit(1)
    seen, since = -1, 0.0
    while seen != count.count or time.monotonic() - since < idle_seconds:
        if seen != count.count:
            seen, since = count.count, time.monotonic()
            count.last_ns = time.monotonic_ns()
        time.sleep(WATCH_SECONDS)
    report(count.delivered())
    os._exit(0)


def subscribe(peer: Peer, order: SubscribeOrder) -> None:
    """Be a subscriber."""
    count = Count(order.load, order.index)
    handle: Handle = count.stamped if order.load.stamped else count.plain

    def ready() -> None:
        report(ClientReady())
        sys.stdin.buffer.readline()  # Start
        count.start()
        threading.Thread(target=_watch, args=(count, order.idle_seconds), daemon=True).start()

    peer.subscribe(order, handle, ready)
    count.last_ns = time.monotonic_ns()
    report(count.delivered())


def publish(peer: Peer, order: PublishOrder) -> None:
    """Be a publisher. It stays until the run is over: one that leaves at once may take its last messages with it."""
    first_ns, cpu = 0, 0.0

    def ready() -> None:
        nonlocal first_ns, cpu
        report(ClientReady())
        sys.stdin.buffer.readline()  # Start
        first_ns, cpu = time.monotonic_ns(), time.process_time()

    sent = peer.publish(order, ready)
    report(PublisherFinished(sent, first_ns, time.monotonic_ns(), time.process_time() - cpu))
    sys.stdin.buffer.readline()


def main() -> None:
    """Do what the parent orders."""
    order = _orders.decode(sys.stdin.buffer.readline())
    try:
        peer = find_peer(order.system)
        if isinstance(order, PublishOrder):
            publish(peer, order)
        else:
            subscribe(peer, order)
    except Exception as error:  # whatever a peer's library raises is told to the parent
        report(ClientFailed(type(error).__name__, str(error)))
        raise
    finally:
        sys.stdout.flush()
        os._exit(0)  # no peer's clean-up is part of the measure


if __name__ == "__main__":
    main()
