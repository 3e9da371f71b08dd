"""Hosts as containers that the cluster makes for itself: one comes for an Exchange, dies, is replaced, and all are given back.

Not covered: leaders that die (tests/integration/test_fleet.py), providers that lie (tests/model/fleet.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import docker
import pytest

import roq
from benchmarks.elastic.rig import with_fleet
from gcm.providers.docker import FLEET_LABEL, DockerProvider
from gcm.providers.provider import HostSpec, ProviderFailed
from roq.client.fleet import read_fleet, set_limits
from roq.coordination.locate import GcmClient
from roq.errors import TemporaryError
from roq.testing import DockerCluster
from roq.wire.fleet import FleetLimits, MachineState

CLUSTER = {"gcms": 1, "hcms": 1, "exchanges_max": 1}
WAIT_SECONDS = 50.0


@pytest.fixture
def engine() -> Any:
    client = docker.from_env(timeout=30)
    yield client
    client.close()


@pytest.fixture
async def elastic(whole_cluster: DockerCluster, tmp_path: Path) -> AsyncIterator[DockerCluster]:
    """Led by a GCM on this machine, which has the engine."""
    async with with_fleet(whole_cluster, tmp_path):
        yield whole_cluster


async def until(good: Callable[[], Awaitable[bool]], what: str) -> None:
    try:
        async with asyncio.timeout(WAIT_SECONDS):
            while not await good():
                await asyncio.sleep(0.2)
    except TimeoutError:
        pytest.fail(f"not so within {WAIT_SECONDS:g} s: {what}")


async def test_a_container_comes_for_an_exchange_is_replaced_and_given_back(elastic: DockerCluster, engine: Any) -> None:
    asked = GcmClient(elastic.zookeeper)
    info = await set_limits(asked, FleetLimits(0, 3, boot_seconds=12.0, idle_seconds=2.0))

    def containers() -> list[str]:
        label = f"{FLEET_LABEL}={info.prefix.split('-')[1]}"
        found = engine.containers.list(all=True, filters={"label": label}, ignore_removed=True)
        return sorted(one.name for one in found)

    async with roq.connect(elastic.zookeeper) as cluster:
        await cluster.create_queue("orders", overflow="block")
        created: Any = None
        while created is None:  # a ScalingProcess asks again, too
            try:
                created = await cluster.create_exchange("orders")
            except TemporaryError:
                continue
        assert created.host in containers()
        async with cluster.publisher("orders") as publisher, cluster.subscriber("orders") as subscriber:
            await publisher.publish("a", b"one")
            assert (await anext(aiter(subscriber))).payload == b"one"
            engine.containers.get(created.host).kill()

            async def replaced() -> bool:
                hosts = {*(await cluster.queue("orders")).record.exchanges.values()}
                return created.host not in hosts and len(hosts) == 2 and created.host not in containers()

            await until(replaced, "the Exchange runs on another container, the dead one is removed")
            await publisher.publish("a", b"two")
            assert (await anext(aiter(subscriber))).payload == b"two"
        await cluster.remove_queue("orders")

        async def none_left() -> bool:
            machines = (await read_fleet(asked)).machines
            return not containers() and all(one.state is MachineState.GONE for one in machines)

        await until(none_left, "all are given back")
        assert [host.host for host in await cluster.hosts() if host.alive] == list(elastic.hosts)
    asked.close()


@pytest.mark.quick
def test_a_container_of_somebody_else_is_left_alone(whole_cluster: DockerCluster, engine: Any) -> None:
    network = f"roq-{whole_cluster.token}"
    provider = DockerProvider("roq:latest", network, 30.0)
    name = f"roq-{whole_cluster.token}-other"
    other = engine.containers.create("roq:latest", ["sleep", "60"], name=name, network=network)
    try:
        with pytest.raises(ProviderFailed, match="not of this fleet: it is left alone"):
            provider.create(HostSpec(name, whole_cluster.token))
        provider.destroy(name, whole_cluster.token)
        assert provider.names(whole_cluster.token) == []
        other.reload()
    finally:
        other.remove(force=True)


@pytest.mark.quick
def test_a_container_has_its_card_for_its_user_alone_and_is_made_once(whole_cluster: DockerCluster, engine: Any) -> None:
    provider = DockerProvider("roq:latest", f"roq-{whole_cluster.token}", 30.0)
    spec = HostSpec(f"roq-{whole_cluster.token}-7", whole_cluster.token, {"ROQ_ZOOKEEPER": "198.18.0.9"}, b"a card")
    try:
        provider.create(spec)
        provider.create(spec)
        assert provider.names(whole_cluster.token) == [spec.name]
        made = engine.containers.get(spec.name)
        assert "ROQ_CARD=/cards/host.card" in made.attrs["Config"]["Env"]
        archive = b"".join(made.get_archive("/cards/host.card")[0])
        assert b"a card" in archive
    finally:
        provider.destroy(spec.name, whole_cluster.token)
    assert provider.names(whole_cluster.token) == []
