"""What is written down: the changes of one transaction, and an image of everything. Values and their bytes; pure.

    entry   format u8 · MessagePack [zxid, ms since 1970, [change, …]]      change: [kind, fields …]
    image   format u8 · MessagePack [zxid, [node, …], [session, …]]         parents before their children

A change says what came out, not what was asked for, so that it means the same to every later version.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec

from roq.errors import StorageFailed, UnknownFormat

FORMAT = 1

T = TypeVar("T")


class Made(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """A node was created. creates: how many children its parent had made for it then. session: its owner's, or 0."""

    path: str
    data: bytes | None
    session: int
    creates: int


class Removed(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """A node was deleted."""

    path: str


class DataReplaced(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """A node's data was replaced; version: its new one."""

    path: str
    data: bytes | None
    version: int


class AclSet(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """A node's ACL was set, to what it was; aversion: its new one."""

    path: str
    aversion: int


class SessionOpened(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """A session began."""

    session: int
    password: bytes
    timeout_ms: int


class SessionEnded(msgspec.Struct, frozen=True, array_like=True, tag=6):
    """A session is over, and its ephemeral nodes are gone."""

    session: int


Change = Made | Removed | DataReplaced | AclSet | SessionOpened | SessionEnded


class TreeTransaction(msgspec.Struct, frozen=True, array_like=True):
    """Changes that happen at once. at: ms since 1970."""

    zxid: int
    at: int
    changes: tuple[Change, ...]


class NodeImage(msgspec.Struct, frozen=True, array_like=True):
    """One node."""

    path: str
    data: bytes | None
    owner: int
    version: int
    aversion: int
    creates: int
    czxid: int
    mzxid: int
    pzxid: int
    ctime: int
    mtime: int


class TreeImage(msgspec.Struct, frozen=True, array_like=True):
    """Everything, behind the transaction zxid."""

    zxid: int
    nodes: list[NodeImage]
    sessions: list[SessionOpened]


_encoder = msgspec.msgpack.Encoder()
_transactions = msgspec.msgpack.Decoder(TreeTransaction)
_images = msgspec.msgpack.Decoder(TreeImage)
_FORMAT_BYTE = bytes([FORMAT])


def encode(value: TreeTransaction | TreeImage) -> bytes:
    """The bytes of an entry or an image."""
    return _FORMAT_BYTE + _encoder.encode(value)


def decode_transaction(data: bytes) -> TreeTransaction:
    """The transaction of an entry. Raises UnknownFormat, StorageFailed."""
    return _decode(_transactions, data)


def decode_image(data: bytes) -> TreeImage:
    """The image in a snapshot. Raises UnknownFormat, StorageFailed."""
    return _decode(_images, data)


def _decode(decoder: msgspec.msgpack.Decoder[T], data: bytes) -> T:
    if data[:1] != _FORMAT_BYTE:
        raise UnknownFormat(f"the journal has format {data[0] if data else 0}; this program reads format {FORMAT}")
    try:
        return decoder.decode(memoryview(data)[1:])
    except msgspec.MsgspecError as error:
        raise StorageFailed(f"an entry is whole and makes no sense: {error}") from None
