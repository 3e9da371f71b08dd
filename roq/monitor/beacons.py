"""Repeating publishers' beacons: a subscriber that was full, or away, may have missed the one that reveals its last gap.

A beacon names the last numbers of a publisher's topics; one that comes again tells nothing new to whoever has them, so it
can be repeated freely, also for a publisher that has left. Pure: no IO, no clock.
"""

from __future__ import annotations

from collections import OrderedDict

REPEATS = 6  # after 1, 2, 4 … seconds: a subscriber full for half a minute hears the last one
BEACONS_KEPT = 1_000  # the oldest are forgotten first
BEACON_BYTES_MAX = 64 * 1024  # a larger one is not repeated


class Beacons:
    """The beacons still to be repeated, by Exchange and publisher."""

    def __init__(self) -> None:
        self._kept: OrderedDict[tuple[str, int, bytes], tuple[float, int]] = OrderedDict()

    def saw(self, exchange: str, publisher: int, frame: bytes, now: float) -> None:
        """A beacon came out of an Exchange: repeat it there, unless it is our own repetition."""
        key = (exchange, publisher, frame)
        if key in self._kept or len(frame) > BEACON_BYTES_MAX:
            return
        self._kept[key] = (now + 1.0, 1)
        if len(self._kept) > BEACONS_KEPT:
            self._kept.popitem(last=False)

    def due(self, now: float) -> list[tuple[str, bytes]]:
        """(Exchange, frame) to be sent now."""
        out: list[tuple[str, bytes]] = []
        for key, (when, times) in list(self._kept.items()):
            if when <= now and times > REPEATS:
                del self._kept[key]
            elif when <= now:
                out.append((key[0], key[2]))
                self._kept[key] = (now + 2.0**times, times + 1)  # known still when the last repetition comes out
        return out
