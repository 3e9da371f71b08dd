"""Shuffles on the wire: the values that all who speak of shuffles share, their limits, and the conversation with a follower
(its ROUTER ↔ DEALER).

A follower is the part of a host's store that takes part in shuffles. It has two roles: a *buffer* takes attempts from writers,
cuts their runs by the table of ranges and has the pieces stored; *storage* keeps pieces, gives them to readers, and fetches
them from other followers. Requests of the leader carry its epoch; a follower refuses one below the highest it has seen
(StaleEpoch). What is stored, fetched or forgotten is so on stable storage when it is answered. Without room a follower answers
Overloaded.

Committed attempts are many: queries and commands carry their digest (roq/shuffle/committed.py) instead, and whoever does not
know them raises WinnersUnknown and is told them (NameCommitted). What can be long comes in pages: an answer's `next` is where
the next page begins, None on the last one. Not covered: the conversation with the leader (gcm.py).
"""

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
COMMITTED_AT_ONCE = 20_000  # in one message; receipts too: 1.4 MiB with usual names
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
    SEALING = "sealing"  # the committed attempts are named; ranges are checked, balanced, moved
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
    when it was sealed, -1 before. holders: followers (host names) that hold it complete, in no order; () in a folder."""

    number: int
    identity: int
    interval: Interval
    rows: int = -1
    size: int = -1
    holders: tuple[str, ...] = ()


class Description(msgspec.Struct, frozen=True):
    """A shuffle as it is now. ranges: what readers read by (epoch: number of the last table, 0 while there is none); former:
    the other table while data moves, the one before or the one that comes; readers try the holders of both. winners: the
    committed attempts, partition → attempt. rows, size: of the committed attempts. stored: attempts whose data is stored so
    far. moved, moved_least: bytes that rebalancing has sent, and the least the overlap of old and new ranges demands."""

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
    """The rows first … first+rows-1 of one committed run, which lie in the range that is read."""

    partition: int
    attempt: str
    run: int
    first: int
    rows: int


# --- buffer role ------------------------------------------------------------------------------------------------------


class OpenAttempt(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Begin an attempt here. The same again, by the same writer token: fine. By another one: AttemptConflict."""

    shuffle: str
    name: str
    spec: Spec
    partition: int
    attempt: str
    writer: str


