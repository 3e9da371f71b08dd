"""The publisher's ring: bounded by time and bytes, replayed under another path number, and honest about what it gave up."""

from __future__ import annotations

from roq.client.ring import Ring
from roq.wire.frame import encode_data, parse, payloads

SECOND = 1_000_000_000


def frame(sequence: int, payload: bytes = b"x", count: int = 1) -> bytes:
    return encode_data(b"topic", 9, 1, sequence, sequence - 1, sequence - 1, [payload] * count, 5)


def sequences(ring: Ring, path: int = 2) -> list[int]:
    return [parse(one)[1].sequence for one in ring.replay(path)]


def test_a_replay_changes_the_path_and_nothing_else() -> None:
    ring = Ring()
    original = encode_data(b"eu.paris", 9, 1, 7, 3, 2, [b"a", b"\0b"], 1234)
    ring.sent(original, 0)
    [again] = ring.replay(70_000)
    topic, header, body = parse(again)
    assert (topic, payloads(header, body)) == (b"eu.paris", [b"a", b"\0b"])
    assert header == parse(original)[1]._replace(path=70_000)


def test_old_frames_are_forgotten() -> None:
    ring = Ring(seconds=5, max_bytes=1 << 20)
    for number in range(10):
        ring.sent(frame(number + 1), number * SECOND)
    assert sequences(ring) == [5, 6, 7, 8, 9, 10]
    assert ring.first_sequence(99) == 5
    assert ring.bytes == 6 * len(frame(1))


def test_bytes_are_bounded() -> None:
    ring = Ring(seconds=1000, max_bytes=10_000)
    for number in range(100):
        ring.sent(frame(number + 1, b"x" * 900), 0)
    assert ring.bytes <= 10_000
    assert sequences(ring) == list(range(101 - len(sequences(ring)), 101))


def test_what_was_never_sent_is_kept_whatever_its_age_and_counted_when_given_up() -> None:
    ring = Ring(seconds=5, max_bytes=2000)
    ring.sent(frame(1, b"x" * 500), 0)
    assert ring.keep(frame(2, b"x" * 500), 0) == 0
    assert ring.keep(frame(3, b"x" * 500), 100 * SECOND) == 0
    assert ring.unsent_bytes == len(frame(2, b"x" * 500)) * 2
    assert ring.keep(frame(4, b"x" * 500), 100 * SECOND) == 0, "the one that was sent goes first"
    assert ring.keep(frame(5, b"x" * 500), 100 * SECOND) == 1
    assert sequences(ring) == [3, 4, 5]
    assert ring.unsent_bytes == 0, "a replay sends them"


def test_an_empty_ring() -> None:
    assert sequences(Ring()) == []
    assert Ring().first_sequence(8) == 8
