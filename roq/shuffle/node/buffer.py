"""Buffer role: takes attempts from writers, within its memory. What happens to them is in filling.py, one per shuffle.

Above a part of its budget the newest blocks go to their attempts' temporary files; above another one writers are told to come
again later, and what is in files is cut only as there is room for it. A buffer that is started again knows nothing: its
attempts are lost, and written again by their tasks.
"""

from __future__ import annotations

import asyncio
import errno
import os
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from roq.errors import AttemptConflict, AttemptLost, Overloaded, StorageFull
from roq.runtime.files import DISK
from roq.runtime.observe import Counters, logger
from roq.shuffle.node.attempt import Attempt, Held, Spill
from roq.shuffle.node.committer import FREE_BYTES_MIN
from roq.shuffle.node.cutter import Cutter
from roq.shuffle.node.filling import Filling
from roq.shuffle.node.memory import Budget
from roq.shuffle.node.peers import Outbox, Store
from roq.shuffle.node.stored import check_id
from roq.shuffle.node.surroundings import NodeContext
from roq.wire import shuffle as wire
from roq.wire.gcm import ReportRuns, TableInfo

log = logger(__name__)
T = TypeVar("T")
CUT_THREADS = 2
SPILL_BYTES = 8 * 1024 * 1024  # written at once
SPILL_RETRY_SECONDS = 1.0  # on a full disk
SILENT_SECONDS_MAX = 3600.0  # an attempt nobody speaks of for longer is forgotten: its writer is gone
SWEEP_SECONDS = 60.0
WAIT_SECONDS_MAX = 30.0  # of a FinishAttempt


