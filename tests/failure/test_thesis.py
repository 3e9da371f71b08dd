"""The integration tests of the thesis, §10.3 to §10.5, by their names there, on a cluster of containers.

One cluster serves them all: 1 ZooKeeper, 2 GCMs, 4 hosts. Each test leaves it whole (tests/failure/conftest.py).
"""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

import roq
from roq.coordination.locate import GcmClient
from roq.errors import QueueConflict
from roq.testing import DockerCluster
from roq.tools.chaos.watch import Witness
from roq.wire import gcm
from roq.wire.assignment import MonitorRole, QueueSettings
from roq.wire.policy import Bounds, Policy, QueueRule
from tests.failure.conftest import PAUSE_SECONDS, SESSION_SECONDS
from tests.harness.traffic import Traffic

CLUSTER = {"gcms": 2, "hcms": 4}
FAIL_OVER_SECONDS = SESSION_SECONDS + 6.0  # session, ZooKeeper's tick, and clients' retries on a busy machine
FLOWING_SECONDS = SESSION_SECONDS / 2  # messages that nobody's recovery was needed for
RECOVERED_SECONDS = SESSION_SECONDS + 8.0


async def kill_leader(machines: DockerCluster) -> str:
    """Kill the active GCM; its name."""
    leader = await machines.leader()
    await machines.kill(leader)
    return leader


async def everywhere(machines: DockerCluster, *hosts: str) -> Counter[str]:
    """How often each child process runs, by name, as the operating systems tell it."""
    found: Counter[str] = Counter()
    for host in hosts or machines.hosts:
        found.update(process.name for process in await machines.processes(host) if "/" in process.name or process.orphan)
    return found


async def wait_replicas(
    machines: DockerCluster, client: roq.Cluster, queue: str, hosts: int, without: str = ""
) -> dict[str, MonitorRole]:
    """Until one active Monitor and backups run on so many distinct hosts; their roles."""

    async def whole() -> dict[str, MonitorRole] | None:
        info = await client.queue(queue)
        roles = {monitor.host: monitor.role for monitor in info.monitors}
        active = [host for host, role in roles.items() if role is MonitorRole.ACTIVE]
        return roles if info.ready and len(active) == 1 and len(roles) == hosts and without not in roles else None

    return await machines.wait_for(whole, f"{queue} has {hosts} Monitors", RECOVERED_SECONDS)


# --- 10.3.1 GCM ---------------------------------------------------------------------------------------------------------


@pytest.mark.quick
async def test_gcm_failover(machines: DockerCluster, client: roq.Cluster) -> None:
    created = await client.create_queue("orders")
    killed = await kill_leader(machines)
    try:
        again = await client.create_queue("orders")  # the same: it exists
        assert again.record.created == created.record.created
        with pytest.raises(QueueConflict):
            await client.create_queue("orders", overflow="block")
        assert await machines.leader() != killed
        async with Traffic(client, "orders") as traffic:
            await traffic.flowing()
        assert set((await everywhere(machines)).values()) == {1}
    finally:
        await machines.start(killed)


async def test_gcm_failover_does_not_touch_messages(machines: DockerCluster, client: roq.Cluster) -> None:
    await client.create_queue("orders")
    async with Traffic(client, "orders") as traffic:
        killed = await kill_leader(machines)
        assert await traffic.flowing() < FLOWING_SECONDS
        await machines.wait_leader(set(machines.gcms) - {killed}, timeout_seconds=FAIL_OVER_SECONDS)
        assert await traffic.flowing() < FLOWING_SECONDS
        await machines.start(killed)
    assert traffic.lost == []
    traffic.check_order()


async def begun(machines: DockerCluster, request: gcm.CreateQueue | gcm.CreateExchange) -> str:
    """Send a request for host-1 while that host is frozen, kill the GCM in the middle of it, and thaw the host: the processes
    get made, and nobody is left who would say so. The killed GCM's name."""
    leader = await machines.leader()
    sender = GcmClient(machines.zookeeper)
    async with Witness(machines.zookeeper) as witness:

        async def recorded() -> bool:
            return any(request.transaction in path for path in await witness.transactions())

        await machines.pause("host-1")
        asked = asyncio.create_task(sender.request(request, gcm.Done, FAIL_OVER_SECONDS))
        try:
            await machines.wait_for(recorded, "the transaction is recorded", SESSION_SECONDS / 2)
        finally:
            await machines.kill(leader)
            asked.cancel()
            await machines.unpause("host-1")
            sender.close()
    await asyncio.gather(asked, return_exceptions=True)
    return leader


