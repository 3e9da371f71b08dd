"""A gate for threads of a test."""

from __future__ import annotations

import threading

GATE_SECONDS = 90.0


class Gate:
    """Threads stop here until it is opened. came: how many have come."""

    def __init__(self) -> None:
        self.came = 0
        self._lock, self._opened = threading.Lock(), threading.Event()

    def stop(self) -> bool:
        """Whether it was closed. Raises TimeoutError."""
        closed = not self._opened.is_set()
        with self._lock:
            self.came += 1
        if not self._opened.wait(GATE_SECONDS):
            raise TimeoutError("nobody opened the gate")
        return closed

    def open(self) -> None:
        """For good."""
        self._opened.set()
