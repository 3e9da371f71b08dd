"""The latest message of each topic, of all that is read before a subscriber comes into the present."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import count, repeat
from typing import TypeVar, cast

from roq.errors import MessagesLost
from roq.pubsub.subscription import Batch, Message
from roq.wire import frame as frames
from roq.wire.where import Where

T = TypeVar("T")


def messages_of(batch: Batch) -> list[Message]:
    """As the application gets them."""
    topic, header, payloads, _ = batch
    numbers, name, publisher, timestamp = count(header.sequence), topic.decode(), header.publisher, header.timestamp
    if header.version == frames.VERSION:
        plain = cast(Sequence[bytes], payloads)
        return list(map(Message, repeat(name), plain, repeat(publisher), numbers, repeat(timestamp)))
    return [  # one in a hundred has headers: that makes the others hardly slower
        Message(name, item, publisher, number, timestamp)
        if isinstance(item, bytes)
        else Message(name, item[0], publisher, number, timestamp, item[1])
        for item, number in zip(payloads, numbers, strict=False)
    ]


class LatestByTopic:
    """where: what a message must meet to count."""

    def __init__(self, where: Where | None) -> None:
        self._where = where
        self._kept: dict[bytes, Batch] = {}  # in the order in which they came

    def take(self, buffer: deque[Batch | MessagesLost | T], before: int) -> int:
        """The batches out of what came behind the first `before` items; how many bytes they had."""
        size = 0
        for item in [buffer.pop() for _ in range(len(buffer) - before)][::-1]:
            if isinstance(item, Batch):
                size += item.size
                if (latest := self._latest(item)) is not None:
                    self._kept.pop(item.topic, None)
                    self._kept[item.topic] = latest
            else:
                buffer.append(item)
        return size

    def _latest(self, batch: Batch) -> Batch | None:
        topic, header, payloads, size = batch
        at = len(payloads) - 1
        if self._where is not None:
            met = self._where.select(messages_of(batch))
            if not met:
                return None
            at = met[-1].sequence - header.sequence
        header = header._replace(sequence=header.sequence + at, count=1)
        return Batch(topic, header, payloads[at : at + 1], size // len(payloads))

    def give(self) -> list[Batch]:
        """What was kept, each with one message."""
        kept, self._kept = list(self._kept.values()), {}
        return kept
