"""Buffer role, one shuffle: attempts come in, their runs are cut by the table of ranges, all holders store the portions.

A turn of `_work`: tell the leader what came and is stored, take its table, cut what is uncut, hand portions to the outboxes.

    a portion is   uncut → open (some holder lacks it) → stored (all have it) → let go
    let go         when the leader, told after it was stored, still has the table it was stored by: a later table is filled
                   from that one's holders. With another table it goes to who lacks it, cut anew if the borders changed.
    an attempt is  complete when its receipt is here and nothing of it is uncut or open; done when the leader has noted that

While the leader changes the table (TableChanged) nothing is sent, until it tells a later one. Not covered: memory (buffer.py).
"""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_right

from roq.errors import AttemptLost, CallError, DataLost, FrameError, RoqError, ShuffleNotFound, ShuffleSealed, StorageFull
from roq.runtime.observe import logger
from roq.shuffle.node.attempt import Attempt, Held, Portion, sample_bytes
from roq.shuffle.node.surroundings import NodeContext
from roq.shuffle.ranges import borders_of
from roq.wire.gcm import ReportRuns, TableInfo
from roq.wire.shuffle import Block, Piece, Position, Range, RunSample, Spec

log = logger(__name__)
PORTION_BYTES = 512 * 1024  # several fit one message
REPORT_SECONDS = 0.05  # between two reports while an attempt waits for one
ASK_SECONDS = 0.25  # between two others
SAMPLE_KEYS_AT_ONCE = 16 * 1024  # in one report
SAMPLE_BYTES_AT_ONCE = 2 * 1024 * 1024
PAUSE_SECONDS_MAX = 10.0  # since nothing is being sent, without a word of a later table: the leader did not get that far
TELL_AGAIN_SECONDS = 2.0  # between two times that all samples are told
FAILURE_SECONDS = 3.0  # a holder's refusal counts for so long
BLOCKS_A_TURN = 64  # cut before others get a turn


