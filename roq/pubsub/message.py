"""What a subscriber hands out: messages, and what it does with the news of a gap."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from roq.errors import MessagesLost
from roq.runtime.observe import logger
from roq.wire.frame import Header

log = logger(__name__)


class Message(msgspec.Struct, frozen=True, gc=False):
    """One message. timestamp: nanoseconds since 1970 at which the publisher opened the batch that carried it."""

    topic: str
    payload: bytes
    publisher: int
    sequence: int
    timestamp: int


def log_lost(event: MessagesLost) -> None:
    """Default for `on_lost`: a warning in the log."""
    fields = {"publisher": f"{event.publisher:016x}", "topic": event.topic, "first": event.first, "last": event.last}
    log.warning("messages lost", extra={"fields": {**fields, "count": event.count}})


def raise_lost(event: MessagesLost) -> None:
    """For `on_lost`: end the iteration with the MessagesLost itself."""
    raise event


class Batch(NamedTuple):
    """A frame's payloads on their way to the application; size in bytes of the frame."""

    topic: bytes
    header: Header
    payloads: list[bytes]
    size: int
