"""Errors of this room: what ZooKeeper refuses. That it can't be reached is roq.errors.ZooKeeperUnavailable."""

from __future__ import annotations

from roq.errors import RoqError


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
