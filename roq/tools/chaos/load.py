"""Publish/subscribe under faults: publishers and subscribers at a fixed rate in this process, with histories of their own
(history.py).

One topic per publisher, so that a reported gap names exactly the messages it means. What a client does that it should not (an
error out of publish() or of the iteration) is kept in `failures`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from roq.client.cluster import Cluster
from roq.errors import MessagesLost, RoqError
from roq.pubsub.subscriber import Subscriber
from roq.tools.bench.load import Pace
from roq.tools.chaos.edn import EdnHistory, OperationType
from roq.tools.chaos.history import STAMP, GapReported, Sent, SubscriberHistory
from roq.tools.chaos.loads import ClientsLoad

TICK_SECONDS = 0.005  # a publisher looks this often what is due
FLUSH_EVERY_SECONDS = 0.5
FLUSH_SECONDS = 10.0  # a flush that takes longer has failed; what it covered is unknown until the next one succeeds
WATCH_SECONDS = 0.1
POLL_SECONDS = 0.5  # arrivals of so long are one operation in a history
IDLE_SECONDS = 12.0  # with nothing more coming, what is missing is lost; longer than a held path plus a watermark's period


class PubSubLoad(ClientsLoad):
    """See loads.ChaosLoad. One queue, which is there."""

    def __init__(
        self, client: Cluster, history: EdnHistory, queue: str, *, publishers: int, subscribers: int, rate: float, size: int
    ) -> None:
        super().__init__("publisher")
        self._queue, self._history = queue, history
        self._complete = False  # the drain came to its end: what is missing then will not come
        self.heard = [SubscriberHistory(publishers) for _ in range(subscribers)]
        self.started = 0.0  # monotonic seconds
        self._rate, self._size = rate, max(size, STAMP.size)
        self._publishers = [client.publisher(queue) for _ in range(publishers)]
        self._subscribers: list[Subscriber] = [
            client.subscriber(queue, "chaos.>", on_lost=self._teller(heard)) for heard in self.heard
        ]
        self._indexes = {publisher.id: index for index, publisher in enumerate(self._publishers)}
        self._published = [0] * publishers
        self._acked = [0] * publishers

    async def __aenter__(self) -> PubSubLoad:
        try:
            for subscriber in self._subscribers:
                await self._open.enter_async_context(subscriber)
            for at, publisher in enumerate(self._publishers):
                await publisher.open()
                self._open.push_async_callback(self._close, at)
        except BaseException:
            await self._open.aclose()
            raise
        self.started = time.monotonic()
        self._following = [asyncio.create_task(self._receive(at)) for at in range(len(self._subscribers))]
        self._following += [asyncio.create_task(self._flush_often(at)) for at in range(len(self._publishers))]
        if self._history.written:
            self._following += [asyncio.create_task(self._write_often(at)) for at in range(len(self._subscribers))]
        self._producing = [asyncio.create_task(self._publish(at)) for at in range(len(self._publishers))]
        return self

    def sent(self) -> list[Sent]:
        """What each publisher has done so far."""
        return [Sent(*pair) for pair in zip(self._published, self._acked, strict=True)]

    def unhealthy(self) -> list[str]:
        """Clients that are not ready now."""
        found = super().unhealthy()
        for at, subscriber in enumerate(self._subscribers):
            health = subscriber.health()
            if not health.ready:
                found.append(f"subscriber {at}: {', '.join(health.problems)}")
        return found

    # --- the flow -------------------------------------------------------------------------------------------------------

    async def _publish(self, at: int) -> None:
        publisher, padding, topic = self._publishers[at], bytes(self._size - STAMP.size), f"chaos.p{at}"
        pace = Pace(self._rate, 0, time.monotonic_ns())
        try:
            while not self._ending.is_set():
                for _ in range(pace.due(time.monotonic_ns())):
                    self._published[at] += 1
                    await publisher.publish(topic, STAMP.pack(at, self._published[at]) + padding)
                    if self._ending.is_set():
                        return
                await asyncio.sleep(TICK_SECONDS)
        except RoqError as error:
            self._failed(f"publisher {at}", error)

    async def _flush_often(self, at: int) -> None:
        while True:
            await asyncio.sleep(FLUSH_EVERY_SECONDS)
            await self._flush(at, FLUSH_SECONDS)

    async def _flush(self, at: int, timeout_seconds: float) -> bool:
        """Whether everything published so far is acknowledged now."""
        covered, client = self._published[at], f"{self._queue} publisher {at}"
        self._history.invoke(client, "flush", [self._queue, at, covered], time.monotonic())
        try:
            await self._publishers[at].flush(timeout_seconds)
        except RoqError:
            self._history.complete(client, OperationType.INFO, time.monotonic())
            return False
        self._history.complete(client, OperationType.OK, time.monotonic())
        self._acked[at] = max(self._acked[at], covered)
        return True

    async def _receive(self, at: int) -> None:
        heard = self.heard[at]
        try:
            async for batch in self._subscribers[at].batches():
                seconds = time.monotonic() - self.started
                heard.take(((message.sequence, message.payload) for message in batch), self._size, seconds)
        except RoqError as error:
            self._failed(f"subscriber {at}", error)
        else:
            self.failures.append(f"subscriber {at} ended by itself")

    async def _write_often(self, at: int) -> None:
        """What came, into the history."""
        client = f"{self._queue} subscriber {at}"
        while True:
            self._history.invoke(client, "poll", None, time.monotonic())
            try:
                await asyncio.sleep(POLL_SECONDS)
            finally:
                value = [self._queue, self.heard[at].news()]
                self._history.complete(client, OperationType.OK, time.monotonic(), value)

    def _teller(self, heard: SubscriberHistory) -> Callable[[MessagesLost], None]:
        def tell(gap: MessagesLost) -> None:
            at = round(time.monotonic() - self.started, 3)
            heard.reported.append(GapReported(self._indexes.get(gap.publisher, -1), gap.first, gap.last, gap.count, at))

        return tell

    # --- the end --------------------------------------------------------------------------------------------------------

    async def stop(self, timeout_seconds: float) -> None:
        """See loads.ChaosLoad."""
        self._ending.set()
        _, late = await asyncio.wait(self._producing, timeout=timeout_seconds)
        for task in late:
            task.cancel()
        if late:
            self.failures.append(f"{len(late)} publishers are stuck in publish()")
        confirmed = await asyncio.gather(*(self._flush(at, timeout_seconds) for at in range(len(self._publishers))))
        self.failures += [f"publisher {at}: the last flush() failed" for at, good in enumerate(confirmed) if not good]

    async def drain(self, timeout_seconds: float) -> None:
        """Until every subscriber has got everything, or had it reported as lost, or nothing more has come for IDLE_SECONDS."""
        published = sum(self._published)
        until = time.monotonic() + timeout_seconds
        seen, since = -1, time.monotonic()
        while time.monotonic() < until:
            progress = [heard.progress() for heard in self.heard]
            if sum(progress) != seen:
                seen, since = sum(progress), time.monotonic()
            self._complete = all(one >= published for one in progress) or time.monotonic() - since > IDLE_SECONDS
            if self._complete:
                return
            await asyncio.sleep(WATCH_SECONDS)

    def undecided(self) -> list[str]:
        """What could not be found out in the time there was."""
        return [] if self._complete else [f"subscribers of {self._queue} still got messages when the time was over"]
