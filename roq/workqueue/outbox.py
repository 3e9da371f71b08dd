"""Messages of committed transactions on their way to recorded queues. Pure; part of the fold.

    CommitTransaction ──► 1, 2, 3, … of their queue ──► forwarder ──► on its tapes ── OutboxForwarded ──► gone from here

Each queue's messages are numbered densely, in the order of the log. The forwarder (roq/groups/outbox.py) publishes them in this
order as a named producer, whose numbers are as dense: between a number here and the same message's there lies `sent - stored`,
kept with the queue's tapes. So whoever forwards next sees from the producer's last number what is on them, written down here or
not. A queue created anew has other tapes, and the difference is another one.

Not covered: limits (the master's, before it writes one); who may publish (the master's, too).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from itertools import islice

import msgspec

from roq.workqueue.records import OutboxForwarded, Outgoing

Message = tuple[str, bytes]  # topic, payload behind its headers
MESSAGE_COST = 64  # bytes of memory beyond those, at least


class DestinationImage(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """A destination as a snapshot has it."""

    queue: str
    tapes: str
    sent: int
    stored: int
    waiting: list[Message]


class Destination:
    """A recorded queue. sent: number of the last message that was dealt with; waiting: those behind it. tapes, stored: see
    OutboxForwarded; "": it was never forwarded to, or is forgotten. bytes: of memory, of those that wait."""

    __slots__ = ("bytes", "sent", "stored", "tapes", "waiting")

    def __init__(self, tapes: str = "", sent: int = 0, stored: int = 0, waiting: Iterable[Message] = ()) -> None:
        self.tapes, self.sent, self.stored = tapes, sent, stored
        self.waiting = deque(waiting)
        self.bytes = sum(map(_held_bytes, self.waiting))

    @property
    def last(self) -> int:
        """Number of the newest message."""
        return self.sent + len(self.waiting)

    def attached(self, tapes: str, stored: int, durable: int) -> tuple[int, bool]:
        """A producer was opened that has stored `stored` messages on these tapes: the number up to which all is dealt with, and
        whether that follows from what is known. If not, it has to be durable before anything more is published. durable: number
        of the last message that is."""
        number = self.sent - self.stored + stored
        if self.tapes == tapes and self.sent <= number <= durable:
            return number, True
        return self.sent, False

    def lacks(self, tapes: str, stored: int) -> bool:
        """Whether these tapes show less than was on them, so that what comes next would have a number that was used."""
        return self.tapes == tapes and 0 < stored < self.stored

    def first(self, count: int) -> list[Message]:
        """The first `count` of those that wait."""
        return list(islice(self.waiting, count))


def message_bytes(message: Message) -> int:
    """Of topic and payload, as they are sent and logged."""
    return len(message[0].encode()) + len(message[1])


def _held_bytes(message: Message) -> int:
    return MESSAGE_COST + message_bytes(message)


class TransactionOutbox:
    """All destinations by queue. bytes: of memory, of all messages that wait."""

    def __init__(self) -> None:
        self.destinations: dict[str, Destination] = {}
        self.bytes = 0  # of all that waits, at all destinations

    def __bool__(self) -> bool:
        """Whether there is anything that must not be forgotten."""
        return bool(self.destinations)

    @property
    def count(self) -> int:
        """Messages that wait."""
        return sum(len(one.waiting) for one in self.destinations.values())

    def add(self, outgoing: Iterable[Outgoing]) -> None:
        """Of one transaction."""
        for part in outgoing:
            one = self.destinations.get(part.queue)
            if one is None:
                one = self.destinations[part.queue] = Destination()
            size = sum(map(_held_bytes, part.messages))
            one.waiting.extend(part.messages)
            one.bytes += size
            self.bytes += size

    def forwarded(self, record: OutboxForwarded) -> bool:
        """Forget what was dealt with. False: the record is of no destination, or of numbers that it does not have."""
        one = self.destinations.get(record.queue)
        if one is None or not one.sent <= record.number <= one.last:
            return False
        for _ in range(record.number - one.sent):
            size = _held_bytes(one.waiting.popleft())
            one.bytes -= size
            self.bytes -= size
        one.tapes, one.sent, one.stored = record.tapes, record.number, record.stored
        if not record.tapes and not one.waiting:
            del self.destinations[record.queue]
        return True

    def images(self) -> list[DestinationImage]:
        """For a snapshot, in the one order there is."""
        return [
            DestinationImage(queue, one.tapes, one.sent, one.stored, list(one.waiting))
            for queue, one in sorted(self.destinations.items())
        ]

    def load(self, images: Iterable[DestinationImage]) -> None:
        """What `images` gave, into an empty one."""
        for image in images:
            one = Destination(image.tapes, image.sent, image.stored, image.waiting)
            self.destinations[image.queue] = one
            self.bytes += one.bytes

    def check(self) -> None:
        """The invariants, for tests."""
        for one in self.destinations.values():
            assert one.bytes == sum(map(_held_bytes, one.waiting)), "bytes of a destination are miscounted"
            assert one.tapes or not one.stored, "a producer has numbers on no tapes"
        assert self.bytes == sum(one.bytes for one in self.destinations.values()), "bytes are miscounted"
