"""What the follower needs to have done with the rows inside of a block, by whoever can decode it (cutting.py: with pyarrow)."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Sequence
from typing import Protocol

from roq.errors import InvalidConfiguration
from roq.runtime.installation import install
from roq.wire.shuffle import Block, Position, Spec


class Cutter(Protocol):
    """Blocking; any thread. Raises DataLost if the block's data is no such rows."""

    def keys(self, spec: Spec, block: Block) -> Sequence[bytes]:
        """The encoded keys of its rows, in order."""

    def part(self, spec: Spec, block: Block, first: int, end: int) -> Block:
        """Its rows numbered first … end-1 as a block of their own."""

    def divide(self, spec: Spec, block: Block, place: tuple[int, int], borders: Sequence[Position]) -> list[tuple[int, Block]]:
        """(number of borders before it, block): the block of this run, (partition, run), cut at the borders."""

    def check(self) -> None:
        """Raises InvalidConfiguration if it can't do that here."""


class LazyCutter:
    """Imports pyarrow when the first block has to be looked into: most stores of most clusters never see a shuffle. Raises
    InvalidConfiguration where it is not installed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._cutter: Cutter | None = None

    def _loaded(self) -> Cutter:
        with self._lock:
            if self._cutter is None:
                try:
                    made: Cutter = importlib.import_module("roq.shuffle.node.cutting").ArrowCutter()
                except ImportError as error:
                    raise InvalidConfiguration(
                        f"this host's store can't take part in shuffles: {install('shuffle')} ({error})"
                    ) from error
                self._cutter = made
            return self._cutter

    def keys(self, spec: Spec, block: Block) -> Sequence[bytes]:
        """See Cutter."""
        return self._loaded().keys(spec, block)

    def part(self, spec: Spec, block: Block, first: int, end: int) -> Block:
        """See Cutter."""
        return self._loaded().part(spec, block, first, end)

    def divide(self, spec: Spec, block: Block, place: tuple[int, int], borders: Sequence[Position]) -> list[tuple[int, Block]]:
        """See Cutter."""
        return self._loaded().divide(spec, block, place, borders)

    def check(self) -> None:
        """See Cutter."""
        self._loaded()
