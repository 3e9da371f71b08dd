"""Hosts that the cluster makes for itself, as processes: one comes when an Exchange finds no slot, and goes when it is idle."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

import roq
from gcm.crash import VARIABLE
from roq.client.fleet import read_fleet, set_limits
from roq.coordination.locate import GcmClient
from roq.errors import HostFull
from roq.tools.local.cluster import LocalCluster
from roq.wire.fleet import FleetInfo, FleetLimits, MachineState
from tests.harness.documented import block
from tests.integration.running import RunningCluster

DOCUMENT = "docs/elasticity.md"
LIMITS = FleetLimits(0, 2, boot_seconds=20.0, idle_seconds=1.5)
SETTLE_SECONDS = 40.0


class ArmedCluster(LocalCluster):
    """Its GCM gcm-1 dies at this point."""

    point = ""

    def environment(self, process: str) -> dict[str, str]:
        armed = {VARIABLE: self.point} if self.point and process == "gcm-1" else {}
        return {**super().environment(process), **armed}


@pytest.fixture
async def local(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[LocalCluster]:
    """One host with one slot; two more may come. Its parameter: where gcm-1, which leads, dies."""
    made = ArmedCluster(tmp_path, gcms=2, hosts=1, exchanges_max=1, session_seconds=2.0, elastic_hosts=2)
    made.point = getattr(request, "param", "")
    async with made as cluster:
        if made.point:
            await cluster.kill_gcm("gcm-2")
            await cluster.settled(20.0)
            await cluster.start_gcm("gcm-2")
        client = GcmClient(cluster.zookeeper)
        await set_limits(client, LIMITS)
        client.close()
        yield cluster
        await cluster.stop()
        assert cluster.leftovers == []


@pytest.fixture
async def client(local: LocalCluster) -> AsyncIterator[GcmClient]:
    connected = GcmClient(local.zookeeper)
    yield connected
    connected.close()


async def until(client: GcmClient, good: Callable[[FleetInfo], bool], what: str) -> FleetInfo:
    info: FleetInfo | None = None
    try:
        async with asyncio.timeout(SETTLE_SECONDS):
            while True:
                info = await read_fleet(client)
                if good(info):
                    return info
                await asyncio.sleep(0.1)
    except TimeoutError:
        pytest.fail(f"not so within {SETTLE_SECONDS:g} s: {what}: {info}")


def serving(info: FleetInfo) -> list[str]:
    return [machine.name for machine in info.machines if machine.state is MachineState.SERVING]


def all_gone(info: FleetInfo) -> bool:
    return all(machine.state is MachineState.GONE and not machine.alive for machine in info.machines)


@pytest.mark.quick
async def test_a_host_comes_for_an_exchange_and_goes_when_it_is_idle(local: LocalCluster, client: GcmClient) -> None:
    async with roq.connect(local.zookeeper) as cluster:
        await cluster.create_queue("orders", overflow="block")
        exchange = await cluster.create_exchange("orders")  # no slot is left: it waits for the host that is made
        info = await until(client, lambda found: bool(serving(found)), "a machine serves")
        assert exchange.host == serving(info)[0]
        assert exchange.host.startswith(info.prefix)
        async with cluster.publisher("orders") as publisher, cluster.subscriber("orders") as subscriber:
            await publisher.publish("a", b"through either")
            assert (await anext(aiter(subscriber))).payload == b"through either"
        await cluster.drain_exchange("orders", exchange.exchange)
        await cluster.remove_exchange("orders", exchange.exchange)
        await until(client, all_gone, "the machine is given back")
        assert [host.host for host in await cluster.hosts()] == ["host-1"]
    assert not [process for process in local.processes() if process.owner == exchange.host]


async def test_a_host_comes_for_a_queue(local: LocalCluster, client: GcmClient) -> None:
    async with roq.connect(local.zookeeper) as cluster:
        await cluster.create_queue("orders")
        await cluster.create_queue("bills")
        info = await until(client, lambda found: bool(serving(found)), "a machine serves")
        assert {host.host: host.exchanges for host in await cluster.hosts()} == {"host-1": 1, serving(info)[0]: 1}


async def test_no_more_than_allowed_come_and_it_says_why(local: LocalCluster, client: GcmClient) -> None:
    await set_limits(client, FleetLimits(0, 2, cost=2.0, budget=3.0, boot_seconds=20.0, idle_seconds=600.0))
    async with roq.connect(local.zookeeper) as cluster:
        await cluster.create_queue("orders")
        await cluster.create_exchange("orders")
        with pytest.raises(HostFull):
            await cluster.create_exchange("orders")
        info = await until(client, lambda found: bool(found.problem), "the budget is a reason")
        assert len(serving(info)) == 1
        assert "the budget of 3/h pays for 1 at 2/h" in info.problem
        assert info.unmet == ("orders",)


async def test_what_its_store_keeps_goes_elsewhere_first(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        local = await stack.enter_async_context(
            LocalCluster(tmp_path, hosts=2, exchanges_max=20, session_seconds=2.0, elastic_hosts=1)
        )
        cluster = await stack.enter_async_context(roq.connect(local.zookeeper))
        asked = GcmClient(local.zookeeper)
        stack.callback(asked.close)
        await set_limits(asked, FleetLimits(1, 1, boot_seconds=20.0, idle_seconds=1.5))
        (name,) = serving(await until(asked, lambda found: bool(serving(found)), "a machine serves"))
        queues = [f"orders-{number}" for number in range(20)]
        for queue in queues:  # two of three stores are chosen for each
            await cluster.create_queue(queue, host="host-1", record=roq.Record(copies=2))
            async with cluster.publisher(queue) as publisher:
                await publisher.publish_many("a", [b"%d" % number for number in range(200)], confirm="stored")
            if (await cluster.host_remains(name)).segments:
                break
        await set_limits(asked, LIMITS)
        await until(asked, all_gone, "it is given back")
        async with cluster.subscriber(queue, start="earliest", follow=False) as subscriber:
            assert [int(message.payload) async for message in subscriber] == list(range(200))
    assert local.leftovers == []


@pytest.mark.parametrize("local", [f"fleet.{step}" for step in ("creating", "created", "booting")], indirect=True)
async def test_the_next_leader_makes_it(local: LocalCluster, client: GcmClient) -> None:
    await set_limits(client, FleetLimits(1, 1, boot_seconds=20.0, idle_seconds=1.5))
    info = await until(client, lambda found: bool(serving(found)), "one serves")
    assert not local.gcms["gcm-1"].running, "it did not die: the test shows nothing"
    assert len(info.machines) == 1, "only one was ever made"
    assert {process.owner for process in local.processes()} == {"gcm-2", "host-1", info.machines[0].name}


@pytest.mark.parametrize("local", ["fleet.returning", "fleet.destroying", "fleet.destroyed"], indirect=True)
async def test_the_next_leader_gives_it_back(local: LocalCluster, client: GcmClient) -> None:
    await set_limits(client, FleetLimits(1, 1, boot_seconds=20.0, idle_seconds=1.5))
    await until(client, lambda found: bool(serving(found)), "one serves")
    await set_limits(client, FleetLimits(0, 1, boot_seconds=20.0, idle_seconds=1.5))
    await until(client, all_gone, "it is given back")
    assert not local.gcms["gcm-1"].running, "it did not die: the test shows nothing"
    assert {process.owner for process in local.processes()} == {"gcm-2", "host-1"}


@pytest.mark.quick
def test_what_the_document_shows(tmp_path: Path) -> None:
    """In a secured cluster, as `roq up` starts one."""
    commands = [*block(DOCUMENT, "Try it").splitlines(), *block(DOCUMENT, "Allow it").splitlines()]
    assert commands[0] == "roq up --elastic 2 --exchanges-max 1 &"
    running = RunningCluster(tmp_path, zookeeper=None, hosts=1, exchanges_max=1, elastic_hosts=2, secured=True)
    try:
        settings = {**os.environ, "ROQ_CLUSTER": running.zookeeper, "ROQ_CARD": str(running.local.card)}
        for command in commands[1:]:
            words = [sys.executable, "-m", "roq.cli", *command.split()[1:]]
            done = subprocess.run(words, env=settings, capture_output=True, text=True, timeout=40, check=False)
            assert done.returncode == 0, f"{command}: {done.stderr}"
        assert "machines: 2 to 10, 3.5/h pay for 10 at 0.35/h" in done.stdout
        assert "serving" in done.stdout
    finally:
        left = running.stop()
    assert left == []
