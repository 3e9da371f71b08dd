"""Repeating publishers' watermarks: a subscriber may have missed the one that reveals its last gap. Pure: no IO, no clock.

A watermark names the last numbers of a publisher's topics; a repeated one says nothing new to whoever has them, so it can be
repeated through the same life of its Exchange freely, also for a publisher that has left. It never overtakes there what it
speaks of. If that life is over, what it had not handed out yet is lost: a publisher that lives sends it again, and watermarks
behind it, so its old ones are forgotten; for one that is gone (it closed, or died with the Exchange) its last watermark is all
that reports the loss, and is repeated through the Exchanges that live.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection
from typing import NamedTuple

from roq.wire.frame import Header

REPEATS = 6  # after 1, 2, 4 … seconds: a subscriber full for half a minute hears the last one
WATERMARKS_KEPT = 1_000  # the oldest are forgotten first
RESTING_SECONDS = 60.0  # without its Exchange: far longer than a dead publisher is taken for a living one
WATERMARK_BYTES_MAX = 64 * 1024  # a larger one is not repeated


class _KeptWatermark(NamedTuple):
    """A watermark, when to repeat it next, and how often that was done."""

    exchange: str  # token of the life it came out of
    order: tuple[int, int]  # path and last number: which of two watermarks of one publisher is the newer
    frame: bytes
    due: float
    times: int = 1
    elsewhere: bool = False  # its Exchange is gone, and so is its publisher


class Watermarks:
    """The newest watermark of each publisher and set of topics."""

    def __init__(self) -> None:
        self._kept: OrderedDict[tuple[int, frozenset[str]], _KeptWatermark] = OrderedDict()

    def saw(self, exchange: str, header: Header, topics: Collection[str], frame: bytes, now: float) -> None:
        """A watermark came out of an Exchange (its token): repeat it there, unless it is our own repetition or an old one."""
        key, order = (header.publisher, frozenset(topics)), (header.path, header.sequence)
        known = self._kept.get(key)
        if len(frame) > WATERMARK_BYTES_MAX or (known is not None and order <= known.order):
            return
        self._kept[key] = _KeptWatermark(exchange, order, frame, now + 1.0)
        self._kept.move_to_end(key)
        if len(self._kept) > WATERMARKS_KEPT:
            self._kept.popitem(last=False)

    def due(
        self, now: float, known: Collection[str], carrying: Collection[str], publishes: Callable[[int], bool]
    ) -> list[tuple[str, bytes]]:
        """(token of the Exchange, frame) to be sent now. known, carrying: tokens of the Exchanges that live, and of those that
        messages go through; publishes: whether a publisher is still there."""
        out: list[tuple[str, bytes]] = []
        for key, kept in list(self._kept.items()):
            if kept.exchange not in known and not kept.elsewhere:
                if publishes(key[0]) or not carrying:
                    if now - kept.due > RESTING_SECONDS:
                        del self._kept[key]
                    continue
                kept = kept._replace(due=now, times=1, elsewhere=True)
            if kept.due <= now and kept.times > REPEATS:
                del self._kept[key]
            elif kept.due <= now:
                out += [(token, kept.frame) for token in (carrying if kept.elsewhere else (kept.exchange,))]
                # known still when the last repetition comes out
                self._kept[key] = kept._replace(due=now + 2.0**kept.times, times=kept.times + 1)
        return out
