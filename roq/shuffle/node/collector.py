"""Buffer role, one shuffle: does what its plan (fill_plan.py) decides. A turn of `_work`: tell the leader what came and is
stored, take its table, split what is unsplit, hand parts to the outboxes. Not covered: memory (memory.py).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import NamedTuple

from roq.errors import AttemptLost, CallError, DataLost, RoqError, ShuffleNotFound, StorageFull
from roq.runtime.observe import Counters, logger
from roq.shuffle.node.attempt import Attempt, BufferedBlock, Part, sample_bytes
from roq.shuffle.node.fill_plan import AttemptEnded, FillPlan, FreeMemory, SendPart
from roq.shuffle.node.memory import BlockMemory
from roq.shuffle.node.peers import Outbox
from roq.shuffle.node.splitter import splitter
from roq.wire.gcm import ReportRuns, TableInfo
from roq.wire.shuffle import Block, Piece, Position, Receipt, RunSample, Spec

log = logger(__name__)
BLOCKS_A_TURN = 64  # split before others get a turn


class NodeContext(NamedTuple):
    """What all shuffles of a buffer share. report: to the leader. outbox: of a host. endpoints: of followers by host, as last
    reported."""

    host: str
    report: Callable[[ReportRuns], Awaitable[TableInfo]]
    outbox: Callable[[str], Outbox]
    memory: BlockMemory
    counters: Counters
    endpoints: dict[str, str]


class AttemptCollector:
    """On the running loop, until `end`. A PartSource."""

    def __init__(self, id: str, name: str, spec: Spec, context: NodeContext) -> None:
        self.id, self.name, self.spec, self._context, self._memory = id, name, spec, context, context.memory
        self.plan = FillPlan(id, name, spec, context.host, context.counters)
        self._done: dict[Attempt, asyncio.Event] = {}  # somebody waits for it
        self._sending = 0
        self._quiet = asyncio.Event()  # nothing is being sent
        self._quiet.set()
        self._borrowed: dict[tuple[Part, str], int] = {}  # by what is being sent
        self._wake = asyncio.Event()  # something may have changed
        self._loop = asyncio.get_running_loop()
        self._task = self._loop.create_task(self._work(), name=f"shuffle {name}")
        self._task.add_done_callback(self._stopped)

    def _perform(self) -> None:
        for each in self.plan.taken():
            match each:
                case SendPart(part, host):
                    self._context.outbox(host).put(self, part)
                case FreeMemory(blocks, size):
                    for block in blocks:
                        self._memory.dropped(block)
                    self._memory.budget.held -= size
                case AttemptEnded(attempt):
                    if attempt in self._done:
                        self._done.pop(attempt).set()

    # --- what comes ---------------------------------------------------------------------------------------------------

    def took(self, attempt: Attempt, run: int, blocks: list[Block]) -> None:
        """Blocks came. Raises CallError."""
        for block in attempt.took(run, blocks):
            self._memory.took(attempt, block)
        self._wake.set()

    def run_ended(self, attempt: Attempt, sample: RunSample) -> None:
        """A run is complete. Raises CallError."""
        self.plan.run_ended(attempt, sample)
        self._memory.budget.held += sample_bytes(sample)
        self._wake.set()

    async def finish(self, attempt: Attempt, receipt: Receipt) -> None:
        """Nothing more comes; returns when it is done or failed. Raises CallError."""
        if attempt.receipt is None:
            attempt.finish(receipt)
            self._wake.set()
        if not attempt.done:
            await self._done.setdefault(attempt, asyncio.Event()).wait()

    def why_not_yet(self) -> str | StorageFull:
        """Why an attempt isn't done."""
        return self.plan.why_not_yet(time.monotonic())

    def drop(self, attempt: Attempt, error: RoqError) -> None:
        """It fails."""
        self.plan.drop(attempt, error)
        self._perform()

    def forget(self, attempt: Attempt) -> None:
        """As if it had never begun."""
        self.plan.forget(attempt)
        self._perform()

    def end(self, error: RoqError) -> None:
        """The shuffle takes nothing more; all attempts fail."""
        self.plan.end(error)
        self._perform()
        self._task.cancel()

    async def pause(self, table_epoch: int) -> None:
        """Send nothing until a table of this epoch is reported; returns when nothing is being sent."""
        if self.plan.pause(table_epoch):
            self._wake.set()
            try:
                await self._quiet.wait()
            finally:
                self.plan.quiet(time.monotonic())

    # --- a turn -------------------------------------------------------------------------------------------------------

    def _stopped(self, task: asyncio.Task[None]) -> None:
        """Of a defect: better a shuffle that fails here than one that never gets done."""
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("attempt collector failed", exc_info=error, extra={"fields": {"shuffle": self.name}})
            self.end(AttemptLost(f"{type(error).__name__}: {error}"))

    async def _work(self) -> None:
        plan, was_paused = self.plan, False
        while True:
            await self._wake.wait()
            self._wake.clear()
            pause = plan.report_in(time.monotonic())
            if pause is not None and pause <= 0:
                await self._report()
            paused = plan.paused(time.monotonic())
            if was_paused and not paused:
                plan.resume()
                self._perform()
            was_paused = paused
            if plan.epoch and not paused:
                await self._split_all()
            pause = plan.report_in(time.monotonic())
            if pause is not None:
                self._loop.call_later(max(pause, 0.001), self._wake.set)

    async def _report(self) -> None:
        report = self.plan.report(self._memory.pressed, time.monotonic())
        self._perform()
        try:
            info = await self._context.report(report.request)
        except RoqError as error:
            if isinstance(error, CallError) and not isinstance(error, ShuffleNotFound):
                log.warning("the leader refused a report", extra={"fields": {"shuffle": self.name, "reason": str(error)}})
            self.plan.refused(error, time.monotonic())
        else:
            self._context.endpoints.update(info.followers)
            self.plan.answered(report, info, time.monotonic())
        self._perform()
        if self.plan.ended:
            self._task.cancel()

    async def _split_all(self) -> None:
        self.plan.short = False
        for attempt in list(self.plan.attempts.values()):
            try:
                await self._split(attempt)
            except (AttemptLost, DataLost) as error:
                self.drop(attempt, AttemptLost(str(error)))
            except CallError as error:  # its rows are not what they should be: written again they would be the same
                self.drop(attempt, error)
            except Exception as error:  # whatever is wrong with one attempt, the others go on
                log.exception("attempt could not be split", extra={"fields": {"shuffle": self.name, "attempt": attempt.place}})
                self.drop(attempt, AttemptLost(f"{type(error).__name__}: {error}"))

    async def _split(self, attempt: Attempt) -> None:
        """Put what is unsplit into parts; what there is no room for stays. Raises AttemptLost, DataLost, CallError, and what
        else a block can break."""
        making: dict[int, list[BufferedBlock]] = {}
        left: list[BufferedBlock] = []
        count = 0
        try:
            while attempt.unsplit:
                block = attempt.unsplit.popleft()
                number, borders = self.plan.span(attempt, block)
                if not borders:
                    self.plan.collect(attempt, making, number, block)
                elif block.data is None and not self._memory.room_to_split(block.size):
                    self.plan.short = True
                    left.append(block)
                    self.plan.collected(attempt, making)  # it may be in memory, and is to leave
                else:
                    for at, one in await self._divided(attempt, block, borders):
                        self.plan.collect(attempt, making, number + at, one)
                self._perform()
                count += 1
                if count % BLOCKS_A_TURN == 0:
                    await asyncio.sleep(0)
        finally:
            attempt.unsplit.extendleft(reversed(left))
            self.plan.collected(attempt, making)
            if attempt.failed is not None:
                self.plan.drop(attempt)
            self._perform()

    async def _divided(
        self, attempt: Attempt, block: BufferedBlock, borders: list[Position]
    ) -> list[tuple[int, BufferedBlock]]:
        """(number of borders before it, block): what it is split into. A block that is in its file comes out of it."""
        place = (attempt.place[0], block.run)
        block.busy += 1
        try:
            divided = await self._memory.thread(lambda: splitter().divide(self.spec, block.block(), place, borders))
        finally:
            block.busy -= 1
            self._memory.dropped(block)
        self._context.counters["blocks_cut"] += 1
        found = [(at, BufferedBlock(block.run, one)) for at, one in divided]
        for _, one in found:
            self._memory.took(attempt, one)
        return found

    # --- being sent (peers.PartSource) --------------------------------------------------------------------------------

    def wants(self, part: Part, host: str) -> bool:
        """See PartSource."""
        return self.plan.wants(part, host, time.monotonic())

    def leaving(self, parts: list[Part]) -> None:
        """See PartSource."""
        self._sending += 1
        self._quiet.clear()
        for part in parts:
            for block in part.blocks:
                block.busy += 1

    async def pieces(self, parts: list[Part], host: str) -> list[Piece]:
        """See PartSource."""
        blocks = [block for part in parts for block in part.blocks]
        spilled = sum(block.size for block in blocks if block.data is None)
        size = sum(block.size for block in blocks) + spilled  # the message, and what is read for it
        await self._memory.budget.borrow(size)
        self._borrowed[parts[0], host] = self._borrowed.get((parts[0], host), 0) + size
        if not spilled:
            return [part.piece() for part in parts]
        return await self._memory.thread(lambda: [part.piece() for part in parts])

    def sent(self, parts: list[Part], host: str, error: RoqError | None) -> None:
        """See PartSource."""
        self._sending -= 1
        self._memory.budget.give_back(self._borrowed.pop((parts[0], host), 0))
        if not self._sending:
            self._quiet.set()
        for part in parts:
            for block in part.blocks:
                block.busy -= 1
        self.plan.sent(parts, host, error, time.monotonic())
        self._perform()
        self._wake.set()