class Filling:
    """On the running loop, until `end`."""

    def __init__(self, id: str, name: str, spec: Spec, around: NodeContext) -> None:
        self.id, self.name, self.spec, self._around = id, name, spec, around
        self.attempts: dict[tuple[int, str], Attempt] = {}
        self.finished: set[tuple[int, str]] = set()
        self._samples: list[RunSample] = []  # to be told
        self._sampled = False  # there was one
        self._all_told = 0.0  # when those of all attempts were, while there is no table
        self.epoch = 0
        self._ranges: tuple[Range, ...] = ()
        self._borders: list[Position] = []
        self._sending = 0
        self._borrowed: dict[tuple[Portion, str], int] = {}  # by what is being sent
        self._quiet = asyncio.Event()  # nothing is being sent
        self._quiet.set()
        self._paused_for, self._paused_until = 0, 0.0  # table epoch, monotonic seconds
        self._pausing = 0  # who waits until nothing is being sent: the pause lasts at least so long
        self._failure: tuple[float, RoqError] | None = None
        self.ended = self._short = False
        self._wake = asyncio.Event()
        self._told = 0.0
        self._loop = asyncio.get_running_loop()
        self._task = self._loop.create_task(self._work(), name=f"shuffle {name}")
        self._task.add_done_callback(self._stopped)

    # --- what comes ---------------------------------------------------------------------------------------------------

    def took(self, attempt: Attempt, run: int, blocks: list[Block]) -> None:
        """Blocks came. Raises CallError."""
        for held in attempt.took(run, blocks):
            self._around.room.took(attempt, held)
        self._wake.set()

    def run_ended(self, attempt: Attempt, sample: RunSample) -> None:
        """A run is whole. Raises CallError."""
        attempt.ended(sample)
        self._samples.append(sample)
        attempt.sampled += sample_bytes(sample)
        self._around.budget.held += sample_bytes(sample)
        self._sampled = True
        self._wake.set()

    def wake(self) -> None:
        """Something may have changed."""
        self._wake.set()

    def why_not_yet(self) -> str | StorageFull:
        """Why an attempt isn't done."""
        if self._failure is not None and self._failed_lately():
            error = self._failure[1]
            return error if isinstance(error, StorageFull) else f"{type(error).__name__}: {error}"
        return "there is no table yet" if not self.epoch else "it is being stored"

    def _failed_lately(self) -> bool:
        return self._failure is not None and time.monotonic() - self._failure[0] < FAILURE_SECONDS

    def drop(self, attempt: Attempt, error: RoqError | None = None) -> None:
        """Forget what is held of it; it is done or failed."""
        for held in attempt.holding():
            self._around.room.dropped(held)
        self._drop_samples(attempt)
        attempt.uncut.clear()
        for portion in [*attempt.open, *attempt.stored]:
            portion.void = True
        attempt.open.clear()
        attempt.stored.clear()
        attempt.spill = None
        if error is not None and attempt.failed is None:
            attempt.failed = error
            self._around.counters["attempts_failed"] += 1
        attempt.done.set()

    def _drop_samples(self, attempt: Attempt) -> None:
        self._samples = [sample for sample in self._samples if (sample.partition, sample.attempt) != attempt.place]
        attempt.samples.clear()
        self._around.budget.held -= attempt.sampled
        attempt.sampled = 0

    def forget(self, attempt: Attempt) -> None:
        """As if it had never begun."""
        self.drop(attempt, AttemptLost("the attempt was abandoned"))
        self.attempts.pop(attempt.place, None)

    def end(self, error: RoqError) -> None:
        """The shuffle takes nothing more; all attempts fail."""
        self.ended = True
        for attempt in self.attempts.values():
            self.drop(attempt, error)
        self._task.cancel()

    def _stopped(self, task: asyncio.Task[None]) -> None:
        """Of a defect: better a shuffle that fails here than one that never gets done."""
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("attempt collector failed", exc_info=error, extra={"fields": {"shuffle": self.name}})
            self.end(AttemptLost(f"{type(error).__name__}: {error}"))

    # --- the leader ---------------------------------------------------------------------------------------------------

    async def pause(self, table_epoch: int) -> None:
        """Send nothing until a table of this epoch is told; returns when nothing is being sent."""
        if table_epoch > self.epoch:
            self._paused_for = max(self._paused_for, table_epoch)
            self._pausing += 1
            self._wake.set()
            try:
                await self._quiet.wait()
            finally:
                self._pausing -= 1
                self._paused_until = time.monotonic() + PAUSE_SECONDS_MAX

    @property
    def paused(self) -> bool:
        """The leader is changing the table."""
        return self._paused_for > self.epoch and (self._pausing > 0 or time.monotonic() < self._paused_until)

    async def _work(self) -> None:
        was_paused = False
        while True:
            await self._wake.wait()
            self._wake.clear()
            pause = self._report_in()
            if pause is not None and pause <= 0:
                await self._tell()
            if was_paused and not self.paused:
                self._paused_for = 0
                self._route_all()
            was_paused = self.paused
            if self.epoch and not was_paused:
                await self._cut_all()
            pause = self._report_in()
            if pause is not None:
                self._loop.call_later(max(pause, 0.001), self._wake.set)

    def _report_in(self) -> float | None:
        """Seconds until the leader should be told or asked something; None: nothing is to be said."""
        attempts = self.attempts.values()
        if self._short or any(attempt.complete and not attempt.done.is_set() for attempt in attempts):
            wait = REPORT_SECONDS  # what is let go makes room
        else:
            telling = any(attempt.stored or attempt.receipt for attempt in attempts)
            asking = self._paused_for > self.epoch or (not self.epoch and any(attempt.uncut for attempt in attempts))
            doubting = self._failed_lately() and any(attempt.open for attempt in attempts)  # somebody else may be the holder
            if not (telling or asking or doubting):
                return None
            wait = ASK_SECONDS
        return self._told + wait - time.monotonic()

    def _few_samples(self) -> list[RunSample]:
        """As many as fit a message, at least one if there is any."""
        keys = size = 0
        for count, sample in enumerate(self._samples):
            keys += len(sample.keys)
            size += sum(map(len, sample.keys))
            if count and (keys > SAMPLE_KEYS_AT_ONCE or size > SAMPLE_BYTES_AT_ONCE):
                return self._samples[:count]
        return self._samples[:]

    async def _tell(self) -> None:
        if not self.epoch and time.monotonic() - self._all_told > TELL_AGAIN_SECONDS:  # another leader may know of none
            self._all_told = time.monotonic()
            self._samples = [sample for attempt in self.attempts.values() for sample in attempt.samples]
        if self.epoch:  # from now on storage has better ones
            self._samples.clear()
            for attempt in self.attempts.values():
                self._drop_samples(attempt)
        samples = self._few_samples()
        attempts = [attempt for attempt in self.attempts.values() if not attempt.done.is_set()]
        complete = [attempt for attempt in attempts if attempt.complete]
        stored = [(attempt, set(attempt.stored)) for attempt in attempts]
        pressing = self._around.room.pressed or any(attempt.receipt is not None and attempt.uncut for attempt in attempts)
        wanted = self._sampled and pressing and len(samples) == len(self._samples)
        receipts = [attempt.receipt for attempt in complete if attempt.receipt is not None]
        request = ReportRuns(self.name, self.id, self._around.host, samples, receipts, wanted, self.epoch)
        try:
            info = await self._around.report(request)
        except ShuffleNotFound as error:
            self.end(AttemptLost(f"the shuffle is gone: {error}"))
            return
        except CallError as error:
            log.warning("the leader refused a report", extra={"fields": {"shuffle": self.name, "reason": str(error)}})
            self.end(error)
            return
        except RoqError as error:
            self._failure = (time.monotonic(), error)
            return
        finally:
            self._told = time.monotonic()
        told = set(map(id, samples))
        self._samples = [sample for sample in self._samples if id(sample) not in told]
        self._around.endpoints.update(info.followers)
        if info.winners:
            self.end(ShuffleSealed())
        elif info.epoch != self.epoch:
            self._adopt(info)
        else:
            self._let_go(stored, complete)

    def _let_go(self, stored: list[tuple[Attempt, set[Portion]]], complete: list[Attempt]) -> None:
        for attempt, portions in stored:
            for portion in portions & attempt.stored:
                attempt.stored.discard(portion)
                for held in portion.blocks:
                    self._around.room.dropped(held)
        for attempt in complete:
            if attempt.complete and not attempt.done.is_set():
                self.drop(attempt)
                self.finished.add(attempt.place)
                self.attempts.pop(attempt.place, None)
                self._around.counters["attempts_stored"] += 1

    def _adopt(self, info: TableInfo) -> None:
        borders = borders_of(info.ranges)
        same = bool(self.epoch) and borders == self._borders
        self.epoch, self._ranges, self._borders = info.epoch, info.ranges, borders
        for attempt in self.attempts.values():
            if not same:
                attempt.begin_again()
        self._route_all()

    # --- portions -----------------------------------------------------------------------------------------------------

    def _route_all(self) -> None:
        for attempt in self.attempts.values():
            for portion in sorted([*attempt.open, *attempt.stored], key=lambda one: (one.run, one.blocks[0].first)):
                self._route(attempt, portion)

    def _route(self, attempt: Attempt, portion: Portion) -> None:
        """To whoever should have it and lacks it."""
        holders = self._ranges[portion.number].holders
        portion.missing = set(holders) - portion.acked
        if holders and not portion.missing:
            attempt.open.discard(portion)
            attempt.stored.add(portion)
            return
        attempt.stored.discard(portion)
        attempt.open.add(portion)
        for host in sorted(portion.missing):
            self._around.outbox(host).put(self, portion)

    async def _cut_all(self) -> None:
        self._short = False
        for attempt in list(self.attempts.values()):
            try:
                await self._cut(attempt)
            except (AttemptLost, DataLost) as error:
                self.drop(attempt, AttemptLost(str(error)))
            except CallError as error:  # its rows are not what they should be: written again they would be the same
                self.drop(attempt, error)
            except Exception as error:  # whatever is wrong with one attempt, the others go on
                log.exception("attempt could not be split", extra={"fields": {"shuffle": self.name, "attempt": attempt.place}})
                self.drop(attempt, AttemptLost(f"{type(error).__name__}: {error}"))

    async def _cut(self, attempt: Attempt) -> None:
        """Put what is uncut into portions; what there is no room for stays uncut. Raises AttemptLost, DataLost, CallError, and
        whatever else a block can break."""
        making: dict[int, list[Held]] = {}
        left: list[Held] = []
        count = 0
        try:
            while attempt.uncut:
                held = attempt.uncut.popleft()
                parts = await self._parts(attempt, held)
                if parts is None:  # what is behind it may be in memory, and is to leave
                    left.append(held)
                    self._route_made(attempt, making)
                for number, part in parts or ():
                    made = making.setdefault(number, [])
                    if made and (made[0].run != part.run or sum(one.size for one in made) + part.size > PORTION_BYTES):
                        self._route(attempt, Portion(attempt.place, number, made[0].run, making.pop(number)))
                    making.setdefault(number, []).append(part)
                count += 1
                if count % BLOCKS_A_TURN == 0:
                    await asyncio.sleep(0)
        finally:
            attempt.uncut.extendleft(reversed(left))
            self._route_made(attempt, making)
            if attempt.failed is not None:
                self.drop(attempt)

    def _route_made(self, attempt: Attempt, making: dict[int, list[Held]]) -> None:
        for number, made in making.items():
            self._route(attempt, Portion(attempt.place, number, made[0].run, made))
        making.clear()

    async def _parts(self, attempt: Attempt, held: Held) -> list[tuple[int, Held]] | None:
        """(number of the range, block): the block itself, or what it is cut into. None: it would come out of its file, and
        there is no room for it."""
        first, last = held.positions(attempt.place[0])
        low, high = bisect_right(self._borders, first), bisect_right(self._borders, last)
        if low == high:
            return [(low, held)]
        if held.data is None and not self._around.room.room_to_cut(held.size):
            self._short = True
            return None
        held.busy += 1
        try:
            blocks = await self._around.thread(lambda: self._cut_block(attempt.place[0], held, low, high))
        finally:
            held.busy -= 1
            self._around.room.dropped(held)
        self._around.counters["blocks_cut"] += 1
        found = []
        for number, block in blocks:
            part = Held(held.run, block)
            self._around.room.took(attempt, part)
            found.append((number, part))
        return found

    def _cut_block(self, partition: int, held: Held, low: int, high: int) -> list[tuple[int, Block]]:
        """In a thread."""
        parts = self._around.cutter.divide(self.spec, held.block(), (partition, held.run), self._borders[low:high])
        return [(low + number, block) for number, block in parts]

    # --- being sent (outbox.Source) -----------------------------------------------------------------------------------

    def wants(self, portion: Portion, host: str) -> bool:
        """See Source."""
        return not portion.void and host in portion.missing and not self.paused

    def leaving(self, portions: list[Portion]) -> None:
        """See Source."""
        self._sending += 1
        self._quiet.clear()
        for portion in portions:
            for held in portion.blocks:
                held.busy += 1

    async def pieces(self, portions: list[Portion], host: str) -> list[Piece]:
        """See Source."""
        blocks = [held for portion in portions for held in portion.blocks]
        spilled = sum(held.size for held in blocks if held.data is None)
        size = sum(held.size for held in blocks) + spilled  # the message, and what is read for it
        await self._around.budget.borrow(size)
        self._borrowed[portions[0], host] = self._borrowed.get((portions[0], host), 0) + size
        if not spilled:
            return [portion.piece() for portion in portions]
        return await self._around.thread(lambda: [portion.piece() for portion in portions])

    def sent(self, portions: list[Portion], host: str, error: RoqError | None) -> None:
        """See Source."""
        self._sending -= 1
        self._around.budget.give_back(self._borrowed.pop((portions[0], host), 0))
        if not self._sending:
            self._quiet.set()
        for portion in portions:
            for held in portion.blocks:
                held.busy -= 1
            attempt = self.attempts.get(portion.attempt)
            if portion.void or attempt is None:
                continue
            if error is None:
                portion.acked.add(host)
                portion.missing.discard(host)
                if not portion.missing:
                    attempt.open.discard(portion)
                    attempt.stored.add(portion)
            elif isinstance(error, FrameError | AttemptLost):  # what we hold is damaged: sending it again would not help
                self.drop(attempt, AttemptLost(str(error)))
        if error is not None:
            self._failure = (time.monotonic(), error)
            self._around.counters["sends_failed"] += 1
        self._wake.set()
