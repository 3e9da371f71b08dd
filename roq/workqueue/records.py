"""The records of a work queue's log, and how they are written. Pure: no IO, no clock.

One entry of a log is a version byte followed by a msgpack array of records; a record is an array that starts with its number.

    +----+---------------------------------------------------+
    | 01 | [[1, now, producer, sequence, payload, …], [3, …]] |
    +----+---------------------------------------------------+

Every record carries `now`, its appender's time in milliseconds since 1970; the fold (state.py) takes its time from there and
reads no clock. Durations count from the highest `now` of the log so far. An instance is one life of a process (or client) that
leases: a random number that is never used again. What a record does: state.py. A reader that meets a version, a record or a
field it does not know must halt: skipping one would make its state differ from everybody else's.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from roq.errors import UnknownFormat
from roq.wire.decoding import UNDECODABLE
from roq.wire.work_queue import TaskSettings
from roq.workqueue.contract import LEASE_COUNT_MAX

VERSION = 1
COPIED_BYTES = 1024  # a copy of so few takes less time than a view of them
POP_SHIFT = 10  # delivery number = LSN of the Pop << POP_SHIFT | place within it
assert LEASE_COUNT_MAX < 1 << POP_SHIFT


class BlobRef(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """A payload that is kept elsewhere. size: bytes; crc: CRC-32 of them; holders: hosts that have a copy."""

    blob: str
    size: int
    crc: int
    holders: tuple[str, ...]


Payload = bytes | BlobRef
TaskKey = tuple[int, int]  # producer, sequence


class Push(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False, tag=1):
    """A new task, ready after `delay_ms`. (producer, sequence) is its id: a record with one seen before changes nothing."""

    now: int
    producer: int
    sequence: int  # from 1; a producer skips none on purpose
    payload: Payload
    priority: int = 0
    delay_ms: int = 0
    dedup_key: str = ""


class Pop(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False, tag=2):
    """Lease up to `count` tasks. If there are none: nothing when wait_ms is 0, else the first that comes within that time.
    (instance, nonce) is its identity: a record with one seen before leases nothing more."""

    now: int
    instance: int
    nonce: int  # from 1, counted by the instance
    count: int
    lease_ms: int
    wait_ms: int = 0


class Complete(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False, tag=3):
    """The task of this delivery is done. Like all records with a delivery: nothing, if that is not the current one."""

    now: int
    delivery: int
    instance: int


class Requeue(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False, tag=4):
    """End this delivery; its task is ready again after `delay_ms`, or dead if it was leased too often.

    due: 0 when the holder gives it back. A monitor that saw a lease run out names the end it saw; if the lease was extended
    since, nothing. error: "" keeps the one before; given back by the holder without one, the task was not tried and does not
    die of it.
    """

    now: int
    delivery: int
    instance: int
    due: int = 0
    delay_ms: int = 0
    error: str = ""


class ExtendLease(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False, tag=5):
    """The lease of this delivery ends `lease_ms` from now."""

    now: int
    delivery: int
    instance: int
    lease_ms: int


class DeadLetter(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False, tag=6):
    """End this delivery; its task is a dead letter."""

    now: int
    delivery: int
    instance: int
    error: str


class Cancel(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False, tag=7):
    """This Pop waits no longer. What it was given stays its own."""

    now: int
    instance: int
    nonce: int


class InstanceDead(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False, tag=8):
    """This instance is gone: its Pops wait no longer, later ones are refused, its deliveries end as by Requeue."""

    now: int
    instance: int
    error: str = ""


class Tick(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False, tag=9):
    """Time has come to `now`: delayed tasks get ready, Pops that waited too long are answered with nothing."""

    now: int


class Configure(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False, tag=10):
    """Settings from now on, if nobody configured the queue since `version` (0: at all)."""

    now: int
    settings: TaskSettings
    version: int


class Purge(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False, tag=11):
    """Remove every task that is not dead, and forget the dedup keys."""

    now: int


class ReleaseAll(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False, tag=12):
    """Every leased and every delayed task is ready; no task dies of it."""

    now: int


class RequeueDead(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False, tag=13):
    """These dead letters (None: all) are ready again, with no attempts."""

    now: int
    tasks: tuple[TaskKey, ...] | None


class RemoveDead(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False, tag=14):
    """Forget these dead letters (None: all)."""

    now: int
    tasks: tuple[TaskKey, ...] | None


class HoldersReplaced(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False, tag=15):
    """The payload of this task is held by these hosts from now on, if it is still that blob."""

    now: int
    task: TaskKey
    blob: str
    holders: tuple[str, ...]


Record = (
    Push
    | Pop
    | Complete
    | Requeue
    | ExtendLease
    | DeadLetter
    | Cancel
    | InstanceDead
    | Tick
    | Configure
    | Purge
    | ReleaseAll
    | RequeueDead
    | RemoveDead
    | HoldersReplaced
)

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(list[Record])
_HEAD = bytes((VERSION,))


def encode(records: Sequence[Record]) -> bytes:
    """One entry of a log."""
    return _HEAD + _encoder.encode(records)


def decode(entry: bytes | memoryview) -> list[Record]:
    """The records of an entry. UnknownFormat: another version wrote it, or it is damaged; do not read on."""
    if not entry or entry[0] != VERSION:
        raise UnknownFormat(f"a log entry of format {entry[0] if entry else 'nothing'}; this program reads format {VERSION}")
    try:
        return _decoder.decode(entry[1:] if len(entry) < COPIED_BYTES else memoryview(entry)[1:])
    except UNDECODABLE as error:
        raise UnknownFormat(f"a log entry can't be read: {error}") from error
