"""The publisher's replay buffer: it forgets what is confirmed, is bounded by bytes, and says what it can't vouch for.

Every interleaving with paths, Exchanges that die and subscribers: tests/model/test_replay.py.
"""

from __future__ import annotations

import tracemalloc

import pytest

from roq.pubsub.replay_buffer import ENTRY_BYTES, MARK_BYTES, MARKS_KEPT, ReplayBuffer, Unknown
from roq.wire.frame import encode_data, parse, payloads


def frame(sequence: int, payload: bytes = b"x", count: int = 1) -> bytes:
    return encode_data(b"topic", 9, 1, sequence, sequence - 1, sequence - 1, [payload] * count, 5)


def send(buffer: ReplayBuffer, *numbers: int, now: float = 0.0, size: int = 1) -> None:
    for number in numbers:
        buffer.sent(frame(number, b"x" * size), number, now)
        buffer.check()


def keep(buffer: ReplayBuffer, *numbers: int, now: float = 0.0, size: int = 1) -> int:
    lost = sum(buffer.keep(frame(number, b"x" * size), number, now) for number in numbers)
    buffer.check()
    return lost


def taken(buffer: ReplayBuffer, path: int = 2, max_bytes: int = 1 << 30) -> list[int]:
    return [parse(one)[1].sequence for one in buffer.take(path, max_bytes)]


def again(buffer: ReplayBuffer) -> list[int]:
    """What a replay would send now."""
    buffer.broken()
    buffer.check()
    numbers = taken(buffer)
    buffer.check()
    return numbers


def test_a_replay_changes_the_path_and_nothing_else() -> None:
    buffer = ReplayBuffer()
    original = encode_data(b"eu.paris", 9, 1, 7, 3, 2, [b"a", b"\0b"], 1234)
    buffer.sent(original, 8, 0.0)
    buffer.broken()
    [copy] = buffer.take(70_000, 1)
    topic, header, body = parse(copy)
    assert (topic, payloads(header, body)) == (b"eu.paris", [b"a", b"\0b"])
    assert header == parse(original)[1]._replace(path=70_000)


def test_age_alone_forgets_nothing() -> None:
    """The Exchange's host lost power, and nobody confirmed: however long that lasts, everything is there to be sent again."""
    buffer = ReplayBuffer(seconds=5)
    send(buffer, 1, 2, 3, now=0.0)
    buffer.prune(1000.0)
    send(buffer, 4, now=2000.0)
    assert again(buffer) == [1, 2, 3, 4]


def test_what_is_confirmed_is_kept_for_some_seconds_more() -> None:
    """It has left its Exchange, but may lie unread there for a subscriber when the Exchange dies."""
    buffer = ReplayBuffer(seconds=5)
    send(buffer, 1, 2, now=0.0)
    assert buffer.forwarded(1, buffer.mark(1))
    send(buffer, 3, now=4.0)
    buffer.prune(4.9)
    assert buffer.gone == 0
    buffer.prune(5.1)
    assert (buffer.gone, buffer.confirmed) == (2, 2)
    assert again(buffer) == [3]
    assert buffer.unknown is None


def test_a_lossless_buffer_forgets_only_what_is_confirmed() -> None:
    """Who fills it waits; frames that are confirmed are bounded as ever."""
    buffer = ReplayBuffer(seconds=1000, max_bytes=10_000, lossless=True)
    send(buffer, *range(1, 11), size=2000)
    buffer.prune(2000.0)
    assert keep(buffer, *range(11, 21), size=2000) == 0
    assert again(buffer) == list(range(1, 21))
    assert (buffer.unknown, buffer.gone, buffer.confirmed) == (None, 0, 0)
    assert buffer.forwarded(2, buffer.mark(2))
    send(buffer, 21, size=2000)
    assert buffer.kept_bytes <= 10_000
    assert buffer.confirmed == 20
    assert buffer.unknown is None


def test_bytes_are_bounded_and_what_is_gone_unconfirmed_is_unknown_once_its_path_breaks() -> None:
    buffer = ReplayBuffer(max_bytes=10_000)
    send(buffer, *range(1, 101), size=900)
    assert buffer.kept_bytes <= 10_000
    assert buffer.unknown is None, "the path holds: the next confirmation covers what is gone"
    numbers = again(buffer)
    assert numbers == list(range(101 - len(numbers), 101))
    assert buffer.unknown == Unknown(1, 100 - len(numbers))
    buffer.unknown = None
    assert again(buffer) == numbers
    assert buffer.unknown is None, "said once"


@pytest.mark.parametrize("waits", [False, True], ids=["sent", "waiting"])
def test_tiny_frames_take_no_more_memory_than_the_bound(waits: bool) -> None:
    """Most of what a tiny frame costs is not its bytes."""
    buffer = ReplayBuffer(max_bytes=1 << 20)
    tracemalloc.start()
    try:
        for number in range(1, 20_001):
            (buffer.keep if waits else buffer.sent)(frame(number), number, number / 1e4)
        taken_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert buffer.gone > 0, "it never was full"
    assert 0.75 < taken_bytes / (1 << 20) < 1.1


