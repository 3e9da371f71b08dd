"""A local cluster whose GCMs start further hosts themselves, as processes of this machine (gcm/providers/process.py)."""

from __future__ import annotations

import asyncio
from pathlib import Path

from roq.client.fleet import set_limits
from roq.coordination.locate import GcmClient
from roq.runtime.files import DISK
from roq.tools.local import leftovers
from roq.wire.fleet import FleetLimits

BOOT_SECONDS, IDLE_SECONDS = 30.0, 60.0  # of a host that is a process
STOP_SECONDS = 8.0
MADE = "roq-"  # what names of hosts that a fleet made begin with


def fleet_file(directory: Path, exchanges_max: int, authority: Path | None) -> Path:
    """The file for `roq-gcm --fleet`, made. authority: signs their cards; None: no security."""
    path = directory / "fleet.toml"
    signed = f'authority = "{authority.resolve()}"\n' if authority is not None else ""
    text = f'provider = "process"\nexchanges_max = {exchanges_max}\n{signed}\n[process]\ndirectory = "{directory.resolve()}"\n'
    DISK.write_file(path, text.encode(), mode=0o600)
    return path


async def allow(zookeeper: str, most: int) -> None:
    """So many hosts more may be made."""
    client = GcmClient(zookeeper)
    try:
        await set_limits(client, FleetLimits(0, most, boot_seconds=BOOT_SECONDS, idle_seconds=IDLE_SECONDS))
    finally:
        client.close()


async def stop(token: str) -> None:
    """Stop the hosts that were made, cleanly. The GCMs are stopped before: they would make others."""
    made = sorted({process.owner for process in leftovers.find(token) if process.owner.startswith(MADE)})
    await asyncio.gather(*(asyncio.to_thread(leftovers.stop_owner, token, name, STOP_SECONDS) for name in made))
