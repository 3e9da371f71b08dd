"""ZMTP as bytes: whatever way they are cut, the same messages come out; what breaks the protocol raises FrameError.

Not covered: sockets and libzmq itself (tests/integration/test_zmtp_sockets.py).
"""

from __future__ import annotations

import tracemalloc

import hypothesis.strategies as st
import pytest
from hypothesis import example, given

from roq.errors import AccessDenied, FrameError
from roq.wire.limits import CONTROL_BYTES_MAX
from roq.wire.zmtp import COMMAND, GREETING_BYTES, LONG, MORE, PARTS_MAX, Parser, frame, hello

HELLO = hello(b"DEALER")
PING = frame(b"\x04PING\0\x0acontext", COMMAND)
messages = st.lists(st.lists(st.binary(max_size=600), min_size=1, max_size=PARTS_MAX), max_size=6)


def encode(*message: bytes) -> bytes:
    """One message of these parts."""
    return b"".join(frame(part, MORE) for part in message[:-1]) + frame(message[-1])


def greeted() -> Parser:
    parser = Parser()
    assert parser.feed(HELLO) == []
    assert parser.ready
    return parser


def test_layout_is_the_documented_one() -> None:
    assert GREETING_BYTES == 64
    assert HELLO[:12] == b"\xff" + bytes(8) + b"\x7f\x03\x01"
    assert HELLO[12:64] == b"NULL" + bytes(16 + 32)
    ready = b"\x05READY\x0bSocket-Type\0\0\0\x06DEALER\x08Identity\0\0\0\0"
    assert HELLO[64:] == bytes([COMMAND, len(ready)]) + ready
    assert frame(b"ab", MORE) == b"\x01\x02ab"
    assert frame(b"a" * 255)[:2] == b"\0\xff"
    assert frame(b"a" * 256, MORE)[:9] == bytes([MORE | LONG]) + (256).to_bytes(8, "big")


SEVERAL = [[b"one"], [b"", b"two", b"x" * 255], [b"y" * 256], [b""]]
STREAM = HELLO + encode(*SEVERAL[0]) + PING + b"".join(encode(*message) for message in SEVERAL[1:])


def test_cut_at_every_boundary() -> None:
    for cut in range(len(STREAM) + 1):
        parser = Parser()
        assert parser.feed(STREAM[:cut]) + parser.feed(STREAM[cut:]) == SEVERAL, cut
        assert parser.ready
        assert parser.pongs == [frame(b"\x04PONGcontext", COMMAND)]


@pytest.mark.parametrize("size", [1, 2, 3, 8, 9, 10, 63, 64, 65])
def test_in_crumbs_a_message_comes_with_its_last_byte(size: int) -> None:
    parser, taken = Parser(), list[list[bytes]]()
    for at in range(0, len(STREAM), size):
        taken += parser.feed(STREAM[at : at + size])
        whole = Parser().feed(STREAM[: at + size])
        assert taken == whole, at
    assert taken == SEVERAL


@given(messages, st.lists(st.integers(1, 700), min_size=1, max_size=8))
@example([[b"z" * 256]], [9, 1, 255])
def test_what_is_sent_comes_back(sent: list[list[bytes]], steps: list[int]) -> None:
    stream = HELLO + b"".join(encode(*message) for message in sent)
    parser, taken, at, turn = Parser(), list[list[bytes]](), 0, 0
    while at < len(stream):
        step = steps[turn % len(steps)]
        taken += parser.feed(stream[at : at + step])
        at, turn = at + step, turn + 1
    assert taken == sent
    assert not parser.pongs


@given(st.binary(max_size=400))
def test_any_bytes_after_the_greeting_raise_frame_error_or_nothing(junk: bytes) -> None:
    parser = greeted()
    try:
        taken = parser.feed(junk)
    except FrameError:
        return
    assert sum(len(part) for message in taken for part in message) <= len(junk)


def test_the_largest_frame_passes_in_pieces() -> None:
    parser, body = greeted(), bytes(CONTROL_BYTES_MAX)
    stream, taken = frame(body), list[list[bytes]]()
    for at in range(0, len(stream), 65536):
        taken += parser.feed(stream[at : at + 65536])
    assert taken == [[body]]


