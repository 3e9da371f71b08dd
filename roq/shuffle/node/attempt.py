"""What a buffer holds: attempts, their blocks (in memory or in a temporary file), and parts of runs on their way to a range.

Plain values on the follower's loop; the temporary file is written and read in threads. It has no name: nothing is left of it
when the process ends.
"""

from __future__ import annotations

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

    def write(self, data: bytes) -> int:
        """Where it begins."""
        with self._lock:
            place = self._size
            DISK.write_all(self._file, data, place)
            self._size += len(data)
        return place

    def read(self, offset: int, size: int) -> bytes:
        """Written bytes."""
        data = os.pread(self._file, size, offset)
        if len(data) < size:
            raise OSError(f"a temporary file ends at {offset + len(data)}")
        return data

    def __del__(self) -> None:
        os.close(self._file)


class BufferedBlock:
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


class Part:
    """Consecutive blocks of a run in one range. missing: holders that don't have it yet. void: it was split again."""

    __slots__ = ("acked", "attempt", "blocks", "missing", "number", "run", "size", "void")

    def __init__(self, attempt: tuple[int, str], number: int, run: int, blocks: list[BufferedBlock]) -> None:
        """number: of the range."""
        self.attempt, self.number, self.run, self.blocks = attempt, number, run, blocks
        self.size = sum(block.size for block in blocks)
        self.acked: set[str] = set()
        self.missing: set[str] = set()
        self.void = False

    def piece(self) -> Piece:
        """As it travels. Blocking. Raises AttemptLost."""
        return Piece(*self.attempt, self.run, [block.block() for block in self.blocks])


def sample_bytes(sample: RunSample) -> int:
    """Of its keys."""
    return sum(map(len, sample.keys))


class Attempt:
    """place: (partition, attempt). next_number: of its next message. touched: when somebody last spoke of it."""

    def __init__(self, partition: int, id: str, writer: str, now: float) -> None:
        self.place, self.writer, self.touched = (partition, id), writer, now
        self.next_number = 0
        self.unsplit: deque[BufferedBlock] = deque()  # a block is here, or in a part that is open or stored, or let go of
        self.open: set[Part] = set()
        self.stored: set[Part] = set()
        self.samples: list[RunSample] = []  # of whole runs, while there is no table
        self.receipt: Receipt | None = None  # nothing more comes
        self.failed: RoqError | None = None
        self.done = False  # the leader knows all is stored, or it failed
        self.spill: Spill | None = None
        self._rows = self._runs = self._run_rows = 0  # of whole runs; of the one that is being taken

    @property
    def complete(self) -> bool:
        """All of it is with all holders."""
        return self.receipt is not None and not (self.unsplit or self.open or self.failed)

    def is_next(self, number: int) -> bool:
        """A message came; False: it came before. Raises AttemptLost: one before it never came."""
        if number > self.next_number:
            raise AttemptLost(f"message {self.next_number} of attempt {self.place[1]} never came")
        return number == self.next_number

    def took(self, run: int, blocks: list[Block]) -> list[BufferedBlock]:
        """The next blocks of a run. Raises CallError: they aren't the next ones."""
        if self.receipt is not None or run != self._runs:
            raise CallError(f"run {run} of attempt {self.place}: the next one is {self._runs}")
        for block in blocks:
            if block.first != self._run_rows or block.rows < 1 or block.first_key > block.last_key:
                raise CallError(
                    f"rows {block.first} … of run {run} of attempt {self.place}: row {self._run_rows} is the next one"
                )
            self._run_rows += block.rows
        made = [BufferedBlock(run, block) for block in blocks]
        self.unsplit.extend(made)
        return made

    def ended(self, sample: RunSample) -> None:
        """The run is complete. Raises CallError."""
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

    def holding(self) -> Iterator[BufferedBlock]:
        """All blocks."""
        yield from self.unsplit
        for part in [*self.open, *self.stored]:
            yield from part.blocks

    def holds(self, part: Part, *, stored: bool) -> None:
        """The part is with all holders, or not."""
        (self.open if stored else self.stored).discard(part)
        (self.stored if stored else self.open).add(part)

    def void(self) -> None:
        """Nothing is held of it any more."""
        self.unsplit.clear()
        for part in [*self.open, *self.stored]:
            part.void = True
        self.open.clear()
        self.stored.clear()

    def split_again(self) -> None:
        """All that is held is to be split anew."""
        found = sorted(self.holding(), key=lambda block: (block.run, block.first))
        self.void()
        self.unsplit.extend(found)
