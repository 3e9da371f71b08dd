"""A whole cluster on a coordinator: GCMs elect, hosts register, queues and work queues run, and its restart harms nobody."""

from __future__ import annotations

import asyncio
import uuid
from pathlib import Path

import pytest

import roq
from roq.coordination.locate import read_leader
from roq.errors import TemporaryError
from roq.tools.local.cluster import LocalCluster
from tests.integration.coordinator_rig import RunningCoordinator


async def once_it_works(cluster: roq.Cluster, name: str) -> None:
    """Create a queue; the leader may just be elected."""
    while True:
        try:
            await cluster.create_queue(name)
            return
        except TemporaryError:
            await asyncio.sleep(0.1)


@pytest.mark.quick
@pytest.mark.timeout(180)
async def test_a_cluster_runs_on_it_and_outlives_its_kill(tmp_path: Path) -> None:
    coordinator = RunningCoordinator(tmp_path / "coordinator")
    coordinator.start()
    try:
        async with (
            asyncio.timeout(150),
            LocalCluster(tmp_path / "cluster", gcms=2, hosts=1, zookeeper=f"{coordinator.address}/{uuid.uuid4().hex}") as local,
            roq.connect(local.zookeeper) as cluster,
        ):
            await cluster.create_queue("q")
            async with cluster.subscriber("q", "t") as subscriber, cluster.publisher("q") as publisher:
                await publisher.publish("t", b"before")
                assert (await anext(subscriber)).payload == b"before"
                coordinator.kill()
                await publisher.publish("t", b"meanwhile")  # the data plane needs no tree
                assert (await anext(subscriber)).payload == b"meanwhile"
                coordinator.start()
                await once_it_works(cluster, "later")
                async with roq.open_queue(f"roq://{local.zookeeper}/work") as work:
                    await work.put(b"task")
                    async for task in work.leases(seconds=30):
                        assert task.payload == b"task"
                        await task.ack()
                        break
                leader = await read_leader(local.zookeeper)
                await local.kill_gcm(f"gcm-{leader.host.rpartition('.')[2]}")
                await once_it_works(cluster, "after")
                await publisher.publish("t", b"after")
                assert (await anext(subscriber)).payload == b"after"
        assert local.leftovers == []
    finally:
        assert coordinator.stop() == 0, coordinator.log()
