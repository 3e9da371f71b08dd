"""The publisher's replay buffer: it forgets what is confirmed, is bounded by bytes, and says what it can't vouch for.

Every interleaving with paths, Exchanges that die and subscribers: tests/model/test_replay.py.
"""

from __future__ import annotations

import tracemalloc

import pytest

from roq.pubsub.ring import ENTRY_BYTES, MARK_BYTES, MARKS_KEPT, Ring, Unknown
from roq.wire.frame import encode_data, parse, payloads


def frame(sequence: int, payload: bytes = b"x", count: int = 1) -> bytes:
    return encode_data(b"topic", 9, 1, sequence, sequence - 1, sequence - 1, [payload] * count, 5)


def send(ring: Ring, *numbers: int, now: float = 0.0, size: int = 1) -> None:
    for number in numbers:
        ring.sent(frame(number, b"x" * size), number, now)
        ring.check()


def keep(ring: Ring, *numbers: int, now: float = 0.0, size: int = 1) -> int:
    lost = sum(ring.keep(frame(number, b"x" * size), number, now) for number in numbers)
    ring.check()
    return lost


def taken(ring: Ring, path: int = 2, max_bytes: int = 1 << 30) -> list[int]:
    return [parse(one)[1].sequence for one in ring.take(path, max_bytes)]


def again(ring: Ring) -> list[int]:
    """What a replay would send now."""
    ring.broken()
    ring.check()
    numbers = taken(ring)
    ring.check()
    return numbers


def test_a_replay_changes_the_path_and_nothing_else() -> None:
    ring = Ring()
    original = encode_data(b"eu.paris", 9, 1, 7, 3, 2, [b"a", b"\0b"], 1234)
    ring.sent(original, 8, 0.0)
    ring.broken()
    [copy] = ring.take(70_000, 1)
    topic, header, body = parse(copy)
    assert (topic, payloads(header, body)) == (b"eu.paris", [b"a", b"\0b"])
    assert header == parse(original)[1]._replace(path=70_000)


def test_age_alone_forgets_nothing() -> None:
    """The Exchange's host lost power, and nobody confirmed: however long that lasts, everything is there to be sent again."""
    ring = Ring(seconds=5)
    send(ring, 1, 2, 3, now=0.0)
    ring.prune(1000.0)
    send(ring, 4, now=2000.0)
    assert again(ring) == [1, 2, 3, 4]


def test_what_is_confirmed_is_kept_for_some_seconds_more() -> None:
    """It has left its Exchange, but may lie unread there for a subscriber when the Exchange dies."""
    ring = Ring(seconds=5)
    send(ring, 1, 2, now=0.0)
    assert ring.forwarded(1, ring.mark(1))
    send(ring, 3, now=4.0)
    ring.prune(4.9)
    assert ring.gone == 0
    ring.prune(5.1)
    assert (ring.gone, ring.confirmed) == (2, 2)
    assert again(ring) == [3]
    assert ring.unknown is None


def test_bytes_are_bounded_and_what_is_gone_unconfirmed_is_unknown_once_its_path_breaks() -> None:
    ring = Ring(max_bytes=10_000)
    send(ring, *range(1, 101), size=900)
    assert ring.kept_bytes <= 10_000
    assert ring.unknown is None, "the path holds: the next confirmation covers what is gone"
    numbers = again(ring)
    assert numbers == list(range(101 - len(numbers), 101))
    assert ring.unknown == Unknown(1, 100 - len(numbers))
    ring.unknown = None
    assert again(ring) == numbers
    assert ring.unknown is None, "said once"


@pytest.mark.parametrize("waits", [False, True], ids=["sent", "waiting"])
def test_tiny_frames_take_no_more_memory_than_the_bound(waits: bool) -> None:
    """Most of what a tiny frame costs is not its bytes."""
    ring = Ring(max_bytes=1 << 20)
    tracemalloc.start()
    try:
        for number in range(1, 20_001):
            (ring.keep if waits else ring.sent)(frame(number), number, number / 1e4)
        taken_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert ring.gone > 0, "it never was full"
    assert 0.75 < taken_bytes / (1 << 20) < 1.1


def test_a_confirmation_in_time_covers_what_is_gone() -> None:
    ring = Ring(max_bytes=10_000)
    send(ring, *range(1, 101), size=900)
    assert ring.forwarded(1, ring.mark(1))
    assert ring.unconfirmed_bytes == 0
    again(ring)
    assert ring.unknown is None


