"""What a buffer holds: attempts, their blocks (in memory or in a temporary file), and parts of runs on their way to a range.

Plain values on the follower's loop; the temporary file is written and read in threads. It has no name: nothing is left of it
when the process ends.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import threading
from collections import deque
from collections.abc import Iterator
from pathlib import Path

from roq.errors import AttemptLost, CallError, RoqError
from roq.runtime.files import DISK
from roq.shuffle.sampling import is_sound
from roq.wire.shuffle import SAMPLE_BYTES_MAX, SAMPLE_KEYS_MAX, Block, Piece, Position, Receipt, RunSample


class Spill:
    """An attempt's temporary file. Blocking; any thread. Raises OSError."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._file, name = tempfile.mkstemp(dir=directory)
        os.unlink(name)
        self._lock = threading.Lock()
        self._size = 0

    def write(self, parts: list[bytes]) -> list[int]:
        """Where each begins."""
        places = []
        with self._lock:
            for part in parts:
                places.append(self._size)
                DISK.write_all(self._file, part, self._size)
                self._size += len(part)
        return places

    def read(self, offset: int, size: int) -> bytes:
        """Written bytes."""
        data = os.pread(self._file, size, offset)
        if len(data) < size:
            raise OSError(f"a temporary file ends at {offset + len(data)}")
        return data

    def __del__(self) -> None:
        os.close(self._file)


class Held:
    """One block of a run. data: None when it is in the file `spill`. busy: somebody works on it, so it stays where it is.
    counted: bytes of memory it is counted with."""

    __slots__ = ("busy", "counted", "crc", "data", "first", "first_key", "last_key", "offset", "rows", "run", "size", "spill")

    def __init__(self, run: int, block: Block) -> None:
        self.run, self.first, self.rows = run, block.first, block.rows
        self.first_key, self.last_key, self.crc = block.first_key, block.last_key, block.crc
        self.size = len(block.data)
        self.data: bytes | None = block.data
        self.spill: Spill | None = None
        self.offset, self.busy, self.counted = 0, 0, 0

    @property
    def memory(self) -> int:
        """Bytes it takes as it is: its keys stay when its data goes to a file."""
        return len(self.first_key) + len(self.last_key) + (self.size if self.data is not None else 0)

    def positions(self, partition: int) -> tuple[Position, Position]:
        """Of the first and of the last row."""
        first = Position(self.first_key, partition, self.run, self.first)
        return first, Position(self.last_key, partition, self.run, self.first + self.rows - 1)

    def block(self) -> Block:
        """With its data, read from the file if it is there. Blocking. Raises AttemptLost."""
        data = self.data
        if data is None:
            try:
                data = self.spill.read(self.offset, self.size) if self.spill is not None else b""
            except OSError as error:
                raise AttemptLost(f"a temporary file can't be read: {error}") from error
        return Block(self.first, self.rows, self.first_key, self.last_key, self.crc, data)


class Portion:
    """Consecutive blocks of a run in one range. missing: holders that don't have it yet. void: it was cut again."""

    __slots__ = ("acked", "attempt", "blocks", "missing", "number", "run", "size", "void")

    def __init__(self, attempt: tuple[int, str], number: int, run: int, blocks: list[Held]) -> None:
        """number: of the range."""
        self.attempt, self.number, self.run, self.blocks = attempt, number, run, blocks
        self.size = sum(held.size for held in blocks)
        self.acked: set[str] = set()
        self.missing: set[str] = set()
        self.void = False

    def piece(self) -> Piece:
        """As it travels. Blocking. Raises AttemptLost."""
        return Piece(*self.attempt, self.run, [held.block() for held in self.blocks])


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
