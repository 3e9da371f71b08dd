"""Headers of messages and tasks: what their reader should know before it decodes the payload.

    name     any text but "", without control characters; case counts
    value    text or bytes; text only for names whose meaning others have fixed (RESERVED): traceparent and tracestate are W3C
             Trace Context's, content-type is HTTP's, ce-… are CloudEvents' in its HTTP binding
    roq-…    is RoQ's own

One message's or task's headers have HEADERS_BYTES_MAX bytes at most, names and values together in UTF-8. Those of messages
travel in frames (frame.py), those of tasks at the beginning of what is stored as the payload.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any

import msgspec

from roq.errors import InvalidHeaders
from roq.wire.decoding import UNDECODABLE

HEADERS_BYTES_MAX = 4096
RESERVED = frozenset(("content-type", "traceparent", "tracestate"))
RESERVED_PREFIX = "ce-"
OWN_PREFIX = "roq-"
MARK = b"\x93RoQ\x00h\xc1\x01"  # c1 is no msgpack, 93 begins no text: nobody's payload begins like this by chance
ENCODED_BYTES_MAX = 0xFFFF
_LENGTH = struct.Struct("<H")  # HEADERS_BYTES_MAX is three times as much in msgpack at most
PREFIX_BYTES = len(MARK) + _LENGTH.size
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(dict[str, Any]).decode  # str | bytes can't be said there

Headers = Mapping[str, str | bytes]


class OwnHeaders(dict[str, str | bytes]):
    """Checked before; what RoQ says itself is among them (requests.py), and counts beyond HEADERS_BYTES_MAX."""


def check_headers(headers: Headers) -> tuple[dict[str, str | bytes], int]:
    """A copy of them, and their bytes. Raises InvalidHeaders."""
    if headers.__class__ is OwnHeaders:
        return dict(headers), sum(len(name.encode()) + _bytes_of(value) for name, value in headers.items())
    if not isinstance(headers, Mapping):
        raise InvalidHeaders(f"headers are a mapping of names to text or bytes, got {type(headers).__name__}")
    copied: dict[str, str | bytes] = {}
    size = 0
    for name, value in headers.items():
        size += _checked_size(name, value)
        copied[name] = value
    if size > HEADERS_BYTES_MAX:
        raise InvalidHeaders(f"headers of {size} bytes; a message takes at most {HEADERS_BYTES_MAX}")
    return copied, size


def _bytes_of(value: str | bytes) -> int:
    return len(value.encode()) if isinstance(value, str) else len(value)


def _checked_size(name: str, value: str | bytes) -> int:
    if name.__class__ is not str or not name or not name.isprintable():
        raise InvalidHeaders(f"the name of a header is text without control characters, got {name!r}")
    if name.startswith(OWN_PREFIX):
        raise InvalidHeaders(f"header {name!r}: names that begin with {OWN_PREFIX!r} are RoQ's own")
    if value.__class__ is not str and value.__class__ is not bytes:
        raise InvalidHeaders(f"header {name!r} is text or bytes, got {type(value).__name__}")
    if value.__class__ is bytes and (name in RESERVED or name.startswith(RESERVED_PREFIX)):
        raise InvalidHeaders(f"header {name!r} is text: its meaning is fixed by a standard")
    try:
        return len(name.encode()) + _bytes_of(value)
    except UnicodeEncodeError:
        raise InvalidHeaders(f"header {name!r} has text that is no Unicode: a lone surrogate") from None


# --- tasks ------------------------------------------------------------------------------------------------------------


def with_headers(payload: bytes, headers: Headers | None) -> bytes:
    """What is stored for a task: its payload as it is, or behind its headers: MARK, their length (u16, little endian), msgpack.
    A payload that begins with MARK by itself gets empty ones. Raises InvalidHeaders."""
    return join_headers(payload, check_headers(headers)[0] if headers else {})


def join_headers(payload: bytes, headers: Mapping[str, str | bytes]) -> bytes:
    """The same of headers that their publisher checked, or should have. Raises InvalidHeaders: they are too large."""
    if not headers and not payload.startswith(MARK):
        return payload
    encoded = _encode(headers)
    if len(encoded) > ENCODED_BYTES_MAX:
        raise InvalidHeaders(f"headers of {len(encoded)} bytes; a message takes at most {HEADERS_BYTES_MAX}")
    return b"".join((MARK, _LENGTH.pack(len(encoded)), encoded, payload))


def split_headers(stored: bytes) -> tuple[bytes, dict[str, str | bytes]]:
    """Payload and headers. What has MARK and no headers that can be read is a payload as a whole."""
    if not stored.startswith(MARK) or len(stored) < PREFIX_BYTES:
        return stored, {}
    (length,) = _LENGTH.unpack_from(stored, len(MARK))
    end = PREFIX_BYTES + length
    try:
        headers = _decode(stored[PREFIX_BYTES:end])
    except UNDECODABLE:
        return stored, {}
    if end > len(stored) or not all(isinstance(value, str | bytes) for value in headers.values()):
        return stored, {}
    return stored[end:], headers
