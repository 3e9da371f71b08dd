"""What a buffer does about one shuffle: attempts come in, their runs are split by the table of ranges, all holders store the
parts. Pure: time comes in as an argument, what is to be done comes out as instructions (`taken`); buffer.py does it.

    a part is       unsplit → open (some holder lacks it) → stored (all have it) → released
    released        when the leader, told after it was stored, still has the table it was stored by: a later table is filled
                    from that one's holders. With another table it goes to who lacks it, split anew if the borders changed.
    an attempt is   complete when its receipt is here and nothing of it is unsplit or open; done when the leader has noted that

While the leader changes the table (TableChanged) nothing is sent, until it reports a later one. Not covered: memory.py.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from typing import NamedTuple

from roq.errors import AttemptLost, CallError, FrameError, RoqError, ShuffleNotFound, ShuffleSealed, StorageFull
from roq.runtime.observe import Counters
from roq.shuffle.node.attempt import Attempt, BufferedBlock, Part, sample_bytes
from roq.shuffle.ranges import borders_of
from roq.wire.gcm import ReportRuns, TableInfo
from roq.wire.shuffle import Position, Range, RunSample, Spec

PART_BYTES = 512 * 1024  # several fit one message
REPORT_SECONDS = 0.05  # between two reports while an attempt waits for one
ASK_SECONDS = 0.25  # between two others
SAMPLE_KEYS_AT_ONCE = 16 * 1024  # in one report
SAMPLE_BYTES_AT_ONCE = 2 * 1024 * 1024
PAUSE_SECONDS_MAX = 10.0  # since nothing is being sent, without a word of a later table: the leader did not get that far
REPORT_ALL_SECONDS = 2.0  # between two times that all samples are reported
FAILURE_SECONDS = 3.0  # a holder's refusal counts for so long


@dataclass(frozen=True)
class SendPart:
    """To one of its holders, when its turn comes; twice is once."""

    part: Part
    host: str


@dataclass(frozen=True)
class FreeMemory:
    """Memory of an attempt: blocks, and bytes of samples."""

    blocks: list[BufferedBlock]
    sample_bytes: int = 0


@dataclass(frozen=True)
class AttemptEnded:
    """The attempt is done, or it failed; who waits for it is answered."""

    attempt: Attempt


class FillReport(NamedTuple):
    """What the leader is told, and what was stored and complete by then."""

    request: ReportRuns
    stored: list[tuple[Attempt, set[Part]]]
    complete: list[Attempt]


class FillPlan:
    """Of one shuffle at one buffer. After each call something may be `taken`. now: seconds, steady."""

    def __init__(self, id: str, name: str, spec: Spec, host: str, counters: Counters) -> None:
        self.id, self.name, self.spec, self._host, self._counters = id, name, spec, host, counters
        self.attempts: dict[tuple[int, str], Attempt] = {}
        self.finished: set[tuple[int, str]] = set()  # none of them is among the attempts
        self.ended = False  # for ever
        self.epoch = 0  # of the table, 0 while there is none
        self.short = False  # a block stayed unsplit since there was no room for it
        self._ranges: tuple[Range, ...] = ()
        self._borders: list[Position] = []  # of the ranges
        self._samples: list[RunSample] = []  # to be reported
        self._sampled = False  # there was one
        self._all_reported = 0.0  # when those of all attempts were, while there is no table
        self._reported = 0.0
        self._paused_for, self._paused_until = 0, 0.0  # epoch of a table, seconds
        self._pausing = 0  # who waits until nothing is being sent: the pause lasts at least so long
        self._failure: tuple[float, RoqError] | None = None
        self._out: list[SendPart | FreeMemory | AttemptEnded] = []

    def taken(self) -> list[SendPart | FreeMemory | AttemptEnded]:
        """What is to be done, in order; it is not told again."""
        out, self._out = self._out, []
        return out

    # --- attempts -----------------------------------------------------------------------------------------------------

    def run_ended(self, attempt: Attempt, sample: RunSample) -> None:
        """A run is complete. Raises CallError."""
        attempt.ended(sample)
        self._samples.append(sample)
        self._sampled = True

    def drop(self, attempt: Attempt, error: RoqError | None = None) -> None:
        """Forget what is held of it; it is done or failed."""
        self._out.append(FreeMemory([*attempt.holding()]))
        self._drop_samples(attempt)
        attempt.void()
        attempt.spill = None
        if error is not None and attempt.failed is None:
            attempt.failed = error
            self._counters["attempts_failed"] += 1
        attempt.done = True
        self._out.append(AttemptEnded(attempt))

    def _drop_samples(self, attempt: Attempt) -> None:
        self._samples = [sample for sample in self._samples if (sample.partition, sample.attempt) != attempt.place]
        if attempt.samples:
            self._out.append(FreeMemory([], sum(map(sample_bytes, attempt.samples))))
            attempt.samples.clear()

    def forget(self, attempt: Attempt) -> None:
        """As if it had never begun."""
        self.drop(attempt, AttemptLost("the attempt was abandoned"))
        self.attempts.pop(attempt.place, None)

    def end(self, error: RoqError) -> None:
        """The shuffle takes nothing more; all attempts fail."""
        self.ended = True
        for attempt in self.attempts.values():
            self.drop(attempt, error)

    def why_not_yet(self, now: float) -> str | StorageFull:
        """Why an attempt isn't done."""
        if self._failure is not None and self._failed_lately(now):
            error = self._failure[1]
            return error if isinstance(error, StorageFull) else f"{type(error).__name__}: {error}"
        return "there is no table yet" if not self.epoch else "it is being stored"

    def _failed_lately(self, now: float) -> bool:
        return self._failure is not None and now - self._failure[0] < FAILURE_SECONDS

    # --- the leader ---------------------------------------------------------------------------------------------------

    def pause(self, table_epoch: int) -> bool:
        """Send nothing until a table of this epoch comes, for PAUSE_SECONDS_MAX from `quiet` on at most. False: it is known."""
        if table_epoch <= self.epoch:
            return False
        self._paused_for = max(self._paused_for, table_epoch)
        self._pausing += 1
        return True

    def quiet(self, now: float) -> None:
        """Nothing is being sent any more, or who asked for the pause is gone."""
        self._pausing -= 1
        self._paused_until = now + PAUSE_SECONDS_MAX

    def paused(self, now: float) -> bool:
        """The leader is changing the table."""
        return self._paused_for > self.epoch and (self._pausing > 0 or now < self._paused_until)

    def resume(self) -> None:
        """The pause is over: what waits is sent."""
        self._paused_for = 0
        self._route_all()

    def report_in(self, now: float) -> float | None:
        """Seconds until the leader should be told or asked something; None: nothing is to be said."""
        attempts = self.attempts.values()
        if self.short or any(attempt.complete and not attempt.done for attempt in attempts):
            wait = REPORT_SECONDS  # what is released makes room
        else:
            telling = any(attempt.stored or attempt.receipt for attempt in attempts)
            asking = self._paused_for > self.epoch or (not self.epoch and any(attempt.unsplit for attempt in attempts))
            doubting = self._failed_lately(now) and any(attempt.open for attempt in attempts)  # others may be the holders
            if not (telling or asking or doubting):
                return None
            wait = ASK_SECONDS
        return self._reported + wait - now

    def report(self, pressed: bool, now: float) -> FillReport:
        """What to tell. pressed: memory can't go on without sending."""
        if not self.epoch and now - self._all_reported > REPORT_ALL_SECONDS:  # another leader may know of none
            self._all_reported = now
            self._samples = [sample for attempt in self.attempts.values() for sample in attempt.samples]
        if self.epoch:  # from now on storage has better ones
            self._samples.clear()
            for attempt in self.attempts.values():
                self._drop_samples(attempt)
        samples = self._few_samples()
        attempts = [attempt for attempt in self.attempts.values() if not attempt.done]
        complete = [attempt for attempt in attempts if attempt.complete]
        pressing = pressed or any(attempt.receipt is not None and attempt.unsplit for attempt in attempts)
        wanted = self._sampled and pressing and len(samples) == len(self._samples)
        receipts = [attempt.receipt for attempt in complete if attempt.receipt is not None]
        request = ReportRuns(self.name, self.id, self._host, samples, receipts, wanted, self.epoch)
        return FillReport(request, [(attempt, set(attempt.stored)) for attempt in attempts], complete)

    def _few_samples(self) -> list[RunSample]:
        """As many as fit a message, at least one if there is any."""
        keys = size = 0
        for count, sample in enumerate(self._samples):
            keys += len(sample.keys)
            size += sample_bytes(sample)
            if count and (keys > SAMPLE_KEYS_AT_ONCE or size > SAMPLE_BYTES_AT_ONCE):
                return self._samples[:count]
        return self._samples[:]

    def refused(self, error: RoqError, now: float) -> None:
        """The leader did not take the report; it may have no answer yet, or never."""
        self._reported = now
        if isinstance(error, ShuffleNotFound):
            self.end(AttemptLost(f"the shuffle is gone: {error}"))
        elif isinstance(error, CallError):
            self.end(error)
        else:
            self._failure = (now, error)

    def answered(self, report: FillReport, info: TableInfo, now: float) -> None:
        """The leader's answer."""
        self._reported = now
        told = set(map(id, report.request.samples))
        self._samples = [sample for sample in self._samples if id(sample) not in told]
        if info.committed:
            self.end(ShuffleSealed())
        elif info.epoch != self.epoch:
            self._adopt(info)
        else:
            self._release(report)

    def _release(self, report: FillReport) -> None:
        for attempt, parts in report.stored:
            for part in parts & attempt.stored:
                attempt.stored.discard(part)
                self._out.append(FreeMemory(part.blocks))
        for attempt in report.complete:
            if attempt.complete and not attempt.done:
                self.drop(attempt)
                self.finished.add(attempt.place)
                self.attempts.pop(attempt.place, None)
                self._counters["attempts_stored"] += 1

    def _adopt(self, info: TableInfo) -> None:
        borders = borders_of(info.ranges)
        same = bool(self.epoch) and borders == self._borders
        self.epoch, self._ranges, self._borders = info.epoch, info.ranges, borders
        for attempt in self.attempts.values():
            if not same:
                attempt.split_again()
        self._route_all()

    # --- parts --------------------------------------------------------------------------------------------------------

    def span(self, attempt: Attempt, block: BufferedBlock) -> tuple[int, list[Position]]:
        """Number of the range that the block begins in, and the borders it has to be split at."""
        first, last = block.positions(attempt.place[0])
        low, high = bisect_right(self._borders, first), bisect_right(self._borders, last)
        return low, self._borders[low:high]

    def collect(self, attempt: Attempt, making: dict[int, list[BufferedBlock]], number: int, block: BufferedBlock) -> None:
        """The next block of a range. making: those of each range that are no part yet."""
        made = making.setdefault(number, [])
        if made and (made[0].run != block.run or sum(one.size for one in made) + block.size > PART_BYTES):
            self._route(attempt, Part(attempt.place, number, made[0].run, making.pop(number)))
        making.setdefault(number, []).append(block)

    def collected(self, attempt: Attempt, making: dict[int, list[BufferedBlock]]) -> None:
        """What is in the making leaves as it is."""
        for number, made in making.items():
            self._route(attempt, Part(attempt.place, number, made[0].run, made))
        making.clear()

    def _route_all(self) -> None:
        for attempt in self.attempts.values():
            for part in sorted([*attempt.open, *attempt.stored], key=lambda one: (one.run, one.blocks[0].first)):
                self._route(attempt, part)

    def _route(self, attempt: Attempt, part: Part) -> None:
        """To whoever should have it and lacks it."""
        holders = self._ranges[part.number].holders
        part.missing = set(holders) - part.acked
        attempt.holds(part, stored=bool(holders) and not part.missing)
        self._out += [SendPart(part, host) for host in sorted(part.missing)]

    def wants(self, part: Part, host: str, now: float) -> bool:
        """It still has to go there, and may now."""
        return not part.void and host in part.missing and not self.paused(now)

    def sent(self, parts: list[Part], host: str, error: RoqError | None, now: float) -> None:
        """They are on the host's stable storage, unless there is an error."""
        for part in parts:
            attempt = self.attempts.get(part.attempt)
            if part.void or attempt is None:
                continue
            if error is None:
                part.acked.add(host)
                part.missing.discard(host)
                if not part.missing:
                    attempt.holds(part, stored=True)
            elif isinstance(error, FrameError | AttemptLost):  # what we hold is damaged: sending it again would not help
                self.drop(attempt, AttemptLost(str(error)))
        if error is not None:
            self._failure = (now, error)
            self._counters["sends_failed"] += 1
