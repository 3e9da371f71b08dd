"""A program without RoQ that publishes to a queue and subscribes to it: pyzmq, msgpack and docs/wire.md are all it knows.

    python plain_zmq.py subscribe 127.42.1.11:7003 127.42.1.12:7005 --topic eu.      # backs of all Exchanges
    python plain_zmq.py publish 127.42.1.11:7002 --topic eu.paris one two three      # front of one Exchange

Ports: `roq queue show NAME --json`. In a secured cluster:

    python plain_zmq.py keys plain.secret            # prints the public key, for `roq access admit plain KEY publish orders`
    python plain_zmq.py publish ... --name plain --secret plain.secret --servers KEY     # that `admit` printed
"""

from __future__ import annotations

import argparse
import hashlib
import os
import secrets
import struct
import sys
import time
from pathlib import Path

import msgspec
import zmq
from zmq.utils import z85

HEADER = struct.Struct("<BBQIQQQIQ")  # version, kind, publisher, path, sequence, previous, index, count, timestamp
VERSION, DATA, OPEN, MARK = 1, 0, 2, 4
CONTROL = b"\xff"
CONFIRMED = struct.Struct("<cIQ")  # 02, path, mark
WAIT_MS = 10_000


def make_keys(path: Path) -> None:
    """Keep a secret key there, and print the public one."""
    public, secret = zmq.curve_keypair()
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(z85.decode(secret).hex())
    print(z85.decode(public).hex())


def seal(socket: zmq.Socket[bytes], secret: Path, servers: str) -> None:
    """Before it connects. servers: their public key."""
    own = z85.encode(bytes.fromhex(secret.read_text()))
    socket.curve_publickey, socket.curve_secretkey = zmq.curve_public(own), own
    socket.curve_serverkey = z85.encode(bytes.fromhex(servers))


def subscribe(socket: zmq.Socket[bytes], backs: list[str], topic: str, count: int) -> None:
    """Print what comes on topics that begin with `topic`, until `count` messages have come."""
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


def publish(socket: zmq.Socket[bytes], front: str, topic: str, payloads: list[str], name: str) -> None:
    """Send each payload as a message, and wait until the Exchange has forwarded them. name: that the cluster knows us by."""
    socket.setsockopt(zmq.RCVTIMEO, WAIT_MS)
    socket.setsockopt(zmq.XPUB_MANUAL, 1)  # a connection, also one that is made anew, gets nothing before we say so
    socket.connect(f"tcp://{front}")
    while socket.recv() != b"\x01":
        pass  # the Exchange subscribes to everything, and then names its life
    socket.setsockopt(zmq.SUBSCRIBE, b"")
    nonce, sequence, now = secrets.token_bytes(16), 0, time.time_ns()
    publisher = int.from_bytes(hashlib.sha256(b"roq member id\0" + name.encode() + b"\0" + nonce).digest()[:8], "little")
    opening = HEADER.pack(VERSION, OPEN, publisher, 1, 0, 0, 0, 0, now)
    socket.send(CONTROL + opening + msgspec.msgpack.encode(["", False, nonce]))
    for payload in payloads:
        header = HEADER.pack(VERSION, DATA, publisher, 1, sequence + 1, sequence, sequence, 1, now)
        socket.send(topic.encode() + b"\0" + header + msgspec.msgpack.encode([payload.encode()]))
        sequence += 1
    mark = HEADER.pack(VERSION, MARK, publisher, 1, sequence, 0, 0, 0, now)
    socket.send(CONTROL + mark + msgspec.msgpack.encode(1))
    while (told := socket.recv()) != CONFIRMED.pack(b"\x02", 1, 1):
        if told == b"\x01":
            sys.exit("the connection was cut, and is a new one: some of it may not have been forwarded")
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
    for command in (one, other):
        command.add_argument("--secret", type=Path, default=Path())
        command.add_argument("--servers", default="")
    other.add_argument("--name", default="")
    commands.add_parser("keys").add_argument("path", type=Path)
    asked = parser.parse_args()
    if asked.command == "keys":
        make_keys(asked.path)
        return
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(zmq.SUB if asked.command == "subscribe" else zmq.XPUB)
    if asked.servers:
        seal(socket, asked.secret, asked.servers)
    if asked.command == "subscribe":
        subscribe(socket, asked.backs, asked.topic, asked.count)
    else:
        publish(socket, asked.front, asked.topic, asked.payloads, asked.name)


if __name__ == "__main__":
    main()
