"""Long work on the follower's loop, in steps: others get a turn in between, and a page of it ends in time."""

from __future__ import annotations

import asyncio
import time

PAGE_SECONDS = 2.0  # of one page; a few are answered at a time, and each has many times as long
TURN_SECONDS = 0.005


class Turn:
    """How long a page is being worked on."""

    def __init__(self) -> None:
        now = time.monotonic()
        self._end, self._pause = now + PAGE_SECONDS, now + TURN_SECONDS

    @property
    def over(self) -> bool:
        """The page has taken long enough."""
        return time.monotonic() >= self._end

    async def pause(self) -> None:
        """Let others work if it is time to."""
        if time.monotonic() >= self._pause:
            await asyncio.sleep(0)
            self._pause = time.monotonic() + TURN_SECONDS
