"""How many bytes of rows a follower holds in memory, and when it has to say no. One loop.

    coming     10 %   of unfinished messages (runtime/read_budget.py)
    held       60 %   blocks of attempts, keys and samples; above SPILL of it blocks go to temporary files, down to SPILLED
    pending    10 %   pieces that come to be stored and are not on the disk yet
    borrowed   10 %   blocks on their way to other followers or from them, as read and as sent
    reading    10 %   blocks for readers, until the network has taken them

One request of a kind always fits. Above PAUSE of `held` nothing new is taken until it is below RESUME; the rest is for blocks
that come back out of files to be split.
"""

from __future__ import annotations

import asyncio
import errno
import os
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from roq.runtime.files import DISK
from roq.runtime.observe import Counters, logger
from roq.shuffle.node.attempt import Attempt, BufferedBlock, Spill

log = logger(__name__)
T = TypeVar("T")
PAUSE, RESUME = 0.85, 0.70
SPILL, SPILLED = 0.50, 0.40
SHARE = 0.10
THREADS = 2  # that split blocks
SPILL_BYTES = 8 * 1024 * 1024  # written at once
SPILL_RETRY_SECONDS = 1.0  # on a full disk


class Budget:
    """Bytes in memory. size: what they shall not be above. unsent(): bytes of answers that the network has not taken."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.held_max = int((1 - 4 * SHARE) * size)
        self.coming_max = int(SHARE * size)
        self.held = self.pending = self.borrowed = self.reading = 0
        self.unsent: Callable[[], int] = lambda: 0
        self._paused = False
        self._given_back = asyncio.Event()

    @property
    def used(self) -> int:
        """All of it."""
        return self.held + self.pending + self.borrowed + self.reading

    @property
    def paused(self) -> bool:
        """Nothing new can be taken."""
        self._paused = self.held > (RESUME if self._paused else PAUSE) * self.held_max
        return self._paused

    @property
    def spill(self) -> int:
        """Bytes that should go to a file now."""
        return int(self.held - SPILLED * self.held_max) if self.held > SPILL * self.held_max else 0

    def room_to_hold(self, size: int) -> bool:
        """Whether so much of attempts may be taken."""
        return not self.paused and self.held + size <= self.held_max

    def room_to_split(self, size: int) -> bool:
        """Whether so much may come out of a file."""
        return self.held + size <= self.held_max

    def room_to_store(self, size: int) -> bool:
        """Whether storage may take so much more."""
        return not self.pending or self.pending + size <= SHARE * self.size

    def room_to_read(self, size: int) -> bool:
        """Whether so much more may be read for readers."""
        there = self.reading + self.unsent()
        return not there or there + size <= SHARE * self.size

    async def borrow(self, size: int) -> None:
        """Wait until so much may be on its way between followers."""
        while self.borrowed and self.borrowed + size > SHARE * self.size:
            self._given_back.clear()
            await self._given_back.wait()
        self.borrowed += size

    def give_back(self, size: int) -> None:
        """It is not in memory any more."""
        self.borrowed -= size
        self._given_back.set()


class BlockMemory:
    """Blocks of attempts in memory, and those in temporary files: above a part of the budget the newest ones go there. On the
    running loop. free_bytes_min: of the disk, below which no temporary file grows."""

    def __init__(self, directory: Path, budget: Budget, counters: Counters, free_bytes_min: int) -> None:
        self.budget = budget
        self._directory, self._counters, self._free_bytes_min = directory, counters, free_bytes_min
        self._threads = ThreadPoolExecutor(THREADS, "shuffle-cut")
        self._loop = asyncio.get_running_loop()
        self._resident: OrderedDict[BufferedBlock, Attempt] = OrderedDict()
        self._spill_due = asyncio.Event()
        self._task = self._loop.create_task(self._spill())

    async def thread(self, function: Callable[[], T]) -> T:
        """Blocking work on blocks."""
        return await self._loop.run_in_executor(self._threads, function)

    @property
    def pressed(self) -> bool:
        """It can't go on without sending."""
        return self.budget.spill > 0

    def room_to_split(self, size: int) -> bool:
        """So much may come out of a file. One block always fits: keys, which stay, may take all the room there is."""
        return not self._resident or self.budget.room_to_split(size)

    def took(self, attempt: Attempt, block: BufferedBlock) -> None:
        """A block is in memory."""
        self._resident[block] = attempt
        self._count(block, block.memory)
        if self.budget.spill:
            self._spill_due.set()

    def dropped(self, block: BufferedBlock) -> None:
        """It is not needed any more."""
        self._resident.pop(block, None)
        self._count(block, 0)

    def _count(self, block: BufferedBlock, size: int) -> None:
        self.budget.held += size - block.counted
        block.counted = size

    async def _spill(self) -> None:
        while True:
            await self._spill_due.wait()
            self._spill_due.clear()
            while (wanted := self.budget.spill) > 0:
                batch = self._choose(min(wanted, SPILL_BYTES))
                if not batch:
                    break
                try:
                    await self._write(batch)
                except OSError as error:
                    self._counters["spills_failed"] += 1
                    log.warning("temporary file could not be written", extra={"fields": {"reason": str(error)}})
                    await asyncio.sleep(SPILL_RETRY_SECONDS)

    def _choose(self, size: int) -> list[tuple[BufferedBlock, Attempt]]:
        """The newest blocks nobody works on: the oldest are the next to be sent."""
        chosen: list[tuple[BufferedBlock, Attempt]] = []
        for block in reversed(self._resident):
            if not block.busy:
                chosen.append((block, self._resident[block]))
                size -= block.size
                if size <= 0:
                    break
        return chosen

    async def _write(self, batch: list[tuple[BufferedBlock, Attempt]]) -> None:
        for block, _ in batch:
            block.busy += 1
        try:
            places = await self.thread(lambda: [self._write_one(block, attempt) for block, attempt in batch])
        finally:
            for block, _ in batch:
                block.busy -= 1
        for (block, _), (spill, place) in zip(batch, places, strict=True):
            self._counters["bytes_spilled"] += block.size
            if block in self._resident:
                block.spill, block.offset, block.data = spill, place, None
                del self._resident[block]
                self._count(block, block.memory)

    def _write_one(self, block: BufferedBlock, attempt: Attempt) -> tuple[Spill, int]:
        """In a thread. Raises OSError, also when the space left is that of the logs of work queues."""
        spill = attempt.spill
        if spill is None:
            spill = attempt.spill = Spill(self._directory)
        if DISK.free(self._directory) < block.size + self._free_bytes_min:  # it stays in memory, and writers wait
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return spill, spill.write(block.data or b"")

    async def close(self) -> None:
        """Nothing is written any more."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._threads.shutdown(wait=False)
