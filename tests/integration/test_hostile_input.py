"""Random bytes at every socket of a cluster: refusals are counted, no process dies, no message is lost."""

from __future__ import annotations

import asyncio
import random
import socket
from collections.abc import Callable

import pytest
import zmq

import roq
from roq.coordination.locate import read_leader
from roq.runtime.shutdown import ask
from roq.wire import frame as frames
from roq.wire import process as process_wire
from roq.wire.assignment import HostReport
from roq.wire.envelope import EnvelopeKind, seal
from roq.wire.monitor import Leave
from tests.harness import libzmq
from tests.integration.running import RunningCluster

SEED = 20261120
MESSAGES = 200  # per socket


def junk(chance: random.Random) -> list[bytes]:
    """A message of 1 to 4 parts: random bytes, nearly right control messages, nearly right frames."""
    kinds: list[Callable[[], bytes]] = [
        lambda: chance.randbytes(chance.randrange(0, 200)),
        lambda: seal(EnvelopeKind.NOTICE, 0, Leave(1))[: chance.randrange(1, 8)],
        lambda: seal(EnvelopeKind.REQUEST, chance.randrange(1, 9), None),
        lambda: b"\x94\x01" + chance.randbytes(6),
        lambda: b"topic\0" + chance.randbytes(chance.randrange(0, 80)),
        lambda: b"\xff" + chance.randbytes(chance.randrange(0, 80)),
        lambda: frames.CONTROL_PREFIX + frames.HEADER.pack(1, chance.randrange(8), 7, 1, 1, 0, 0, 1, 1) + b"\xc1",
        lambda: b"t\0" + frames.HEADER.pack(1, 0, 7, 1, 1, 0, 0, 5, 1) + b"\x91\xc4\x01x",
        lambda: b"\x01" + chance.randbytes(300),
        lambda: b"",
    ]
    return [chance.choice(kinds)() for _ in range(chance.randrange(1, 5))]


async def throw(kind: int, address: str, port: int, chance: random.Random) -> None:
    """MESSAGES junk messages through a ZeroMQ socket of this kind, then raw bytes over plain TCP."""
    thrower = libzmq.socket(kind)
    thrower.set(zmq.SNDTIMEO, 1000)
    thrower.connect(f"tcp://{address}:{port}")
    if kind == zmq.XPUB:
        thrower.set(zmq.RCVTIMEO, 2000)
        thrower.recv()  # the Exchange's welcome: only then does anything leave
    for _ in range(MESSAGES):
        parts = junk(chance)
        thrower.send_multipart(parts[:1] if kind == zmq.XPUB else parts)
    thrower.close()
    for payload in (
        b"",
        b"GET / HTTP/1.1\r\n\r\n",
        chance.randbytes(500),
        b"\xff\0\0\0\0\0\0\0\x01\x7f\x03" + chance.randbytes(60),
    ):
        with socket.create_connection((address, port), 2) as raw:
            raw.sendall(payload)
    await asyncio.sleep(0)


def living(report: HostReport) -> dict[str, tuple[int, int]]:
    return {process.name: (process.pid, process.restarts) for process in report.processes}


@pytest.mark.quick
async def test_random_bytes_at_every_socket(cluster: RunningCluster, client: roq.Cluster, queue: str) -> None:
    chance = random.Random(SEED)
    info = await client.queue(queue)
    hosts = await client.hosts()
    host = next(one for one in hosts if one.host == info.record.monitor_host)
    assert host.report is not None
    before = {one.host: living(one.report) for one in hosts if one.report is not None}
    ports = {str(process.kind): process.ports for process in host.report.processes if process.queue == queue}
    monitor, exchange, scaling = ports["monitor"], ports["exchange"], ports["scaling"]
    leader = await read_leader(cluster.zookeeper)
    targets = [
        (zmq.DEALER, host.address, monitor["clients"]),
        (zmq.XSUB, host.address, monitor["kpis"]),
        (zmq.DEALER, host.address, monitor["control"]),
        (zmq.XPUB, host.address, exchange["front"]),
        (zmq.XSUB, host.address, exchange["back"]),
        (zmq.DEALER, host.address, exchange["control"]),
        (zmq.DEALER, host.address, scaling["control"]),
        (zmq.DEALER, host.address, host.port),
        (zmq.DEALER, leader.host, leader.port),
        (zmq.XSUB, leader.host, leader.broadcast),
    ]
    async with client.subscriber(queue) as subscriber, client.publisher(queue) as publisher:
        await publisher.publish("good", b"0")
        for kind, address, port in targets:
            await throw(kind, address, port, chance)
            await publisher.publish("good", b"x")
        await publisher.flush()
        received: list[int] = []
        async with asyncio.timeout(20):
            async for message in subscriber:
                if message.publisher == publisher.id:
                    received.append(message.sequence)
                if len(received) == 1 + len(targets):
                    break
        assert received == list(range(1, 2 + len(targets)))
        assert subscriber.lost == 0
        assert subscriber.counters["refused_undecodable"] > 0
    pong = await ask(host.address, monitor["control"], process_wire.Ping())
    assert isinstance(pong, process_wire.Pong)
    assert sum(count for name, count in pong.counters.items() if name.startswith("refused_")) > 0
    after = {one.host: living(one.report) for one in await client.hosts() if one.report is not None}
    assert after == before
