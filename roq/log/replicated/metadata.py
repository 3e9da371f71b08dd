"""What ZooKeeper keeps of a log (`logs/<id>`, JSON, changed by compare-and-set), and every change that may be made to it.

A log is a chain of segments; a segment is written by one epoch to one ensemble of nodes (hosts) at a time. When the ensemble
changes, a new fragment begins. Positions begin at 1 and have no gaps; an entry's position is its name in every store.
Changes are pure functions; they raise LogFenced if the log is no longer the caller's to change.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum

import msgspec

from roq.errors import CallError, LogFenced

SEGMENTS_MAX = 2_000  # of one log: their JSON must stay far below what a znode holds
TAKE_OVER_SEGMENTS_MAX = 2_500  # a new writer must come to make the snapshot that is missing


class SegmentState(StrEnum):
    """How a segment is."""

    OPEN = "open"
    RECOVERY = "recovery"  # an epoch is finding out where it ends
    CLOSED = "closed"


class Fragment(msgspec.Struct, frozen=True, array_like=True):
    """From position `first` on, entries are on `nodes`."""

    first: int
    nodes: tuple[str, ...]


class SegmentMetadata(msgspec.Struct, frozen=True):
    """One segment. last: its last position, -1 unless CLOSED. closed_at: milliseconds since 1970; 0: not known."""

    id: str
    first: int
    state: SegmentState
    fragments: tuple[Fragment, ...]
    last: int = -1
    closed_at: int = 0

    def fragment_of(self, position: int) -> Fragment:
        """Where the entry at `position` is."""
        return [one for one in self.fragments if one.first <= position][-1]

    def end_of(self, fragment: Fragment) -> int:
        """Last position of a fragment of a closed segment."""
        later = [one.first for one in self.fragments if one.first > fragment.first]
        return min(later) - 1 if later else self.last


class SnapshotMetadata(msgspec.Struct, frozen=True):
    """State as of `position`: a blob on `nodes`."""

    position: int
    blob: str
    size: int
    nodes: tuple[str, ...]


class LogMeta(msgspec.Struct, frozen=True):
    """The log. serial: number of the next segment or blob. trimmed: entries up to here may be gone. term: of its owner. owner:
    which process took the epoch (drawn at random; "": one of version 0.1, which doesn't know the field)."""

    epoch: int = 0
    term: int = 0
    serial: int = 1
    write_quorum: int = 3
    ack_quorum: int = 2
    trimmed: int = 0
    segments: tuple[SegmentMetadata, ...] = ()
    snapshot: SnapshotMetadata | None = None
    owner: str = ""

    @property
    def next_first(self) -> int:
        """Where the segment after the last closed one begins."""
        return self.segments[-1].last + 1 if self.segments else self.trimmed + 1

    def check(self) -> None:
        """Its invariants."""
        assert 1 <= self.ack_quorum <= self.write_quorum
        expected = None
        for place, segment in enumerate(self.segments):
            assert segment.state is SegmentState.CLOSED or place == len(self.segments) - 1, (
                "only the last segment may be unfinished"
            )
            assert expected in (None, segment.first), "a gap between segments"
            firsts = [one.first for one in segment.fragments]
            assert firsts == sorted({segment.first, *firsts}), "fragments out of order"
            least = (
                1 if segment.state is SegmentState.CLOSED else self.ack_quorum
            )  # a closed one may be of the time of a lower one
            assert all(len(set(one.nodes)) == len(one.nodes) >= least for one in segment.fragments)
            if segment.state is SegmentState.CLOSED:
                assert segment.first <= firsts[-1] <= segment.last
                expected = segment.last + 1
        if self.segments:
            assert self.segments[0].first <= self.trimmed + 1


Change = Callable[[LogMeta], LogMeta]


def take(meta: LogMeta, term: int) -> LogMeta:
    """A new owner: the next epoch; an open segment goes into recovery. Raises LogFenced if a later term had it."""
    if term < meta.term:
        raise LogFenced(f"term {meta.term} has this log, this is term {term}")
    segments = meta.segments
    if segments and segments[-1].state is not SegmentState.CLOSED:
        segments = (*segments[:-1], msgspec.structs.replace(segments[-1], state=SegmentState.RECOVERY))
    return msgspec.structs.replace(meta, epoch=meta.epoch + 1, term=term, segments=segments)


def owned(meta: LogMeta, epoch: int) -> LogMeta:
    """Itself. Raises LogFenced unless `epoch` owns it."""
    if meta.epoch != epoch:
        raise LogFenced(f"epoch {meta.epoch} has this log, this was epoch {epoch}")
    return meta


def close_last(meta: LogMeta, last: int, fragments: tuple[Fragment, ...], at: int = 0) -> LogMeta:
    """The unfinished segment ends at `last`, on these fragments. An empty one leaves the chain. at: milliseconds since 1970."""
    segment = meta.segments[-1]
    if last < segment.first:
        return msgspec.structs.replace(meta, segments=meta.segments[:-1])
    kept = tuple(one for one in fragments if one.first <= last)
    closed = msgspec.structs.replace(segment, state=SegmentState.CLOSED, last=last, fragments=kept, closed_at=at)
    return msgspec.structs.replace(meta, segments=(*meta.segments[:-1], closed))


def open_next(
    meta: LogMeta, id: str, nodes: tuple[str, ...], segments_max: int = SEGMENTS_MAX, quorums: tuple[int, int] = (0, 0)
) -> LogMeta:
    """A new segment behind the last one, which is closed.

    quorums: of writing and acknowledging from here on, if they are higher and there are as many nodes. Every segment written
    under the former ones is closed, so none is ever recovered under others than it was written with.
    """
    if len(meta.segments) >= segments_max:
        raise CallError(f"a log has at most {SEGMENTS_MAX} segments: make a snapshot")
    if len(nodes) >= quorums[0] > meta.write_quorum:
        meta = msgspec.structs.replace(meta, write_quorum=quorums[0], ack_quorum=max(meta.ack_quorum, quorums[1]))
    first = max(meta.next_first, meta.trimmed + 1)
    segment = SegmentMetadata(id, first, SegmentState.OPEN, (Fragment(first, nodes),))
    return msgspec.structs.replace(meta, serial=meta.serial + 1, segments=(*meta.segments, segment))


def change_ensemble(meta: LogMeta, id: str, first: int, nodes: tuple[str, ...]) -> LogMeta:
    """From `first` (nothing from there on is acknowledged) the open segment is on these nodes."""
    segment = meta.segments[-1] if meta.segments else None
    if segment is None or segment.id != id or segment.state is not SegmentState.OPEN:
        raise LogFenced(f"segment {id} is not open any more")
    kept = tuple(one for one in segment.fragments if one.first < first)
    changed = msgspec.structs.replace(segment, fragments=(*kept, Fragment(first, nodes)))
    return msgspec.structs.replace(meta, segments=(*meta.segments[:-1], changed))


def replace_copies(meta: LogMeta, id: str, first: int, before: tuple[str, ...], after: tuple[str, ...]) -> LogMeta:
    """Copies of the closed fragment at `first` of segment `id`, or of the snapshot of that name, are on `after` now. Unchanged
    if it isn't on `before` any more."""
    if meta.snapshot is not None and (meta.snapshot.blob, meta.snapshot.nodes) == (id, before):
        return msgspec.structs.replace(meta, snapshot=msgspec.structs.replace(meta.snapshot, nodes=after))
    segments = []
    for segment in meta.segments:
        if segment.id == id and segment.state is SegmentState.CLOSED:
            fragments = tuple(
                Fragment(one.first, after) if (one.first, one.nodes) == (first, before) else one for one in segment.fragments
            )
            segment = msgspec.structs.replace(segment, fragments=fragments)
        segments.append(segment)
    return msgspec.structs.replace(meta, segments=tuple(segments))


def set_snapshot(meta: LogMeta, snapshot: SnapshotMetadata) -> LogMeta:
    """Readers may begin here: closed segments up to its position leave the chain."""
    if meta.snapshot is not None and meta.snapshot.position > snapshot.position:
        return meta
    return msgspec.structs.replace(trim(meta, snapshot.position), serial=meta.serial + 1, snapshot=snapshot)


def trim(meta: LogMeta, position: int) -> LogMeta:
    """Nobody needs what is up to `position` any more: closed segments that end there or before leave the chain."""
    gone = [one for one in meta.segments if one.state is SegmentState.CLOSED and one.last <= position]
    if not gone:
        return meta
    kept = tuple(one for one in meta.segments if one not in gone)
    return msgspec.structs.replace(meta, trimmed=max(meta.trimmed, gone[-1].last), segments=kept)
