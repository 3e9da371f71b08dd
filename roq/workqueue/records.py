"""The records of a work queue's log, how they are written, and which of their numbers were used. Pure: no IO, no clock.

One entry of a log is a version byte followed by a msgpack array of records; a record is an array that starts with its number.

    +----+---------------------------------------------------+
    | 01 | [[1, now, producer, sequence, payload, …], [3, …]] |
    +----+---------------------------------------------------+

Every record carries `now`, its appender's time in milliseconds since 1970; the fold (fold.py) takes its time from there and
reads no clock. Durations count from the highest `now` of the log so far. An instance is one life of a process (or client) that
leases: a random number that is never used again. What a record does: fold.py; a Pop that waits: state.py. A
reader that meets a version, a record or a field it does not know must halt: skipping one would make its state differ from
everybody else's.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from enum import StrEnum

import msgspec

from roq.errors import UnknownFormat
from roq.wire.decoding import UNDECODABLE
from roq.wire.work_queue import TaskSettings
from roq.workqueue.contract import LEASE_COUNT_MAX

VERSION = 1
COPIED_BYTES = 1024  # a copy of so few takes less time than a view of them
POP_SHIFT = 10  # delivery number = LSN of the Pop << POP_SHIFT | place within it
GAPS_MAX = 128  # puts that failed, or are still on their way in other threads
SENDER_IDLE_MS = 3_600_000  # far above any time-out after which a client still repeats a request
LASTING_IDLE_MS = 90 * 86_400_000
LASTING = 0x5A17  # the upper 16 bits of such ids; of a random one they are so once in 65,536 times, which does no harm
SENDERS_MAX = 100_000  # above it the longest idle are forgotten early
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


class FeedMessage(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False, tag=16):
    """A message of the recorded queue that this group takes from. (publisher, sequence) is its id: one whose number is not
    above all that came of its publisher changes nothing. published: ms. ordered: those of its topic go one after the other.
    expires: ms from which on nobody is to get it any more, 0: never."""

    now: int
    publisher: int
    sequence: int
    payload: bytes
    topic: str
    published: int
    ordered: bool
    priority: int = 0
    expires: int = 0


class FeedPosition(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False, tag=17):
    """Everything is in the group up to these entries of the tapes, by Exchange. missed: gaps since the position before."""

    now: int
    done: dict[str, int]
    missed: int = 0


class FeedMessages(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False, tag=20):
    """Several of a publisher that are alike but for number and payload, as so many FeedMessages. messages: in their order."""

    now: int
    publisher: int
    topic: str
    published: int
    ordered: bool
    messages: tuple[tuple[int, bytes], ...]
    priority: int = 0
    expires: int = 0


class CompleteMany(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False, tag=21):
    """As a Complete of each of these deliveries. runs: (first, how many in a row)."""

    now: int
    instance: int
    runs: tuple[tuple[int, int], ...]


class Outgoing(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """What a transaction publishes to one recorded queue, in this order: topic, and payload behind its headers."""

    queue: str
    messages: tuple[tuple[str, bytes], ...]


class CommitTransaction(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False, tag=18):
    """A transaction: the tasks of all these deliveries (number, instance) are done and the messages are on their way, or, if
    one of them is not current, nothing. (producer, sequence) is its identity: a record with one that took effect changes
    nothing."""

    now: int
    producer: int
    sequence: int
    deliveries: tuple[tuple[int, int], ...]
    outgoing: tuple[Outgoing, ...]


class OutboxForwarded(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False, tag=19):
    """Messages of transactions to this queue are dealt with up to `number`. tapes, stored: the last of them has this number of
    its producer there, so `number - stored` lies between the two from now on; "": the queue is gone."""

    now: int
    queue: str
    tapes: str
    number: int
    stored: int


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
    | FeedMessage
    | FeedMessages
    | CompleteMany
    | FeedPosition
    | CommitTransaction
    | OutboxForwarded
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


# --- numbers ----------------------------------------------------------------------------------------------------------


def lasting(id: int) -> int:
    """The id of a sender that is kept for long, from 64 bits of which the upper 16 are not used."""
    return LASTING << 48 | (id & (1 << 48) - 1)


def _idle_ms(id: int) -> int:
    return LASTING_IDLE_MS if id >> 48 == LASTING else SENDER_IDLE_MS


class Use(StrEnum):
    """What is known of a number."""

    NEW = "new"
    KNOWN = "known"
    FORGOTTEN = "forgotten"


class Sender(msgspec.Struct, array_like=True):
    """One sender's numbers. missing: ranges (first, last), ascending. floor: nothing is known of numbers up to it. touched: ms
    of its last record. ended: nothing more is taken from it."""

    highest: int = 0
    touched: int = 0
    floor: int = 0
    missing: list[tuple[int, int]] = []
    ended: bool = False

    def use(self, number: int) -> Use:
        """Take note of this number."""
        if number > self.highest:
            if number > self.highest + 1:
                self.missing.append((self.highest + 1, number - 1))
                if len(self.missing) > GAPS_MAX:
                    self.floor = self.missing.pop(0)[1]
            self.highest = number
            return Use.NEW
        at = bisect_right(self.missing, (number, self.highest)) - 1
        if at >= 0 and self.missing[at][0] <= number <= self.missing[at][1]:
            first, last = self.missing[at]
            self.missing[at : at + 1] = [part for part in ((first, number - 1), (number + 1, last)) if part[0] <= part[1]]
            if len(self.missing) > GAPS_MAX:
                self.floor = self.missing.pop(0)[1]
            return Use.NEW
        return Use.FORGOTTEN if number <= self.floor else Use.KNOWN

    def ascend(self, number: int) -> bool:
        """The same of one who numbers in order, and may leave numbers out; False: it was used before."""
        if number <= self.highest:
            return False
        self.highest = number
        return True

    def knows(self, number: int) -> bool:
        """Whether this number was used, as far as it is remembered."""
        return self.floor < number <= self.highest and not any(first <= number <= last for first, last in self.missing)


class Senders(msgspec.Struct, array_like=True):
    """Which numbers each producer or instance has used, so that a record written twice takes effect once.

    A sender counts its records from 1 and may write them out of order. What is kept: the highest number and the ranges below it
    that are still missing, at most GAPS_MAX of them; of numbers below a range given up nothing is known, and a record with one
    is refused instead of taken or called a repeat. A sender from whom nothing came for SENDER_IDLE_MS of the log's time may be
    forgotten: the same record written again after that is taken as a new one. A sender with a `lasting` id, of a job that may
    rest for weeks between two tries, is kept for LASTING_IDLE_MS.

    known: by id. sweep: the log's time at which the idle are looked for again.
    """

    known: dict[int, Sender] = {}
    sweep: int = 0

    def use(self, sender: int, number: int, clock: int) -> Use:
        """Take note of a record."""
        one = self.known.get(sender)
        if one is not None and number == one.highest + 1 and not one.ended:  # what nearly all are
            one.highest, one.touched = number, clock
            return Use.NEW
        one = self.of(sender, clock)
        return Use.FORGOTTEN if one.ended else one.use(number)

    def seen(self, sender: int, number: int) -> Use:
        """What is known of a number. Nothing is noted."""
        one = self.known.get(sender)
        if one is None or number > one.highest:
            return Use.NEW
        if one.knows(number):
            return Use.KNOWN
        return Use.FORGOTTEN if number <= one.floor else Use.NEW

    def of(self, sender: int, clock: int) -> Sender:
        """This sender, touched."""
        one = self.known.get(sender)
        if one is None:
            self._forget(clock)
            one = self.known[sender] = Sender()
        one.touched = clock
        return one

    def _forget(self, clock: int) -> None:
        """The only place where there get to be more is also the one where there get to be fewer."""
        if clock >= self.sweep:
            self.sweep = clock + SENDER_IDLE_MS // 4
            for id in [id for id, one in self.known.items() if one.touched + _idle_ms(id) < clock]:
                del self.known[id]
        if len(self.known) >= SENDERS_MAX:
            oldest = sorted(self.known, key=lambda id: (self.known[id].touched, id))
            for id in oldest[: SENDERS_MAX // 8]:
                del self.known[id]

    def ordered(self) -> Senders:
        """The same, in the one order a dump has."""
        return Senders(dict(sorted(self.known.items())), self.sweep)