@pytest.mark.parametrize("transaction", ["t-orders", "t-another"])
async def test_idempotent_queue_creation(machines: DockerCluster, client: roq.Cluster, transaction: str) -> None:
    settings = QueueSettings()
    killed = await begun(machines, gcm.CreateQueue("orders", "t-orders", settings, "host-1"))
    asker = GcmClient(machines.zookeeper)
    try:
        info = await asker.request(gcm.CreateQueue("orders", transaction, settings, "host-2"), gcm.QueueInfo, 20.0)
        assert info.ready
        assert info.record.monitor_host == "host-1", "the transaction's host counts, not the request's"
        (exchange,) = info.record.exchanges
        expected = Counter(["monitor/orders", "scaling/orders", f"exchange/orders/{exchange}"])
        assert await everywhere(machines) == expected, "nothing was made twice"
        assert await everywhere(machines, "host-1") == expected
    finally:
        asker.close()
        await machines.start(killed)


async def test_idempotent_exchange_creation(machines: DockerCluster, client: roq.Cluster) -> None:
    await client.create_queue("orders", host="host-3")
    killed = await begun(machines, gcm.CreateExchange("orders", "t-exchange", "host-1"))
    try:
        made = await client.create_exchange("orders", host="host-2", transaction="t-exchange", timeout_seconds=20.0)
        assert made.host == "host-1"
        info = await machines.wait_queue_ready("orders", exchanges=2)
        assert set(info.record.exchanges.values()) == {"host-1", "host-3"}
        assert await everywhere(machines, "host-1") == {f"exchange/orders/{made.exchange}": 1}
        assert await everywhere(machines, "host-2") == {}
    finally:
        await machines.start(killed)


# --- 10.4.1 processes crash recovery --------------------------------------------------------------------------------------


async def test_active_monitor_crash_recovery(machines: DockerCluster, client: roq.Cluster) -> None:
    info = await client.create_queue("orders", host="host-1")
    for host in ("host-1", "host-2"):
        await client.create_exchange("orders", host=host)
    before = await machines.wait_queue_ready("orders", exchanges=3)
    killed = await machines.kill_process("host-1", "monitor/orders")
    async with Traffic(client, "orders") as traffic:
        await traffic.flowing()
    after = await machines.wait_process("host-1", "monitor/orders", not_pid=killed)
    assert after.ports["clients"] == info.monitors[0].clients
    await machines.wait_queue_ready("orders", exchanges=3)
    view = await client.inspect("orders")
    assert {exchange.exchange.id for exchange in view.exchanges} == set(before.record.exchanges)


async def test_backup_monitor_crash_recovery(machines: DockerCluster, client: roq.Cluster) -> None:
    await client.create_queue("orders", host="host-1", replication=2)
    roles = await wait_replicas(machines, client, "orders", 2)
    (backup,) = (host for host, role in roles.items() if role is MonitorRole.BACKUP)
    killed = await machines.kill_process(backup, "monitor/orders")
    await machines.wait_process(backup, "monitor/orders", not_pid=killed)
    after = await wait_replicas(machines, client, "orders", 2)
    assert after == {"host-1": MonitorRole.ACTIVE, backup: MonitorRole.BACKUP}
    await machines.kill("host-1")
    try:
        recovered = await wait_replicas(machines, client, "orders", 2, without="host-1")
        assert recovered[backup] is MonitorRole.ACTIVE
        async with Traffic(client, "orders") as traffic:
            await traffic.flowing()
    finally:
        await machines.start("host-1")


@pytest.mark.quick
async def test_exchange_crash_recovery(machines: DockerCluster, client: roq.Cluster) -> None:
    info = await client.create_queue("orders", host="host-1")
    (exchange,) = info.record.exchanges
    async with Traffic(client, "orders") as traffic:
        killed = await machines.kill_process("host-1", f"exchange/orders/{exchange}")
        await traffic.flowing()
        assert (await machines.wait_process("host-1", f"exchange/orders/{exchange}")).pid != killed
    assert traffic.received == sorted(set(traffic.received))


async def test_scaling_process_crash_recovery(machines: DockerCluster, client: roq.Cluster) -> None:
    policy = Policy(queue=QueueRule(max_publishers_per_exchange=1.0), bounds=Bounds(max_exchanges=2, cooldown_seconds=1.0))
    await client.create_queue("orders", host="host-1")
    await client.set_policy("orders", policy)
    killed = await machines.kill_process("host-1", "scaling/orders")
    await machines.wait_process("host-1", "scaling/orders", not_pid=killed)
    assert await client.get_policy("orders") == policy
    async with Traffic(client, "orders"), Traffic(client, "orders"):  # one too many: statistics and policy make it act
        await machines.wait_queue_ready("orders", exchanges=2)
    decisions = (await client.inspect("orders")).decisions
    assert any(decision.action == "scale-out" for decision in decisions)


# --- 10.4.2 HCM crash recovery --------------------------------------------------------------------------------------------


async def test_hcm_crash_recovery(machines: DockerCluster, client: roq.Cluster) -> None:
    await client.create_queue("queue1", host="host-1", replication=3)
    await client.create_queue("queue2", host="host-2", replication=3)
    for queue in ("queue1", "queue2"):
        await wait_replicas(machines, client, queue, 3)
    async with Traffic(client, "queue1") as traffic:
        await machines.kill("host-1")
        try:
            await traffic.flowing(RECOVERED_SECONDS)
            for queue in ("queue1", "queue2"):
                await wait_replicas(machines, client, queue, 3, without="host-1")
            assert (await client.queue("queue2")).record.monitor_host == "host-2", "not lost, not moved"
            await traffic.flowing()
        finally:
            await machines.start("host-1")
    assert traffic.received == sorted(set(traffic.received))


