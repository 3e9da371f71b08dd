"""Data frames between publishers, Exchanges and subscribers.

A frame is one ZeroMQ message part. Exchanges forward it undecoded and match subscriptions on its first bytes.

    data     topic 00 header body        topic: 1..255 bytes UTF-8; body: msgpack list of payloads; in version 2 of it, instead
                                         of a payload, also a list of payload and headers {name: text or bytes}
    control  FF       header body        body depends on the kind

    header (little endian, 50 bytes)
      0 version    u8     1; 2 for data in which a payload has headers, that older programs can't read
      1 kind       u8     Kind
      2 publisher  u64    who sent it (0: the Exchange itself; 1: the Monitor)
     10 path       u32    number of the publisher's path, from 1
     14 sequence   u64    number of the first payload, from 1, counted per publisher over all topics;
                          for control kinds: the last number sent so far
     22 previous   u64    number of the last payload before this one on the same topic, 0 if none; of a WATERMARK by an
                          Exchange: of the first one that it has dropped for this subscriber
     30 index      u64    how many payloads this publisher sent on this topic before this frame
     38 count      u32    payloads in the body
     42 timestamp  u64    nanoseconds since 1970 at which the batch was opened

The first TAPED that a subscriber gets says: what came before this subscription was active is on the Exchange's tape, up to
entry `sequence`, and what came after is not. Each later one: the tape is stored up to that entry, and was sent before it.

FF never starts a UTF-8 topic, and it is the *last* byte in the order in which libzmq re-sends subscriptions after a
reconnect: whoever receives a control frame over a connection has all its subscriptions active on that connection.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Annotated, Any, NamedTuple, TypeVar

import msgspec

from roq.errors import FrameError
from roq.wire.decoding import UNDECODABLE

T = TypeVar("T")
Item = bytes | tuple[bytes, dict[str, str | bytes]]  # a payload, or a payload and its headers
VERSION = 1
HEADERS_VERSION = 2
CONTROL_PREFIX = b"\xff"
SUBSCRIBE_ALL = b"\x01"  # an Exchange's subscription at each publisher
HEADER = struct.Struct("<BBQIQQQIQ")
CONFIRMATION = struct.Struct("<IQ")  # path, mark
STORED = struct.Struct("<IQBQ")  # path, mark, copies, entry
_CONFIRMED = b"\x02"
_STORED = b"\x03"


def welcome(token: str) -> bytes:
    """The subscription by which an Exchange names itself to a publisher that connects: 01 FE token. FE starts no topic; it
    is sent after the Exchange's subscription to everything, so whoever gets it is heard."""
    return b"\x01\xfe" + token.encode()


def confirmation(path: int, mark: int) -> bytes:
    """What an Exchange says to a publisher on its own connection: everything on `path` before this MARK, or with mark 0 before
    its FIN, has been handed to those who subscribed. 02 starts no subscription."""
    return _CONFIRMED + CONFIRMATION.pack(path, mark)


def confirmed(message: bytes) -> tuple[int, int] | None:
    """(path, mark) if it is such a message."""
    if message[:1] != _CONFIRMED or len(message) != 1 + CONFIRMATION.size:
        return None
    path, mark = CONFIRMATION.unpack_from(message, 1)
    return path, mark


class StoredUpTo(NamedTuple):
    """Everything on `path` before STORE `mark` is on stable storage of so many stores, up to this entry of the Exchange's tape.
    copies 0: not all of it is, for the Exchange did not record all the time since it last confirmed anything."""

    path: int
    mark: int
    copies: int
    entry: int


def store_confirmation(stored: StoredUpTo) -> bytes:
    """The Exchange's answer to STORE, on the publisher's own connection. 03 starts no subscription."""
    return _STORED + STORED.pack(*stored)


def stored_up_to(message: bytes) -> StoredUpTo | None:
    """If it is such a message."""
    if message[:1] != _STORED or len(message) != 1 + STORED.size:
        return None
    return StoredUpTo(*STORED.unpack_from(message, 1))


class FrameKind(IntEnum):
    """What a frame is."""

    DATA = 0
    ATTACHED = 1  # from the Exchange to one subscriber: all it subscribed to before FF is active; body = the Exchange's token
    OPEN = 2  # first frame of a path; body = PathOpening
    FIN = 3  # last frame of a path
    MARK = 4  # asks the Exchange to confirm that it forwarded everything before; body = mark number
    WATERMARK = 5  # last numbers of recently used topics: reveals a lost tail; body = {topic: (last number, payloads sent)}
    RETIRE = 6  # from the Monitor: this Exchange will not carry anything after this; body = Exchange token
    BUNDLE = 7  # part of a replay: data frames of one publisher, in order, of any topics; body = list of whole data frames
    STORE = 8  # as MARK, to be confirmed once everything before it is stored, too (recorded queues); body = mark number
    TAPED = 9  # from the Exchange to a subscriber that asks for it: number of an entry of its tape; body = its token
    INDEX = 10  # on a tape only: where its topics are, see tape_index.py


class Header(NamedTuple):
    """The decoded header, see the module's layout."""

    version: int
    kind: int
    publisher: int
    path: int
    sequence: int
    previous: int
    index: int  # type: ignore[assignment]  # likewise
    count: int  # type: ignore[assignment]  # hides tuple.count, which nobody wants of a header
    timestamp: int


class PathOpening(msgspec.Struct, frozen=True, array_like=True):
    """Body of OPEN: where the path before this one ran, and whether it was ended with FIN.

    A subscriber attached to `left` waits for the FIN when `finished`; otherwise it goes on at once (the old Exchange is
    gone and the publisher replays). proof: for the Exchange of a secured cluster, that the id is the publisher's own.
    """

    left: str
    finished: bool
    proof: bytes = b""


