"""Conversation with a store (its ROUTER ↔ DEALER): segments of replicated logs, blobs, inventory.

The data path is notices: Add → Added | Refused, many on their way at a time. All else is requests. An entry is named by its
segment and its position in the log; its CRC is the writer's and goes with it to the disk and to every reader. Every answer
that says something is stored, fenced or deleted comes when it is on stable storage.
"""

from __future__ import annotations

from enum import IntEnum
from struct import Struct
from zlib import crc32

import msgspec

ENTRY_BYTES_MAX = 4 * 1024 * 1024  # one entry of a log: half of what one control message may carry
FRAME_BYTES = 1024 * 1024  # entries that travel in one Add or Entries, unless a single one is larger
BLOB_PART_BYTES = 1024 * 1024  # of a blob in one message
RECOVER_COUNT_MAX = 256  # entries asked for in one Recover
LIST_COUNT_MAX = 10_000  # items in one part of an inventory
SEGMENT_MARK = "~"  # behind the log's id in the name of a segment

_position = Struct("<Q").pack


def entry_crc(segment: str, position: int, entry: bytes) -> int:
    """CRC-32 of an entry, its segment and its position: an entry that was mixed up with another one is seen as damaged."""
    return crc32(entry, crc32(_position(position), crc32(segment.encode())))


def segment_id(log: str, epoch: int, serial: int) -> str:
    """Of a segment of this log."""
    return f"{log}{SEGMENT_MARK}{epoch}.{serial}"


def log_of(segment: str) -> str:
    """Id of the log of this segment."""
    return segment.rpartition(SEGMENT_MARK)[0] or segment


class Refusal(IntEnum):
    """Why an Add was refused."""

    FENCED = 1  # a newer epoch has this segment
    FULL = 2  # no space
    DIVERGED = 3  # another entry stands at this position
    DAMAGED = 4  # an entry does not fit its CRC
    NOT_OPEN = 5  # this store did not see the segment's opening: it is new here, or something was lost, fences perhaps too
    OVERLOADED = 6  # too much waits for its disk: send it again later


class Found(IntEnum):
    """What a store knows of one position. UNKNOWN is never a proof of absence."""

    ENTRY = 0
    NO_SUCH = 1
    UNKNOWN = 2


class Add(msgspec.Struct, frozen=True, tag=1, array_like=True):
    """Store entries first, first+1, …; `confirmed`: all up to here is acknowledged. Without entries: only tells `confirmed`."""

    segment: str
    epoch: int
    first: int
    confirmed: int
    crcs: list[int]
    entries: list[bytes]


class EntriesAdded(msgspec.Struct, frozen=True, tag=2, array_like=True):
    """Entries first … first+count-1 are on stable storage."""

    segment: str
    first: int
    count: int


class EntriesRefused(msgspec.Struct, frozen=True, tag=3, array_like=True):
    """None of these entries was taken."""

    segment: str
    first: int
    count: int
    reason: Refusal


