"""A publisher's bytes cut into runs: whatever way they come, the same frames leave in order, each for those who asked for it.

Not covered: connections and queues (tests/integration/test_forwarder.py).
"""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable

import hypothesis.strategies as st
import pytest
from hypothesis import example, given, settings

from roq.errors import AccessDenied, FrameError
from roq.pubsub.exchange.runs import CONTROL_KEY_BYTES, IN_PIECES_BYTES, TOPIC_BYTES_MAX, FrameRun, FrameRuns
from roq.wire.frame import publisher_of
from roq.wire.limits import SUBSCRIPTION_BYTES_MAX
from roq.wire.zmtp import COMMAND, LONG, MORE, frame, frames_in

FRAME_BYTES_MAX = 256 * 1024
PREFIXES = (b"", b"a", b"ab", b"ab\0", b"b\0", b"\xff", b"\xff\x01\x04", b"\0")
Route = tuple[bytes, ...]
Sent = tuple[bytes, bool]  # a body, and whether it is a command

topics = st.sampled_from([b"a\0", b"ab\0", b"abc\0", b"b\0", b"\0", b"a", b"ab", b"abc", b"a" * 300])
bodies = st.one_of(
    st.builds(lambda topic, rest: topic + rest, topics, st.binary(max_size=300)),
    topics,
    st.builds(lambda kind, rest: b"\xff\x01" + kind + rest, st.sampled_from([b"\1", b"\4"]), st.binary(max_size=60)),
    st.binary(max_size=3),
    st.builds(
        lambda topic, size: topic + b"x" * size,
        st.sampled_from([b"a\0", b"b\0", b"b" * 256, b"\xff\x01\x04"]),
        st.integers(IN_PIECES_BYTES - 10, 3 * IN_PIECES_BYTES),
    ),
)
commands = st.builds(lambda rest: b"\x04PING\0\0" + rest, st.binary(max_size=16))
sent_frames = st.lists(st.one_of(st.tuples(bodies, st.just(False)), st.tuples(commands, st.just(True))), max_size=14)
steps = st.lists(st.one_of(st.integers(1, 40), st.integers(1, 40_000)), min_size=1, max_size=8)


def expected_route(body: bytes) -> Route:
    """Which of PREFIXES begin its key, as the module's docstring says what that is."""
    if body[:1] == b"\xff":
        key = body[:CONTROL_KEY_BYTES]
    else:
        topic, nul, _ = body[:TOPIC_BYTES_MAX].partition(b"\0")
        key = topic + nul
    return tuple(prefix for prefix in PREFIXES if key.startswith(prefix))


class Cutting:
    """A FrameRuns with what came out of it."""

    def __init__(self, on_sender: Callable[[bytes], None] | None = None) -> None:
        self.controls = list[bytes]()
        self.runs = list[FrameRun[Route]]()
        self._same = dict[Route, Route]()
        self.cut = FrameRuns(self._route, FRAME_BYTES_MAX, self.controls.append, on_sender)

    def _route(self, key: bytes) -> Route:
        route = tuple(prefix for prefix in PREFIXES if key.startswith(prefix))
        return self._same.setdefault(route, route)

    def feed(self, data: bytes) -> list[FrameRun[Route]]:
        runs = self.cut.feed(data)
        self.runs += runs
        return runs

    def frames(self) -> list[tuple[bytes, Route]]:
        """Each with its header and its route."""
        found = list[tuple[bytes, Route]]()
        for route, pieces, count, size in self.runs:
            data = b"".join(pieces)
            within = [(data[at:stop], route) for at, _, stop in frames_in(data)]
            assert (len(within), len(data)) == (count, size)
            found += within
        return found


def stream_of(sent: list[Sent]) -> bytes:
    return b"".join(frame(body, COMMAND if command else 0) for body, command in sent)


def check(cutting: Cutting, sent: list[Sent]) -> None:
    data = [body for body, command in sent if not command]
    assert cutting.frames() == [(frame(body), expected_route(body)) for body in data]
    assert cutting.controls == [body for body in data if body[:1] == b"\xff"]
    assert cutting.cut.pongs == [frame(b"\x04PONG" + body[7:], COMMAND) for body, command in sent if command]
    assert cutting.cut.unfinished == 0


@settings(max_examples=400)
@given(sent_frames, steps)
@example([(b"a", False), (b"ab", False)], [40_000])
@example([(b"a\0" + b"x" * IN_PIECES_BYTES, False), (b"b\0", False)], [300, 40_000])
def test_whatever_way_they_are_cut_the_frames_come_out_in_order_with_their_routes(sent: list[Sent], cuts: list[int]) -> None:
    stream, cutting, at, turn = stream_of(sent), Cutting(), 0, 0
    while at < len(stream):
        step = cuts[turn % len(cuts)]
        cutting.feed(stream[at : at + step])
        at, turn = at + step, turn + 1
    check(cutting, sent)


