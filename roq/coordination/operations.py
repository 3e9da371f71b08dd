"""What can be read and written in ZooKeeper: nodes, and the operations of a multi. Values only, nothing is done here.

Paths are relative to the chroot, without a leading slash; "" is the chroot itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

ANY_VERSION = -1  # ZooKeeper's "whatever the version is"; never write `version or -1`: 0 is a version


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