class SendBlocks(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Blocks of one run. `number`: of this message within the attempt, from 0; a repeated one is dropped and answered Done."""

    shuffle: str
    partition: int
    attempt: str
    number: int
    run: int
    blocks: list[Block]


class EndRun(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The run is complete."""

    shuffle: str
    number: int
    sample: RunSample


class FinishAttempt(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Answered Done when all of it is on stable storage at `replicas` followers of every range. Asked again after silence;
    waits at most `wait_seconds`, then Overloaded ("not yet"). AttemptLost: this follower knows nothing of it (any more)."""

    shuffle: str
    receipt: Receipt
    wait_seconds: float


class AbandonAttempt(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Forget it."""

    shuffle: str
    partition: int
    attempt: str


# --- storage role -----------------------------------------------------------------------------------------------------


class Piece(msgspec.Struct, frozen=True, array_like=True):
    """Consecutive blocks of one run."""

    partition: int
    attempt: str
    run: int
    blocks: list[Block]


class StorePieces(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Keep these. What is here already is not stored twice."""

    shuffle: str
    name: str
    spec: Spec
    pieces: list[Piece]


class NameCommitted(msgspec.Struct, frozen=True, tag="NameWinners", array_like=True):
    """Remember these, to be named by their digest from then on. committed: a part of them, in order of partitions. number: of
    the part, from 0. last: no part follows. Anybody may tell them: a digest has but one meaning."""

    shuffle: str
    name: str
    spec: Spec
    digest: str
    number: int
    last: bool
    committed: dict[int, str]


class ListSlices(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """What of the committed attempts (digest: or of those) lies in the interval here, cut exactly at its bounds. every: of all
    attempts. begin: of the page."""

    shuffle: str
    interval: Interval
    committed: dict[int, str]
    every: bool = False
    digest: str = ""
    begin: Cursor = BEGIN


class ReadBlocks(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Blocks of a run from the one with row `first` on, as many as fit `size`, but one at least; none that begins after `last`.
    Empty: row `first` is not here. DataLost: it is damaged here (and forgotten from now on)."""

    shuffle: str
    partition: int
    attempt: str
    run: int
    first: int
    last: int
    size: int = BLOCKS_BYTES_MAX


class CutBlocks(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """As ReadBlocks, but cut exactly at `first` and `last`."""

    shuffle: str
    partition: int
    attempt: str
    run: int
    first: int
    last: int


class TellSpec(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Name and spec of a shuffle that is stored here. Raises ShuffleNotFound."""

    shuffle: str


class TellSamples(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Samples of what is stored of the committed attempts within these intervals (a leader computes its distribution from
    them). keys: how many are enough; 0: none, only how many rows and bytes there are, once per attempt (as of run 0)."""

    shuffle: str
    intervals: list[Interval]
    committed: dict[int, str]
    keys: int = SAMPLE_KEYS_MAX
    digest: str = ""
    begin: Cursor = BEGIN


class CountRows(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Per interval: rows and bytes of the committed attempts here. The pages add up."""

    shuffle: str
    intervals: list[Interval]
    committed: dict[int, str]
    digest: str = ""
    begin: Cursor = BEGIN


class FetchInterval(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Leader: have everything of the committed attempts in the interval here; fetch what is missing from the sources
    (endpoints), which all hold it complete. No committed attempts and no digest: every attempt. Answered when it is complete
    here, or when that takes long: asked again until it is. table_epoch: of the table that gives it the interval."""

    epoch: int
    shuffle: str
    interval: Interval
    committed: dict[int, str]
    sources: list[str]
    table_epoch: int = 0
    digest: str = ""


class KeepIntervals(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Leader: forget what lies outside of these intervals, and (sealed) what is not the committed attempts'. table_epoch: of
    the table they are of; refused (TemporaryError) below the highest of any FetchInterval or KeepIntervals of the shuffle."""

    epoch: int
    shuffle: str
    intervals: list[Interval]
    committed: dict[int, str]
    sealed: bool
    table_epoch: int = 0
    digest: str = ""


class ForgetShuffle(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Leader: forget all of it, in both roles; attempts under way fail with AttemptLost."""

    epoch: int
    shuffle: str


class TableChanged(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Leader: ask for the table again before storing more of this shuffle."""

    epoch: int
    shuffle: str
    table_epoch: int


class DescribeFollower(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """How are you?"""


# --- answers ----------------------------------------------------------------------------------------------------------


class FollowerDone(msgspec.Struct, frozen=True, tag="Done", array_like=True):
    """It is so."""


class Slices(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Answer to ListSlices; sizes[i]: bytes of slices[i], about."""

    slices: list[RunSlice]
    sizes: list[int]
    next: Cursor | None = None


class Blocks(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Answer to ReadBlocks; empty: none from there on."""

    blocks: list[Block]


class SpecTold(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Answer to TellSpec."""

    name: str
    spec: Spec


class Samples(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Answer to TellSamples."""

    samples: list[RunSample]
    next: Cursor | None = None


class Counts(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Answer to CountRows, one item per interval."""

    rows: list[int]
    sizes: list[int]
    next: Cursor | None = None


class Fetched(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Answer to FetchInterval. size: bytes of blocks that were sent for it. complete: it is; else it goes on, ask again."""

    size: int
    complete: bool = True


class FollowerView(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Answer to DescribeFollower. paused: above its watermark. lacking: ids of sealed shuffles that are not complete here;
    compared: it has been found out, since its start, which ones it should hold."""

    host: str
    memory_bytes: int
    memory_bytes_max: int
    paused: bool
    attempts: int
    shuffles: dict[str, int]  # bytes stored, by shuffle id
    counters: dict[str, int]
    lacking: tuple[str, ...] = ()
    compared: bool = True


Request = (
    OpenAttempt
    | SendBlocks
    | EndRun
    | FinishAttempt
    | AbandonAttempt
    | StorePieces
    | NameCommitted
    | ListSlices
    | ReadBlocks
    | CutBlocks
    | TellSpec
    | TellSamples
    | CountRows
    | FetchInterval
    | KeepIntervals
    | ForgetShuffle
    | TableChanged
    | DescribeFollower
)
AboutCommitted = ListSlices | TellSamples | CountRows | FetchInterval | KeepIntervals  # by their digest, or one by one
Reply = FollowerDone | Slices | Blocks | SpecTold | Samples | Counts | Fetched | FollowerView
