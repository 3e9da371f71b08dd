"""Topics of a tape, by where they are: so that who wants some of them need not read the rest.

Every INDEX_EVERY-th entry of a tape (1024, 2048 …) is an *index* of the entries since the one before it, or since its Exchange
was started: an entry like any other, with one frame of kind INDEX, which whoever does not know it passes over. Entries are
taken together in groups of GROUP_ENTRIES. The body of the frame is msgpack's bytes, compressed by zlib:

    first    u64     number of the first entry that is covered
    always   16      groups that are to be read in any case, a bit each (group 0 is bit 0 of byte 0): paths begin or end there,
                     or something is sent again
    count    u32     of topics
    groups   16 each in which the topic is, or is named by a WATERMARK; in the order of the names
    names            sorted, with a zero byte between them

A tape that has too many topics within INDEX_EVERY entries, or too long ones, has no index there, nor has one that an older
program wrote, nor what is not covered: all of that is read. An Exchange that knows this kind refuses it from publishers; an
older one writes it, and it is believed only if it is alone in an entry of such a number.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping
from struct import Struct
from struct import error as StructError  # noqa: N812
from typing import NamedTuple

import msgspec

from roq.errors import FrameError
from roq.wire.decoding import UNDECODABLE
from roq.wire.frame import CONTROL_PREFIX, HEADER, VERSION, FrameKind, control_prefix, parse
from roq.wire.recording import ANY_TOPIC, decode_entry

INDEX_EVERY = 1024  # entries: what is behind the last index is read; who looks only at indexes asks for each
GROUP_ENTRIES = 8  # 128 groups, 16 bytes for each topic
TOPICS_MAX = 20_000  # within INDEX_EVERY entries
NAMES_BYTES_MAX = 1024 * 1024  # of all of them, each with its zero byte: so that an index is an entry that a log takes
_GROUP_BYTES = INDEX_EVERY // GROUP_ENTRIES // 8
_HEAD = Struct(f"<Q{_GROUP_BYTES}sI")
_BYTES_MAX = _HEAD.size + TOPICS_MAX * _GROUP_BYTES + NAMES_BYTES_MAX
_LEVEL = 1  # of compression: the Exchange waits for it
_INDEX_PREFIX = control_prefix(FrameKind.INDEX)


def index_behind(done: int) -> int:
    """Number of the first index behind this entry, if there is one."""
    return (done // INDEX_EVERY + 1) * INDEX_EVERY


def is_index(position: int) -> bool:
    """Whether the entry of this number is to be one."""
    return position % INDEX_EVERY == 0


def group_of(position: int) -> int:
    """Of an entry, within what its index covers; the index itself is in the next one's first group."""
    return position % INDEX_EVERY // GROUP_ENTRIES


class TopicIndex(NamedTuple):
    """first, last: the entries that are covered. always, and topics by name: groups, a bit each."""

    first: int
    last: int
    always: int
    topics: Mapping[bytes, int]

    def runs(self, wants: Callable[[bytes], bool], after: int) -> Iterator[tuple[int, int]]:
        """(first, last) of the entries behind `after` that may have something of these topics, or that are not covered."""
        if after + 1 < self.first:
            yield after + 1, self.first - 1
        groups = self.always
        for name, some in self.topics.items():
            if wants(name):
                groups |= some
        begin, at = 0, max(after + 1, self.first)
        while at <= self.last:
            stop = min(at // GROUP_ENTRIES * GROUP_ENTRIES + GROUP_ENTRIES - 1, self.last)
            wanted = groups >> group_of(at) & 1
            if wanted and not begin:
                begin = at
            elif begin and not wanted:
                yield begin, at - 1
                begin = 0
            at = stop + 1
        if begin:
            yield begin, self.last


def encode_index(first: int, topics: Mapping[bytes, int], timestamp: int) -> bytes:
    """The frame. topics: groups by name; those of ANY_TOPIC are read in any case. timestamp: nanoseconds since 1970."""
    names = sorted(name for name in topics if name != ANY_TOPIC)
    always = topics.get(ANY_TOPIC, 0).to_bytes(_GROUP_BYTES, "little")
    groups = b"".join(topics[name].to_bytes(_GROUP_BYTES, "little") for name in names)
    body = zlib.compress(_HEAD.pack(first, always, len(names)) + groups + b"\0".join(names), _LEVEL)
    header = HEADER.pack(VERSION, FrameKind.INDEX, 0, 0, first, 0, 0, 0, timestamp)
    return CONTROL_PREFIX + header + msgspec.msgpack.encode(body)


def index_of(position: int, entry: bytes) -> TopicIndex | None:
    """What the entry of this number says; None if it is no index, or says nothing of the entries right before it."""
    try:
        found = decode_entry(entry).frames
        if not is_index(position) or len(found) != 1 or not found[0].startswith(_INDEX_PREFIX):
            return None
        body = msgspec.msgpack.decode(parse(found[0])[2], type=bytes)
        inflate = zlib.decompressobj()
        data = inflate.decompress(body, _BYTES_MAX)
        first, always, count = _HEAD.unpack_from(data)
        names_at = _HEAD.size + count * _GROUP_BYTES
        names = data[names_at:].split(b"\0") if count else []
    except (*UNDECODABLE, FrameError, StructError, zlib.error):
        return None
    if not inflate.eof or len(names) != count or not position - INDEX_EVERY < first < position:
        return None
    places = range(_HEAD.size, names_at, _GROUP_BYTES)
    groups = (int.from_bytes(data[at : at + _GROUP_BYTES], "little") for at in places)
    return TopicIndex(first, position - 1, int.from_bytes(always, "little"), dict(zip(names, groups, strict=True)))
