"""Frames: what is encoded is parsed again, and bytes of any kind raise FrameError or nothing."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis import given, settings

from roq.errors import FrameError
from roq.wire.frame import (
    CONTROL_PREFIX,
    HEADER,
    HEADERS_VERSION,
    SUBSCRIBE_ALL,
    VERSION,
    FrameKind,
    Header,
    PathOpening,
    confirmation,
    confirmed,
    encode_control,
    encode_data,
    mark_body,
    opening_body,
    parse,
    payloads,
    publisher_of,
    text_body,
    watermark_body,
    welcome,
)

U32, U64 = st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)
topics = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1, max_size=60).map(str.encode)
bodies: list[Callable[[memoryview], Any]] = [text_body, mark_body, opening_body, watermark_body]
FRAME = encode_data(b"eu.paris", 7, 3, 11, 9, 4, [b"one", b""], 5)


def test_layout_is_the_documented_one() -> None:
    assert HEADER.size == 50
    header = bytes([VERSION, 0]) + b"".join(
        value.to_bytes(size, "little") for value, size in ((7, 8), (3, 4), (11, 8), (9, 8), (4, 8), (2, 4), (5, 8))
    )
    assert b"eu.paris\0" + header + msgspec.msgpack.encode([b"one", b""]) == FRAME


@given(topics, U64, U32, U64, U64, U64, st.lists(st.binary(max_size=40), max_size=5), U64)
def test_a_data_frame_comes_back(
    topic: bytes, publisher: int, path: int, sequence: int, previous: int, index: int, batch: list[bytes], timestamp: int
) -> None:
    found, header, body = parse(encode_data(topic, publisher, path, sequence, previous, index, batch, timestamp))
    assert found == topic
    assert header == Header(VERSION, FrameKind.DATA, publisher, path, sequence, previous, index, len(batch), timestamp)
    assert payloads(header, body) == batch


@pytest.mark.parametrize(
    ("kind", "body", "decode"),
    [
        (FrameKind.ATTACHED, "A/1f", text_body),
        (FrameKind.RETIRE, "é/0", text_body),
        (FrameKind.MARK, 12, mark_body),
        (FrameKind.OPEN, PathOpening("A", True), opening_body),
        (FrameKind.OPEN, PathOpening("", False), opening_body),
        (FrameKind.WATERMARK, {"eu.paris": (7, 3), "ü": (9, 1)}, watermark_body),
    ],
)
def test_a_control_frame_comes_back(kind: FrameKind, body: Any, decode: Callable[[memoryview], Any]) -> None:
    topic, header, rest = parse(encode_control(kind, 7, 3, 11, body, 5))
    assert (topic, header) == (b"", (VERSION, kind, 7, 3, 11, 0, 0, 0, 5))
    assert decode(rest) == body


def test_fin_has_no_body() -> None:
    _, header, rest = parse(encode_control(FrameKind.FIN, 7, 3, 11, None, 5))
    assert header.kind == FrameKind.FIN
    assert bytes(rest) == b"\xc0"


@pytest.mark.parametrize("mark", [-1, -(2**63)])
def test_a_mark_is_a_number_that_can_be_confirmed(mark: int) -> None:
    _, _, body = parse(encode_control(FrameKind.MARK, 7, 3, 11, mark, 5))
    with pytest.raises(FrameError):
        mark_body(body)


@given(U32, U64)
def test_a_confirmation_comes_back(path: int, mark: int) -> None:
    message = confirmation(path, mark)
    assert message[:1] not in (b"\0", b"\1"), "a subscription, or its end"
    assert confirmed(message) == (path, mark)
    for other in (message[:-1], message + b"\0", b"\1" + message[1:], b"\0" + message[1:]):
        assert confirmed(other) is None


def test_a_subscription_is_no_confirmation() -> None:
    for message in (b"", b"\x02", SUBSCRIBE_ALL, welcome("A/1"), welcome("x" * 10), b"\x01" + bytes(12)):
        assert confirmed(message) is None


@given(st.binary(max_size=20))
def test_other_bytes_are_no_confirmation(message: bytes) -> None:
    known = confirmed(message)
    assert known is None or confirmation(*known) == message


@pytest.mark.parametrize("size", range(len(FRAME)))
def test_a_cut_frame_is_refused(size: int) -> None:
    with pytest.raises(FrameError):
        payloads(*parse(FRAME[:size])[1:])


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"\xff",
        b"no end of topic",
        FRAME[:9] + bytes([HEADERS_VERSION + 1]) + FRAME[10:],  # another version
        FRAME[:10] + bytes([FrameKind.FIN]) + FRAME[11:],  # control kind on a topic
        FRAME[8:],  # data without a topic
        CONTROL_PREFIX + FRAME[9:],  # data kind behind the control prefix
    ],
)
def test_nonsense_is_refused(frame: bytes) -> None:
    with pytest.raises(FrameError):
        parse(frame)


@pytest.mark.parametrize("kind", [kind for kind in FrameKind if kind])
def test_a_control_frame_begins_with_its_prefix(kind: FrameKind) -> None:
    """Exchanges let a frame that begins as data pass as data; a bundle holds data alone, so nothing is nested."""
    frame = b"\0" + encode_control(kind, 7, 1, 1, "A/1", 0)[1:]
    with pytest.raises(FrameError):
        parse(frame)
    with pytest.raises(FrameError):
        parse(encode_control(kind, 7, 1, 1, "A/1", 0).replace(CONTROL_PREFIX, b"t\0", 1))
    assert publisher_of(frame) == b""


def test_a_wrong_count_is_refused() -> None:
    _, header, body = parse(FRAME)
    with pytest.raises(FrameError, match="announces 3 payloads, body has 2"):
        payloads(header._replace(count=3), body)


@pytest.mark.parametrize("value", [1, None, 0.5, [b"x"], {"a": "b"}])
def test_a_header_that_is_neither_text_nor_bytes_is_refused(value: Any) -> None:
    items: list[Any] = [b"none", (b"good", {"a": "text", "b": b"bytes"}), (b"bad", {"a": "text", "b": value})]
    for count in (2, 3):
        _, header, body = parse(encode_data(b"t", 1, 1, 1, 0, 0, items[:count], 0, HEADERS_VERSION))
        if count == 2:
            assert payloads(header, body) == items[:2]
        else:
            with pytest.raises(FrameError, match="neither text nor bytes"):
                payloads(header, body)


def try_all(frame: bytes) -> None:
    """Everything a receiver may do with bytes from the network."""
    try:
        _, header, body = parse(frame)
    except FrameError:
        return
    for decode in [lambda rest: payloads(header, rest), *bodies]:
        with suppress(FrameError):
            decode(body)


@settings(max_examples=300)
@given(st.binary(max_size=120))
def test_random_bytes_raise_nothing_else(noise: bytes) -> None:
    try_all(noise)
    try_all(CONTROL_PREFIX + noise)


@settings(max_examples=300)
@given(st.sampled_from(list(FrameKind)), st.binary(max_size=60))
def test_random_bodies_raise_nothing_else(kind: FrameKind, noise: bytes) -> None:
    prefix = b"t\0" if kind == FrameKind.DATA else CONTROL_PREFIX
    try_all(prefix + HEADER.pack(VERSION, kind, 7, 1, 1, 0, 0, 1, 0) + noise)


@settings(max_examples=200)
@given(st.binary(max_size=20), st.integers(0, 80))
def test_text_that_is_no_utf8_raises_nothing_else(noise: bytes, size: int) -> None:
    text = b"\xd9" + bytes([len(noise)]) + noise
    for body in (text, b"\x81" + text + b"\x92\x01\x01", b"\x92" + text + b"\xc3"):
        try_all(CONTROL_PREFIX + HEADER.pack(VERSION, FrameKind.ATTACHED, 7, 1, 1, 0, 0, 1, 0) + body[:size])


@settings(max_examples=300)
@given(st.integers(0, len(FRAME) - 1), st.integers(0, 255))
def test_a_flipped_byte_raises_nothing_else(place: int, value: int) -> None:
    try_all(FRAME[:place] + bytes([value]) + FRAME[place + 1 :])
