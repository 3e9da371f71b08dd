"""Readers that wait for news of a segment."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class WaitingReaders:
    """On the running loop. Nobody is left behind whose time is over or who is gone."""

    def __init__(self) -> None:
        self.readers: dict[str, list[asyncio.Future[None]]] = {}

    def wake(self, segment: str) -> None:
        """There is news of it."""
        for future in self.readers.pop(segment, ()):
            if not future.done():
                future.set_result(None)

    def wake_all(self) -> None:
        """There may be news of every segment."""
        for segment in list(self.readers):
            self.wake(segment)

    async def wait(self, segment: str, enough: Callable[[], bool], seconds: float) -> None:
        """Until it is enough, or the time is over."""
        try:
            async with asyncio.timeout(seconds):
                while not enough():
                    await self._news(segment)
        except TimeoutError:
            return

    async def _news(self, segment: str) -> None:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.readers.setdefault(segment, []).append(future)
        try:
            await future
        finally:
            others = self.readers.get(segment, [])
            if future in others:  # nobody woke it
                others.remove(future)
                if not others:
                    del self.readers[segment]
