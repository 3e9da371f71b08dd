"""What every shuffle does, whatever its address, and who does it. The values are in roq/wire/shuffle.py. No pyarrow here.

A shuffle takes the rows of many *partitions* (what one task writes) and gives them back as *ranges* (what one task reads), in
key order. A partition may be written several times: each *attempt* has an id of its own, and commit names the one that counts.
An attempt sorts what it has as often as its memory is full: each sorted stretch is a *run*. Runs travel and lie in *blocks*.

Every row has a place in one total order, its `Position`, so that a key with many rows can be cut too, and what is cut is the
same wherever it is cut.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

from roq.wire.shuffle import Block, Description, Interval, Receipt, RunSample, RunSlice, Spec


class AttemptSink(Protocol):
    """Where one attempt's sorted runs go, one after the other."""

    def send(self, blocks: Sequence[Block]) -> None:
        """Blocks of the run in order, BLOCKS_BYTES_MAX of them unless a single one is larger. Waits while the other side has no
        room. Raises Unavailable, StorageFull, AttemptLost."""

    def end(self, sample: RunSample) -> None:
        """The run is complete; the next blocks belong to the next one."""

    def finish(self, receipt: Receipt) -> None:
        """Returns when every row is on stable storage, as often as the shuffle's replicas say. Raises as send."""

    def abandon(self) -> None:
        """Forget the attempt. Never raises."""


class Opened(NamedTuple):
    """What a source has rows of: an interval of a shuffle, by its id. The rows in it are the same ones for ever once it is
    sealed, and the numbers of ranges are not: after another cut number 3 is another interval."""

    shuffle: str
    interval: Interval


class SliceSource(Protocol):
    """Where sorted rows come from."""

    slices: Sequence[RunSlice]

    def blocks(self, slice: RunSlice) -> Iterator[Block]:
        """Blocks that cover the slice, in order; the first and the last may reach beyond it. Checked against their CRC. Raises
        Unavailable, DataLost."""

    def close(self) -> None:
        """Let go."""


class RangeSource(SliceSource, Protocol):
    """Where one range's rows come from; it turns to another replica by itself. opened: what the range's number stood for when
    the slices were looked up."""

    opened: Opened


class ShuffleService(Protocol):
    """An address's shuffles. Blocking; any thread. Every call may raise Closed, CallError or a TemporaryError."""

    def create(self, name: str, spec: Spec) -> Description:
        """Idempotent. Raises ShuffleConflict if it exists with another spec."""

    def describe(self, name: str) -> Description:
        """Raises ShuffleNotFound."""

    def list(self) -> list[Description]:
        """All, by name."""

    def remove(self, name: str) -> None:
        """Forget it and its data. Raises ShuffleNotFound."""

    def open_attempt(self, name: str, partition: int, attempt: str) -> AttemptSink:
        """Raises ShuffleNotFound, ShuffleSealed, AttemptConflict (this very attempt was begun before)."""

    def commit(self, name: str, receipts: Sequence[Receipt]) -> Description:
        """Name the committed attempts and seal: returns when readers may read. The same receipts again: the same answer. Raises
        ShuffleSealed (with other committed attempts), AttemptConflict (two attempts of one partition), AttemptNotFound (never
        stored)."""

    def rebalance(self, name: str, ranges: int = 0) -> Description:
        """Cut a sealed shuffle anew, into `ranges` (0: as many as it has). Returns when the data has moved."""

    def open_range(self, name: str, number: int) -> RangeSource:
        """Raises ShuffleNotFound, ShuffleNotSealed, CallError (no such range)."""

    def close(self) -> None:
        """Let go."""
