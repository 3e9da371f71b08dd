"""What is written down: the changes of one transaction, and an image of everything. Values and their bytes; pure.

    entry   format u8 · MessagePack [zxid, ms since 1970, [change, …]]      change: [kind, fields …]
    image   format u8 · MessagePack [zxid, [node, …], [session, …]]         parents before their children

Format 2 has ACLs, format 1 none: who knows format 1 alone would open nodes that are somebody's. What has none is written as
format 1. An ACL is [[bits, scheme, id], …]; empty: everybody may do everything. A change says what came out, not what was
asked for, so that it means the same to every later version.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec

from roq.errors import StorageFailed, UnknownFormat
from roq.wire.zookeeper import Acl

FORMAT, FORMAT_ACL = 1, 2

T = TypeVar("T")


class Made(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """A node was created. creates: how many children its parent had made for it then. session: its owner's, or 0."""

    path: str
    data: bytes | None
    session: int
    creates: int
    acl: tuple[Acl, ...] = ()


class Removed(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """A node was deleted."""

    path: str


class DataReplaced(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """A node's data was replaced; version: its new one."""

    path: str
    data: bytes | None
    version: int


class AclSet(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """A node's ACL was set; aversion: its new one."""

    path: str
    aversion: int
    acl: tuple[Acl, ...] = ()


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
    acl: tuple[Acl, ...] = ()


class TreeImage(msgspec.Struct, frozen=True, array_like=True):
    """Everything, behind the transaction zxid."""

    zxid: int
    nodes: list[NodeImage]
    sessions: list[SessionOpened]


_encoder = msgspec.msgpack.Encoder()
_transactions = msgspec.msgpack.Decoder(TreeTransaction)
_images = msgspec.msgpack.Decoder(TreeImage)


def encode(value: TreeTransaction | TreeImage) -> bytes:
    """The bytes of an entry or an image."""
    parts = value.changes if isinstance(value, TreeTransaction) else value.nodes
    has_acl = any(isinstance(part, Made | AclSet | NodeImage) and part.acl for part in parts)
    return bytes([FORMAT_ACL if has_acl else FORMAT]) + _encoder.encode(value)


def decode_transaction(data: bytes) -> TreeTransaction:
    """The transaction of an entry. Raises UnknownFormat, StorageFailed."""
    return _decode(_transactions, data)


def decode_image(data: bytes) -> TreeImage:
    """The image in a snapshot. Raises UnknownFormat, StorageFailed."""
    return _decode(_images, data)


def _decode(decoder: msgspec.msgpack.Decoder[T], data: bytes) -> T:
    if data[:1] not in (bytes([FORMAT]), bytes([FORMAT_ACL])):
        found = data[0] if data else 0
        raise UnknownFormat(f"the journal has format {found}; this program reads formats {FORMAT} and {FORMAT_ACL}")
    try:
        return decoder.decode(memoryview(data)[1:])
    except msgspec.MsgspecError as error:
        raise StorageFailed(f"a journal entry is complete but invalid: {error}") from None
