"""The conversation between ZooKeeper's clients and a server: requests, replies, events. Values only.

How they lie in bytes is in jute.py, what a request does in roq/coordinator/tree.py. Requests that ZooKeeper has and RoQ's
coordinator has not become Unsupported.
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

PASSWORD_BYTES = 16
COORDINATOR_VERSION = "3.9 protocol, RoQ coordinator"  # in the coordinator's answer to `srvr`


class Code(IntEnum):
    """Errors in replies."""

    OK = 0
    RUNTIME_INCONSISTENCY = -2  # of an operation behind the one that made its multi fail
    UNIMPLEMENTED = -6
    BAD_ARGUMENTS = -8
    NO_NODE = -101
    NO_AUTH = -102
    BAD_VERSION = -103
    NO_CHILDREN_FOR_EPHEMERALS = -108
    NODE_EXISTS = -110
    NOT_EMPTY = -111
    SESSION_EXPIRED = -112
    INVALID_ACL = -114
    AUTH_FAILED = -115


class Type(IntEnum):
    """Kinds of requests, and of what a multi holds."""

    ERROR = -1
    CREATE = 1
    DELETE = 2
    EXISTS = 3
    GET_DATA = 4
    SET_DATA = 5
    GET_ACL = 6
    SET_ACL = 7
    GET_CHILDREN = 8
    SYNC = 9
    PING = 11
    GET_CHILDREN_2 = 12
    CHECK = 13
    MULTI = 14
    CREATE_2 = 15
    MULTI_READ = 22
    AUTH = 100
    SET_WATCHES = 101
    SET_WATCHES_2 = 105
    CLOSE = -11


class EventType(IntEnum):
    """What a watch tells."""

    CREATED = 1
    DELETED = 2
    CHANGED = 3
    CHILDREN = 4


class Acl(NamedTuple):
    """Who may do what. perms: bits of read, write, create, delete, admin."""

    perms: int
    scheme: str
    id: str


OPEN_ACL = (Acl(31, "world", "anyone"),)
READ_ACL = (Acl(1, "world", "anyone"),)


class Stat(NamedTuple):
    """What ZooKeeper tells of a node beside its data, in the order of the wire. Times: ms since 1970. cversion: children made
    and removed so far. owner: session of an ephemeral node, else 0. pzxid: transaction that made or removed a child last."""

    czxid: int
    mzxid: int
    ctime: int
    mtime: int
    version: int
    cversion: int
    aversion: int
    owner: int
    data_length: int
    children: int
    pzxid: int


# --- requests -----------------------------------------------------------------------------------------------------------


class ConnectRequest(NamedTuple):
    """The first frame. session 0: a new one. read_only: None if the client is so old that it says nothing about it."""

    zxid_seen: int
    timeout_ms: int
    session: int
    password: bytes
    read_only: bool | None


class CreateRequest(NamedTuple):
    """flags: 0 persistent, 1 ephemeral, 2 and 3 the same with a number; others exist in ZooKeeper. with_stat: "create2"."""

    path: str
    data: bytes | None
    acl: tuple[Acl, ...]
    flags: int
    with_stat: bool


class DeleteRequest(NamedTuple):
    """version -1: whatever it is; also in the next three."""

    path: str
    version: int


class SetDataRequest(NamedTuple):
    """Replace a node's data."""

    path: str
    data: bytes | None
    version: int


class CheckRequest(NamedTuple):
    """In a multi: the node has this version."""

    path: str
    version: int


class SetAcl(NamedTuple):
    """version: the node's aversion."""

    path: str
    acl: tuple[Acl, ...]
    version: int


class Multi(NamedTuple):
    """All or nothing."""

    ops: tuple[CreateRequest | DeleteRequest | SetDataRequest | CheckRequest, ...]


class ExistsRequest(NamedTuple):
    """A node's stat; the watch also waits for a node that is not there."""

    path: str
    watch: bool


class GetData(NamedTuple):
    """A node's data and stat."""

    path: str
    watch: bool


class GetAcl(NamedTuple):
    """A node's ACL and stat."""

    path: str


class GetChildren(NamedTuple):
    """Names of a node's children; with_stat: "getChildren2"."""

    path: str
    watch: bool
    with_stat: bool


class MultiRead(NamedTuple):
    """Many nodes in one request; one that can't be read is answered with its error."""

    reads: tuple[GetData, ...]


class Sync(NamedTuple):
    """Answered behind all writes before it."""

    path: str


class SetWatches(NamedTuple):
    """Watches of an earlier connection; what changed after zxid `since` is told at once."""

    since: int
    data: tuple[str, ...]
    exist: tuple[str, ...]
    child: tuple[str, ...]


class PingRequest(NamedTuple):
    """The client lives."""


class Close(NamedTuple):
    """End the session."""


class Auth(NamedTuple):
    """Prove who one is, for as long as the connection lasts. shown: of scheme "digest", name:password."""

    scheme: str
    shown: bytes


class Unsupported(NamedTuple):
    """Something that only ZooKeeper has. type: its number."""

    type: int


Write = CreateRequest | DeleteRequest | SetDataRequest | SetAcl
Read = ExistsRequest | GetData | GetAcl | GetChildren | Sync
Request = Write | Read | Multi | MultiRead | SetWatches | PingRequest | Close | Auth | Unsupported

# --- replies ------------------------------------------------------------------------------------------------------------


class ErrorResponse(NamedTuple):
    """No record but the error."""

    code: Code


class PathReply(NamedTuple):
    """Of create and sync."""

    path: str


class PathStat(NamedTuple):
    """Of create2."""

    path: str
    stat: Stat


class StatReply(NamedTuple):
    """Of setData, setACL and exists."""

    stat: Stat


class DataReply(NamedTuple):
    """Of getData."""

    data: bytes | None
    stat: Stat


class AclReply(NamedTuple):
    """Of getACL."""

    acl: tuple[Acl, ...]
    stat: Stat


class NamesReply(NamedTuple):
    """Of getChildren; with the node's stat of getChildren2."""

    names: tuple[str, ...]
    stat: Stat | None


class EmptyResponse(NamedTuple):
    """An empty record. type: of what was done."""

    type: Type


class Results(NamedTuple):
    """Of a multi and a multiRead, one for each operation."""

    replies: tuple[ErrorResponse | PathReply | PathStat | StatReply | DataReply | EmptyResponse, ...]


Reply = ErrorResponse | PathReply | PathStat | StatReply | DataReply | AclReply | NamesReply | EmptyResponse | Results
