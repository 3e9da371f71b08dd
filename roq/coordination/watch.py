"""A level-triggered watch: tells the newest value, not every change.

ZooKeeper's watches fire once and are lost with the connection, so each is only a hint to read again. A Watch reads at the
start, when its hint fires, after every reconnection, and every so often in any case.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

from roq.coordination.errors import CoordinationError
from roq.coordination.link import Watcher
from roq.errors import ZooKeeperUnavailable
from roq.runtime.observe import logger

log = logger(__name__)

T = TypeVar("T")


class Watch(Generic[T]):
    """One watched node. Made by Session.watch_data and Session.watch_children."""

    def __init__(
        self,
        path: str,
        read: Callable[[Watcher], Awaitable[T]],
        callback: Callable[[T], None],
        reread_seconds: float,
        closed: Callable[[Watch[T]], object],
    ) -> None:
        self.path = path
        self._read = read
        self._callback = callback
        self._reread_seconds = reread_seconds
        self._closed = closed
        self._loop = asyncio.get_running_loop()
        self._stale = asyncio.Event()
        self._task = self._loop.create_task(self._run(), name=f"watch {path}")

    def reread(self) -> None:
        """Read again now (the session does so after a reconnection)."""
        self._stale.set()

    def close(self) -> None:
        """No more callbacks, from now on."""
        self._task.cancel()
        self._closed(self)

    def _fired(self, event: object) -> None:
        try:
            self._loop.call_soon_threadsafe(self._stale.set)
        except RuntimeError:
            return  # the loop is closed: nobody listens any more

    async def _run(self) -> None:
        while True:
            self._stale.clear()
            try:
                value = await self._read(self._fired)
            except ZooKeeperUnavailable:
                pass  # the session wakes us after the reconnection
            except CoordinationError as error:
                log.warning("watched node is unreadable", extra={"fields": {"path": self.path, "reason": str(error)}})
            else:
                self._tell(value)
            try:  # spread, so that a thousand watches don't read in the same instant
                async with asyncio.timeout(self._reread_seconds * random.uniform(0.75, 1.25)):
                    await self._stale.wait()
            except TimeoutError:
                continue

    def _tell(self, value: T) -> None:
        try:
            self._callback(value)
        except Exception:  # the watcher's fault must neither end the watch nor pass unseen
            log.exception("a watch callback failed", extra={"fields": {"path": self.path}})
