"""Headers of messages: what their reader should know before it decodes the payload.

    name     any text but "", without control characters; case counts
    value    text or bytes; text only for names whose meaning others have fixed (RESERVED): traceparent and tracestate are W3C
             Trace Context's, content-type is HTTP's, ce-… are CloudEvents' in its HTTP binding
    roq-…    is RoQ's own

One message's headers have HEADERS_BYTES_MAX bytes at most, names and values together in UTF-8.
"""

from __future__ import annotations

from collections.abc import Mapping

from roq.errors import InvalidHeaders

HEADERS_BYTES_MAX = 4096
RESERVED = frozenset(("content-type", "traceparent", "tracestate"))
RESERVED_PREFIX = "ce-"
OWN_PREFIX = "roq-"

Headers = Mapping[str, str | bytes]


def check_headers(headers: Headers) -> tuple[dict[str, str | bytes], int]:
    """A copy of them, and their bytes. Raises InvalidHeaders."""
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
        return len(name.encode()) + (len(value.encode()) if isinstance(value, str) else len(value))
    except UnicodeEncodeError:
        raise InvalidHeaders(f"header {name!r} has text that is no Unicode: a lone surrogate") from None
