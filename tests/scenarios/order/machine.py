"""A subscriber's OrderMachine for its scenarios: frames of one publisher, the Exchanges it is attached to, and a clock."""

from __future__ import annotations

from typing import Any

from roq.errors import MessagesLost
from roq.pubsub.order import Deliver, FrameEvent, OrderMachine, Output
from roq.wire.frame import FrameKind, Header, PathOpening

PUBLISHER = 7
HOLD_SECONDS, HOLD_MAX_SECONDS = 5.0, 60.0


class Machine:
    """It wants every topic, and is attached to A and B."""

    def __init__(self) -> None:
        self._attached = {"A", "B"}
        self._order = OrderMachine(self._attached.__contains__, lambda topic: True)
        self._now = 0.0
        self.check = self._order.check

    def open(self, path: int, after: int = 0, left: str = "", fin: str = "yes") -> list[str]:
        """First frame of a path. after: last number before it; left: where the path before ran; fin: whether a FIN ended it."""
        return self._take(FrameKind.OPEN, path, after, PathOpening(left, fin == "yes" and left != ""))

    def fin(self, path: int, after: int) -> list[str]:
        """Last frame of a path."""
        return self._take(FrameKind.FIN, path, after)

    def watermark(self, path: int, after: int, **topics: str) -> list[str]:
        """Last number of each topic and how many were sent on it: `a=5/3`."""
        pairs = {topic: tuple(map(int, pair.split("/"))) for topic, pair in topics.items()}
        return self._take(FrameKind.WATERMARK, path, after, pairs)

    def data(self, topic: str, first: int, last: int = 0, path: int = 1, previous: int = 0, index: int = 0) -> list[str]:
        """Messages first..last; previous: number of the last one before on the topic, the index-th of it."""
        count = (last or first) + 1 - first
        event = FrameEvent(topic.encode(), Header(1, 0, PUBLISHER, path, first, previous, index, count, 0))
        quick = self._order.accept(event.topic, event.header)
        return self._told([Deliver(event)] if quick else self._order.handle(event, self._now))

    def _take(self, kind: FrameKind, path: int, number: int, extra: Any = None) -> list[str]:
        event = FrameEvent(b"", Header(1, kind, PUBLISHER, path, number, 0, 0, 0, 0), None, extra)
        return self._told(self._order.handle(event, self._now))

    def detach(self, exchange: str) -> list[str]:
        """The Exchange is gone, or has retired."""
        self._attached.discard(exchange)
        return self._told(self._order.detached(self._now))

    def later(self, seconds: float) -> list[str]:
        """Time passes in which nothing comes and nothing lies unread."""
        self._now += seconds
        return self._told(self._order.expire(self._now, HOLD_SECONDS, HOLD_MAX_SECONDS, lambda exchange: 0.0))

    def doubt(self, well_at: float) -> list[str]:
        """Messages may have passed this subscriber by since `well_at`."""
        return self._told(self._order.doubt(well_at, self._now))

    def amid(self) -> None:
        """It begins at a position, and reads tapes."""
        self._order.amid = True

    def live(self) -> None:
        """They are read to their end."""
        self._order.live()

    def state(self) -> str:
        """What is held, and for which Exchange."""
        held = self._order.held_frames()
        return f"{held} frames held, for a FIN through {', '.join(sorted(self._order.awaits()))}" if held else "nothing held"

    def _told(self, outputs: list[Output]) -> list[str]:
        return [_lost(one) if isinstance(one, MessagesLost) else _delivered(one) for one in outputs]


def _delivered(one: Deliver) -> str:
    header = one.event.header
    return f"Deliver({one.event.topic.decode()} {header.sequence + one.skip}..{header.sequence + header.count - 1})"


def _lost(one: MessagesLost) -> str:
    return f"MessagesLost({one.topic} {one.first}..{one.last}, count={one.count})"
