"""How far a log is known to go, and threads that sleep until it goes further."""

from __future__ import annotations

import time
from threading import Condition


class Arrivals:
    """Any thread. end: the highest position that is known."""

    def __init__(self) -> None:
        self.end = 0
        self._changed = Condition()
        self._closed = False

    def rise(self, position: int) -> None:
        """There are entries up to this position."""
        with self._changed:
            if position > self.end:
                self.end = position
                self._changed.notify_all()

    def wait(self, after: int, seconds: float) -> bool:
        """Sleep until there is something behind `after`, for so long at most; whether there is. False early: it was closed."""
        deadline = time.monotonic() + seconds
        with self._changed:
            while self.end <= after and not self._closed and (left := deadline - time.monotonic()) > 0:
                self._changed.wait(left)
            return self.end > after

    def pause(self, seconds: float) -> None:
        """Sleep so long, or until it was closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed, seconds)

    def close(self) -> None:
        """Wake everybody, for good."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
