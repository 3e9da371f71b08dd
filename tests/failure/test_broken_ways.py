"""Ways that break under both ends and are there again a moment later, as behind a router or a firewall that was started anew:
connections are reset, at one end sooner than at the other, and no process dies."""

from __future__ import annotations

import asyncio

import pytest

import roq
from roq.testing import DockerCluster
from roq.testing.cluster import CLIENT, Cut
from tests.harness.traffic import Traffic

CLUSTER = {"gcms": 1, "hcms": 2}
BROKEN_SECONDS = 0.7  # shorter than a session


@pytest.mark.parametrize("monitor", [pytest.param("host-1", marks=pytest.mark.quick), "host-2"])
async def test_a_way_that_is_reset_for_a_moment_loses_nothing(
    machines: DockerCluster, client: roq.Cluster, monitor: str
) -> None:
    """The Exchange is on host-2. Publishers notice at once, and would be back before the subscribers know of it."""
    await client.create_queue("orders", host=monitor)
    if monitor == "host-1":
        (first,) = (await machines.wait_queue_ready("orders")).record.exchanges
        await client.create_exchange("orders", host="host-2")
        await machines.wait_queue_ready("orders", exchanges=2)
        await client.remove_exchange("orders", first)
    async with Traffic(client, "orders") as traffic:
        await machines.partition(CLIENT, "host-2", how=Cut.REJECT)
        await asyncio.sleep(BROKEN_SECONDS)
        await machines.heal()
        assert await traffic.flowing() < 10.0
        await asyncio.sleep(12.0)  # by then whoever reads has noticed by itself, and what is missing was told
    assert traffic.lost == []
    traffic.check_order()
