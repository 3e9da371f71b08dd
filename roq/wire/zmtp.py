"""ZMTP 3.1 (rfc.zeromq.org/spec/37) for all kinds of sockets: bytes to messages and back. Pure.

    greeting   FF, 8 zeros, 7F · 3 1 · mechanism padded to 20 · as server u8 · 31 zeros   64 bytes, both ways
    frame      flags u8 (1 more, 2 long, 4 command) · size u8 or u64 · body
    READY      the first frame each way; PING is answered with PONG at any time

A subscription is a message of one part, 01 prefix, and its end 00 prefix; the commands SUBSCRIBE and CANCEL of 3.1, which a
peer may use instead, come out of the parser as such messages.

The mechanism here is NULL, no security; what comes with CURVE is opened before it comes here (curve.py).

Not covered: sockets (runtime/connections.py, runtime/links.py, runtime/blocking_connection.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType

from roq.errors import AccessDenied, FrameError
from roq.wire.limits import CONTROL_BYTES_MAX

GREETING_BYTES = 64
VERSION_BYTES = 12  # of the greeting, before the mechanism
CHUNK_BYTES_MIN = 4096  # of a message that comes in crumbs; each chunk costs some 50 bytes beside itself
PARTS_MAX = 16  # of one message, whose limit is that of all of them together
JOINED_BYTES_MAX = 4096  # a larger body is written beside its header, not copied behind it
PING = b"\x04\x07\x04PING\0\0"  # asks for a PONG; says nothing about when the next one comes
MORE, LONG, COMMAND = 1, 2, 4
_NO_PROPERTIES: Mapping[bytes, bytes] = MappingProxyType({})


class OtherMechanism(AccessDenied):
    """The other end has security and we have none, or the other way round."""


def greeting(mechanism: bytes, *, as_server: bool = False) -> bytes:
    """What a connection begins with."""
    return b"\xff\0\0\0\0\0\0\0\0\x7f\x03\x01%b%c%b" % (mechanism.ljust(20, b"\0"), as_server, bytes(31))


def mechanism(greeting: bytes) -> bytes:
    """b"NULL", b"CURVE" … of the other end's greeting. Raises FrameError: it is none of ZMTP 3."""
    if greeting[0] != 0xFF or not greeting[9] & 1 or greeting[10] < 3:
        raise FrameError("not a ZMTP 3 peer")
    return greeting[12:32].rstrip(b"\0")


def frame(body: bytes, flags: int = 0) -> bytes:
    """One frame."""
    size = len(body)
    if size < 256:
        return b"%c%c%b" % (flags, size, body)
    return b"%c%b%b" % (flags | LONG, size.to_bytes(8, "big"), body)


def pieces(body: bytes) -> tuple[bytes, ...]:
    """One frame as bytes to be written behind each other."""
    size = len(body)
    if size <= JOINED_BYTES_MAX:
        return (frame(body),)
    return b"%c%b" % (LONG, size.to_bytes(8, "big")), body


def frames_in(data: bytes) -> Iterator[tuple[int, int, int]]:
    """Where each of these whole frames begins, where its body does, and where it ends."""
    at = 0
    while at < len(data):
        begin, size = at + 2, data[at + 1]
        if data[at] & LONG:
            begin, size = at + 9, int.from_bytes(data[at + 1 : at + 9], "big")
        yield at, begin, begin + size
        at = begin + size


def hello(socket_type: bytes) -> bytes:
    """What a connection begins with: greeting and READY. socket_type: b"DEALER", b"XPUB" …"""
    return greeting(b"NULL") + frame(b"\x05READY" + properties(socket_type), COMMAND)


def properties(socket_type: bytes, more: Mapping[bytes, bytes] = _NO_PROPERTIES) -> bytes:
    """What an end says of itself."""
    told = {b"Socket-Type": socket_type, b"Identity": b"", **more}
    return b"".join(b"%c%b%b%b" % (len(name), name, len(value).to_bytes(4, "big"), value) for name, value in told.items())


def parse_properties(data: bytes) -> dict[bytes, bytes]:
    """By lower-case name. Raises FrameError."""
    at, found = 0, dict[bytes, bytes]()
    while at < len(data):
        begin = at + 1 + data[at] + 4
        stop = begin + int.from_bytes(data[begin - 4 : begin], "big")
        if begin > len(data) or stop > len(data):
            raise FrameError("properties that end too early")
        found[data[at + 1 : begin - 4].lower()] = data[begin:stop]
        at = stop
    return found


