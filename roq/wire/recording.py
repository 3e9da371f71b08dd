"""Recorded queues: how long and how often messages are kept, the tapes they are on, and places on them.

Each Exchange of a recorded queue writes what it forwards to its *tape*, a replicated log. An entry of it is

    0 version  u8    1
    1 time     u64   little endian: milliseconds since 1970 at which it was written
    9 frames         as they came from publishers, each with its ZMTP header

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
from roq.wire import zmtp
from roq.wire.decoding import UNDECODABLE
from roq.wire.work_queue import QUORUM_MAX, in_words

COPIES_DEFAULT = 3
DAYS_MAX = 100_000.0
ENTRY_BYTES = 1024 * 1024  # an entry is closed when it has so many; a frame is never cut, so one may have more
RECORDED_FRAME_BYTES_MAX = 2 * 1024 * 1024  # so that an entry with one more frame is no larger than a log takes
_ENTRY = struct.Struct("<BQ")
_VERSION = 1
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
    """What an Exchange is told. tapes: the queue's part of their names. on: whether to write now; tapes are looked after
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


def encode_entry(time: int, pieces: Iterable[bytes | memoryview]) -> bytes:
    """pieces: whole frames with their ZMTP headers."""
    return b"".join((_ENTRY.pack(_VERSION, time), *pieces))


def entry_time(entry: bytes) -> int:
    """Milliseconds since 1970. Raises FrameError."""
    if len(entry) < _ENTRY.size:
        raise FrameError(f"an entry of {len(entry)} bytes")
    version, time = _ENTRY.unpack_from(entry)
    if version != _VERSION:
        raise FrameError(f"an entry of version {version}, known is {_VERSION}: a newer program wrote this tape")
    return int(time)


def decode_entry(entry: bytes) -> TapeEntry:
    """Raises FrameError."""
    return TapeEntry(entry_time(entry), _frames(entry[_ENTRY.size :]))


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
