"""The envelope of every control message: one part `msgpack [version, kind, id, body]` over DEALER/ROUTER.

Requests carry an id that the reply repeats; a notice has id 0 and no reply. The body is one tagged struct of the
conversation's own file. What can't be decoded is a FrameError: the receiver counts, logs and drops it.
"""

from __future__ import annotations

from enum import IntEnum

import msgspec

from roq.errors import FrameError, NotLeader, RoqError, from_wire
from roq.wire.decoding import UNDECODABLE

VERSION = 1


class EnvelopeKind(IntEnum):
    """What the body is."""

    REQUEST = 0
    REPLY = 1
    ERROR = 2
    NOTICE = 3


class Envelope(msgspec.Struct, frozen=True, array_like=True):
    """One control message; body is undecoded."""

    version: int
    kind: int
    id: int
    body: msgspec.Raw


class ErrorBody(msgspec.Struct, frozen=True, array_like=True):
    """A RoqError on the wire: class name, message, and for NotLeader the leader's address."""

    name: str
    message: str
    detail: str = ""


_encode = msgspec.msgpack.Encoder().encode
_decode_envelope = msgspec.msgpack.Decoder(Envelope).decode
_decode_error = msgspec.msgpack.Decoder(ErrorBody).decode


def seal(kind: EnvelopeKind, id: int, body: msgspec.Struct | None) -> bytes:
    """The bytes of one control message."""
    return _encode((VERSION, int(kind), id, body))


def seal_error(id: int, error: RoqError) -> bytes:
    """The bytes of a reply that raises `error` at the caller."""
    detail = error.leader if isinstance(error, NotLeader) else ""
    return _encode((VERSION, int(EnvelopeKind.ERROR), id, ErrorBody(type(error).__name__, str(error), detail)))


def open_envelope(message: bytes) -> Envelope:
    """The envelope in `message`; raises FrameError."""
    try:
        envelope = _decode_envelope(message)
    except UNDECODABLE as error:
        raise FrameError(f"not a control message: {error}") from None
    if envelope.version != VERSION or not 0 <= envelope.kind <= 3 or envelope.id < 0:
        raise FrameError(f"control message of version {envelope.version}, kind {envelope.kind}")
    return envelope


def error_of(body: msgspec.Raw) -> RoqError:
    """The error in an ERROR envelope."""
    try:
        found = _decode_error(body)
    except UNDECODABLE as error:
        return FrameError(f"undecodable error reply: {error}")
    return from_wire(found.name, found.message, found.detail)
