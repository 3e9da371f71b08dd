"""A GCM that will kill itself at a point, and another that stands by. Not covered: the points (gcm/crash.py)."""

from __future__ import annotations

from gcm.crash import VARIABLE
from roq.coordination import paths
from roq.coordination.election import participants
from roq.coordination.session import Session
from roq.testing import DockerCluster


async def arm(machines: DockerCluster, point: str) -> tuple[str, str]:
    """The leader will kill itself there; the other one is next in line. Their names."""
    armed = await machines.leader()
    other = next(name for name in machines.gcms if name != armed)
    await machines.stop(other)
    await machines.restart_daemon(armed, **{VARIABLE: point})
    await machines.wait_leader([armed])
    await machines.start(other)
    session = await Session.connect(machines.zookeeper)
    try:

        async def in_line() -> bool:
            return len(await participants(session, paths.LATCH)) == len(machines.gcms)

        await machines.wait_for(in_line, f"{other} stands by")
    finally:
        await session.close()
    return armed, other
