"""A publisher and a subscriber that never rest: whether messages flow, and what became of each."""

from __future__ import annotations

import asyncio
import contextlib
import time
from types import TracebackType

import roq
from roq.errors import MessagesLost, RoqError, TemporaryError

TOPIC = "traffic"
EVERY_SECONDS = 0.005
FLOWING_SECONDS = 30.0


class Traffic:
    """`async with Traffic(client, queue) as traffic`: 200 numbered messages a second until left. longest: seconds between two
    that followed each other, since `calm`."""

    def __init__(self, client: roq.Cluster, queue: str) -> None:
        self.published = 0
        self.received: list[int] = []
        self.lost: list[MessagesLost] = []
        self.calm()
        self._subscriber = client.subscriber(queue, on_lost=self.lost.append)
        self._publisher = client.publisher(queue)
        self._arrived = asyncio.Event()
        self._stop = asyncio.Event()
        self._publishing: asyncio.Task[None] | None = None
        self._receiving: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Traffic:
        await self._subscriber.open()
        await self._publisher.open()
        self._publishing = asyncio.create_task(self._publish())
        self._receiving = asyncio.create_task(self._receive())
        await self.flowing()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._stop.set()
        try:
            if self._publishing is not None:
                await self._publishing
        finally:
            with contextlib.suppress(RoqError):
                await self._publisher.close()
            await self._subscriber.close()
            if self._receiving is not None:
                self._receiving.cancel()
                await asyncio.gather(self._receiving, return_exceptions=True)

    async def flowing(self, timeout_seconds: float = FLOWING_SECONDS) -> float:
        """Until a message published after now has arrived; seconds that took."""
        begun, mark = time.monotonic(), self.published
        async with asyncio.timeout(timeout_seconds):
            while not self.received or self.received[-1] <= mark:
                for task in (self._publishing, self._receiving):
                    if task is not None and task.done():
                        task.result()
                self._arrived.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(1.0):
                        await self._arrived.wait()
        return time.monotonic() - begun

    def calm(self) -> None:
        """Forget how long pauses were until now."""
        self.longest, self._came = 0.0, time.monotonic()

    def check_order(self) -> None:
        """Nothing twice, nothing out of order, every gap told."""
        assert self.received == sorted(set(self.received)), "repeated or reordered"
        seen = len(self.received) + sum(lost.count for lost in self.lost)
        assert self.received[-1] - self.received[0] + 1 <= seen + self.received[0], "a gap was not told"

    async def _publish(self) -> None:
        while not self._stop.is_set():
            try:
                await self._publisher.publish(TOPIC, str(self.published + 1).encode())
                self.published += 1
            except TemporaryError:
                pass
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(EVERY_SECONDS):
                    await self._stop.wait()

    async def _receive(self) -> None:
        async for message in self._subscriber:
            self.received.append(int(message.payload))
            now = time.monotonic()
            self.longest, self._came = max(self.longest, now - self._came), now
            self._arrived.set()