class OpenSegment(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """This store is about to become a node of the segment: what it doesn't hold of it from now on was never stored here.

    Sent before the metadata names the node, and never while it does."""

    segment: str
    epoch: int


class FenceLog(msgspec.Struct, frozen=True, tag="Fence", array_like=True):
    """Refuse every lower epoch from now on."""

    segment: str
    epoch: int


class Recover(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Fence, and tell what is known of positions first … first+count-1."""

    segment: str
    epoch: int
    first: int
    count: int


class Read(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Entries from `first` to at most `last`, up to the first one that can't be read. Waits up to `wait_seconds` while the
    store knows of no confirmed entry from `first` on. queue, made_by: of a tape, the queue it is of, and the transaction that
    created that queue: a client needs the right to it."""

    segment: str
    first: int
    last: int
    wait_seconds: float = 0.0
    queue: str = ""
    made_by: str = ""


class Holes(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Which positions from first to last can't be read here? Reads and checks every one."""

    segment: str
    first: int
    last: int


class Compare(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Which of these does this store not hold? Told from memory, nothing is read: what was found damaged is not held. At most
    LIST_COUNT_MAX items.

    segments, opened: (segment, first, last), the latter of a segment that is being written, whose opening this store must have
    seen, too; it need hold nothing of it if last < first. blobs: (name, bytes)."""

    segments: list[tuple[str, int, int]]
    opened: list[tuple[str, int, int]]
    blobs: list[tuple[str, int]]


class CopySegment(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Fetch the entries first … last of a closed segment that are missing here from the store at `source`. Fences the segment
    on this store, so that an earlier owner of the log can't delete the copy any more."""

    segment: str
    epoch: int
    first: int
    last: int
    source: str


class DeleteSegment(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Forget the segment. Refused if a later epoch fenced it."""

    segment: str
    epoch: int


class ListSegments(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Inventory: segments whose name begins with `prefix` and is greater than `after`, in order."""

    prefix: str
    after: str = ""
    count: int = LIST_COUNT_MAX


class PutBlob(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """One part of a blob; parts come in order. `crc`: CRC-32 of the whole. The last part is answered when all is durable."""

    blob: str
    offset: int
    total: int
    crc: int
    data: bytes


class GetBlob(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """One part of a blob."""

    blob: str
    offset: int
    count: int


class CopyBlob(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Fetch the blob from the store at `source`."""

    blob: str
    source: str


class DeleteBlob(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Forget the blob, and refuse it for a while: a copy may be under way."""

    blob: str


class ListBlobs(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Inventory: blobs whose name begins with `prefix` and is greater than `after`, in order."""

    prefix: str
    after: str = ""
    count: int = LIST_COUNT_MAX


class DescribeStore(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Who are you, and how are you?"""


class StoreDone(msgspec.Struct, frozen=True, tag="Done", array_like=True):
    """It is so, on stable storage."""


class Fenced(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Fenced; the highest confirmed position this store was told of (0: none)."""

    confirmed: int


class Recovered(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Answer to Recover, one item per position: (Found, crc, entry)."""

    first: int
    answers: list[tuple[Found, int, bytes]]


class Entries(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Answer to Read: entries first, first+1, … missing: the next one, if any was asked for, can't be read here."""

    first: int
    crcs: list[int]
    entries: list[bytes]
    confirmed: int
    missing: bool


class Ranges(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Answer to Holes: (first, last) of each run of positions."""

    ranges: list[tuple[int, int]]


class Compared(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Answer to Compare: places in the question of what is not held. disk: the identity of the disk that holds the rest."""

    disk: str
    segments: list[int]
    opened: list[int]
    blobs: list[int]


class SegmentView(msgspec.Struct, frozen=True, array_like=True):
    """One segment in an inventory. first, last: of what is held, 0 and -1 if nothing."""

    segment: str
    first: int
    last: int
    size: int


class SegmentList(msgspec.Struct, frozen=True, tag="Segments", array_like=True):
    """Answer to ListSegments."""

    segments: list[SegmentView]


class BlobPart(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Answer to GetBlob. total, crc: of the whole blob."""

    total: int
    crc: int
    data: bytes


class BlobView(msgspec.Struct, frozen=True, array_like=True):
    """One blob in an inventory. age: seconds since it was stored here."""

    blob: str
    size: int
    age: float


class BlobList(msgspec.Struct, frozen=True, tag="Blobs", array_like=True):
    """Answer to ListBlobs; `bad`: blobs found damaged and put aside, of those asked for."""

    blobs: list[BlobView]
    bad: list[str]


class SyncTimes(msgspec.Struct, frozen=True, array_like=True):
    """How long writes and their syncs took. bounds: upper ends of the buckets in seconds; counts: one more, for what took
    longer; seconds: of all together."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    seconds: float


class StoreView(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Answer to DescribeStore. disk: its identity; life: of this process, another one after each start. Counters, and the times
    of the journal's syncs: since its start; blob_bytes: of all blobs; logs: of which it has a segment. The last four: 0
    and None of an older store."""

    host: str
    disk: str
    bytes_free: int
    journal_bytes: int
    live_bytes: int
    segments: int
    counters: dict[str, int]
    life: str = ""
    blobs: int = 0
    blob_bytes: int = 0
    syncs: SyncTimes | None = None
    logs: int | None = None


Request = (
    OpenSegment
    | FenceLog
    | Recover
    | Read
    | Holes
    | Compare
    | CopySegment
    | DeleteSegment
    | ListSegments
    | PutBlob
    | GetBlob
    | CopyBlob
    | DeleteBlob
    | ListBlobs
    | DescribeStore
)
Reply = StoreDone | Fenced | Recovered | Entries | Ranges | Compared | SegmentList | BlobPart | BlobList | StoreView
NoticeToStore = Add
NoticeToWriter = EntriesAdded | EntriesRefused