def test_a_confirmation_in_time_covers_what_is_gone() -> None:
    buffer = ReplayBuffer(max_bytes=10_000)
    send(buffer, *range(1, 101), size=900)
    assert buffer.forwarded(1, buffer.mark(1))
    assert buffer.unconfirmed_bytes == 0
    again(buffer)
    assert buffer.unknown is None


def test_what_waits_is_kept_as_bytes_allow_and_counted_when_given_up() -> None:
    buffer = ReplayBuffer(seconds=5, max_bytes=2000 + 3 * ENTRY_BYTES)
    send(buffer, 1, size=500)
    buffer.forwarded(1, buffer.mark(1))
    buffer.broken()
    assert keep(buffer, 2, 3, size=500) == 0
    assert keep(buffer, 4, now=100.0, size=500) == 0, "the one that is confirmed goes first"
    assert keep(buffer, 5, now=100.0, size=500) == 1
    assert buffer.unknown == Unknown(2, 2)
    assert taken(buffer) == [3, 4, 5]
    assert buffer.sent_to == 5


def test_what_was_sent_once_is_unknown_but_not_given_up() -> None:
    buffer = ReplayBuffer(max_bytes=2000 + 3 * ENTRY_BYTES)
    send(buffer, 1, 2, size=500)
    buffer.broken()
    assert keep(buffer, 3, 4, 5, size=500) == 0
    assert buffer.unknown == Unknown(1, 2)


def test_a_replay_leaves_in_parts_and_new_frames_follow_it() -> None:
    buffer = ReplayBuffer()
    send(buffer, 1, 2, 3, size=500)
    buffer.broken()
    assert taken(buffer, max_bytes=1200) == [1, 2]
    keep(buffer, 4, size=500)
    assert buffer.sent_to == 2
    assert taken(buffer, max_bytes=10) == [3], "one that is larger goes alone"
    assert taken(buffer) == [4]
    assert taken(buffer) == []


def test_a_replay_that_is_cut_off_begins_again_where_nothing_is_confirmed() -> None:
    buffer = ReplayBuffer(seconds=0)
    send(buffer, 1, 2, 3, 4, size=500)
    buffer.broken()
    assert taken(buffer, 2, 1200) == [1, 2]
    buffer.forwarded(2, buffer.mark(2))
    assert taken(buffer, 2, 600) == [3]
    buffer.prune(1.0)
    assert again(buffer) == [3, 4]


def test_a_mark_counts_when_the_paths_before_are_confirmed() -> None:
    buffer = ReplayBuffer()
    send(buffer, 1)
    buffer.mark(1, fin=True)
    send(buffer, 2)
    assert not buffer.forwarded(2, buffer.mark(2))
    assert buffer.confirmed == 0
    assert buffer.forwarded(1, 0)
    assert (buffer.confirmed, buffer.confirmed_mark, buffer.open_question) == (2, 2, False)


def test_a_mark_confirms_those_before_it_but_no_fin_and_no_other_path() -> None:
    buffer = ReplayBuffer()
    send(buffer, 1)
    buffer.mark(1)
    send(buffer, 2)
    second = buffer.mark(1)
    buffer.mark(1, fin=True)
    assert not buffer.forwarded(7, 99)
    assert buffer.forwarded(1, second)
    assert (buffer.confirmed, buffer.open_question) == (2, True)


def test_a_mark_of_a_broken_path_says_nothing_of_the_next() -> None:
    buffer = ReplayBuffer()
    send(buffer, 1)
    mark = buffer.mark(1)
    buffer.broken()
    assert not buffer.forwarded(1, mark)
    assert taken(buffer) == [1]


@pytest.mark.parametrize("fins", [0, 1])
def test_questions_nobody_answers_do_not_pile_up(fins: int) -> None:
    buffer = ReplayBuffer()
    if fins:
        send(buffer, 1)
        buffer.mark(1, fin=True)
    for number in range(2, 1000):
        send(buffer, number)
        last = buffer.mark(2)
    assert len(buffer._marks) <= MARKS_KEPT
    buffer.forwarded(2, last)
    assert buffer.confirmed == (0 if fins else 999)


def test_a_mark_is_due_after_so_many_bytes() -> None:
    buffer = ReplayBuffer()
    send(buffer, 1, size=MARK_BYTES - 10_000)
    assert not buffer.mark_due
    send(buffer, 2, size=10_000)
    assert buffer.mark_due
    buffer.mark(1)
    assert not buffer.mark_due


def test_an_empty_buffer() -> None:
    buffer = ReplayBuffer()
    assert again(buffer) == []
    assert (buffer.gone, buffer.sent_to, buffer.kept_bytes, buffer.unknown) == (0, 0, 0, None)


def test_confirmations_that_come_late_still_confirm() -> None:
    """Many MARKs are under way: the oldest, whose answer comes next, is never given up for a newer one."""
    buffer, asked, confirmed = ReplayBuffer(), list[int](), 0
    for number in range(1, 40 * MARKS_KEPT):
        send(buffer, number)
        asked.append(buffer.mark(1))
        if number > 10 * MARKS_KEPT:
            buffer.forwarded(1, asked[number - 1 - 10 * MARKS_KEPT])
            assert number - buffer.confirmed <= 22 * MARKS_KEPT
            confirmed = buffer.confirmed
    assert confirmed > 17 * MARKS_KEPT
