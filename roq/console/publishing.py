"""Publishers for requests over HTTP: one for each queue, kept while it is used."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Mapping

from roq.client.cluster import Cluster
from roq.console.errors import TooManyStreams
from roq.errors import CallError, DeadlineExceeded, RoqError
from roq.pubsub.publisher import CONFIRM_SECONDS, Publisher, PublishReceipt
from roq.runtime.observe import logger

PUBLISHERS_MAX = 64  # each has a connection and a replay buffer
IDLE_SECONDS = 30.0
PUBLISH_SECONDS = 2 * CONFIRM_SECONDS  # a queue that blocks may be full: nobody waits for ever
log = logger(__name__)


class _Lent:
    def __init__(self, publisher: Publisher) -> None:
        self.publisher = publisher
        self.users, self.used, self.failed = 0, time.monotonic(), False
        self.opened = asyncio.create_task(publisher.open())

    def never_opened(self) -> bool:
        return self.opened.done() and (self.opened.cancelled() or self.opened.exception() is not None)


class Publishers:
    """Of one console."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._lent: dict[str, _Lent] = {}

    @contextlib.asynccontextmanager
    async def of(self, queue: str) -> AsyncIterator[Publisher]:
        """An open one. An error within that is none of the call ends it: the next request has a new one. Raises TooManyStreams
        and what opening it raises."""
        await self._close_idle()
        lent = self._lent.get(queue)
        if lent is None:
            if len(self._lent) >= PUBLISHERS_MAX:
                raise TooManyStreams(f"{PUBLISHERS_MAX} queues are published to at once: try again in a minute")
            lent = self._lent[queue] = _Lent(self._cluster.publisher(queue))
        lent.users += 1
        try:
            await asyncio.shield(lent.opened)
            yield lent.publisher
        except BaseException as error:
            if lent.never_opened() or (isinstance(error, RoqError) and not isinstance(error, CallError)):
                lent.failed = True
                if self._lent.get(queue) is lent:
                    del self._lent[queue]
            raise
        finally:
            lent.users -= 1
            lent.used = time.monotonic()
            if lent.failed and not lent.users:
                await self._close(lent)

    async def publish(
        self, queue: str, topic: str, payload: bytes, headers: Mapping[str, str | bytes] | None, confirm: str
    ) -> PublishReceipt:
        """One message, and wait until it is confirmed. Raises DeadlineExceeded, also where the way stays full, and what `of`
        and Publisher.publish raise."""
        async with self.of(queue) as publisher:
            try:
                async with asyncio.timeout(PUBLISH_SECONDS):
                    receipt = await publisher.publish(topic, payload, dict(headers or {}) or None, confirm)
            except TimeoutError:
                raise DeadlineExceeded(f"it was not published within {PUBLISH_SECONDS:.0f} s, and may be yet") from None
        assert receipt is not None
        return receipt

    async def _close_idle(self) -> None:
        before = time.monotonic() - IDLE_SECONDS
        idle = [queue for queue, lent in self._lent.items() if not lent.users and lent.used < before]
        for lent in [self._lent.pop(queue) for queue in idle]:  # none is there for anybody else once the first is awaited
            await self._close(lent)

    async def _close(self, lent: _Lent) -> None:
        lent.opened.cancel()
        await asyncio.gather(lent.opened, return_exceptions=True)
        try:
            await lent.publisher.close()
        except RoqError as error:
            log.info("a publisher was closed with an error", extra={"fields": {"reason": str(error)}})

    async def close(self) -> None:
        """All of them."""
        lent, self._lent = list(self._lent.values()), {}
        await asyncio.gather(*(self._close(one) for one in lent))
