"""What a buffer holds: blocks, in memory or in their attempt's temporary file, and portions of runs on their way to a range.

Plain values on the follower's loop; the temporary file is written and read in threads. It has no name: nothing is left of it
when the process ends.
"""

from __future__ import annotations

import os
import tempfile
import threading
from pathlib import Path

from roq.errors import AttemptLost
from roq.wire.shuffle import Block, Piece, Position


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
                view = memoryview(part)
                places.append(self._size)
                while view:
                    written = os.pwrite(self._file, view, self._size)
                    self._size += written
                    view = view[written:]
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
