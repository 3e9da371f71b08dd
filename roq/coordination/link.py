"""What a Session stands on: the address people type, nodes and operations, what is refused, and one connection after the other
to a coordinator. Values and an interface only.

Two keep the interface: kazoo (kazoo_link.py), and the tree in memory (roq/tools/simulation/coordination.py). The tests of a
Session run on both. Paths are relative to the chroot, without a leading slash; "" is the chroot itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple, Protocol

from roq.errors import InvalidConfiguration, RoqError

DEFAULT_CHROOT = "/RoQ"
DEFAULT_PORT = 2181
PORT_MAX = 65535
ANY_VERSION = -1  # ZooKeeper's "whatever the version is"; never write `version or -1`: 0 is a version
Watcher = Callable[[object], None]  # a hint that something changed; any thread may call it


# --- the address ------------------------------------------------------------------------------------------------------------


class ZooKeeperAddress(NamedTuple):
    """hosts: "host:port,host:port"; chroot: "/RoQ" or deeper, "" for ZooKeeper's own root."""

    hosts: str
    chroot: str

    def __str__(self) -> str:
        return self.hosts + (self.chroot or "/")


def parse_address(text: str) -> ZooKeeperAddress:
    """The address in `text`; without a chroot it is /RoQ, a lone "/" means ZooKeeper's root. Raises InvalidConfiguration."""
    hosts, slash, rest = text.strip().partition("/")
    chroot = "/" + rest.strip("/") if rest.strip("/") else "" if slash else DEFAULT_CHROOT
    if "//" in chroot or any(part in (".", "..") for part in chroot.split("/")):
        raise InvalidConfiguration(f"ZooKeeper address {text!r}: {chroot!r} is not a chroot")
    return ZooKeeperAddress(",".join(_host_port(part.strip(), text) for part in hosts.split(",")), chroot)


def _host_port(part: str, text: str) -> str:
    if part.startswith("["):  # IPv6
        host, _, port = part.partition("]")
        host, port = host + "]", port.removeprefix(":")
    else:
        host, _, port = part.partition(":")
    port = port or str(DEFAULT_PORT)
    if (
        not host
        or host == "[]"
        or any(blank in host for blank in " \t@?#")
        or not port.isdecimal()
        or not 0 < int(port) <= PORT_MAX
    ):
        raise InvalidConfiguration(
            f'ZooKeeper address {text!r}: {part!r} is not host:port (write "zk1:2181,zk2:2181[/chroot]")'
        )
    return f"{host}:{port}"


# --- nodes and operations ---------------------------------------------------------------------------------------------------


class Node(NamedTuple):
    """One znode at one moment. owner: session id of an ephemeral node, 0 for a persistent one. changed: ms since 1970 on the
    clock of ZooKeeper's leader, when it was changed last."""

    data: bytes
    version: int
    czxid: int  # transaction that created it: tells a re-created node from the old one
    mzxid: int  # transaction that changed it last
    owner: int
    changed: int = 0


@dataclass(frozen=True)
class Check:
    """The node has this version; otherwise the whole multi fails with VersionConflict."""

    path: str
    version: int


@dataclass(frozen=True)
class Create:
    """Make a persistent node."""

    path: str
    data: bytes = b""


@dataclass(frozen=True)
class CreateEphemeral:
    """Make a node that vanishes with this session."""

    path: str
    data: bytes = b""


@dataclass(frozen=True)
class SetData:
    """Replace the node's data."""

    path: str
    data: bytes
    version: int = ANY_VERSION


@dataclass(frozen=True)
class Delete:
    """Remove the node (which has no children)."""

    path: str
    version: int = ANY_VERSION


Op = Check | Create | CreateEphemeral | SetData | Delete


# --- refusals; that ZooKeeper can't be reached is roq.errors.ZooKeeperUnavailable -----------------------------------------


class CoordinationError(RoqError):
    """ZooKeeper refused an operation."""

    def __init__(self, message: str | None = None, path: str = "") -> None:
        super().__init__(message)
        self.path = path  # below the chroot; of the failing operation, in a multi


class VersionConflict(CoordinationError):
    """The node was changed by somebody else meanwhile."""


class NodeExists(CoordinationError):
    """A node of this path exists already."""


class NoNode(CoordinationError):
    """No node of this path (or no parent) exists."""


class NodeNotEmpty(CoordinationError):
    """The node has children."""


# --- the connection ---------------------------------------------------------------------------------------------------------


class LinkState(StrEnum):
    """What was last heard of the connection."""

    CONNECTED = "connected"
    SUSPENDED = "suspended"
    EXPIRED = "expired"
    ENDED = "ended"  # nobody tries to connect any more, without anyone having asked for that


class CoordinationLink(Protocol):
    """Made, used and closed on the loop's thread. Every request gives a future, settled on the loop, which raises NodeExists,
    NoNode, VersionConflict, NodeNotEmpty, CoordinationError, or ZooKeeperUnavailable when the connection ended. Paths are
    relative to the chroot; one that begins with "/" is not."""

    def start(self) -> None:
        """Begin connecting; the state says when it worked."""

    def silent_seconds(self) -> float:
        """How long the server has not been heard, by a clock that runs while this process is stopped."""

    def session_seconds(self) -> float:
        """The negotiated session time-out."""

    def drop(self) -> None:
        """Cut the current connection; a new one is made at once."""

    async def close(self) -> None:
        """End the session; bounded also when the server is silent."""

    def get(self, path: str, watcher: Watcher | None = None) -> asyncio.Future[Node]:
        """The node."""

    def get_many(self, paths: Sequence[str]) -> asyncio.Future[list[Node | None]]:
        """The nodes, in order, None for one that is not there; in one request."""

    def exists(self, path: str, watcher: Watcher | None = None) -> asyncio.Future[bool]:
        """Whether it is there; the watch fires also when the node comes to be."""

    def children(self, path: str, watcher: Watcher | None = None) -> asyncio.Future[list[str]]:
        """Names, sorted."""

    def create(self, path: str, data: bytes, *, ephemeral: bool = False) -> asyncio.Future[Node]:
        """The node that was made."""

    def create_ephemeral_sequential(self, prefix: str, data: bytes) -> asyncio.Future[str]:
        """Its path, with its number."""

    def set(self, path: str, data: bytes, version: int) -> asyncio.Future[int]:
        """The new version."""

    def delete(self, path: str, version: int) -> asyncio.Future[None]:
        """Remove the node."""

    def multi(self, ops: Sequence[Op]) -> asyncio.Future[None]:
        """All or none; the error is that of the first operation that failed by itself."""

    def is_open(self, path: str) -> asyncio.Future[bool]:
        """Whether the node has other rights than a new one gets, where these are for members alone."""

    def protect(self, path: str) -> asyncio.Future[None]:
        """Give the node the rights that a new one gets."""


# (address, session seconds, seconds to connect to one host, told of every change: state and session id)
OpenLink = Callable[[ZooKeeperAddress, float, float, Callable[[LinkState, int], None]], CoordinationLink]


def full_path(chroot: str, path: str) -> str:
    """As the coordinator knows it."""
    if path.startswith("/"):
        return path  # the chroot itself and what is above it
    return f"{chroot}/{path}" if path else chroot or "/"
