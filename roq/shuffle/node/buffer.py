"""Buffer role: takes attempts from writers, within its memory (memory.py), and does with them what a plan per shuffle decides
(fill_plan.py). Above a part of its budget writers are told to retry later, and what is in files is split only as there is room
for it. A buffer that is started again knows nothing: its attempts are lost, and written again by their tasks.

A turn of a collector: tell the leader what came and is stored, take its table, split what is unsplit, hand out parts.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import NamedTuple

from roq.errors import AttemptConflict, AttemptLost, CallError, DataLost, Overloaded, RoqError, ShuffleNotFound, StorageFull
from roq.runtime.observe import Counters, logger
from roq.shuffle.node.attempt import Attempt, BufferedBlock, Part, sample_bytes
from roq.shuffle.node.fill_plan import AttemptEnded, FillPlan, FreeMemory, SendPart
from roq.shuffle.node.memory import BlockMemory
from roq.shuffle.node.peers import Outbox, Store
from roq.shuffle.node.splitter import splitter
from roq.shuffle.node.stored import check_id
from roq.wire import shuffle as wire
from roq.wire.gcm import ReportRuns, TableInfo
from roq.wire.shuffle import Block, Piece, Position, Receipt, RunSample, Spec

log = logger(__name__)
BLOCKS_A_TURN = 64  # split before others get a turn
SILENT_SECONDS_MAX = 3600.0  # an attempt nobody speaks of for longer is forgotten: its writer is gone
SWEEP_SECONDS = 60.0
WAIT_SECONDS_MAX = 30.0  # of a FinishAttempt


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

    def name_of(self, shuffle: str) -> str | None:
        """Of a shuffle that attempts are being written of."""
        collector = self._collectors.get(shuffle)
        return None if collector is None else collector.name

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
