"""What a ScalingProcess keeps of its queue in the cluster's history: every KPI record it saw, every decision and outcome.

It never holds up the scaling: `note_…` puts something down and returns, and what can't be published waits, a few at most, the
oldest goes first. A decision counts as kept once it is stored; it may be there twice, as (time, cause) and outcome tell. While
there is nothing to write, the process is no member of those queues.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from contextlib import suppress

import msgspec

from roq.coordination.locate import GcmClient
from roq.errors import InvalidTopic, PayloadTooLarge, RoqError
from roq.ids import is_reserved, topic_bytes
from roq.pubsub.publisher import STORED, Publisher
from roq.runtime.backoff import delays
from roq.runtime.observe import Counters, logger
from roq.wire.kpi import HISTORY_DECISIONS, HISTORY_KPIS, Decision, QueueDecision, QueueKpi

log = logger(__name__)
KPIS_WAITING = 10  # seconds of them: longer than an Exchange takes to come back
DECISIONS_WAITING = 256  # a few hours of a restless queue
IDLE_SECONDS = 10.0  # without anything to write: then it leaves
CLOSE_SECONDS = 1.0
RETRY_FIRST_SECONDS, RETRY_MAX_SECONDS = 0.5, 15.0
encode = msgspec.json.Encoder().encode


class HistoryBatcher:
    """To one of the two queues. waiting: at most so many records. confirm: "stored", or None: what is sent counts as kept."""

    def __init__(
        self, target: str, topic: str, connect: Callable[[], GcmClient], counters: Counters, waiting: int, confirm: str | None
    ) -> None:
        self._target, self._topic, self._connect, self._counters = target, topic, connect, counters
        self._waiting: deque[msgspec.Struct] = deque(maxlen=waiting)
        self._arrived = asyncio.Event()
        self._confirm = confirm

    def put(self, record: msgspec.Struct) -> None:
        """Write it when that is possible, unless newer ones come first."""
        if len(self._waiting) == self._waiting.maxlen:
            self._counters["history_dropped"] += 1
        self._waiting.append(record)
        self._arrived.set()

    def stop(self) -> None:
        """Write nothing more, and leave."""
        self._waiting.clear()
        self._arrived.set()

    async def run(self) -> None:
        """Write for ever."""
        waits = delays(RETRY_FIRST_SECONDS, RETRY_MAX_SECONDS)
        while True:
            while not self._waiting:
                await self._arrives()
            try:
                await self._write()
                waits = delays(RETRY_FIRST_SECONDS, RETRY_MAX_SECONDS)
                continue
            except RoqError as error:
                fields = {"queue": self._target, "error": type(error).__name__, "reason": str(error)}
                log.warning("history can't be written just now; retrying", extra={"fields": fields})
            except Exception:  # a defect here must not end the scaling
                log.exception("defect in writing the history; retrying", extra={"fields": {"queue": self._target}})
            await asyncio.sleep(next(waits))

    async def _write(self) -> None:
        """Join, write what comes, and leave once nothing does."""
        client = self._connect()
        try:
            publisher = Publisher(client, self._target)
            try:
                await publisher.open()
                while await self._more():
                    if self._confirm is None and not _takes(publisher):  # it would keep what should wait, and go, here
                        await self._arrives()  # a second later
                        continue
                    record = self._waiting[0]
                    await self._send(publisher, record)
                    if self._waiting and self._waiting[0] is record:
                        self._waiting.popleft()
            finally:
                with suppress(RoqError):
                    await publisher.close(CLOSE_SECONDS)
        finally:
            client.close()

    async def _more(self) -> bool:
        if not self._waiting:
            with suppress(TimeoutError):
                async with asyncio.timeout(IDLE_SECONDS):
                    await self._arrives()
        return bool(self._waiting)

    async def _arrives(self) -> None:
        self._arrived.clear()
        await self._arrived.wait()

    async def _send(self, publisher: Publisher, record: msgspec.Struct) -> None:
        try:
            await publisher.publish(self._topic, encode(record), confirm=self._confirm)
        except PayloadTooLarge as error:
            self._counters["history_dropped"] += 1
            log.warning("a record of the history is too large and left out", extra={"fields": {"reason": str(error)}})


def _takes(publisher: Publisher) -> bool:
    """Whether it sends at once what it is given."""
    health = publisher.health()
    return health.ready and not health.backlog_bytes


class HistoryWriter:
    """Of one queue; off until it is switched on. `run` it beside the scaling."""

    def __init__(self, queue: str, connect: Callable[[], GcmClient], counters: Counters) -> None:
        self._queue, self._on = queue, False
        self._kpis = HistoryBatcher(HISTORY_KPIS, queue, connect, counters, KPIS_WAITING, None)
        self._decisions = HistoryBatcher(HISTORY_DECISIONS, queue, connect, counters, DECISIONS_WAITING, STORED)

    def switch(self, on: bool) -> None:
        """Keep what comes from now on, or nothing more. The history itself has none."""
        wanted, self._on = on and not is_reserved(self._queue), False
        if not wanted:
            self._kpis.stop()
            self._decisions.stop()
            return
        try:
            topic_bytes(self._queue)
        except InvalidTopic as error:  # a name of more than 63 characters may have more than 255 bytes
            log.warning("this queue has no history: its name is no topic", extra={"fields": {"reason": str(error)}})
            return
        self._on = True

    def note_kpi(self, record: QueueKpi) -> None:
        """One record."""
        if self._on:
            self._kpis.put(record)

    def note_decision(self, decision: Decision) -> None:
        """A decision as it is begun, or with its outcome."""
        if self._on:
            self._decisions.put(QueueDecision(**msgspec.structs.asdict(decision), queue=self._queue))

    async def run(self) -> None:
        """For ever."""
        await asyncio.gather(self._kpis.run(), self._decisions.run())
