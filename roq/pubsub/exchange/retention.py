"""Which segments of a queue's tapes are older, or more, than its Record says. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from roq.log.replicated.metadata import LogMeta, SegmentMetadata, SegmentState, trim
from roq.wire.recording import Record

DAY_MS = 86_400_000
STEP_MS = 1_000  # between two looks: more is no drift
BELIEVED_SECONDS = 6 * 3600.0
SEGMENTS_MAX = 1_800  # of one tape; a log may not have many more, so from here on the oldest go, whatever the Record says


class ExpiryClock:
    """What time it is, for what is dropped by its age. A clock that is set ahead is not believed before BELIEVED_SECONDS: what
    is dropped does not come back when it is set right."""

    def __init__(self) -> None:
        self._anchor: tuple[int, float] | None = None  # the time, and when that was (monotonic)
        self._ahead_since: float | None = None  # monotonic

    def now(self, wall_ms: int, monotonic: float) -> int:
        """wall_ms: what the host's clock says. Milliseconds since 1970."""
        if self._anchor is None:
            self._anchor = wall_ms, monotonic
        steady_ms = self._anchor[0] + round((monotonic - self._anchor[1]) * 1000)
        if wall_ms - steady_ms <= STEP_MS:
            self._ahead_since, self._anchor = None, (wall_ms, monotonic)
            return wall_ms
        if self._ahead_since is None:
            self._ahead_since = monotonic
        if monotonic - self._ahead_since >= BELIEVED_SECONDS:
            self._ahead_since, self._anchor = None, (wall_ms, monotonic)
            return wall_ms
        return steady_ms


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
