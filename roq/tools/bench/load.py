"""What a publish/subscribe load is: how many clients, how much, how fast, on which topics. Pure; nothing is sent here."""

from __future__ import annotations

import struct

import msgspec

from roq.errors import CallError

STAMP = struct.Struct("<IIQQ")  # publisher index, topic index, number on that topic from 1, monotonic nanoseconds
CLIENTS_MAX = 1_000  # operating-system processes of one run, publishers and subscribers each
TICK_SECONDS = 0.001  # a paced publisher looks this often what is due


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """One load. messages: per publisher, 0 without bound; rate: messages/s per publisher, 0 flat out; duration: seconds, 0
    without bound; batch: payloads per publish_many call, 0 means one publish call per message; pairs: subscriber i hears
    publisher i only."""

    publishers: int = 1
    subscribers: int = 1
    size: int = 100
    messages: int = 0
    topics: int = 1
    rate: float = 0.0
    duration: float = 0.0
    batch: int = 0
    pairs: bool = False

    def check(self) -> Load:
        """The load itself; raises CallError if it contradicts itself."""
        for name, value, low, high in (
            ("publishers", self.publishers, 1, CLIENTS_MAX),
            ("subscribers", self.subscribers, 1, CLIENTS_MAX),
            ("topics", self.topics, 1, 1_000_000),
            ("size", self.size, 0, 1 << 30),
            ("messages", self.messages, 0, 1 << 60),
            ("rate", self.rate, 0, 1e9),
            ("seconds", self.duration, 0, 1e6),
            ("batch", self.batch, 0, 1_000_000),
        ):
            if not low <= value <= high:
                raise CallError(f"--{name} is from {low:g} to {high:g}, got {value:g}")
        if self.pairs and self.publishers != self.subscribers:
            raise CallError(f"--pairs needs as many publishers as subscribers, got {self.publishers} and {self.subscribers}")
        if not self.messages and not self.duration:
            raise CallError("the load needs an end: give --messages or --seconds")
        return self

    @property
    def stamped(self) -> bool:
        """Every payload carries a STAMP: paced loads whose payloads have room for it."""
        return self.rate > 0 and self.size >= STAMP.size

    def topics_of(self, publisher: int) -> list[str]:
        """The topics publisher number `publisher` goes through in turn."""
        prefix = f"bench.p{publisher}" if self.pairs else "bench"
        return [f"{prefix}.t{number}" for number in range(self.topics)]

    def patterns_of(self, subscriber: int) -> list[str]:
        """What subscriber number `subscriber` subscribes to: all topics of its publishers."""
        topics = self.topics_of(subscriber)
        return topics if len(topics) == 1 else [topics[0].rpartition(".")[0] + ".>"]

    def heard_by(self, subscriber: int) -> list[int]:
        """Indexes of the publishers this subscriber hears."""
        return [subscriber] if self.pairs else list(range(self.publishers))

    def expected(self, published: list[int]) -> int:
        """Deliveries over all subscribers if nothing is lost. published: messages by publisher index."""
        return sum(published[heard] for number in range(self.subscribers) for heard in self.heard_by(number))


def on_topic(published: int, topics: int, topic: int) -> int:
    """How many of `published` messages, dealt in turn over `topics` topics, went to topic number `topic`."""
    return published // topics + (topic < published % topics)


class Pace:
    """How many messages are due at a moment. Late messages are caught up in one burst, so the offered rate holds."""

    def __init__(self, rate: float, messages: int, started_ns: int) -> None:
        self._rate, self._messages, self._started_ns = rate / 1e9, messages, started_ns
        self.sent = 0

    def due(self, now_ns: int) -> int:
        """Messages to send now; they count as sent."""
        total = int((now_ns - self._started_ns) * self._rate) + 1
        if self._messages:
            total = min(total, self._messages)
        count = max(0, total - self.sent)
        self.sent += count
        return count

    @property
    def finished(self) -> bool:
        """All messages of a bounded load were due."""
        return bool(self._messages) and self.sent >= self._messages
