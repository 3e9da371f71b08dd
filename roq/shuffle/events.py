"""What happens to the leader's machine of a shuffle, and what it wants to have done (plan.py). Values only."""

from __future__ import annotations

from dataclasses import dataclass

from roq.errors import RoqError
from roq.shuffle.record import FollowerHosts, NewTable, ShuffleRecord
from roq.wire import shuffle as wire
from roq.wire.shuffle import Receipt, RunSample

# --- events ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class AttemptReported:
    """A buffer role tells what it has."""

    samples: tuple[RunSample, ...]
    stored: tuple[Receipt, ...]
    wanted: bool


@dataclass(frozen=True)
class Commit:
    """The committed attempts. Raises AttemptConflict, ShuffleSealed."""

    receipts: tuple[Receipt, ...]


@dataclass(frozen=True)
class Rebalance:
    """Split anew. Raises ShuffleNotSealed, NotReady (another one is under way, or data moves)."""

    transaction: str
    ranges: int


@dataclass(frozen=True)
class Remove:
    """Forget everything."""

    transaction: str


@dataclass(frozen=True)
class Touched:
    """Somebody is about to go on with it."""


@dataclass(frozen=True)
class RecordWritten:
    """The record is written."""


@dataclass(frozen=True)
class TableComputed:
    """Answer to ComputeTable."""

    id: int
    table: NewTable


@dataclass(frozen=True)
class Answered:
    """A follower has answered."""

    id: int
    reply: wire.Reply


@dataclass(frozen=True)
class FollowerFailed:
    """A follower has not answered in time, or refused. final: asking again is of no use."""

    id: int
    final: bool = False


@dataclass(frozen=True)
class TimePassed:
    """Time has passed."""


Event = (
    FollowerHosts
    | AttemptReported
    | Commit
    | Rebalance
    | Remove
    | Touched
    | RecordWritten
    | TableComputed
    | Answered
    | FollowerFailed
    | TimePassed
)


# --- instructions ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class WriteRecord:
    """Make the record durable, then say Written."""

    record: ShuffleRecord


@dataclass(frozen=True)
class Ask:
    """Ask a follower; Answered or (after a pause) Failed. An id that comes again: the former request is not waited for."""

    id: int
    host: str
    request: wire.Request


@dataclass(frozen=True)
class ComputeTable:
    """Work out a new table (record.new_table), then say Cut."""

    id: int
    record: ShuffleRecord
    samples: tuple[RunSample, ...]
    count: int
    hosts: frozenset[str]


@dataclass(frozen=True)
class Refuse:
    """What was named can't be committed; who waits for that is told."""

    error: RoqError


@dataclass(frozen=True)
class Wake:
    """Say Tick after so many seconds."""

    seconds: float


@dataclass(frozen=True)
class DeleteShuffle:
    """Every follower that runs has forgotten it."""


Instruction = WriteRecord | Ask | ComputeTable | Refuse | Wake | DeleteShuffle