senders = st.builds(
    lambda topic, publisher, size: topic + b"\1\0" + publisher * 8 + b"x" * size,
    st.sampled_from([b"a\0", b"ab\0", b"\0", b"c" * 255 + b"\0", b"a" * 256]),
    st.sampled_from([b"p", b"p", b"p", b"q"]),
    st.one_of(st.integers(0, 60), st.integers(IN_PIECES_BYTES - 10, 2 * IN_PIECES_BYTES)),
)


@settings(max_examples=400)
@given(st.lists(senders, max_size=10), steps)
@example([b"a\0\1\0pppppppp", b"a\0\1\0pppppppq"], [40_000])
@example([b"a\0\1\0pppppppp", b"a\0\1\0ppp"], [40_000])
def test_no_frame_of_another_sender_comes_out(sent: list[bytes], cuts: list[int]) -> None:
    """Alike begins a row of frames that are compared at once; one that is too short has no sender."""
    own, at, turn = b"p" * 8, 0, 0

    def look(beginning: bytes) -> None:
        if publisher_of(beginning) != own:
            raise AccessDenied("of another one")

    stream, cutting = stream_of([(one, False) for one in sent]), Cutting(look)
    foreign = [one for one in sent if one.find(b"\0") + 1 == 0 or publisher_of(one) != own]
    refused = False
    while at < len(stream) and not refused:
        step = cuts[turn % len(cuts)]
        try:
            cutting.feed(stream[at : at + step])
        except AccessDenied:
            refused = True
        at, turn = at + step, turn + 1
    out = [one for one, _ in cutting.frames()]
    assert refused == bool(foreign)
    assert out == [frame(one) for one in sent[: len(out)]]
    assert len(out) == len(sent) or (foreign and len(out) <= sent.index(foreign[0]))


SEVERAL: list[Sent] = [
    (b"a\0one", False),
    (b"\xff\x01\x04mark", False),
    (b"\x04PING\0\0context", True),
    (b"a\0" + b"y" * 300, False),
    (b"", False),
    (b"ab\0two", False),
]


def test_cut_at_every_boundary_and_in_crumbs() -> None:
    stream = stream_of(SEVERAL)
    for cut in range(len(stream) + 1):
        cutting = Cutting()
        cutting.feed(stream[:cut])
        cutting.feed(stream[cut:])
        check(cutting, SEVERAL)
    for size in (1, 2, 3, 9, 10):
        cutting = Cutting()
        for at in range(0, len(stream), size):
            cutting.feed(stream[at : at + size])
        check(cutting, SEVERAL)


@pytest.mark.parametrize("cut", [1, 2, 8, 9, 10, 9 + TOPIC_BYTES_MAX - 1, 9 + TOPIC_BYTES_MAX, 9 + TOPIC_BYTES_MAX + 1, 5000])
@pytest.mark.parametrize("begin", [b"ab\0", b"\xff\x01\x04", b"z" * 256, b"z" * 255 + b"\0"])
def test_a_large_frame_in_two_pieces_with_others_around_it(begin: bytes, cut: int) -> None:
    sent = [(b"a\0before", False), (begin.ljust(3 * IN_PIECES_BYTES, b"."), False), (b"b\0after", False)]
    stream, cutting = stream_of(sent), Cutting()
    first = len(frame(sent[0][0])) + cut
    cutting.feed(stream[:first])
    assert cutting.cut.unfinished == cut
    cutting.feed(stream[first:])
    check(cutting, sent)


def test_neighbours_for_the_same_route_leave_as_one_run() -> None:
    cutting = Cutting()
    runs = cutting.feed(b"".join(frame(body) for body in (b"abc\0one", b"ab1\0two", b"abc\0", b"b\0three", b"abc\0four")))
    assert [(run.route, run.frames) for run in runs] == [((b"", b"a", b"ab"), 3), ((b"", b"b\0"), 1), ((b"", b"a", b"ab"), 1)]


def test_a_chunk_of_one_run_is_not_copied() -> None:
    chunk = b"".join(frame(b"ab\0%d" % number) for number in range(500))
    (run,) = Cutting().feed(chunk)
    assert run.pieces[0] is chunk
    assert (run.frames, run.size) == (500, len(chunk))


def test_a_large_part_of_a_chunk_is_shared_and_a_small_one_is_not() -> None:
    many = b"".join(frame(b"ab\0%d" % number) for number in range(4_000))
    large, small = Cutting().feed(many + frame(b"b\0"))
    assert isinstance(large.pieces[0], memoryview)
    assert small.pieces == [frame(b"b\0")]
    assert type(small.pieces[0]) is bytes


