"""Shuffles on the wire: the conversation with a follower (its ROUTER ↔ DEALER), and the values of shuffle_values.py.

A follower is the part of a host's store that takes part in shuffles. It has two roles: a *buffer* takes attempts from writers,
cuts their runs by the table of ranges and has the pieces stored; *storage* keeps pieces, gives them to readers, and fetches
them from other followers. Requests of the leader carry its epoch; a follower refuses one below the highest it has seen
(StaleEpoch). What is stored, fetched or forgotten is so on stable storage when it is answered. Without room a follower answers
Overloaded.

Winners are many: questions and orders carry their digest (roq/shuffle/committed.py) instead, and whoever does not know them
raises WinnersUnknown and is told them (NameWinners). What can be long comes in pages: an answer's `next` is where the next page
begins, None on the last one. Not covered: the conversation with the leader (gcm.py).
"""

from __future__ import annotations

import msgspec

from roq.wire.shuffle_values import (
    BEGIN,
    BLOCK_BYTES,
    BLOCK_ROWS,
    BLOCKS_BYTES_MAX,
    KEY_BYTES_MAX,
    PARTITIONS_MAX,
    RANGES_MAX,
    REPLICAS_MAX,
    ROW_BYTES_MAX,
    SAMPLE_BYTES_MAX,
    SAMPLE_KEYS_MAX,
    WINNERS_AT_ONCE,
    Block,
    Cursor,
    Description,
    Interval,
    Position,
    Range,
    Receipt,
    RunSample,
    RunSlice,
    ShuffleState,
    Spec,
)

__all__ = [  # values, as all who speak of shuffles import them from here
    "BEGIN",
    "BLOCKS_BYTES_MAX",
    "BLOCK_BYTES",
    "BLOCK_ROWS",
    "KEY_BYTES_MAX",
    "PARTITIONS_MAX",
    "RANGES_MAX",
    "REPLICAS_MAX",
    "ROW_BYTES_MAX",
    "SAMPLE_BYTES_MAX",
    "SAMPLE_KEYS_MAX",
    "WINNERS_AT_ONCE",
    "Block",
    "Cursor",
    "Description",
    "Interval",
    "Position",
    "Range",
    "Receipt",
    "RunSample",
    "RunSlice",
    "ShuffleState",
    "Spec",
]


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
    """The run is whole."""

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


class NameWinners(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Remember these, to be named by their digest from then on. winners: a part of them, in order of partitions. number: of the
    part, from 0. last: no part follows. Anybody may tell them: a digest has but one meaning."""

    shuffle: str
    name: str
    spec: Spec
    digest: str
    number: int
    last: bool
    winners: dict[int, str]


class ListSlices(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """What of the winners (digest: or of those) lies in the interval here, cut exactly at its bounds. every: of all attempts.
    begin: of the page."""

    shuffle: str
    interval: Interval
    winners: dict[int, str]
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
    """Samples of what is stored of the winners within these intervals (a leader computes its distribution from them). keys: how
    many are enough; 0: none, only how many rows and bytes there are, once per attempt (as of run 0)."""

    shuffle: str
    intervals: list[Interval]
    winners: dict[int, str]
    keys: int = SAMPLE_KEYS_MAX
    digest: str = ""
    begin: Cursor = BEGIN


class CountRows(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Per interval: rows and bytes of the winners here. The pages add up."""

    shuffle: str
    intervals: list[Interval]
    winners: dict[int, str]
    digest: str = ""
    begin: Cursor = BEGIN


class FetchInterval(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Leader: have everything of the winners in the interval here; fetch what is missing from the sources (endpoints), which
    all hold it whole. No winners and no digest: every attempt. Answered when it is whole here, or when that takes long: asked
    again until it is. table_epoch: of the table that gives the interval to this follower."""

    epoch: int
    shuffle: str
    interval: Interval
    winners: dict[int, str]
    sources: list[str]
    table_epoch: int = 0
    digest: str = ""


class KeepIntervals(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Leader: forget what lies outside of these intervals, and (sealed) what is not the winners'. table_epoch: of the table
    they are of; refused (TemporaryError) below the highest of any FetchInterval or KeepIntervals of the shuffle."""

    epoch: int
    shuffle: str
    intervals: list[Interval]
    winners: dict[int, str]
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
    """Answer to FetchInterval. size: bytes of blocks that were sent for it. whole: it is; else it goes on, ask again."""

    size: int
    whole: bool = True


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
    | NameWinners
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
Reply = FollowerDone | Slices | Blocks | SpecTold | Samples | Counts | Fetched | FollowerView
