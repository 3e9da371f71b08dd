"""Administration under faults: queues made and removed all the time, what came of each request, and what must hold then.

C5 A request repeated with its transaction id has the same answer and changes nothing; one whose outcome is unknown (every error
   counts as that) can be repeated when all is healed, and has then taken effect once.
C6 What was acknowledged is so: queues that were made are there and serve, those that were removed are not.
"""

from __future__ import annotations

import asyncio

import msgspec

from roq.coordination.locate import GcmClient
from roq.errors import QueueNotFound, RoqError
from roq.wire import gcm
from roq.wire.assignment import QueueRecord

PREFIX = "administered-"
ASK_SECONDS = 8.0  # under faults
SURE_SECONDS = 30.0  # when everything is healed
KEPT = 2  # queues at a time, and those whose making is unknown


class RequestCounts(msgspec.Struct):
    """Requests that were acknowledged, and those of unknown outcome."""

    acked: int = 0
    unknown: int = 0


class _Queue(msgspec.Struct):
    """record: of the acknowledged creation, None while that is unknown. removal: "", "asked" or "acked"."""

    name: str
    record: QueueRecord | None = None
    removal: str = ""


class Administration:
    """`await administration.run(every)` until it is cancelled; then `check()`, and `clear()`."""

    def __init__(self, zookeeper: str) -> None:
        self._client = GcmClient(zookeeper)
        self._queues: list[_Queue] = []
        self.counts = RequestCounts()
        self.violations: list[str] = []

    def close(self) -> None:
        """Close the connection."""
        self._client.close()

    async def run(self, every_seconds: float) -> None:
        """Make a queue and an Exchange of it, each asked for twice, and remove the oldest one."""
        while True:
            await asyncio.sleep(every_seconds)
            queue = _Queue(f"{PREFIX}{len(self._queues)}")
            self._queues.append(queue)
            try:
                await self._make(queue, ASK_SECONDS)
                await self._make(queue, ASK_SECONDS)
                made = [await self._exchange(queue) for _ in range(2)]
                if made[0] != made[1]:
                    self.violations.append(f"C5: one transaction made two Exchanges of {queue.name}: {made}")
                for old in [one for one in self._queues if one.record is not None and not one.removal][:-KEPT]:
                    await self._remove(old, ASK_SECONDS)
            except RoqError:
                self.counts.unknown += 1

    async def _make(self, queue: _Queue, seconds: float) -> None:
        request = gcm.CreateQueue(queue.name, f"made-{queue.name}")
        record = (await self._client.request(request, gcm.QueueInfo, seconds)).record
        self.counts.acked += 1
        if record.transaction != request.transaction or (queue.record and record.created != queue.record.created):
            self.violations.append(f"C5: making {queue.name} again made another one: {queue.record}, then {record}")
        queue.record = record

    async def _exchange(self, queue: _Queue) -> str:
        request = gcm.CreateExchange(queue.name, f"more-{queue.name}")
        made = await self._client.request(request, gcm.ExchangeCreated, ASK_SECONDS)
        self.counts.acked += 1
        return made.exchange

    async def _remove(self, queue: _Queue, seconds: float) -> None:
        queue.removal = "asked"
        await self._client.request(gcm.RemoveQueue(queue.name, f"removed-{queue.name}"), gcm.Done, seconds)
        self.counts.acked += 1
        queue.removal = "acked"

    # --- when all is healed ---------------------------------------------------------------------------------------------

    async def check(self) -> list[str]:
        """All violations; what is unknown is made known by asking again. Raises RoqError if the cluster does not answer."""
        there = await self._there()
        for queue in self._queues:
            if queue.removal == "acked" and queue.name in there:
                self.violations.append(f"C6: {queue.name} was removed and is there")
            elif queue.removal == "asked":
                await self._gone(queue)
            elif not queue.removal:
                if queue.record is not None and queue.name not in there:
                    self.violations.append(f"C6: {queue.name} was made and is gone")
                await self._make(queue, SURE_SECONDS)
        wanted = {queue.name for queue in self._queues if not queue.removal}
        if (there := await self._there()) != wanted:
            self.violations.append(f"C5: there are queues {sorted(there)}, should be {sorted(wanted)}")
        return self.violations

    async def clear(self) -> None:
        """Remove what is left. Raises RoqError."""
        for queue in self._queues:
            if not queue.removal:
                await self._gone(queue)

    async def _gone(self, queue: _Queue) -> None:
        try:
            await self._remove(queue, SURE_SECONDS)
        except QueueNotFound:  # removed at the first request, too long ago for the same answer
            queue.removal = "acked"

    async def _there(self) -> set[str]:
        answer = await self._client.request(gcm.ListQueues(), gcm.Queues, SURE_SECONDS)
        return {info.record.name for info in answer.queues if info.record.name.startswith(PREFIX)}
