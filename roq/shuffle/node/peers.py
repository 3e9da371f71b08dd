"""What another follower is to get from this buffer: parts of many attempts, batched, a few requests at a time. A part that
could not be stored is tried again until somebody else is its holder. Not covered: who that is (fill_plan.py).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Protocol

from roq.errors import AttemptLost, RoqError
from roq.runtime.backoff import delays
from roq.shuffle.node.attempt import Part
from roq.wire.shuffle import BLOCKS_BYTES_MAX, Piece, Spec, StorePieces

REQUESTS_AT_ONCE = 2  # to one follower: one is written while the next one travels
RETRY_SECONDS, RETRY_SECONDS_MAX = 0.02, 0.5
Store = Callable[[str, StorePieces], Awaitable[None]]


class PartSource(Protocol):
    """A shuffle whose parts are sent."""

    id: str
    name: str
    spec: Spec

    def wants(self, part: Part, host: str) -> bool:
        """It still has to go there, and may now."""

    def leaving(self, parts: list[Part]) -> None:
        """They are being sent: what they hold stays where it is until `sent`."""

    async def pieces(self, parts: list[Part], host: str) -> list[Piece]:
        """As they travel. Raises AttemptLost."""

    def sent(self, parts: list[Part], host: str, error: RoqError | None) -> None:
        """They are on the host's stable storage, unless there is an error."""


class Outbox:
    """On the running loop. store(host, request)."""

    def __init__(self, host: str, store: Store) -> None:
        self.host, self._store = host, store
        self._queue: deque[tuple[PartSource, Part]] = deque()
        self._queued: set[Part] = set()
        self._pauses = delays(RETRY_SECONDS, RETRY_SECONDS_MAX)
        self._workers: list[asyncio.Task[None]] = []

    def put(self, source: PartSource, part: Part) -> None:
        """To be sent when its turn comes; twice is once."""
        if part in self._queued:
            return
        self._queued.add(part)
        self._queue.append((source, part))
        if len(self._workers) < REQUESTS_AT_ONCE:
            worker = asyncio.get_running_loop().create_task(self._work(), name=f"to {self.host}")
            self._workers.append(worker)

    def _take(self) -> tuple[PartSource, list[Part]] | None:
        """Parts of one shuffle for one request."""
        taken: list[Part] = []
        source: PartSource | None = None
        size = 0
        while self._queue:
            owner, part = self._queue[0]
            wanted = owner.wants(part, self.host)
            if wanted and taken and (owner is not source or size + part.size > BLOCKS_BYTES_MAX):
                break
            self._queue.popleft()
            self._queued.discard(part)
            if wanted:
                source = owner
                taken.append(part)
                size += part.size
        return (source, taken) if source is not None else None

    async def _work(self) -> None:
        try:
            await self._send_all()
        finally:  # at once: whoever puts something in before this task's callbacks run must not count on it
            self._workers = [task for task in self._workers if task is not asyncio.current_task()]

    async def _send_all(self) -> None:
        while (batch := self._take()) is not None:
            source, parts = batch
            error: RoqError | None = None
            source.leaving(parts)
            try:
                pieces = await source.pieces(parts, self.host)
                await self._store(self.host, StorePieces(source.id, source.name, source.spec, pieces))
                self._pauses = delays(RETRY_SECONDS, RETRY_SECONDS_MAX)
            except RoqError as failure:
                error = failure
            except BaseException:
                source.sent(parts, self.host, AttemptLost("the follower is stopping"))
                raise
            source.sent(parts, self.host, error)
            if error is not None:
                await asyncio.sleep(next(self._pauses))
                for part in parts:
                    if source.wants(part, self.host):
                        self.put(source, part)

    async def close(self) -> None:
        """Send nothing more."""
        workers = self._workers[:]
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