_encode = msgspec.msgpack.Encoder().encode
_decode_payloads = msgspec.msgpack.Decoder(list[bytes]).decode
_decode_items = msgspec.msgpack.Decoder(list[bytes | tuple[bytes, dict[str, Any]]]).decode  # str | bytes can't be said there
_decode_text = msgspec.msgpack.Decoder(str).decode
_decode_number: Callable[[memoryview], int] = msgspec.msgpack.Decoder(Annotated[int, msgspec.Meta(ge=0)]).decode
_decode_opening = msgspec.msgpack.Decoder(PathOpening).decode
_decode_watermark = msgspec.msgpack.Decoder(dict[str, tuple[int, int]]).decode
_pack = HEADER.pack
_unpack_from = HEADER.unpack_from
_make = Header._make
_SIZE = HEADER.size


def encode_data(
    topic: bytes,
    publisher: int,
    path: int,
    sequence: int,
    previous: int,
    index: int,
    payloads: Sequence[Item],
    timestamp: int,
    version: int = VERSION,
) -> bytes:
    """One data frame carrying `payloads` numbered sequence, sequence + 1, … version: HEADERS_VERSION if one has headers."""
    header = _pack(version, 0, publisher, path, sequence, previous, index, len(payloads), timestamp)
    return b"%b\0%b%b" % (topic, header, _encode(payloads))


def encode_control(
    kind: FrameKind,
    publisher: int,
    path: int,
    sequence: int,
    body: str | int | PathOpening | dict[str, tuple[int, int]] | None,
    timestamp: int,
    previous: int = 0,
) -> bytes:
    """One control frame of `kind`. previous: of a WATERMARK by an Exchange."""
    header = _pack(VERSION, kind, publisher, path, sequence, previous, 0, 0, timestamp)
    return CONTROL_PREFIX + header + _encode(body)


def parse(frame: bytes) -> tuple[bytes, Header, memoryview]:
    """(topic, header, undecoded body); topic is empty for control frames. Raises FrameError on anything else."""
    try:
        control = frame[0] == 0xFF
        at = 0 if control else frame.index(0)
        fields = _unpack_from(frame, at + 1)
    except (ValueError, IndexError, struct.error):
        raise FrameError(f"{len(frame)} bytes without a readable header") from None
    header = _make(fields)
    if header.version != VERSION and (header.version != HEADERS_VERSION or header.kind):
        raise FrameError(f"frame of version {header.version}, known are {VERSION} and, for data, {HEADERS_VERSION}")
    if (header.kind == 0) == control or not (control or at):
        raise FrameError(f"frame kind {header.kind} does not fit its topic")
    return frame[:at], header, memoryview(frame)[at + 1 + _SIZE :]


def payloads(header: Header, body: memoryview) -> Sequence[Item]:
    """The payloads of a data frame, as many as its header says; with headers only in HEADERS_VERSION."""
    try:
        found: Sequence[Item] = _decode_payloads(body) if header.version == VERSION else _decode_items(body)
    except UNDECODABLE as error:
        raise FrameError(f"undecodable body: {error}") from None
    if header.version != VERSION:
        _check_values(found)
    if len(found) != header.count:
        raise FrameError(f"header announces {header.count} payloads, body has {len(found)}")
    return found


def _check_values(items: Sequence[Item]) -> None:
    for item in items:  # a generator for each costs three times as much
        if isinstance(item, tuple):
            for value in item[1].values():
                if value.__class__ is not str and value.__class__ is not bytes:
                    raise FrameError("a header that is neither text nor bytes")


def encode_bundle(publisher: int, path: int, sequence: int, data_frames: list[bytes], timestamp: int) -> bytes:
    """A BUNDLE of these data frames. Everybody gets it, and takes what it wants of it: an Exchange counts messages, so what
    was a frame per message is not a burst of thousands when it is sent again."""
    header = _pack(VERSION, FrameKind.BUNDLE, publisher, path, sequence, 0, 0, 0, timestamp)
    return CONTROL_PREFIX + header + _encode(data_frames)


def _body(decode: Callable[[memoryview], T], body: memoryview) -> T:
    try:
        return decode(body)
    except UNDECODABLE as error:
        raise FrameError(f"undecodable body: {error}") from None


def bundle_body(body: memoryview) -> list[bytes]:
    """Body of BUNDLE: whole data frames. Raises FrameError if anything else is in it; likewise the others for their kinds."""
    found = _body(_decode_payloads, body)
    if any(frame[:1] == CONTROL_PREFIX for frame in found):
        raise FrameError("a control frame within a bundle")
    return found


def publisher_of(frame: bytes) -> bytes:
    """The 8 bytes of the publisher's id in a frame, or in what it begins with; fewer if `parse` takes it for none."""
    at = 0 if frame[:1] == CONTROL_PREFIX else frame.find(0) or -1
    return frame[at + 3 : at + 11] if at >= 0 else b""


def control_prefix(kind: FrameKind) -> bytes:
    """What every control frame of this kind begins with."""
    return CONTROL_PREFIX + bytes((VERSION, kind))


def text_body(body: memoryview) -> str:
    """Body of ATTACHED and RETIRE: the Exchange's token."""
    return _body(_decode_text, body)


def mark_body(body: memoryview) -> int:
    """Body of MARK: the publisher's mark number."""
    return _body(_decode_number, body)


def opening_body(body: memoryview) -> PathOpening:
    """Body of OPEN."""
    return _body(_decode_opening, body)


def watermark_body(body: memoryview) -> dict[str, tuple[int, int]]:
    """Body of WATERMARK: {topic: (number of its last payload, payloads sent on it)}."""
    return _body(_decode_watermark, body)
