"""Machines that the cluster makes for itself, as an administrator sees and allows them."""

from __future__ import annotations

from roq.coordination.locate import GcmClient
from roq.ids import new_token
from roq.wire.fleet import FleetInfo, FleetLimits, GetFleet, SetFleet

SECONDS = 15.0  # as for all administration


async def read_fleet(client: GcmClient) -> FleetInfo:
    """What is allowed, what there is, and what can't be met."""
    return await client.request(GetFleet(), FleetInfo, SECONDS)


async def set_limits(client: GcmClient, limits: FleetLimits) -> FleetInfo:
    """These from now on; the fleet with them. Raises InvalidConfiguration."""
    return await client.request(SetFleet(limits.check(), new_token()), FleetInfo, SECONDS)
