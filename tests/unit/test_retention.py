"""Which segments of tapes expire, by age and by size."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from roq.log.replicated.metadata import Fragment, LogMeta, SegmentMetadata, SegmentState, trim
from roq.pubsub.exchange.retention import BELIEVED_SECONDS, DAY_MS, SEGMENTS_MAX, ExpiryClock, expired
from roq.wire.recording import Record

NOW = 100 * DAY_MS
FOR_EVER = Record(days=0)


def tape(*closed: float, name: str = "a", first: int = 1, is_open: bool = True) -> LogMeta:
    """Segments of ten entries, closed so many days ago (-1: nobody knows when), and one that is written."""
    segments = [
        segment(f"{name}~{number}", first + 10 * number, 0 if days < 0 else round(NOW - days * DAY_MS))
        for number, days in enumerate(closed)
    ]
    if is_open:
        last = first + 10 * len(closed)
        segments.append(SegmentMetadata(f"{name}~open", last, SegmentState.OPEN, (Fragment(last, ("h",)),)))
    made = LogMeta(write_quorum=1, ack_quorum=1, trimmed=first - 1, segments=tuple(segments))
    made.check()
    return made


def segment(id: str, first: int, closed_at: int) -> SegmentMetadata:
    return SegmentMetadata(id, first, SegmentState.CLOSED, (Fragment(first, ("h",)),), first + 9, closed_at)


def sizes(**tapes: list[int]) -> dict[str, int]:
    """Of the closed segments, in their order, and of the one that is written."""
    return {f"{name}~{number}": size for name, each in tapes.items() for number, size in enumerate(each[:-1])} | {
        f"{name}~open": each[-1] for name, each in tapes.items()
    }


def test_what_was_closed_long_enough_ago_goes_by_age() -> None:
    tapes = {"a": tape(9, 7.1, 6.9, 0), "b": tape(8, first=101), "c": tape(1)}
    assert expired(tapes, {}, Record(days=7), NOW) == {"a": 20, "b": 110}
    assert expired(tapes, {}, Record(days=0.5), NOW) == {"a": 30, "b": 110, "c": 10}
    assert expired(tapes, {}, FOR_EVER, NOW) == {}
    assert expired({}, {}, Record(), NOW) == {}


def test_a_clock_that_is_set_ahead_drops_nothing_before_its_time() -> None:
    """Set right again in time, it never counts; nobody corrected it for hours: it is right."""
    clock = ExpiryClock()
    assert clock.now(1_000, 0.0) == 1_000
    assert clock.now(31_900, 30.0) == 31_900, "a little faster"
    assert clock.now(61_900 + DAY_MS, 60.0) == 61_900
    assert clock.now(91_900, 90.0) == 91_900
    assert clock.now(1_900, 120.0) == 1_900, "set back: later, if at all"
    ahead = 2_900 + DAY_MS
    assert clock.now(ahead, 121.0) == 2_900
    assert clock.now(ahead + 1_000, 120.9 + BELIEVED_SECONDS) == 2_900 + round((BELIEVED_SECONDS - 0.1) * 1000)
    assert clock.now(ahead + 2_000, 121.0 + BELIEVED_SECONDS) == ahead + 2_000
    assert clock.now(ahead + 3_000, 122.0 + BELIEVED_SECONDS) == ahead + 3_000


def test_exactly_as_old_as_it_may_be_stays() -> None:
    assert expired({"a": tape(7)}, {}, Record(days=7), NOW) == {}
    assert expired({"a": tape(7)}, {}, Record(days=7), NOW + 1) == {"a": 10}


def test_of_which_nobody_knows_when_it_was_closed_never_goes_by_age_alone() -> None:
    assert expired({"a": tape(-1, -1)}, {}, Record(days=7), NOW) == {}
    assert expired({"a": tape(-1, 8, 1)}, {}, Record(days=7), NOW) == {"a": 20}, "an older one leaves with a newer one"


def test_by_size_what_was_closed_first_goes_of_whichever_tape() -> None:
    tapes = {"a": tape(9, 5, 1), "b": tape(7, 3, name="b")}
    known = sizes(a=[10, 10, 10, 5], b=[10, 10, 5])
    kept = {
        60: {},
        59: {"a": 10},
        50: {"a": 10},
        49: {"a": 10, "b": 10},
        39: {"a": 20, "b": 10},
        29: {"a": 20, "b": 20},
        19: {"a": 30, "b": 20},
    }
    for most, found in kept.items():
        assert expired(tapes, known, Record(days=0, max_bytes=most), NOW) == found


def test_what_is_written_counts_and_stays() -> None:
    assert expired({"a": tape(2, 1)}, sizes(a=[10, 10, 500]), Record(days=0, max_bytes=100), NOW) == {"a": 20}
    assert expired({"a": tape()}, {"a~open": 500}, Record(days=1, max_bytes=100), NOW) == {}
    recovering = SegmentMetadata("a~1", 1, SegmentState.RECOVERY, (Fragment(1, ("h",)),))
    assert expired({"a": LogMeta(segments=(recovering,))}, {"a~1": 500}, Record(days=1, max_bytes=100), NOW) == {}


def test_what_goes_by_age_makes_room() -> None:
    tapes = {"a": tape(9, 1), "b": tape(8, 2, name="b")}
    known = sizes(a=[10, 10, 0], b=[10, 10, 0])
    assert expired(tapes, known, Record(days=7, max_bytes=20), NOW) == {"a": 10, "b": 10}
    assert expired(tapes, known, Record(days=7, max_bytes=19), NOW) == {"a": 10, "b": 20}
    assert expired(tapes, known, Record(days=1.5, max_bytes=25), NOW) == {"a": 10, "b": 20}


def test_what_leaves_with_a_newer_one_makes_room_too() -> None:
    """Clocks of hosts differ: the first segment of a seems to have been closed last."""
    tapes = {"a": tape(1, 9), "b": tape(8, name="b")}
    known = sizes(a=[10, 10, 0], b=[10, 0])
    assert expired(tapes, known, Record(days=0, max_bytes=15), NOW) == {"a": 20}


def test_nothing_goes_of_which_no_size_is_known_unless_it_must() -> None:
    assert expired({"a": tape(3, 2)}, {}, Record(days=0, max_bytes=1), NOW) == {}


def test_a_tape_has_no_more_segments_than_a_log_may_have() -> None:
    ages = [1.0] * (SEGMENTS_MAX + 4)
    assert expired({"a": tape(*ages), "b": tape(1, name="b")}, {}, FOR_EVER, NOW) == {"a": 50}
    assert expired({"a": tape(*ages[:-5])}, {}, FOR_EVER, NOW) == {}


def test_what_goes_because_there_are_too_many_makes_room() -> None:
    tapes = {"a": tape(*[1.0] * (SEGMENTS_MAX + 1), is_open=False), "b": tape(2, name="b")}
    known = {"a~0": 10, "a~1": 10, "b~0": 10}
    assert expired(tapes, known, Record(days=0, max_bytes=20), NOW) == {"a": 10}


@st.composite
def worlds(draw: st.DrawFn) -> tuple[dict[str, LogMeta], dict[str, int], Record]:
    """Tapes; closed in order or, as clocks differ, not."""
    tapes: dict[str, LogMeta] = {}
    for name in "abc"[: draw(st.integers(0, 3))]:
        closed = draw(st.lists(st.sampled_from([-1.0, 0.5, 1.0, 2.0, 3.0, 5.0, 8.0]), max_size=5))
        tapes[name] = tape(*closed, name=name, first=draw(st.sampled_from([1, 71])), is_open=draw(st.booleans()))
    ids = [segment.id for meta in tapes.values() for segment in meta.segments]
    known = {id: draw(st.integers(0, 12)) for id in ids if draw(st.integers(0, 9))}
    record = Record(days=draw(st.sampled_from([0.0, 1.5, 4.0])), max_bytes=draw(st.sampled_from([0, 1, 8, 20, 40])))
    return tapes, known, record


def held(tapes: dict[str, LogMeta], known: dict[str, int], found: dict[str, int]) -> int:
    """Bytes that are left."""
    left = (segment for log, meta in tapes.items() for segment in trim(meta, found.get(log, 0)).segments)
    return sum(known.get(segment.id, 0) for segment in left)


@given(worlds())
def test_what_is_left_fits_and_nothing_goes_without_need(world: tuple[dict[str, LogMeta], dict[str, int], Record]) -> None:
    tapes, known, record = world
    found = expired(tapes, known, record, NOW)
    by_age = expired(tapes, known, Record(days=record.days), NOW)
    ends = {log: [one.last for one in meta.segments if one.state is SegmentState.CLOSED] for log, meta in tapes.items()}
    for log, position in found.items():
        assert position in ends[log]
        trim(tapes[log], position).check()
    assert all(found.get(log, 0) >= position for log, position in by_age.items())
    for log, meta in tapes.items():
        old = [one.last for one in meta.segments if record.days and 0 < one.closed_at < NOW - record.days * DAY_MS]
        assert by_age.get(log, 0) == max(old, default=0)
    if not record.max_bytes:
        assert found == by_age
        return
    closed = [one for log in tapes for one in trim(tapes[log], found.get(log, 0)).segments if one.state is SegmentState.CLOSED]
    assert held(tapes, known, found) <= record.max_bytes or not closed, "it fits, or only what is written is left"
    if found != by_age:
        assert held(tapes, known, found | last_step(tapes, found, by_age)) > record.max_bytes, "none less would do"


def last_step(tapes: dict[str, LogMeta], found: dict[str, int], by_age: dict[str, int]) -> dict[str, int]:
    """Up to where the tape was to be trimmed that was closed last of those that went by size, before that."""
    ends = sorted(
        (one.closed_at, one.last, log)
        for log, meta in tapes.items()
        for one in meta.segments
        if one.state is SegmentState.CLOSED and by_age.get(log, 0) < one.last <= found.get(log, 0)
    )
    at, last, log = next(end for end in reversed(ends) if found[end[2]] == end[1])
    return {
        log: max((one for _, one, other in ends[: ends.index((at, last, log))] if other == log), default=by_age.get(log, 0))
    }
