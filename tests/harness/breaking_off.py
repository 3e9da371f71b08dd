"""A call broken off at a chosen point, as by a signal handler that raises (Ctrl-C, an alarm).

Python runs handlers where a function begins, after each call of a C function, and where a loop jumps back; the first two are
the points here.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType


class Stop(Exception):
    """What the handler raises."""


def broken_off(call: Callable[[], object], point: int) -> bool:
    """Whether `call` came to this point (from 0), and was broken off there."""
    left = point

    def count(frame: FrameType, event: str, _: object) -> None:
        nonlocal left
        if event in {"call", "c_return"}:
            left -= 1
            if left < 0:
                raise Stop

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        call()
    except Stop:
        return True
    finally:
        sys.setprofile(before)
    return left < 0  # in what hides its exceptions, as a generator's end does
