"""Which segments of a queue's tapes are older, or more, than its Record says. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from roq.log.replicated.metadata import LogMeta, SegmentMetadata, SegmentState, trim
from roq.wire.recording import Record

DAY_MS = 86_400_000
SEGMENTS_MAX = 1_800  # of one tape; a log may not have many more, so from here on the oldest go, whatever the Record says


def expired(tapes: Mapping[str, LogMeta], sizes: Mapping[str, int], record: Record, now_ms: int) -> dict[str, int]:
    """By log: the position up to which it is to be trimmed. sizes: bytes by segment id, as far as they are known.

    By age a closed segment goes when the last entry of it is old enough. By size the ones that were closed first go, of
    whichever tape, until the rest fits; what is being written counts, and stays."""
    found: dict[str, int] = {}
    closed = [
        (segment.closed_at, segment.last, log)
        for log, meta in tapes.items()
        for segment in meta.segments
        if segment.state is SegmentState.CLOSED
    ]
    if record.days:
        oldest = now_ms - record.days * DAY_MS
        found = _up_to((log, last) for at, last, log in closed if 0 < at < oldest)
    for log, meta in tapes.items():
        if (over := len(meta.segments) - SEGMENTS_MAX) > 0:
            found[log] = max(found.get(log, 0), meta.segments[over - 1].last)
    if record.max_bytes:
        left = sum(_bytes(trim(meta, found.get(log, 0)).segments, sizes) for log, meta in tapes.items())
        for _, last, log in sorted(closed):
            if left <= record.max_bytes:
                break
            if last > (gone := found.get(log, 0)):  # and with it what is before it on its tape, whenever that was closed
                left -= _bytes((one for one in tapes[log].segments if gone < one.last <= last), sizes)
                found[log] = last
    return found


def _bytes(segments: Iterable[SegmentMetadata], sizes: Mapping[str, int]) -> int:
    return sum(sizes.get(segment.id, 0) for segment in segments)


def _up_to(gone: Iterable[tuple[str, int]]) -> dict[str, int]:
    found: dict[str, int] = {}
    for log, last in gone:
        found[log] = max(last, found.get(log, 0))
    return found
