"""Headers of messages and tasks: what their reader should know before it decodes the payload.

    name     any text but "", without control characters; case counts
    value    text or bytes; text only for names whose meaning others have fixed (RESERVED): traceparent and tracestate are W3C
             Trace Context's, content-type is HTTP's, ce-… are CloudEvents' in its HTTP binding
    roq-…    is RoQ's own. Of a message publishers may say two, as text, which groups obey: roq-priority, a whole number of
             PRIORITIES; roq-ttl, seconds from its publication (`30`, `0.5`)

One message's or task's headers have HEADERS_BYTES_MAX bytes at most, names and values together in UTF-8. Those of messages
travel in frames (frame.py), those of tasks at the beginning of what is stored as the payload.
"""

from __future__ import annotations

import math
import re
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
PRIORITY, TTL = "roq-priority", "roq-ttl"
PRIORITIES = range(-128, 128)  # 0 is the default, higher goes first
TTL_SECONDS_MAX = 10 * 366 * 86_400  # more is a mistake
MARK = b"\x93RoQ\x00h\xc1\x01"  # c1 is no msgpack, 93 begins no text: nobody's payload begins like this by chance
ENCODED_BYTES_MAX = 0xFFFF
_LENGTH = struct.Struct("<H")  # HEADERS_BYTES_MAX is three times as much in msgpack at most
PREFIX_BYTES = len(MARK) + _LENGTH.size
_WHOLE = re.compile(r"-?[0-9]{1,3}")
_SECONDS = re.compile(r"[0-9]{1,9}(\.[0-9]{1,9})?")
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(dict[str, Any]).decode  # str | bytes can't be said there

Headers = Mapping[str, str | bytes]


class OwnHeaders(dict[str, str | bytes]):
    """Checked before; what RoQ says itself is among them (requests.py), and counts beyond HEADERS_BYTES_MAX."""


def check_headers(headers: Headers) -> tuple[dict[str, str | bytes], int]:
    """A copy of them, and their bytes. Raises InvalidHeaders."""
    return _check(headers, frozenset())


def check_message_headers(headers: Headers) -> tuple[dict[str, str | bytes], int]:
    """As `check_headers`, of a message: it may have PRIORITY and TTL, too. Raises InvalidHeaders."""
    return _check(headers, _OF_MESSAGES)


def priority_of(headers: Headers) -> int:
    """A message's, 0 if it says none. Raises InvalidHeaders."""
    text = headers.get(PRIORITY)
    if text is None:
        return 0
    if not isinstance(text, str) or not _WHOLE.fullmatch(text) or int(text) not in PRIORITIES:
        allowed = f"{PRIORITIES[0]} to {PRIORITIES[-1]}, a higher one goes first"
        raise InvalidHeaders(f"header {PRIORITY!r} is a whole number as text, {allowed}; got {text!r:.40}")
    return int(text)


def ttl_ms(headers: Headers) -> int:
    """Milliseconds from a message's publication to its end, 0 if it has none. Raises InvalidHeaders."""
    text = headers.get(TTL)
    if text is None:
        return 0
    if not isinstance(text, str) or not _SECONDS.fullmatch(text) or not 0 < float(text) <= TTL_SECONDS_MAX:
        raise InvalidHeaders(
            f"header {TTL!r} is seconds as text, more than 0 and at most {TTL_SECONDS_MAX}, as '30' or '0.5'; got {text!r:.40}"
        )
    return max(1, math.ceil(float(text) * 1000 - 1e-6))


_OF_MESSAGES = frozenset((PRIORITY, TTL))


def _check(headers: Headers, own: frozenset[str]) -> tuple[dict[str, str | bytes], int]:
    if headers.__class__ is OwnHeaders:
        return dict(headers), sum(len(name.encode()) + _bytes_of(value) for name, value in headers.items())
    if not isinstance(headers, Mapping):
        raise InvalidHeaders(f"headers are a mapping of names to text or bytes, got {type(headers).__name__}")
    copied: dict[str, str | bytes] = {}
    size = 0
    for name, value in headers.items():
        size += _checked_size(name, value, own)
        copied[name] = value
    if own and not own.isdisjoint(copied):
        priority_of(copied)
        ttl_ms(copied)
    if size > HEADERS_BYTES_MAX:
        raise InvalidHeaders(f"headers of {size} bytes; a message takes at most {HEADERS_BYTES_MAX}")
    return copied, size


def _bytes_of(value: str | bytes) -> int:
    return len(value.encode()) if isinstance(value, str) else len(value)


def _checked_size(name: str, value: str | bytes, own: frozenset[str]) -> int:
    if name.__class__ is not str or not name or not name.isprintable():
        raise InvalidHeaders(f"the name of a header is text without control characters, got {name!r}")
    if name.startswith(OWN_PREFIX) and name not in own:
        but = f", and a message may have {' and '.join(sorted(own))} of them" if own else ""
        raise InvalidHeaders(f"header {name!r}: names that begin with {OWN_PREFIX!r} are RoQ's own{but}")
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