@pytest.mark.parametrize(
    "header",
    [
        bytes([LONG]) + (CONTROL_BYTES_MAX + 1).to_bytes(8, "big"),
        bytes([LONG]) + b"\xff" * 8,
        bytes([LONG | COMMAND]) + (CONTROL_BYTES_MAX + 1).to_bytes(8, "big"),
        b"\x08\0",
    ],
)
def test_a_frame_too_large_or_of_no_known_kind_is_refused_by_its_header(header: bytes) -> None:
    with pytest.raises(FrameError):
        greeted().feed(header)


def test_too_many_parts() -> None:
    most = [b"part"] * PARTS_MAX
    assert greeted().feed(encode(*most)) == [most]
    with pytest.raises(FrameError):
        greeted().feed(encode(*most, b"one more"))


def change(at: int, byte: int) -> bytes:
    return HELLO[:at] + bytes([byte]) + HELLO[at + 1 :]


@pytest.mark.parametrize(
    "greeting",
    [
        b"GET / HTTP/1.1\r\nHost: somewhere\r\n".ljust(GREETING_BYTES, b"\n"),
        bytes(GREETING_BYTES),
        change(0, 0xFE),
        change(9, 0x7E),
        change(10, 2),
        HELLO[:12] + b"PLAIN".ljust(20, b"\0") + HELLO[32:],
    ],
)
def test_a_greeting_of_something_else(greeting: bytes) -> None:
    with pytest.raises(FrameError):
        Parser().feed(greeting)


def test_one_with_security_lets_nobody_in_without() -> None:
    with pytest.raises(AccessDenied, match="card"):
        Parser().feed(HELLO[:12] + b"CURVE".ljust(20, b"\0") + HELLO[32:])


@pytest.mark.parametrize("tail", [b"", b"\x03400", b"\xff400"])
def test_an_error_says_why_nobody_is_let_in(tail: bytes) -> None:
    with pytest.raises(AccessDenied, match="400" if tail else "card"):
        Parser().feed(HELLO[:GREETING_BYTES] + frame(b"\x05ERROR" + tail, COMMAND))


def test_a_command_has_one_part() -> None:
    with pytest.raises(FrameError):
        Parser().feed(HELLO + frame(b"\x04PING\0\0", COMMAND | MORE))


def test_a_later_version_is_welcome_and_not_ready_before_its_ready() -> None:
    parser = Parser()
    assert parser.feed(change(11, 9)[:GREETING_BYTES]) == []
    assert not parser.ready
    parser.feed(HELLO[GREETING_BYTES:])
    assert parser.ready


def test_a_pong_repeats_at_most_16_bytes_of_context_and_other_commands_are_passed_over() -> None:
    parser = greeted()
    assert parser.feed(frame(b"\x04PING\0\0", COMMAND) + frame(b"\x04PING\0\0" + b"c" * 40, COMMAND)) == []
    assert parser.pongs == [frame(b"\x04PONG", COMMAND), frame(b"\x04PONG" + b"c" * 16, COMMAND)]
    assert parser.feed(frame(b"\x07UNKNOWN", COMMAND) + encode(b"on")) == [[b"on"]]


def test_a_message_of_many_parts_is_no_larger_than_one_of_a_single_part() -> None:
    part = frame(bytes(CONTROL_BYTES_MAX // 4), MORE)
    parser = greeted()
    for number in range(4):
        assert parser.feed(part) == []
        assert parser.unfinished == (number + 1) * (CONTROL_BYTES_MAX // 4)
    with pytest.raises(FrameError, match="bytes"):
        parser.feed(frame(b"x"))


def test_what_is_unfinished_is_counted() -> None:
    parser, message = greeted(), encode(b"a" * 700, b"b" * 300)
    assert parser.unfinished == 0
    for at in range(len(message) - 1):
        parser.feed(message[at : at + 1])
        assert at - 20 <= parser.unfinished <= at + 1
    assert parser.feed(message[-1:]) == [[b"a" * 700, b"b" * 300]]
    assert parser.unfinished == 0


def test_a_message_in_crumbs_costs_hardly_more_than_its_bytes() -> None:
    parser, crumb = greeted(), b"x" * 3
    parser.feed(b"%c%c%b" % (LONG, 0, (CONTROL_BYTES_MAX - 1).to_bytes(7, "big")))
    tracemalloc.start()
    try:
        for _ in range(100_000):
            parser.feed(crumb)
        assert tracemalloc.get_traced_memory()[0] < 1.1 * parser.unfinished
    finally:
        tracemalloc.stop()
