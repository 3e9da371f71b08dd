"""Buffer role: takes attempts from writers, within its memory (memory.py). What happens to them: collector.py, one per shuffle.

Above a part of its budget writers are told to retry later, and what is in files is split only as there is room for it. A buffer
that is started again knows nothing: its attempts are lost, and written again by their tasks.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from roq.errors import AttemptConflict, AttemptLost, Overloaded, StorageFull
from roq.runtime.observe import Counters
from roq.shuffle.node.attempt import Attempt
from roq.shuffle.node.collector import AttemptCollector, NodeContext
from roq.shuffle.node.memory import BlockMemory
from roq.shuffle.node.peers import Outbox, Store
from roq.shuffle.node.stored import check_id
from roq.wire import shuffle as wire
from roq.wire.gcm import ReportRuns, TableInfo

SILENT_SECONDS_MAX = 3600.0  # an attempt nobody speaks of for longer is forgotten: its writer is gone
SWEEP_SECONDS = 60.0
WAIT_SECONDS_MAX = 30.0  # of a FinishAttempt


class Buffer:
    """On the running loop. report: to the leader. store(endpoint, request): at a storage follower."""

    def __init__(
        self,
        host: str,
        memory: BlockMemory,
        counters: Counters,
        report: Callable[[ReportRuns], Awaitable[TableInfo]],
        store: Store,
    ) -> None:
        self._memory, self._counters, self._store = memory, counters, store
        self._outboxes: dict[str, Outbox] = {}
        self._context = NodeContext(host, report, self._outbox, memory, counters, {})
        self._collectors: dict[str, AttemptCollector] = {}
        self._task = asyncio.get_running_loop().create_task(self._sweep())

    def _outbox(self, host: str) -> Outbox:
        if host not in self._outboxes:
            self._outboxes[host] = Outbox(host, self._send)
        return self._outboxes[host]

    async def _send(self, host: str, request: wire.StorePieces) -> None:
        endpoint = self._context.endpoints.get(host)
        if endpoint is None:
            raise Overloaded(f"host {host} is not known yet")
        await self._store(endpoint, request)

    @property
    def attempts(self) -> int:
        """Under way here."""
        return sum(len(collector.plan.attempts) for collector in self._collectors.values())

    # --- requests -----------------------------------------------------------------------------------------------------

    def open(self, request: wire.OpenAttempt) -> None:
        """Raises AttemptConflict, Overloaded."""
        collector = self._collectors.get(check_id(request.shuffle))
        place = (request.partition, request.attempt)
        if collector is None or collector.plan.ended:
            collector = AttemptCollector(request.shuffle, request.name, request.spec, self._context)
            self._collectors.pop(request.shuffle, None)
            self._collectors[request.shuffle] = collector
        known = collector.plan.attempts.get(place)
        if place in collector.plan.finished or (known is not None and known.writer != request.writer):
            raise AttemptConflict(f"attempt {request.attempt} of partition {request.partition} was begun before")
        if known is None:
            self._check_room(0)
            collector.plan.attempts[place] = Attempt(request.partition, request.attempt, request.writer, time.monotonic())

    def _check_room(self, size: int) -> None:
        if not self._memory.budget.room_to_hold(size):
            self._counters["refused_blocks"] += 1
            raise Overloaded("this follower's memory is full: retry later")

    def _find(self, shuffle: str, partition: int, attempt: str) -> tuple[AttemptCollector, Attempt]:
        collector = self._collectors.get(shuffle)
        found = collector.plan.attempts.get((partition, attempt)) if collector is not None else None
        if collector is None or found is None:
            raise AttemptLost(f"attempt {attempt} of partition {partition} is not known here: this follower was started again")
        if found.failed is not None:
            raise type(found.failed)(str(found.failed))
        found.touched = time.monotonic()
        return collector, found

    def send(self, request: wire.SendBlocks) -> None:
        """Raises AttemptLost, Overloaded, CallError."""
        collector, attempt = self._find(request.shuffle, request.partition, request.attempt)
        if attempt.is_next(request.number):
            self._check_room(sum(len(one.data) + len(one.first_key) + len(one.last_key) for one in request.blocks))
            collector.took(attempt, request.run, request.blocks)
            attempt.next_number += 1
            self._counters["blocks_taken"] += len(request.blocks)

    def end_run(self, request: wire.EndRun) -> None:
        """Raises AttemptLost, CallError."""
        collector, attempt = self._find(request.shuffle, request.sample.partition, request.sample.attempt)
        if attempt.is_next(request.number):
            collector.run_ended(attempt, request.sample)
            attempt.next_number += 1

    async def finish(self, request: wire.FinishAttempt) -> None:
        """Returns when all of it is stored as often as it shall be. Raises AttemptLost, StorageFull, Overloaded, CallError."""
        receipt = request.receipt
        collector = self._collectors.get(request.shuffle)
        if collector is not None and (receipt.partition, receipt.attempt) in collector.plan.finished:
            return
        collector, attempt = self._find(request.shuffle, receipt.partition, receipt.attempt)
        try:
            async with asyncio.timeout(min(max(request.wait_seconds, 0.0), WAIT_SECONDS_MAX)):
                await collector.finish(attempt, receipt)
        except TimeoutError:
            why = collector.why_not_yet()
            raise why if isinstance(why, StorageFull) else Overloaded(f"not yet: {why}") from None
        if attempt.failed is not None:
            raise type(attempt.failed)(str(attempt.failed))

    def abandon(self, request: wire.AbandonAttempt) -> None:
        """Forget it."""
        collector = self._collectors.get(request.shuffle)
        attempt = collector.plan.attempts.get((request.partition, request.attempt)) if collector is not None else None
        if collector is not None and attempt is not None:
            collector.forget(attempt)

    async def table_changed(self, shuffle: str, table_epoch: int) -> None:
        """Returns when nothing is being sent by an older table."""
        collector = self._collectors.get(shuffle)
        if collector is not None and not collector.plan.ended:
            await collector.pause(table_epoch)

    def forget(self, shuffle: str) -> None:
        """All attempts of it are lost."""
        collector = self._collectors.pop(shuffle, None)
        if collector is not None:
            collector.end(AttemptLost("the shuffle was removed"))

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_SECONDS)
            before = time.monotonic() - SILENT_SECONDS_MAX
            for collector in self._collectors.values():
                for attempt in [one for one in collector.plan.attempts.values() if one.touched < before]:
                    collector.forget(attempt)

    async def close(self) -> None:
        """All attempts are lost."""
        self._task.cancel()
        for collector in self._collectors.values():
            collector.end(AttemptLost("the follower is stopping"))
        await asyncio.gather(self._task, *(outbox.close() for outbox in self._outboxes.values()), return_exceptions=True)
        await self._memory.close()