async def test_reviving_node_runs_nothing_old(machines: DockerCluster, client: roq.Cluster) -> None:
    """§8.3.3: a host cut off for longer than its session, then back."""
    await client.create_queue("orders", host="host-1", replication=2)
    await wait_replicas(machines, client, "orders", 2)
    await machines.partition("host-1", set(machines.machines()) - {"host-1"})
    await wait_replicas(machines, client, "orders", 2, without="host-1")
    await machines.heal()
    await machines.wait_hosts(4)

    async def nothing() -> bool:
        return not await everywhere(machines, "host-1")

    await machines.wait_for(nothing, "host-1 runs nothing old", RECOVERED_SECONDS)
    assert max((await everywhere(machines)).values()) <= 2  # two Monitors by one name, on two hosts


async def test_a_slow_host_that_kept_its_session_is_left_alone(machines: DockerCluster, client: roq.Cluster) -> None:
    await client.create_queue("orders", host="host-1")
    before = {process.name: process.pid for process in await machines.processes("host-1")}
    await machines.pause("host-1")
    await asyncio.sleep(PAUSE_SECONDS)  # a freeze shorter than the session is the point here
    await machines.unpause("host-1")
    await machines.wait_queue_ready("orders")
    assert {process.name: process.pid for process in await machines.processes("host-1")} == before


# --- 10.5 edge cases --------------------------------------------------------------------------------------------------------


async def test_maintaining_the_connection_with_every_monitor(machines: DockerCluster, client: roq.Cluster) -> None:
    """§10.5.1: host after host of the active Monitor dies; clients have learned of each new backup."""
    await client.create_queue("orders", host="host-1", replication=2)
    await wait_replicas(machines, client, "orders", 2)
    lost: list[str] = []
    async with Traffic(client, "orders") as traffic:
        try:
            for _ in range(2):
                active = (await client.queue("orders")).record.monitor_host
                await machines.kill(active)
                lost.append(active)
                await traffic.flowing(RECOVERED_SECONDS)
                await wait_replicas(machines, client, "orders", 2, without=active)
        finally:
            for host in lost:
                await machines.start(host)
    assert traffic.received == sorted(set(traffic.received))


async def test_daemon_that_supervises_the_hcm(machines: DockerCluster, client: roq.Cluster) -> None:
    """§10.5.2: the HCM dies, is started again, adopts what runs; no message is affected, no recovery begun."""
    info = await client.create_queue("orders", host="host-1")
    before = {process.name: process.pid for process in await machines.processes("host-1") if "/" in process.name}
    async with Traffic(client, "orders") as traffic:
        killed = await machines.kill_process("host-1", "roq-hcm")
        adopted = await machines.wait_process("host-1", "monitor/orders", timeout_seconds=5.0)
        assert adopted.pid == before["monitor/orders"]
        after = {process.name: process.pid for process in await machines.processes("host-1")}
        assert after["roq-hcm"] != killed
        assert {name: pid for name, pid in after.items() if "/" in name} == before
        assert await traffic.flowing() < FLOWING_SECONDS
    assert traffic.lost == []
    traffic.check_order()
    assert (await client.queue("orders")).record == info.record


async def test_maintaining_the_replication_factor_in_any_situation(machines: DockerCluster, client: roq.Cluster) -> None:
    """§10.5.3: too few hosts at creation; another one joins."""
    for host in ("host-3", "host-4"):
        await machines.stop(host)
    await machines.wait_hosts(2)
    try:
        await client.create_queue("orders", replication=3)
        await wait_replicas(machines, client, "orders", 2)
    finally:
        await machines.start("host-3")
        await machines.start("host-4")
    await wait_replicas(machines, client, "orders", 3)


async def test_simultaneous_crash_of_gcm_and_hcm(machines: DockerCluster, client: roq.Cluster) -> None:
    """§10.5.4: the next GCM finishes what the dead one began or never saw."""
    await client.create_queue("orders", host="host-1", replication=3)
    await wait_replicas(machines, client, "orders", 3)
    leader = await machines.leader()
    await asyncio.gather(machines.kill("host-1"), machines.kill(leader))
    try:
        await machines.wait_leader(set(machines.gcms) - {leader}, timeout_seconds=FAIL_OVER_SECONDS)
        await wait_replicas(machines, client, "orders", 3, without="host-1")
        async with Traffic(client, "orders") as traffic:
            await traffic.flowing()
        names = await everywhere(machines, "host-2", "host-3", "host-4")
        assert names["monitor/orders"] == 3
        assert all(count == 1 for name, count in names.items() if not name.startswith("monitor/"))
    finally:
        await machines.start(leader)
        await machines.start("host-1")
