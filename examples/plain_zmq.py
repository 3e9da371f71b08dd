"""A program without RoQ that publishes to a queue and subscribes to it: pyzmq, msgpack and docs/wire.md are all it knows.

    python plain_zmq.py subscribe 127.42.1.11:7003 127.42.1.12:7005 --topic eu.      # backs of all Exchanges
    python plain_zmq.py publish 127.42.1.11:7002 --topic eu.paris one two three      # front of one Exchange

Ports: `roq queue show NAME --json`.
"""

from __future__ import annotations

import argparse
import secrets
import struct
import time

import msgspec
import zmq

HEADER = struct.Struct("<BBQIQQQIQ")  # version, kind, publisher, path, sequence, previous, index, count, timestamp
VERSION, DATA, MARK = 1, 0, 4
CONTROL = b"\xff"
CONFIRMED = struct.Struct("<cIQ")  # 02, path, mark
WAIT_MS = 10_000


def subscribe(context: zmq.Context[zmq.Socket[bytes]], backs: list[str], topic: str, count: int) -> None:
    """Print what comes on topics that begin with `topic`, until `count` messages have come."""
    socket = context.socket(zmq.SUB)
    for back in backs:
        socket.connect(f"tcp://{back}")
    socket.subscribe(topic.encode())
    print("subscribed", flush=True)
    while count > 0:
        name, _, rest = socket.recv().partition(b"\0")
        publisher, sequence = HEADER.unpack_from(rest)[2], HEADER.unpack_from(rest)[4]
        for number, item in enumerate(msgspec.msgpack.decode(rest[HEADER.size :]), sequence):
            payload = item if isinstance(item, bytes) else item[0]  # the other one are its headers
            print(f"{name.decode()} {payload.decode()} ({publisher:016x} {number})", flush=True)
            count -= 1


def publish(context: zmq.Context[zmq.Socket[bytes]], front: str, topic: str, payloads: list[str]) -> None:
    """Send each payload as a message, and wait until the Exchange has forwarded them."""
    socket = context.socket(zmq.XPUB)
    socket.setsockopt(zmq.RCVTIMEO, WAIT_MS)
    socket.connect(f"tcp://{front}")
    while not socket.recv().startswith(b"\x01\xfe"):
        pass  # its subscription to everything comes first, then the name of its life
    publisher, sequence, now = secrets.randbits(64), 0, time.time_ns()
    for payload in payloads:
        header = HEADER.pack(VERSION, DATA, publisher, 1, sequence + 1, sequence, sequence, 1, now)
        socket.send(topic.encode() + b"\0" + header + msgspec.msgpack.encode([payload.encode()]))
        sequence += 1
    mark = HEADER.pack(VERSION, MARK, publisher, 1, sequence, 0, 0, 0, now)
    socket.send(CONTROL + mark + msgspec.msgpack.encode(1))
    while socket.recv() != CONFIRMED.pack(b"\x02", 1, 1):
        pass
    print(f"{sequence} forwarded", flush=True)


def main() -> None:
    """See the module's text."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("subscribe")
    one.add_argument("backs", nargs="+", metavar="HOST:PORT")
    one.add_argument("--topic", default="")
    one.add_argument("--count", type=int, default=2**62)
    other = commands.add_parser("publish")
    other.add_argument("front", metavar="HOST:PORT")
    other.add_argument("payloads", nargs="+")
    other.add_argument("--topic", required=True)
    asked = parser.parse_args()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    if asked.command == "subscribe":
        subscribe(context, asked.backs, asked.topic, asked.count)
    else:
        publish(context, asked.front, asked.topic, asked.payloads)


if __name__ == "__main__":
    main()
