"""How soon a value with three copies is lost, by the arithmetic of Blizzard's section 3.2. Closed forms, pure.

Its text says two different things: all three must fail "within the same 20 second time period", and a node is taken for dead
after three missed heartbeats of three seconds, "approximately 10 seconds". Both readings are here, and a third without the
grid of periods: a value is lost when its third copy fails within the window after the other two.
"""

from __future__ import annotations

import math
from typing import NamedTuple

COPIES = 3


class Reading(NamedTuple):
    """window: seconds in which all copies must fail; period: seconds from one chance to the next, 0 for a rolling window."""

    name: str
    window: float
    period: float


LITERAL = Reading("text: within 20 s, every 20 s", 20.0, 20.0)
HEARTBEATS = Reading("heartbeats: within 10 s, every 10 s", 10.0, 10.0)
ROLLING = Reading("within any 10 s", 10.0, 0.0)
READINGS = (LITERAL, HEARTBEATS, ROLLING)


def lost_within(reading: Reading, failure: float, seconds: float) -> float:
    """Probability that a value is lost within `seconds`; failure: probability per second and node."""
    if reading.period:
        in_window = 1 - math.pow(1 - failure, reading.window)
        return 1 - math.pow(1 - math.pow(in_window, COPIES), seconds / reading.period)
    rate = COPIES * failure * math.pow(1 - math.exp(-failure * reading.window), COPIES - 1)
    return 1 - math.exp(-rate * seconds)
