"""How a client finds the leading GCM, or who else leads: one short session, one read, nothing kept."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from roq.coordination import paths
from roq.coordination.latch import participants
from roq.coordination.session import SESSION_SECONDS, Session
from roq.errors import ClusterNotFound, FrameError, Unavailable, ZooKeeperUnavailable
from roq.wire.assignment import from_json
from roq.wire.gcm import LeaderAddress

T = TypeVar("T")


async def read_leader(zookeeper: str, timeout_seconds: float = 5.0) -> LeaderAddress:
    """The leading GCM's address. `zookeeper`: "zk1:2181,zk2:2181[/chroot]".

    Raises InvalidConfiguration, ZooKeeperUnavailable, ClusterNotFound (no such chroot), Unavailable (no leader just now).
    """
    return await _with_session(zookeeper, timeout_seconds, _read)


async def read_election(zookeeper: str, timeout_seconds: float = 5.0) -> list[str]:
    """What the participants of the election call themselves, the leader first: GCMs, and whoever else takes part.

    Raises InvalidConfiguration, ZooKeeperUnavailable.
    """
    return await _with_session(zookeeper, timeout_seconds, lambda session: participants(session, paths.LATCH))


async def _with_session(zookeeper: str, timeout_seconds: float, work: Callable[[Session], Awaitable[T]]) -> T:
    try:
        async with asyncio.timeout(timeout_seconds):
            session = await Session.connect(zookeeper, SESSION_SECONDS, connect_seconds=timeout_seconds)
            try:
                return await work(session)
            finally:
                await session.close()
    except TimeoutError:
        raise ZooKeeperUnavailable(f"no ZooKeeper answered at {zookeeper} within {timeout_seconds:.1f} s") from None


async def _read(session: Session) -> LeaderAddress:
    node = await session.get(paths.LEADER)
    if node is None:
        if await session.get("") is None:
            raise ClusterNotFound(f"no RoQ cluster at ZooKeeper {session.address}")
        raise Unavailable("no Global Configuration Manager leads just now")
    try:
        return from_json(node.data, LeaderAddress)
    except FrameError as error:
        raise Unavailable(f"gcm/leader: {error}") from error
