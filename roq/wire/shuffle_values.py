"""The values that every room of a shuffle shares, and their limits. What is said to followers with them: shuffle.py; to the
leader: gcm.py."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

import msgspec

PARTITIONS_MAX = 1_000_000  # partition numbers are below it
RANGES_MAX = 10_000
REPLICAS_MAX = 16
KEY_BYTES_MAX = 64 * 1024  # of one encoded key
BLOCK_BYTES = 256 * 1024  # a block is closed when it has so many bytes …
BLOCK_ROWS = 8192  # … or rows; a single row may be larger
ROW_BYTES_MAX = 7 * 1024 * 1024  # it must fit one message, with its keys (limits.CONTROL_BYTES_MAX)
BLOCKS_BYTES_MAX = 2 * 1024 * 1024  # of blocks in one message, unless a single one is larger
SAMPLE_KEYS_MAX = 4096  # of one run
SAMPLE_BYTES_MAX = 512 * 1024  # of the keys of one run's sample: it travels in one message, and several in a report
WINNERS_AT_ONCE = 20_000  # in one message; receipts too: 1.4 MiB with usual names
Cursor = tuple[int, str, int]  # partition, attempt, run: a page begins there
BEGIN: Cursor = (-1, "", 0)


class Position(NamedTuple):
    """Place of a row in the total order. key: encoded (keys.py). run: number within its attempt. row: number within the run.

    The attempt is no part of it: only one attempt of a partition counts.
    """

    key: bytes
    partition: int
    run: int
    row: int


class ShuffleState(StrEnum):
    """Where a shuffle is in its life."""

    FILLING = "filling"  # attempts are written
    SEALING = "sealing"  # the winners are named; ranges are checked, balanced, moved
    SEALED = "sealed"  # readers may read
    REMOVED = "removed"


class Spec(msgspec.Struct, frozen=True):
    """What a shuffle is created with. schema: a serialized pyarrow.Schema. ranges: 0 for as many as fit the cluster and the
    data. replicas: followers that hold each range (a folder has one copy whatever is said)."""

    keys: tuple[str, ...]
    schema: bytes
    replicas: int = 2
    ranges: int = 0


class Receipt(msgspec.Struct, frozen=True):
    """An attempt is stored, all of it. size: bytes of its blocks."""

    partition: int
    attempt: str
    rows: int
    size: int
    runs: int


class RunSample(msgspec.Struct, frozen=True):
    """Regular sample of one run: the rows at every so many bytes. keys[i] is the key of row rows_at[i], or (long keys) as much
    of its begin as tells it from the row before; weights[i] the bytes from there to the next one (to the end of the run). The
    first row is one of them, unless the run is empty. At most SAMPLE_BYTES_MAX of keys."""

    partition: int
    attempt: str
    run: int
    rows: int
    size: int
    keys: tuple[bytes, ...]
    rows_at: tuple[int, ...]
    weights: tuple[int, ...]


class Interval(msgspec.Struct, frozen=True):
    """Rows from `lower` on and before `upper`; None: no bound on this side."""

    lower: Position | None
    upper: Position | None


class Range(msgspec.Struct, frozen=True):
    """One range of a table. identity: what its holders are chosen by, kept when the borders move a little. rows, size: counted
    when it was sealed, -1 before. holders: followers (host names) that hold it whole, in no order; () in a folder."""

    number: int
    identity: int
    interval: Interval
    rows: int = -1
    size: int = -1
    holders: tuple[str, ...] = ()


class Description(msgspec.Struct, frozen=True):
    """A shuffle as it is now. ranges: what readers read by (epoch: number of the last table, 0 while there is none); former:
    the other table while data moves, the one before or the one that comes; readers try the holders of both. winners:
    partition → attempt. rows, size: of the winners. stored: attempts whose data is stored so far. moved, moved_least: bytes
    that rebalancing has sent, and the least the overlap of old and new ranges demands."""

    name: str
    id: str
    spec: Spec
    state: ShuffleState
    created: float
    epoch: int
    ranges: tuple[Range, ...]
    former: tuple[Range, ...]
    winners: dict[int, str]
    rows: int
    size: int
    stored: int
    moved: int
    moved_least: int


class Block(msgspec.Struct, frozen=True, array_like=True):
    """Consecutive rows of one run. data: an Arrow IPC record batch message, without its schema. crc: CRC-32 of data."""

    first: int
    rows: int
    first_key: bytes
    last_key: bytes
    crc: int
    data: bytes


class RunSlice(msgspec.Struct, frozen=True, array_like=True):
    """The rows first … first+rows-1 of one winning run, which lie in the range that is read."""

    partition: int
    attempt: str
    run: int
    first: int
    rows: int
