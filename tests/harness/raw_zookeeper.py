"""ZooKeeper's client protocol by hand, for what kazoo never sends: setWatches, chosen ids and passwords, nonsense."""

from __future__ import annotations

import socket
import struct
from types import TracebackType
from typing import NamedTuple

STAT = struct.Struct("!qqqqiiiqiiq")
CREATE, DELETE, EXISTS, GET_DATA, SET_DATA, GET_CHILDREN, PING = 1, 2, 3, 4, 5, 8, 11
MULTI, MULTI_READ, CREATE_CONTAINER, CREATE_TTL, AUTH, SET_WATCHES, SET_WATCHES_2, CLOSE = 14, 22, 19, 21, 100, 101, 105, -11
EVENT_XID, SET_WATCHES_XID, PING_XID, AUTH_XID = -1, -8, -2, -4


class Welcome(NamedTuple):
    """What answers the first frame."""

    timeout_ms: int
    session: int
    password: bytes
    rest: bytes


class Answer(NamedTuple):
    """A reply."""

    xid: int
    zxid: int
    error: int
    record: bytes


class Event(NamedTuple):
    """What a watch told. kind: 1 created, 2 deleted, 3 changed, 4 children."""

    kind: int
    state: int
    path: str


def text(value: str | None) -> bytes:
    """A string."""
    return buffer(None if value is None else value.encode())


def buffer(value: bytes | None) -> bytes:
    """A buffer."""
    return struct.pack("!i", -1) if value is None else struct.pack("!i", len(value)) + value


def texts(*values: str) -> bytes:
    """A vector of strings."""
    return struct.pack("!i", len(values)) + b"".join(text(value) for value in values)


OPEN = struct.pack("!ii", 1, 31) + text("world") + text("anyone")


def create(path: str, data: bytes | None = b"", flags: int = 0, acl: bytes = OPEN) -> bytes:
    """The record of a create."""
    return text(path) + buffer(data) + acl + struct.pack("!i", flags)


class RawClient:
    """A blocking connection; every wait is bounded. events: all that came so far."""

    def __init__(self, address: str, seconds: float = 10.0) -> None:
        host, _, port = address.partition("/")[0].partition(":")
        self.socket = socket.create_connection((host, int(port)), seconds)
        self.events: list[Event] = []
        self._xid = 0

    def __enter__(self) -> RawClient:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.socket.close()

    def welcome(
        self,
        timeout_ms: int = 4000,
        session: int = 0,
        password: bytes = bytes(16),
        zxid: int = 0,
        read_only: bytes = b"\0",
    ) -> Welcome:
        """Begin a session, or go on with one."""
        self.send(struct.pack("!iqiq", 0, zxid, timeout_ms, session) + buffer(password) + read_only)
        body = self.frame()
        _, granted, given = struct.unpack_from("!iiq", body)
        (size,) = struct.unpack_from("!i", body, 16)
        return Welcome(granted, given, body[20 : 20 + size], body[20 + size :])

    def send(self, body: bytes) -> None:
        """One frame."""
        self.socket.sendall(struct.pack("!i", len(body)) + body)

    def frame(self) -> bytes:
        """The next frame's body. Raises EOFError when the server closed."""
        (size,) = struct.unpack("!i", self._exactly(4))
        return self._exactly(size)

    def _exactly(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            try:
                chunk = self.socket.recv(size - len(data))
            except ConnectionResetError:
                chunk = b""
            if not chunk:
                raise EOFError("the server closed the connection")
            data += chunk
        return data

    def ask(self, kind: int, record: bytes = b"", xid: int | None = None) -> Answer:
        """Send a request, wait for its reply; events that come before it are collected."""
        if xid is None:
            self._xid += 1
            xid = self._xid
        self.send(struct.pack("!ii", xid, kind) + record)
        while True:
            body = self.frame()
            xid_, zxid, error = struct.unpack_from("!iqi", body)
            answer = Answer(xid_, zxid, error, body[16:])
            if answer.xid != EVENT_XID:
                assert answer.xid == xid
                return answer
            happened, state, size = struct.unpack_from("!iii", answer.record)
            self.events.append(Event(happened, state, answer.record[12 : 12 + size].decode()))

    def ended(self) -> bool:
        """Wait for the server to close; False if it sends something else."""
        try:
            self.frame()
        except EOFError:
            return True
        return False
