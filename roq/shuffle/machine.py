"""The machinery of the leader's machine of one shuffle (plan.py): a record is written, followers are asked and their answers
gathered, time passes; one of these at a time. Pure. Not covered: what is written, asked and waited for, and why."""

from __future__ import annotations

from bisect import insort

import msgspec

from roq.shuffle import inquiries
from roq.shuffle.events import Ask, Instruction, StageStep, Wake, WriteRecord
from roq.shuffle.record import ShuffleRecord, Stage
from roq.wire import shuffle as wire
from roq.wire.shuffle import ShuffleState

RETRY_SECONDS = 5.0  # after data that must be somewhere was found nowhere


class ShuffleMachine:
    """record: as it is written; writing: on its way. `_out` gathers what is to be done."""

    def __init__(self, record: ShuffleRecord, epoch: int) -> None:
        self.record = record
        self.writing: ShuffleRecord | None = None
        self.step = StageStep.IDLE
        self._epoch = epoch
        self._ids = 0
        self._asks: dict[int, Ask] = {}  # of this step, not answered yet
        self._answers: list[tuple[str, wire.Request, wire.Reply]] = []  # of this step
        self._until: float | None = None  # end of a pause
        self._wakes: list[float] = []  # when ticks were asked for that have not come, the next one first
        self._moved = 0  # bytes, since the record was written
        self._out: list[Instruction] = []
        self._now = 0.0

    def outstanding(self, id: int) -> bool:
        """Whether the answer to this Ask is still of interest."""
        return id in self._asks

    # --- writing ------------------------------------------------------------------------------------------------------

    def _write(self, record: ShuffleRecord) -> None:
        """Only when `Written` has come, anything is done on the strength of it."""
        sent = record.sent + self._moved if record.former else 0
        self.writing = msgspec.structs.replace(record, moved=record.moved + self._moved, sent=sent)
        self._moved = 0
        self._reset()
        self._out.append(WriteRecord(self.writing))

    def _change(self, after: ShuffleRecord) -> bool:
        if after is not self.record:
            self._write(after)
        return after is not self.record

    # --- asking -------------------------------------------------------------------------------------------------------

    def _reset(self) -> None:
        self.step, self._until = StageStep.IDLE, None
        self._asks.clear()
        self._answers.clear()

    def _ask(self, step: StageStep, asks: inquiries.Asks) -> bool:
        self._reset()
        self.step = step
        for host, request in asks:
            self._ids += 1
            self._asks[self._ids] = Ask(self._ids, host, request)
        self._out.extend(self._asks.values())
        return True

    def _answered(self, id: int, reply: wire.Reply) -> None:
        ask = self._asks.pop(id, None)
        if ask is None:
            return  # of an earlier step, or told twice
        self._answers.append((ask.host, ask.request, reply))
        if (
            isinstance(reply, wire.Fetched)
            and self.record.stage is Stage.MOVING
            and self.record.state is not ShuffleState.FILLING
        ):
            self._moved += reply.size

    # --- waiting ------------------------------------------------------------------------------------------------------

    def _wake(self, at: float) -> None:
        """A tick comes at this time, or before it: who waits asks again then. Timers may be early."""
        if not self._wakes or self._wakes[0] > at:
            insort(self._wakes, at)
            self._out.append(Wake(max(0.0, at - self._now)))

    def _ticked(self) -> None:
        """The tick that was due next has come."""
        del self._wakes[:1]

    def _pause(self) -> bool:
        """Before it is tried again."""
        self._reset()
        self.step, self._until = StageStep.PAUSE, self._now + RETRY_SECONDS
        self._wake(self._until)
        return False

    def _paused(self) -> bool:
        if self._until is not None and self._now < self._until:
            self._wake(self._until)
            return False
        self._reset()
        return True
