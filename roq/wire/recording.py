"""Recorded queues: how long and how often messages are kept, the tapes they are on, and places on them.

Each Exchange of a recorded queue writes what it forwards to its *tape*, a replicated log. An entry of it is

    0 version  u8    2
    1 time     u64   little endian: milliseconds since 1970 at which it was written
    9 before   u64   messages on the tape before this entry, trimmed ones and those that were sent again included
   17 frames         as they came from publishers, each with its ZMTP header

Version 1 has no `before`: its frames begin at 9.

A tape is named `tape.<queue's>.<Exchange's id>`; the queue's part is drawn anew whenever a queue is created. A *position* says
how far somebody has read, by tape: number of the last entry that is done with.
"""

from __future__ import annotations

import base64
import hashlib
import struct
from collections.abc import Iterable
from typing import NamedTuple

import msgspec

from roq.errors import FrameError, InvalidConfiguration, InvalidPosition
from roq.ids import TOPIC_BYTES_MAX
from roq.wire import frame as data_frames
from roq.wire import zmtp
from roq.wire.decoding import UNDECODABLE
from roq.wire.work_queue import QUORUM_MAX, in_words

COPIES_DEFAULT = 3
DAYS_MAX = 100_000.0
ENTRY_BYTES = 1024 * 1024  # an entry is closed when it has so many; a frame is never cut, so one may have more
RECORDED_FRAME_BYTES_MAX = 2 * 1024 * 1024  # so that an entry with one more frame is no larger than a log takes
_ENTRY = struct.Struct("<BQQ")
_ENTRY_1 = struct.Struct("<BQ")
_VERSION = 2
_SIZES = {1: _ENTRY_1.size, _VERSION: _ENTRY.size}  # of what comes before the frames
_COUNT = struct.Struct("<I")
_COUNT_AT = 1 + 38  # behind the topic, see frame.py
_COUNT_AT_MAX = TOPIC_BYTES_MAX + _COUNT_AT
_CONTROL = data_frames.CONTROL_PREFIX[0]
_BUNDLE = data_frames.control_prefix(data_frames.FrameKind.BUNDLE)
_FOR_NOBODY = (data_frames.FrameKind.MARK, data_frames.FrameKind.STORE, data_frames.FrameKind.INDEX)
ANY_TOPIC = b""  # in place of one: whoever reads any has to read this
_TAPE = "tape."
_POSITION = "p1."


class Record(msgspec.Struct, frozen=True):
    """How a recorded queue keeps its messages. days: for so long at least, 0: for ever. max_bytes: of all its tapes, each copy
    counted once; the oldest go first; 0: no limit. copies: stores that keep each message, 0: 3, or as many as there are. ack:
    that must have it before it counts as stored, 0: the majority."""

    days: float = 7.0
    max_bytes: int = 0
    copies: int = 0
    ack: int = 0

    def __str__(self) -> str:
        return in_words(self)

    def check(self) -> Record:
        """Itself. Raises InvalidConfiguration."""
        if not 0 <= self.days <= DAYS_MAX or not self.days == self.days:
            raise InvalidConfiguration(f"days are 0 (for ever) to {DAYS_MAX:g}, got {self.days:g}")
        if self.max_bytes < 0:
            raise InvalidConfiguration(f"max_bytes is 0 (no limit) or more, got {self.max_bytes}")
        if not 0 <= self.copies <= QUORUM_MAX or not 0 <= self.ack <= (self.copies or COPIES_DEFAULT):
            raise InvalidConfiguration(f"copies are 0 to {QUORUM_MAX}, ack not above them; got {self.copies}, {self.ack}")
        return self

    def quorums(self, stores: int) -> tuple[int, int]:
        """(stores that keep each entry, that must have it before it counts), with so many stores in the cluster."""
        copies = self.copies or max(1, min(COPIES_DEFAULT, stores), self.ack)
        return copies, self.ack or copies // 2 + 1


class Recording(msgspec.Struct, frozen=True):
    """What an Exchange is told. tapes: the queue's part of their names. on: whether to write now; tapes are taken care of
    either way."""

    record: Record
    tapes: str
    on: bool = True


def tapes_of(queue: str, transaction: str) -> str:
    """The queue's part of the names of its tapes. transaction: that created the queue."""
    return hashlib.sha256(f"tapes\0{queue}\0{transaction}".encode()).hexdigest()[:16]


def tapes_prefix(tapes: str) -> str:
    """What the names of all tapes of a queue begin with."""
    return f"{_TAPE}{tapes}."


def tape_log(tapes: str, exchange: str) -> str:
    """Id of the log that is this Exchange's tape."""
    return tapes_prefix(tapes) + exchange


def is_tape(log: str) -> bool:
    """Whether a log is a tape, of whatever queue."""
    return log.startswith(_TAPE)


def is_tape_of(name: str, tapes: str) -> bool:
    """Whether a log or segment of this name is a tape of the queue, or of one. tapes: the queue's part of their names."""
    return name.startswith(tapes_prefix(tapes))


def tape_exchange(log: str) -> str:
    """The Exchange whose tape this log is."""
    return log.rpartition(".")[2]


# --- entries ----------------------------------------------------------------------------------------------------------


class TapeEntry(NamedTuple):
    """time: milliseconds since 1970. frames: without their ZMTP headers."""

    time: int
    frames: list[bytes]


def encode_entry(time: int, pieces: Iterable[bytes | memoryview], before: int = 0) -> bytes:
    """pieces: whole frames with their ZMTP headers. before: messages on the tape before them."""
    return b"".join((_ENTRY.pack(_VERSION, time, before), *pieces))


