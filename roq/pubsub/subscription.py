"""What a subscriber asks for and what it hands out: filters of topics, messages, the news of gaps, its health.

    eu.paris     literal: every topic that starts with it (ZeroMQ's prefix match)
    eu.*.rain    `*` stands for exactly one dot-separated token
    eu.>         `>` at the end stands for one or more tokens; `>` alone for everything

A filter with a wildcard is sent to the Exchanges as its longest literal prefix; the rest is decided in the subscriber. Requests
and answers (roq/wire/requests.py) travel on topics that begin with `_serve.` and `_reply.`: only a filter that begins like that
matches them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec

from roq.errors import InvalidConfiguration, InvalidTopic, MessagesLost
from roq.ids import check_name, topic_bytes
from roq.runtime.observe import logger
from roq.wire.frame import Header, Item
from roq.wire.monitor import Service
from roq.wire.requests import PRIVATE_PREFIXES

log = logger(__name__)
CACHED_TOPICS = 10_000  # decisions remembered per subscriber
PRIVATE = tuple(prefix.encode() for prefix in PRIVATE_PREFIXES)
SERVICE_TOPICS_MAX = 100  # every caller gets every server's
NOT_PRIVATE = "".join(f"(?!{re.escape(prefix)})" for prefix in PRIVATE_PREFIXES)


def _is_wild(pattern: str) -> bool:
    tokens = pattern.split(".")
    return "*" in tokens or ">" in tokens


def check_filter(pattern: str) -> str:
    """The filter itself if it is well-formed. Raises InvalidTopic."""
    topic_bytes(pattern)
    if ">" in pattern.split(".")[:-1]:
        raise InvalidTopic(f"{pattern!r}: '>' stands for the rest of a topic and comes last")
    return pattern


def check_service(service: Service) -> None:
    """What a server of requests says of itself. Raises InvalidName, InvalidTopic, InvalidConfiguration."""
    if service.group:
        check_name(service.group, "group")
    if not 1 <= len(service.topics) <= SERVICE_TOPICS_MAX:
        raise InvalidConfiguration(f"one server has 1 to {SERVICE_TOPICS_MAX} filters of topics, got {len(service.topics)}")
    for pattern in service.topics:
        check_filter(pattern)


def prefix_of(pattern: str) -> bytes:
    """What the Exchange matches for this filter."""
    if not _is_wild(pattern):
        return pattern.encode()
    literal: list[str] = []
    for token in pattern.split("."):
        if token in ("*", ">"):
            break
        literal.append(token + ".")
    return "".join(literal).encode()


def _expression(pattern: str) -> str:
    others = "" if prefix_of(pattern).startswith(PRIVATE) else NOT_PRIVATE
    if not _is_wild(pattern):
        return others + re.escape(pattern) + ".*"
    parts = {"*": r"[^.]+", ">": r".+"}
    return others + r"\.".join(parts.get(token) or re.escape(token) for token in pattern.split(".")) + r"\Z"


class TopicFilter:
    """All filters of one subscriber. `wants(topic)` is whether any of them matches."""

    def __init__(self, patterns: tuple[str, ...]) -> None:
        self.patterns = tuple(check_filter(pattern) for pattern in patterns)
        prefixes = sorted({prefix_of(pattern) for pattern in self.patterns})
        # a prefix of another one makes the longer one superfluous
        self.prefixes = [one for one in prefixes if not any(one != other and one.startswith(other) for other in prefixes)]
        self._expression = re.compile("|".join(f"(?:{_expression(pattern)})" for pattern in self.patterns), re.DOTALL)
        self._known: dict[bytes, bool] = {}

    @property
    def takes_all(self) -> bool:
        """But for private topics: there is nothing to be chosen."""
        return ">" in self.patterns

    def wants(self, topic: bytes) -> bool:
        """Whether messages on this topic are delivered; an undecodable topic is not."""
        known = self._known.get(topic)
        if known is None:
            try:
                known = self._expression.match(topic.decode()) is not None
            except UnicodeDecodeError:
                known = False
            if len(self._known) >= CACHED_TOPICS:
                self._known.clear()
            self._known[topic] = known
        return known


class Message(msgspec.Struct, frozen=True, gc=False):
    """One message. timestamp: nanoseconds since 1970 at which the publisher opened the batch that carried it."""

    topic: str
    payload: bytes
    publisher: int
    sequence: int
    timestamp: int
    _headers: dict[str, str | bytes] | None = msgspec.field(default=None, name="headers")  # a dictionary each costs 5 %

    def __hash__(self) -> int:
        return hash((self.publisher, self.sequence, self.topic, self.payload))

    @property
    def headers(self) -> dict[str, str | bytes]:
        """What its publisher said of it, {} if nothing."""
        return self._headers or {}


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
    payloads: Sequence[Item]
    size: int


class SubscriberHealth(NamedTuple):
    """What is well with a subscriber and what is not."""

    ready: bool
    attached: tuple[str, ...]
    missing: tuple[str, ...]  # Exchanges that have not proved our subscriptions yet
    monitor_silent_seconds: float
    buffered_bytes: int
    lost: int
    problems: tuple[str, ...]

    @classmethod
    def of(
        cls,
        ready: bool,
        closed: bool,
        proved: Mapping[str, bool],
        silent: float,
        buffered: int,
        lost: int,
        problems: list[str],
    ) -> SubscriberHealth:
        """With what these say themselves among the problems. proved: whether our subscriptions are, by Exchange."""
        attached = tuple(id for id, is_proved in proved.items() if is_proved)
        missing = tuple(id for id, is_proved in proved.items() if not is_proved)
        told = [*(["closed"] * closed), *problems]
        told += [f"not attached to Exchanges {', '.join(missing)}"] if missing else []
        told += [f"{lost} messages were lost"] if lost else []
        return cls(ready and not missing, attached, missing, silent, buffered, lost, tuple(told))
