"""What a Session stands on: one connection after the other to a coordinator, and requests on it. Values and an interface only.

Two keep it: kazoo (kazoo_link.py), and the tree in memory (roq/tools/simulation/coordination.py). The tests of a Session
run on both.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import Protocol

from roq.coordination.address import ZooKeeperAddress
from roq.coordination.operations import Node, Op

Watcher = Callable[[object], None]  # a hint that something changed; any thread may call it


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


# (address, session seconds, seconds to connect to one host, told of every change: state and session id)
OpenLink = Callable[[ZooKeeperAddress, float, float, Callable[[LinkState, int], None]], CoordinationLink]


def full_path(chroot: str, path: str) -> str:
    """As the coordinator knows it."""
    if path.startswith("/"):
        return path  # the chroot itself and what is above it
    return f"{chroot}/{path}" if path else chroot or "/"