def with_before(entry: bytes, before: int, written: int = 0) -> bytes:
    """The same entry, with so many messages before it, the last of which were written then (milliseconds since 1970)."""
    return _ENTRY.pack(_VERSION, max(entry_time(entry), written), before) + entry[_head_bytes(entry) :]


def _head_bytes(entry: bytes) -> int:
    version = entry[0] if entry else 0
    size = _SIZES.get(version)
    if size is None:
        raise FrameError(f"an entry of version {version}, known are 1 and {_VERSION}: a newer program wrote this tape")
    if len(entry) < size:
        raise FrameError(f"an entry of {len(entry)} bytes")
    return size


def entry_time(entry: bytes) -> int:
    """Milliseconds since 1970. Raises FrameError."""
    _head_bytes(entry)
    return int(_ENTRY_1.unpack_from(entry)[1])


def messages_before(entry: bytes) -> int | None:
    """On its tape; None: it was written by a program that does not count them. Raises FrameError."""
    return int(_ENTRY.unpack_from(entry)[2]) if _head_bytes(entry) == _ENTRY.size else None


def messages_in(entry: bytes, topics: set[bytes] | None = None) -> int:
    """As its frames say, which are not decoded: what is no frame counts nothing. Raises FrameError. topics: gets those that are
    in there or are named, and ANY_TOPIC if there is more to it than that."""
    total, at, end, find, count = 0, _head_bytes(entry), len(entry), entry.find, _COUNT.unpack_from
    while at + 2 < end:  # all that a recorded queue carries goes through this loop
        if not entry[at] & zmtp.LONG:
            begin = at + 2
            stop = begin + entry[at + 1]
        else:
            begin = at + 9
            stop = begin + int.from_bytes(entry[at + 1 : begin], "big")
        if begin < end and entry[begin] != _CONTROL:
            place = find(0, begin, stop) + _COUNT_AT
            if topics is not None:
                is_topic = begin + _COUNT_AT < place <= begin + _COUNT_AT_MAX
                topics.add(entry[begin : place - _COUNT_AT] if is_topic else ANY_TOPIC)
            if place >= begin + _COUNT_AT and place + 4 <= min(stop, end):
                total += min(count(entry, place)[0], stop - begin)
        elif entry.startswith(_BUNDLE, begin):
            total += _messages_in_bundle(entry[begin:stop])
            if topics is not None:
                topics.add(ANY_TOPIC)
        elif topics is not None:
            topics |= _topics_named(entry[begin:stop])
        at = stop
    return total


def _topics_named(frame: bytes) -> set[bytes]:
    """By a control frame. Confirmations that publishers asked for are nothing to readers."""
    try:
        _, header, body = data_frames.parse(frame)
        if header.kind == data_frames.FrameKind.WATERMARK:
            names = {name.encode() for name in data_frames.watermark_body(body)}
            return {name if len(name) <= TOPIC_BYTES_MAX else ANY_TOPIC for name in names}
    except FrameError:
        return {ANY_TOPIC}
    return set() if header.kind in _FOR_NOBODY else {ANY_TOPIC}


def _messages_in_bundle(frame: bytes) -> int:
    try:
        parts = data_frames.bundle_body(data_frames.parse(frame)[2])
        return sum(min(data_frames.parse(part)[1].count, len(part)) for part in parts)
    except FrameError:
        return 0


def decode_entry(entry: bytes) -> TapeEntry:
    """Raises FrameError."""
    return TapeEntry(entry_time(entry), _frames(entry[_head_bytes(entry) :]))


def _frames(data: bytes) -> list[bytes]:
    try:
        places = list(zmtp.frames_in(data))
    except IndexError:
        raise FrameError("an entry ends within the header of a frame") from None
    if places and places[-1][2] != len(data):
        raise FrameError("an entry ends within a frame")
    return [data[begin:end] for _, begin, end in places]


# --- positions --------------------------------------------------------------------------------------------------------


def is_position(text: str) -> bool:
    """Whether this is the text of a TapePosition, or shall be one."""
    return text.startswith(_POSITION)


class TapePosition(msgspec.Struct, frozen=True):
    """A place on the tapes of a queue, for `start`. As text (`str`) it can be kept; `TapePosition.parse` reads that. done:
    number of the last entry that is done with, by Exchange; a tape that is not named is read from its beginning."""

    tapes: str
    done: dict[str, int]

    def __str__(self) -> str:
        data = msgspec.msgpack.encode((self.tapes, self.done))
        return _POSITION + base64.urlsafe_b64encode(data).decode().rstrip("=")

    @classmethod
    def parse(cls, text: str) -> TapePosition:
        """Raises InvalidPosition."""
        try:
            if not text.startswith(_POSITION):
                raise ValueError("it does not begin with " + _POSITION)
            body = text[len(_POSITION) :]
            data = base64.b64decode(body + "=" * (-len(body) % 4), altchars=b"-_", validate=True)
            tapes, done = msgspec.msgpack.decode(data, type=tuple[str, dict[str, int]])
        except (*UNDECODABLE, ValueError) as error:
            raise InvalidPosition(f"not a position of a recorded queue: {text[:80]!r}: {error}") from None
        return cls(tapes, done)

    def check_queue(self, tapes: str, what: str = "the position", otherwise: str = "take one of this queue, or a time") -> None:
        """Raises InvalidPosition: it is of other tapes than the queue's. what: it is, otherwise: what to do; for the error."""
        if self.tapes != tapes:
            raise InvalidPosition(f"{what} is of another queue, or of one that was removed and created anew: {otherwise}")
