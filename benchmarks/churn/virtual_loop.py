"""An asyncio loop whose clock jumps to the next thing to do: hours pass in seconds, always the same way."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class _Instant(selectors.SelectSelector):
    """Waits for nothing: what would be waited is added to the clock."""

    seconds = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        found = super().select(0)
        if not found and timeout:
            self.seconds += timeout
        elif not found and timeout is None:
            raise RuntimeError("everything waits for something that never comes")
        return found


class VirtualLoop(asyncio.SelectorEventLoop):
    """Starts at second 0."""

    def __init__(self) -> None:
        self._instant = _Instant()
        super().__init__(self._instant)

    def time(self) -> float:
        """Virtual seconds."""
        return self._instant.seconds


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run it in virtual time."""
    loop = VirtualLoop()
    try:
        return loop.run_until_complete(work)
    finally:
        loop.close()