class Parser:
    """The messages of one connection as its bytes come in. ready: the other side takes messages now. pongs: to be sent.
    bytes_max: of one message."""

    def __init__(self, bytes_max: int = CONTROL_BYTES_MAX) -> None:
        self.ready = False
        self._bytes_max = bytes_max
        self.pongs: list[bytes] = []
        self._chunks: list[bytes] = []  # begin in the middle of nothing
        self._size, self._needed = 0, GREETING_BYTES
        self._greeted = False
        self._parts: list[bytes] = []
        self._parts_size = 0

    def rest(self) -> bytes:
        """The bytes of the incomplete frame, taken out: somebody else goes on with them. Raises FrameError within a
        message of several parts."""
        if self._parts:
            raise FrameError("a message of more than one part")
        rest, self._chunks, self._size, self._needed = b"".join(self._chunks), [], 0, 2
        return rest

    @property
    def unfinished(self) -> int:
        """Bytes of a message that is not complete yet."""
        return self._size + self._parts_size

    def feed(self, data: bytes) -> list[list[bytes]]:
        """The messages that are complete now. Raises FrameError, AccessDenied: the connection is of no use."""
        if not self._chunks and self._greeted and len(data) >= 9 and not self._parts:
            flags, size, begin = data[0], data[1], 2  # most often it is one message of one part
            if flags == LONG:
                size, begin = int.from_bytes(data[1:9], "big"), 9
            if not flags & ~LONG and begin + size == len(data) and size <= self._bytes_max:
                return [[data[begin:]]]
        if self._chunks and len(self._chunks[-1]) < CHUNK_BYTES_MIN:
            self._chunks[-1] += data
        else:
            self._chunks.append(data)
        self._size += len(data)
        if self._size < self._needed:
            return []
        data = self._chunks[0] if len(self._chunks) == 1 else b"".join(self._chunks)
        at, end, messages = 0, self._size, list[list[bytes]]()
        if not self._greeted:
            self._greet(data)
            at = GREETING_BYTES
        while True:
            if end - at < 2:
                self._needed = 2
                break
            flags, size, begin = data[at], data[at + 1], at + 2
            if flags & LONG:
                if end - at < 9:
                    self._needed = 9
                    break
                size, begin = int.from_bytes(data[at + 1 : at + 9], "big"), at + 9
            if size > self._bytes_max or flags > 7 or (flags & COMMAND and flags & MORE):
                raise FrameError(f"a frame of {size} bytes with flags {flags}")
            if begin + size > end:
                self._needed = begin + size - at
                break
            at = begin + size
            self._take(flags, data[begin:at], messages)
        self._size = end - at
        self._chunks = [data[at:]] if self._size else []
        return messages

    def _greet(self, data: bytes) -> None:
        wanted = mechanism(data)
        if wanted == b"CURVE":
            raise OtherMechanism("this cluster takes only who shows a card: `roq --card`, roq.connect(card=) or ROQ_CARD")
        if wanted != b"NULL":
            raise FrameError("a peer with another security mechanism")
        self._greeted = True

    def _take(self, flags: int, body: bytes, messages: list[list[bytes]]) -> None:
        if flags & COMMAND:
            if body.startswith(b"\x04PING"):
                self.pongs.append(frame(b"\x04PONG" + body[7:23], COMMAND))
            elif body.startswith(b"\x05READY"):
                self.ready = True
            elif body.startswith(b"\x05ERROR") and not self.ready:
                raise AccessDenied(body[7 : 7 + body[6]].decode(errors="replace") if len(body) > 7 else None)
            elif body.startswith(b"\x09SUBSCRIBE"):
                messages.append([b"\x01" + body[10:]])
            elif body.startswith(b"\x06CANCEL"):
                messages.append([b"\x00" + body[7:]])
            return
        self._parts.append(body)
        if flags & MORE or len(self._parts) > 1:
            self._parts_size += len(body)
            if len(self._parts) > PARTS_MAX or self._parts_size > self._bytes_max:
                raise FrameError(f"a message of more than {PARTS_MAX} parts or {self._bytes_max} bytes")
        if not flags & MORE:
            messages.append(self._parts)
            self._parts, self._parts_size = [], 0
