"""Watermarks that wait until what they speak of may have come again. Pure: no IO, no clock.

The Monitor repeats a publisher's watermark through the Exchange that it came out of, where it never overtakes what it tells of.
That does not hold where a connection was made anew: what was on the way when it broke is gone, and comes once more if the
publisher's broke, too, when that is back. So a watermark that comes there counts REPLAY_SECONDS after the connection, and after
all that has come was read: the replay may lie unread. However often a connection breaks, it counts after DEFER_SECONDS.

Where an Exchange is left, it counts as long after that; at once if the Exchange has retired, as nothing comes any more. It is
not forgotten: its publisher need not say it again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

from roq.pubsub.order import HELD_FRAME_BYTES, TOPIC_BYTES, FrameEvent
from roq.wire.monitor import ExchangeAddress

REPLAY_SECONDS = 6.0  # an Exchange holds publishers for 4 s until all subscribers are back
DEFER_SECONDS = 30.0  # the Monitor repeats for 63 s, and a publisher's end is remembered for 150 s
UNREAD_SECONDS = 600.0  # and however long some of what has come lies unread
DEFER_BYTES_MAX = 8 * 1024 * 1024  # beyond, watermarks count at once

Key = tuple[str, int, frozenset[str]]  # Exchange's token, publisher, topics: a later one says more


class _Deferred(NamedTuple):
    """exchange: its id. came: when the first one of its key did."""

    exchange: str
    watermark: FrameEvent
    came: float


class DeferredWatermarks:
    """Of one subscriber. `now` is monotonic."""

    def __init__(self) -> None:
        self._anew: dict[str, float] = {}  # by token: when its connection was made anew, or it was left
        self._waiting: dict[Key, _Deferred] = {}
        self._bytes = 0

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def anew(self, token: str, now: float) -> None:
        """The connection to this Exchange was made anew."""
        self._anew[token] = now

    def left(self, token: str, now: float) -> None:
        """It is gone, or nobody says any more that it is there."""
        self._restart(token, now)

    def retired(self, token: str) -> None:
        """Nothing comes through it any more."""
        self._restart(token, -math.inf)

    def _restart(self, token: str, at: float) -> None:
        self._anew.pop(token, None)
        if any(key[0] == token for key in self._waiting):
            self._anew[token] = at

    def defers(self, exchange: ExchangeAddress, watermark: FrameEvent, now: float) -> bool:
        """It waits for `ripe`. Not if an Exchange says in it what it has dropped: nobody replays that."""
        if now >= self._anew.get(exchange.token, -math.inf) + REPLAY_SECONDS or watermark.header.previous:
            return False
        key = exchange.token, watermark.header.publisher, frozenset(watermark.extra)
        known = self._waiting.get(key)
        if known is None and self._bytes >= DEFER_BYTES_MAX:
            return False
        if known is not None and _order(watermark) < _order(known.watermark):
            return True  # one that overtook it says more
        self._bytes += _size(watermark) - (_size(known.watermark) if known is not None else 0)
        self._waiting[key] = _Deferred(exchange.id, watermark, known.came if known is not None else now)
        return True

    def ripe(self, now: float, unread_at: Callable[[str], float]) -> Iterator[FrameEvent]:
        """Those that count by now. unread_at: see OrderMachine.expire."""
        for key, (exchange, watermark, came) in list(self._waiting.items()):
            anew = min(self._anew.get(key[0], -math.inf) + REPLAY_SECONDS, came + DEFER_SECONDS)
            if now >= max(anew, min(unread_at(exchange) + REPLAY_SECONDS, came + UNREAD_SECONDS)):
                del self._waiting[key]
                self._bytes -= _size(watermark)
                yield watermark
        self._anew = {token: at for token, at in self._anew.items() if now < at + REPLAY_SECONDS}


def _order(watermark: FrameEvent) -> tuple[int, int]:
    """Which of two watermarks of one publisher is the newer."""
    return watermark.header.path, watermark.header.sequence


def _size(watermark: FrameEvent) -> int:
    """Bytes that it takes, about."""
    return watermark.size + HELD_FRAME_BYTES + TOPIC_BYTES * len(watermark.extra)
