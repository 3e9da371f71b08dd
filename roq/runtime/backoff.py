"""Waiting times between tries: exponential, capped, with full jitter."""

from __future__ import annotations

import random
from collections.abc import Iterator


def delays(first_seconds: float = 0.05, max_seconds: float = 2.0, random_unit: random.Random | None = None) -> Iterator[float]:
    """An endless series of seconds to wait: between half and all of first, 2*first, 4*first … max."""
    source = random_unit or random.Random()
    step = first_seconds
    while True:
        yield step * (0.5 + 0.5 * source.random())
        step = min(step * 2, max_seconds)
