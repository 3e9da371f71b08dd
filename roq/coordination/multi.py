"""Fenced writes: every write of a GCM carries the version of `gcm/epoch` that its term began with (RELIABILITY §2.4).

A GCM that has been replaced without knowing it can't change anything: ZooKeeper itself refuses.
"""

from __future__ import annotations

from dataclasses import dataclass

from roq.coordination import paths
from roq.coordination.errors import NoNode, VersionConflict
from roq.coordination.operations import Check, Create, CreateEphemeral, Delete, Op, SetData
from roq.coordination.session import Session
from roq.errors import StaleEpoch

__all__ = ["Check", "Create", "CreateEphemeral", "Delete", "Fence", "Op", "SetData", "fenced", "take_epoch"]


@dataclass(frozen=True)
class Fence:
    """One term of a leading GCM. `epoch` goes into every order; `version` of `gcm/epoch` is checked by every write."""

    epoch: int
    version: int


async def take_epoch(session: Session) -> Fence:
    """Begin a new term: bump `gcm/epoch` (made if missing). Only the winner of the latch calls this, before it reads anything.

    Raises VersionConflict if somebody else did so at the same moment, ZooKeeperUnavailable.
    """
    await session.ensure_path(paths.EPOCH)
    node = await session.get(paths.EPOCH)
    if node is None:
        raise NoNode("gcm/epoch vanished", paths.EPOCH)
    version = await session.set(paths.EPOCH, str(node.version + 1).encode(), node.version)
    return Fence(epoch=version, version=version)


async def fenced(session: Session, fence: Fence, *ops: Op) -> None:
    """All of `ops` or none, and only while `fence` is the current leadership term.

    Raises StaleEpoch (step down at once), VersionConflict, NodeExists, NoNode of the other operations, ZooKeeperUnavailable
    (whether it took effect is unknown).
    """
    try:
        await session.multi((Check(paths.EPOCH, fence.version), *ops))
    except (VersionConflict, NoNode) as error:
        if error.path == paths.EPOCH:
            raise StaleEpoch(f"epoch {fence.epoch} is over") from error
        raise