@pytest.mark.parametrize("chunk", [70_000, 100_000, 150_000, 256_000])
def test_what_a_queue_holds_is_little_more_than_its_size(chunk: int) -> None:
    cutting, stream = Cutting(), frame(b"ab\0".ljust(64 * 1024, b".")) * 40
    for at in range(0, len(stream), chunk):
        cutting.feed(stream[at : at + chunk])
    held = {id(base): len(base) for run in cutting.runs for piece in run.pieces for base in (base_of(piece),)}
    assert sum(held.values()) < 1.3 * sum(run.size for run in cutting.runs)


def base_of(piece: bytes | memoryview) -> bytes:
    """The object that a piece keeps alive."""
    base = piece if isinstance(piece, bytes) else piece.obj
    assert isinstance(base, bytes)
    return base


def test_a_frame_shorter_than_the_topic_before_it_is_not_matched_by_the_bytes_behind_it() -> None:
    cutting = Cutting()
    sent = [(b"ab\0", False), (b"a", False), (b"", False), (b"b\0", False), (b"ab\0", False)]
    cutting.feed(stream_of(sent))
    check(cutting, sent)
    short = Cutting()  # its header continues the topic of the frame before, as bytes
    sent = [(b"\0", False), (b"", False), (b"\0", False)]
    short.feed(stream_of(sent))
    check(short, sent)


def test_a_topic_without_an_end_does_not_decide_for_a_longer_one() -> None:
    cutting = Cutting()
    sent = [(b"a", False), (b"ab", False), (b"ab\0c", False), (b"a" * 300, False), (b"a" * 301, False)]
    cutting.feed(stream_of(sent))
    check(cutting, sent)


REFUSED = {
    "too large": frame(b"a\0".ljust(FRAME_BYTES_MAX + 1)),
    "too large, its header": bytes([LONG]) + (FRAME_BYTES_MAX + 1).to_bytes(8, "big"),
    "far too large": bytes([LONG]) + b"\xff" * 8,
    "a first part": frame(b"a\0", MORE),
    "a large first part": frame(b"a\0".ljust(1000), MORE),
    "an unknown flag": b"\x08\0",
    "a command with an unknown flag": b"\x0c\0",
    "a command too large": bytes([LONG | COMMAND]) + (FRAME_BYTES_MAX + 1).to_bytes(8, "big"),
    "a command larger than commands are": bytes([LONG | COMMAND]) + (SUBSCRIPTION_BYTES_MAX + 1).to_bytes(8, "big"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_breaks_the_protocol_is_refused(what: str) -> None:
    with pytest.raises(FrameError):
        Cutting().feed(REFUSED[what])
    with pytest.raises(FrameError):
        Cutting().feed(frame(b"a\0good") + REFUSED[what])


def test_the_largest_frame_and_the_largest_command_pass() -> None:
    cutting, sent = Cutting(), [(b"ab\0".ljust(FRAME_BYTES_MAX), False), (b"\x04OTHER".ljust(SUBSCRIPTION_BYTES_MAX), True)]
    stream = stream_of(sent)
    for at in range(0, len(stream), 10_000):
        cutting.feed(stream[at : at + 10_000])
    assert [size for _, _, _, size in cutting.runs] == [FRAME_BYTES_MAX + 9]
    assert not cutting.cut.pongs


def test_a_pong_repeats_at_most_16_bytes_of_context() -> None:
    cutting = Cutting()
    cutting.feed(frame(b"\x04PING\0\0" + b"c" * 40, COMMAND))
    assert cutting.cut.pongs == [frame(b"\x04PONG" + b"c" * 16, COMMAND)]


@given(st.binary(max_size=400))
def test_any_bytes_raise_frame_error_or_nothing(junk: bytes) -> None:
    cutting = Cutting()
    try:
        cutting.feed(junk)
    except FrameError:
        return
    assert sum(size for _, _, _, size in cutting.runs) <= len(junk)


def test_a_large_frame_in_crumbs_costs_hardly_more_than_its_bytes() -> None:
    cutting, crumb = Cutting(), b"x" * 3
    cutting.feed(bytes([LONG]) + FRAME_BYTES_MAX.to_bytes(8, "big") + b"a\0")
    cutting.feed(b"x" * TOPIC_BYTES_MAX)
    tracemalloc.start()
    try:
        for _ in range((FRAME_BYTES_MAX - 2 - TOPIC_BYTES_MAX) // 3 - 1):
            assert not cutting.feed(crumb)
        assert tracemalloc.get_traced_memory()[0] < 1.1 * cutting.cut.unfinished
    finally:
        tracemalloc.stop()
    assert FRAME_BYTES_MAX - 6 < cutting.cut.unfinished < FRAME_BYTES_MAX + 9
    run, _ = cutting.feed(b"x" * (FRAME_BYTES_MAX + 9 - cutting.cut.unfinished) + frame(b"ab\0"))
    assert (run.size, run.route) == (FRAME_BYTES_MAX + 9, (b"", b"a"))
