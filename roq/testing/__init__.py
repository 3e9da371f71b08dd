"""Clusters for tests of applications that use RoQ: in containers, where every fault can be injected, or on
loopback addresses.

    pytest_plugins = ["roq.testing.plugin"]          # in your conftest.py

    async def test_orders_survive(roq_cluster):
        async with roq_cluster.connect() as cluster:
            await cluster.create_queue("orders")
            await roq_cluster.kill(await roq_cluster.leader())

`asyncio_mode = auto` in your pytest.ini makes such tests run. See roq/testing/cluster.py for what can be done to a cluster.
All of it needs the extra `testing`; DockerCluster also needs an image (`make image` in RoQ's sources builds it).
"""

from roq.testing.cluster import Cut, HostProcess, NotPossible, TestedCluster
from roq.testing.docker_cluster import DockerCluster
from roq.testing.loopback_cluster import LoopbackCluster

__all__ = ["Cut", "DockerCluster", "HostProcess", "LoopbackCluster", "NotPossible", "TestedCluster"]