def test_what_waits_is_kept_as_bytes_allow_and_counted_when_given_up() -> None:
    ring = Ring(seconds=5, max_bytes=2000 + 3 * ENTRY_BYTES)
    send(ring, 1, size=500)
    ring.forwarded(1, ring.mark(1))
    ring.broken()
    assert keep(ring, 2, 3, size=500) == 0
    assert keep(ring, 4, now=100.0, size=500) == 0, "the one that is confirmed goes first"
    assert keep(ring, 5, now=100.0, size=500) == 1
    assert ring.unknown == Unknown(2, 2)
    assert taken(ring) == [3, 4, 5]
    assert ring.sent_to == 5


def test_what_was_sent_once_is_unknown_but_not_given_up() -> None:
    ring = Ring(max_bytes=2000 + 3 * ENTRY_BYTES)
    send(ring, 1, 2, size=500)
    ring.broken()
    assert keep(ring, 3, 4, 5, size=500) == 0
    assert ring.unknown == Unknown(1, 2)


def test_a_replay_leaves_in_portions_and_new_frames_follow_it() -> None:
    ring = Ring()
    send(ring, 1, 2, 3, size=500)
    ring.broken()
    assert taken(ring, max_bytes=1200) == [1, 2]
    keep(ring, 4, size=500)
    assert ring.sent_to == 2
    assert taken(ring, max_bytes=10) == [3], "one that is larger goes alone"
    assert taken(ring) == [4]
    assert taken(ring) == []


def test_a_replay_that_is_cut_off_begins_again_where_nothing_is_confirmed() -> None:
    ring = Ring(seconds=0)
    send(ring, 1, 2, 3, 4, size=500)
    ring.broken()
    assert taken(ring, 2, 1200) == [1, 2]
    ring.forwarded(2, ring.mark(2))
    assert taken(ring, 2, 600) == [3]
    ring.prune(1.0)
    assert again(ring) == [3, 4]


def test_a_mark_counts_when_the_paths_before_are_confirmed() -> None:
    ring = Ring()
    send(ring, 1)
    ring.mark(1, fin=True)
    send(ring, 2)
    assert not ring.forwarded(2, ring.mark(2))
    assert ring.confirmed == 0
    assert ring.forwarded(1, 0)
    assert (ring.confirmed, ring.confirmed_mark, ring.open_question) == (2, 2, False)


def test_a_mark_confirms_those_before_it_but_no_fin_and_no_other_path() -> None:
    ring = Ring()
    send(ring, 1)
    ring.mark(1)
    send(ring, 2)
    second = ring.mark(1)
    ring.mark(1, fin=True)
    assert not ring.forwarded(7, 99)
    assert ring.forwarded(1, second)
    assert (ring.confirmed, ring.open_question) == (2, True)


def test_a_mark_of_a_broken_path_says_nothing_of_the_next() -> None:
    ring = Ring()
    send(ring, 1)
    mark = ring.mark(1)
    ring.broken()
    assert not ring.forwarded(1, mark)
    assert taken(ring) == [1]


@pytest.mark.parametrize("fins", [0, 1])
def test_questions_nobody_answers_do_not_pile_up(fins: int) -> None:
    ring = Ring()
    if fins:
        send(ring, 1)
        ring.mark(1, fin=True)
    for number in range(2, 1000):
        send(ring, number)
        last = ring.mark(2)
    assert len(ring._marks) <= MARKS_KEPT
    ring.forwarded(2, last)
    assert ring.confirmed == (0 if fins else 999)


def test_a_mark_is_due_after_so_many_bytes() -> None:
    ring = Ring()
    send(ring, 1, size=MARK_BYTES - 10_000)
    assert not ring.mark_due
    send(ring, 2, size=10_000)
    assert ring.mark_due
    ring.mark(1)
    assert not ring.mark_due


def test_an_empty_buffer() -> None:
    ring = Ring()
    assert again(ring) == []
    assert (ring.gone, ring.sent_to, ring.kept_bytes, ring.unknown) == (0, 0, 0, None)


def test_confirmations_that_come_late_still_confirm() -> None:
    """Many MARKs are under way: the oldest, whose answer comes next, is never given up for a newer one."""
    ring, asked, confirmed = Ring(), list[int](), 0
    for number in range(1, 40 * MARKS_KEPT):
        send(ring, number)
        asked.append(ring.mark(1))
        if number > 10 * MARKS_KEPT:
            ring.forwarded(1, asked[number - 1 - 10 * MARKS_KEPT])
            assert number - ring.confirmed <= 22 * MARKS_KEPT
            confirmed = ring.confirmed
    assert confirmed > 17 * MARKS_KEPT
