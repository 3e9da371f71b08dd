"""One attempt at its buffer: what has come of it, what of that is cut, stored, told. Pure; on the follower's loop."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator

from roq.errors import CallError, RoqError
from roq.shuffle.node.held import Held, Portion, Spill
from roq.shuffle.sampling import is_sound
from roq.wire.shuffle import SAMPLE_BYTES_MAX, SAMPLE_KEYS_MAX, Block, Receipt, RunSample


def sample_bytes(sample: RunSample) -> int:
    """Of its keys."""
    return sum(map(len, sample.keys))


class Attempt:
    """place: (partition, attempt). next_number: of its next message. sampled: bytes its samples are counted with. done: the
    leader knows all is stored, or it failed."""

    def __init__(self, partition: int, id: str, writer: str, now: float) -> None:
        self.place, self.writer, self.touched = (partition, id), writer, now
        self.next_number = 0
        self.uncut: deque[Held] = deque()
        self.open: set[Portion] = set()
        self.stored: set[Portion] = set()
        self.samples: list[RunSample] = []
        self.sampled = 0
        self.receipt: Receipt | None = None
        self.failed: RoqError | None = None
        self.spill: Spill | None = None
        self.done = asyncio.Event()
        self._run, self._run_rows = 0, 0  # the run that is being taken
        self._rows = self._runs = 0

    @property
    def complete(self) -> bool:
        """All of it is with all holders."""
        return self.receipt is not None and not (self.uncut or self.open or self.failed)

    def took(self, run: int, blocks: list[Block]) -> list[Held]:
        """The next blocks of a run. Raises CallError: they aren't the next ones."""
        if self.receipt is not None or run != self._runs:
            raise CallError(f"run {run} of attempt {self.place}: the next one is {self._runs}")
        self._run = run
        for block in blocks:
            if block.first != self._run_rows or block.rows < 1 or block.first_key > block.last_key:
                raise CallError(
                    f"rows {block.first} … of run {run} of attempt {self.place}: row {self._run_rows} is the next one"
                )
            self._run_rows += block.rows
        made = [Held(run, block) for block in blocks]
        self.uncut.extend(made)
        return made

    def ended(self, sample: RunSample) -> None:
        """The run is whole. Raises CallError."""
        if (sample.run, sample.rows) != (self._runs, self._run_rows):
            raise CallError(f"run {sample.run} of attempt {self.place} has {self._run_rows} rows, not {sample.rows}")
        if len(sample.keys) > SAMPLE_KEYS_MAX or sample_bytes(sample) > SAMPLE_BYTES_MAX or not is_sound(sample):
            raise CallError(f"the sample of run {sample.run} of attempt {self.place} is too large, or no sample of its rows")
        self.samples.append(sample)
        self._rows += self._run_rows
        self._runs, self._run_rows = self._runs + 1, 0

    def finish(self, receipt: Receipt) -> None:
        """Nothing more comes. Raises CallError."""
        if (receipt.rows, receipt.runs) != (self._rows, self._runs) or self._run_rows:
            raise CallError(f"attempt {self.place} has {self._rows} rows in {self._runs} runs: the receipt does not fit")
        self.receipt = receipt

    def holding(self) -> Iterator[Held]:
        """All blocks."""
        yield from self.uncut
        for portion in [*self.open, *self.stored]:
            yield from portion.blocks

    def begin_again(self) -> None:
        """All that is held is to be cut anew."""
        found = sorted(self.holding(), key=lambda held: (held.run, held.first))
        for portion in [*self.open, *self.stored]:
            portion.void = True
        self.open.clear()
        self.stored.clear()
        self.uncut = deque(found)