class Buffer:
    """On the running loop. report: to the leader. store(endpoint, request): at a storage follower.
    free_bytes_min: of the disk, below which no temporary file grows."""

    def __init__(
        self,
        host: str,
        directory: Path,
        cutter: Cutter,
        budget: Budget,
        counters: Counters,
        report: Callable[[ReportRuns], Awaitable[TableInfo]],
        store: Store,
        free_bytes_min: int = FREE_BYTES_MIN,
    ) -> None:
        self._directory, self._budget, self._counters = directory, budget, counters
        self._free_bytes_min = free_bytes_min
        self._threads = ThreadPoolExecutor(CUT_THREADS, "shuffle-cut")
        self._loop = asyncio.get_running_loop()
        self._store, self._endpoints = store, dict[str, str]()
        self._outboxes: dict[str, Outbox] = {}
        self._resident: OrderedDict[Held, Attempt] = OrderedDict()
        self._around = NodeContext(host, report, self._outbox, self, budget, cutter, self._thread, counters, self._endpoints)
        self._fillings: dict[str, Filling] = {}
        self._spill_due = asyncio.Event()
        self._tasks = [self._loop.create_task(work) for work in (self._spill(), self._sweep())]

    async def _thread(self, function: Callable[[], T]) -> T:
        return await self._loop.run_in_executor(self._threads, function)

    def _outbox(self, host: str) -> Outbox:
        if host not in self._outboxes:
            self._outboxes[host] = Outbox(host, self._send)
        return self._outboxes[host]

    async def _send(self, host: str, request: wire.StorePieces) -> None:
        endpoint = self._endpoints.get(host)
        if endpoint is None:
            raise Overloaded(f"host {host} is not known yet")
        await self._store(endpoint, request)

    @property
    def attempts(self) -> int:
        """Under way here."""
        return sum(len(filling.attempts) for filling in self._fillings.values())

    # --- requests -----------------------------------------------------------------------------------------------------

    def open(self, request: wire.OpenAttempt) -> None:
        """Raises AttemptConflict, Overloaded."""
        filling = self._fillings.get(check_id(request.shuffle))
        place = (request.partition, request.attempt)
        if filling is not None and filling.ended:
            del self._fillings[request.shuffle]
            filling = None
        if filling is None:
            filling = Filling(request.shuffle, request.name, request.spec, self._around)
            self._fillings[request.shuffle] = filling
        known = filling.attempts.get(place)
        if place in filling.finished or (known is not None and known.writer != request.writer):
            raise AttemptConflict(f"attempt {request.attempt} of partition {request.partition} was begun before")
        if known is None:
            self._check_room(0)
            filling.attempts[place] = Attempt(request.partition, request.attempt, request.writer, time.monotonic())

    def _check_room(self, size: int) -> None:
        if not self._budget.room_to_hold(size):
            self._counters["refused_blocks"] += 1
            raise Overloaded("this follower's memory is full: come again")

    def _find(self, shuffle: str, partition: int, attempt: str) -> tuple[Filling, Attempt]:
        filling = self._fillings.get(shuffle)
        found = filling.attempts.get((partition, attempt)) if filling is not None else None
        if filling is None or found is None:
            raise AttemptLost(f"attempt {attempt} of partition {partition} is not known here: this follower was started again")
        if found.failed is not None:
            raise type(found.failed)(str(found.failed))
        found.touched = time.monotonic()
        return filling, found

    def send(self, request: wire.SendBlocks) -> None:
        """Raises AttemptLost, Overloaded, CallError."""
        filling, attempt = self._find(request.shuffle, request.partition, request.attempt)
        if request.number < attempt.next_number:
            return
        if request.number > attempt.next_number:
            raise AttemptLost(f"message {attempt.next_number} of attempt {request.attempt} never came")
        self._check_room(sum(len(one.data) + len(one.first_key) + len(one.last_key) for one in request.blocks))
        filling.took(attempt, request.run, request.blocks)
        attempt.next_number += 1
        self._counters["blocks_taken"] += len(request.blocks)

    def end_run(self, request: wire.EndRun) -> None:
        """Raises AttemptLost, CallError."""
        filling, attempt = self._find(request.shuffle, request.sample.partition, request.sample.attempt)
        if request.number < attempt.next_number:
            return
        if request.number > attempt.next_number:
            raise AttemptLost(f"message {attempt.next_number} of attempt {request.sample.attempt} never came")
        filling.run_ended(attempt, request.sample)
        attempt.next_number += 1

    async def finish(self, request: wire.FinishAttempt) -> None:
        """Returns when all of it is stored as often as it shall be. Raises AttemptLost, StorageFull, Overloaded, CallError."""
        receipt = request.receipt
        filling = self._fillings.get(request.shuffle)
        if filling is not None and (receipt.partition, receipt.attempt) in filling.finished:
            return
        filling, attempt = self._find(request.shuffle, receipt.partition, receipt.attempt)
        if attempt.receipt is None:
            attempt.finish(receipt)
            filling.wake()
        try:
            async with asyncio.timeout(min(max(request.wait_seconds, 0.0), WAIT_SECONDS_MAX)):
                await attempt.done.wait()
        except TimeoutError:
            why = filling.why_not_yet()
            raise why if isinstance(why, StorageFull) else Overloaded(f"not yet: {why}") from None
        if attempt.failed is not None:
            raise type(attempt.failed)(str(attempt.failed))

    def abandon(self, request: wire.AbandonAttempt) -> None:
        """Forget it."""
        filling = self._fillings.get(request.shuffle)
        attempt = filling.attempts.get((request.partition, request.attempt)) if filling is not None else None
        if filling is not None and attempt is not None:
            filling.forget(attempt)

    async def table_changed(self, shuffle: str, table_epoch: int) -> None:
        """Returns when nothing is being sent by an older table."""
        filling = self._fillings.get(shuffle)
        if filling is not None and not filling.ended:
            await filling.pause(table_epoch)

    def forget(self, shuffle: str) -> None:
        """All attempts of it are lost."""
        filling = self._fillings.pop(shuffle, None)
        if filling is not None:
            filling.end(AttemptLost("the shuffle was removed"))

    # --- memory (filling.Room) ----------------------------------------------------------------------------------------

    @property
    def pressed(self) -> bool:
        """See Room."""
        return self._budget.spill > 0

    def room_to_cut(self, size: int) -> bool:
        """See Room. One block always fits: keys, which stay, may take all the room there is."""
        return not self._resident or self._budget.room_to_cut(size)

    def took(self, attempt: Attempt, held: Held) -> None:
        """See Room."""
        self._resident[held] = attempt
        self._count(held, held.memory)
        if self._budget.spill:
            self._spill_due.set()

    def dropped(self, held: Held) -> None:
        """See Room."""
        self._resident.pop(held, None)
        self._count(held, 0)

    def _count(self, held: Held, size: int) -> None:
        self._budget.held += size - held.counted
        held.counted = size

    async def _spill(self) -> None:
        while True:
            await self._spill_due.wait()
            self._spill_due.clear()
            while (wanted := self._budget.spill) > 0:
                batch = self._choose(min(wanted, SPILL_BYTES))
                if not batch:
                    break
                try:
                    await self._write(batch)
                except OSError as error:
                    self._counters["spills_failed"] += 1
                    log.warning("temporary file could not be written", extra={"fields": {"reason": str(error)}})
                    await asyncio.sleep(SPILL_RETRY_SECONDS)

    def _choose(self, size: int) -> list[tuple[Held, Attempt]]:
        """The newest blocks nobody works on: the oldest are the next to be sent."""
        chosen: list[tuple[Held, Attempt]] = []
        for held in reversed(self._resident):
            if not held.busy:
                chosen.append((held, self._resident[held]))
                size -= held.size
                if size <= 0:
                    break
        return chosen

    async def _write(self, batch: list[tuple[Held, Attempt]]) -> None:
        for held, _ in batch:
            held.busy += 1
        try:
            places = await self._thread(lambda: [self._write_one(held, attempt) for held, attempt in batch])
        finally:
            for held, _ in batch:
                held.busy -= 1
        for (held, _), (spill, place) in zip(batch, places, strict=True):
            self._counters["bytes_spilled"] += held.size
            if held in self._resident:
                held.spill, held.offset, held.data = spill, place, None
                del self._resident[held]
                self._count(held, held.memory)

    def _write_one(self, held: Held, attempt: Attempt) -> tuple[Spill, int]:
        """In a thread. Raises OSError, also when the space left is that of the logs of work queues."""
        spill = attempt.spill
        if spill is None:
            spill = attempt.spill = Spill(self._directory)
        if DISK.free(self._directory) < held.size + self._free_bytes_min:  # it stays in memory, and writers wait
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return spill, spill.write([held.data or b""])[0]

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_SECONDS)
            before = time.monotonic() - SILENT_SECONDS_MAX
            for filling in self._fillings.values():
                for attempt in [one for one in filling.attempts.values() if one.touched < before]:
                    filling.forget(attempt)

    async def close(self) -> None:
        """All attempts are lost."""
        for task in self._tasks:
            task.cancel()
        for filling in self._fillings.values():
            filling.end(AttemptLost("the follower is stopping"))
        await asyncio.gather(*self._tasks, *(outbox.close() for outbox in self._outboxes.values()), return_exceptions=True)
        self._threads.shutdown(wait=False)
