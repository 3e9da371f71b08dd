"""Hosts are left, and levelled, under load on real processes: nothing is lost, a removed host is not missed. Missing queues.

Not covered: what is decided (tests/unit/test_evacuation.py), containers (tests/failure/test_evacuation.py).
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

import roq
from roq.errors import AccessDenied, NoHosts, QueueNotFound, TemporaryError
from roq.runtime.security import write_secret
from roq.tools.authority import Authority
from roq.tools.local.cluster import LocalCluster
from roq.wire.assignment import Leaving
from roq.wire.card import CardRole, Grant, Right
from roq.wire.hosts import HostRemains
from roq.wire.task import NewTask
from roq.workqueue.remote import RemoteQueue
from tests.harness.cards import as_holder
from tests.harness.task_load import TaskLoad
from tests.harness.traffic import Traffic
from tests.integration.running import RunningCluster

ROOT = Path(__file__).parents[2]
LEAVE_SECONDS = 90.0
KINDS = ("exchanges", "monitors", "masters", "segments", "payloads", "ranges")
pytestmark = pytest.mark.timeout(240)


@asynccontextmanager
async def cluster_of(tmp_path: Path, hosts: int, gcms: int = 1) -> AsyncIterator[tuple[LocalCluster, roq.Cluster]]:
    async with LocalCluster(tmp_path, hosts=hosts, gcms=gcms) as local, roq.connect(local.zookeeper) as client:
        yield local, client


class Levelling(LocalCluster):
    """Hosts are levelled a second after they came."""

    def environment(self, process: str) -> dict[str, str]:
        return {**super().environment(process), "ROQ_REBALANCE_AFTER_SECONDS": "1"}


async def left(client: roq.Cluster, host: str) -> HostRemains:
    """The last word about a host that is being left."""
    async with asyncio.timeout(LEAVE_SECONDS):
        found = [remains async for remains in client.remains(host)]
    return found[-1]


async def command(zookeeper: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-m", "roq.cli", *arguments, "-c", zookeeper],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        timeout=LEAVE_SECONDS,
        check=False,
    )


async def publish_stored(client: roq.Cluster, queue: str, stop: asyncio.Event, stored: list[int]) -> None:
    """Numbers, each once it is stored."""
    async with client.publisher(queue, confirm="stored") as publisher:
        while not stop.is_set():
            number = len(stored)
            try:
                await publisher.publish("kept", str(number).encode(), confirm="stored")
            except TemporaryError:
                continue  # it may be stored: the same number again
            stored.append(number)


async def test_a_host_is_evacuated_under_load_then_stopped_and_removed(tmp_path: Path) -> None:
    async with cluster_of(tmp_path, hosts=4) as (local, client):
        host = (await client.create_work_queue("work", write_quorum=3)).record.master_host
        await client.create_queue("live", overflow="block", host=host, replication=2)
        await client.create_queue("kept", overflow="block", host=host, record=roq.Record(days=1, copies=3))
        await client.create_exchange("live", host=host)
        stop, stored = asyncio.Event(), list[int]()
        load = TaskLoad(local.zookeeper, "work", pause_seconds=0.01, big_every=20)
        load.start()
        try:
            async with Traffic(client, "live") as traffic:
                keeping = asyncio.create_task(publish_stored(client, "kept", stop, stored))
                await asyncio.sleep(1.0)
                done = await command(local.zookeeper, "host", "evacuate", host, "--json")
                assert done.returncode == 0, done.stderr
                told = [json.loads(line) for line in done.stdout.splitlines()]
                assert (told[0]["exchanges"], told[0]["leaving"]) == (3, "everything")
                assert {told[-1][kind] for kind in ("exchanges", "monitors", "masters", "segments", "payloads", "ranges")} == {
                    0
                }
                remains = await client.host_remains(host)
                assert (remains.processes, remains.data, remains.left) == (0, False, True)
                local.hosts[host].dismiss()
                assert (await command(local.zookeeper, "host", "stop", host)).returncode == 0
                shutil.rmtree(local.directory / host)
                assert host not in {one.host for one in await client.hosts()}, "nobody misses it"
                await traffic.flowing()
                stop.set()
                await keeping
            verdict = await asyncio.to_thread(load.finish)
        finally:
            stop.set()
            load.stop()
        assert traffic.lost == []
        traffic.check_order()
        verdict.check()
        assert len(stored) > 10
        async with client.subscriber("kept", start="earliest", follow=False) as past:
            found = [int(message.payload) async for message in past]
        assert sorted(set(found)) == stored


async def test_payloads_on_a_lost_host_are_counted(tmp_path: Path) -> None:
    """Nobody can ask its store, and nothing may be thrown away that has no other copy."""
    async with cluster_of(tmp_path, hosts=3) as (local, client):
        record = (await client.create_work_queue("work", write_quorum=1, standbys=0)).record
        queue = RemoteQueue(local.zookeeper, "work")
        try:
            for _ in range(30):
                await asyncio.to_thread(queue.put, [NewTask(b"x" * 100_000)])
        finally:
            queue.close()
        found = [await client.host_remains(host) for host in local.hosts]
        (host, count) = next((one.host, one.payloads) for one in found if not one.segments and one.host != record.master_host)
        assert count > 0
        await local.lose_host(host)
        async with asyncio.timeout(LEAVE_SECONDS):
            while next(one.alive for one in await client.hosts() if one.host == host):
                await asyncio.sleep(0.1)
        remains = await client.host_remains(host)
        assert (remains.payloads, remains.data) == (count, True)


async def test_the_next_leader_goes_on_where_the_first_one_died(tmp_path: Path) -> None:
    async with cluster_of(tmp_path, hosts=3, gcms=2) as (local, client):
        names = [f"q{number}" for number in range(6)]
        for name in names:
            await client.create_queue(name, overflow="block", host="host-1")
        async with Traffic(client, "q0") as traffic:
            await client.drain_host("host-1")
            async for remains in client.remains("host-1"):
                if 0 < remains.exchanges < len(names) or remains.monitors < len(names):
                    break
            leader = (await client.view()).leader
            await local.kill_gcm(next(name for name, one in local.gcms.items() if f":{one.ready['port']}" in leader))
            last = await left(client, "host-1")
            await traffic.flowing()
        assert (last.processes, last.leaving, last.left) == (0, Leaving.PROCESSES, True)
        assert traffic.lost == []
        traffic.check_order()
        for info in await client.queues():
            assert info.ready
            assert len(info.record.exchanges) == 1


async def test_what_can_not_work_is_refused_and_what_was_begun_can_be_called_off(tmp_path: Path) -> None:
    async with cluster_of(tmp_path, hosts=2) as (local, client):
        await client.create_work_queue("work", write_quorum=2)
        with pytest.raises(NoHosts, match="wants 2 copies, and 1 other hosts could keep them"):
            await client.evacuate_host("host-1")
        assert not (await client.hosts())[0].draining
        refused = await command(local.zookeeper, "host", "evacuate", "host-1")
        assert refused.returncode == 1
        assert "host-1 runs nothing of queues" in (await command(local.zookeeper, "host", "drain", "host-1")).stderr
        told = (await command(local.zookeeper, "host", "drain", "host-1", "--no-wait", "--json")).stdout
        assert json.loads(told)["leaving"] == "processes"
        with pytest.raises(NoHosts, match="no other host takes what is on 'host-2'"):
            await client.drain_host("host-2")
        done = await command(local.zookeeper, "host", "evacuate", "host-1", "--cancel")
        assert done.returncode == 0, done.stderr
        (info, _) = await client.hosts()
        assert (info.draining, info.leaving) == (False, Leaving.NOTHING)
        async with asyncio.timeout(LEAVE_SECONDS):
            while len({host for one in await client.work_queues() for host in one.record.hosts}) != 2:
                await asyncio.sleep(0.1)  # its standby comes back


async def test_hosts_that_join_get_their_share_without_a_loss(tmp_path: Path) -> None:
    async with Levelling(tmp_path, hosts=1, exchanges_max=20) as local, roq.connect(local.zookeeper) as client:
        for number in range(6):
            await client.create_queue(f"q{number}", overflow="block")
        await client.set_rebalance(False)
        async with Traffic(client, "q0") as traffic:
            await local.add_host()
            await client.set_rebalance(True)
            async with asyncio.timeout(LEAVE_SECONDS):
                while not level(hosts := await client.hosts()):
                    await asyncio.sleep(0.2)
            await traffic.flowing()
        assert sum(host.exchanges for host in hosts) == 6
        assert traffic.lost == []
        traffic.check_order()


def level(hosts: list[roq.HostInfo]) -> bool:
    if len(hosts) < 2:
        return False
    first, second = hosts
    return abs(first.exchanges - second.exchanges) < 3 and abs(first.monitors - second.monitors) < 3 and second.exchanges > 1


@pytest.mark.quick
async def test_a_missing_queue_is_made_once_by_many_who_open_it(cluster: RunningCluster, client: roq.Cluster) -> None:
    template = roq.QueueTemplate(overflow=roq.Overflow.BLOCK, record=roq.Record(days=1))
    before = (await client.options()).template
    await client.set_template(template)
    try:
        with pytest.raises(QueueNotFound):
            await client.publisher("made").open()
        async with AsyncExitStack() as stack:
            others = [await stack.enter_async_context(roq.connect(cluster.zookeeper)) for _ in range(4)]
            publishers = [one.publisher("made", create_missing=True) for one in others for _ in range(5)]
            subscriber = others[0].subscriber("made", create_missing=True)
            await asyncio.gather(subscriber.open(), *(publisher.open() for publisher in publishers))
            for publisher in publishers:
                stack.push_async_callback(publisher.close)
            stack.push_async_callback(subscriber.close)
            for number, publisher in enumerate(publishers):
                await publisher.publish("t", str(number).encode())
            async with asyncio.timeout(20):
                found = {(await anext(subscriber)).payload for _ in publishers}
            assert len(found) == len(publishers)
        info = await client.queue("made")
        assert (info.record.settings.overflow, info.record.recorded, info.record.term) == (roq.Overflow.BLOCK, True, 1)
        with roq.blocking.connect(cluster.zookeeper) as plain:
            with plain.publisher("made", create_missing=True) as sender:
                sender.publish("t", b"last")
            with plain.subscriber("made-for-group", group="g", create_missing=True) as member:
                assert member is not None
            assert plain.queue("made-for-group").record.recorded
            plain.remove_queue("made-for-group")
    finally:
        await client.set_template(before)
    await client.remove_queue("made")


async def test_a_queue_that_is_removed_is_not_made_again_by_who_is_still_there(client: roq.Cluster) -> None:
    async with client.subscriber("short", create_missing=True):
        await client.remove_queue("short")
        await asyncio.sleep(4.0)  # by then it has looked for its Monitor again
        assert not await client.queue_exists("short")


async def test_with_cards_a_host_is_drained_and_missing_queues_take_the_right_to_make_them(tmp_path: Path) -> None:
    async with LocalCluster(tmp_path, hosts=2, secured=True) as local:
        async with roq.connect(local.zookeeper, card=local.card) as client:
            await client.create_queue("live", overflow="block", host="host-1")
            await client.create_work_queue("work", write_quorum=1, standbys=0)
            async with Traffic(client, "live") as traffic:
                await client.drain_host("host-1")
                assert (await left(client, "host-1")).left
                await traffic.flowing()
            assert traffic.lost == []
            await client.cordon_host("host-1", False)
            await client.evacuate_host("host-1")  # masters and stores are asked with the GCM's card
            assert (await left(client, "host-1")).left
        authority = Authority.load(local.directory / "authority.json")
        publishes = Grant(Right.PUBLISH, "ord*")
        for name, grants in {"maker": [publishes, Grant(Right.ADMIN, "ord*")], "guest": [publishes]}.items():
            write_secret(tmp_path / f"{name}.card", authority.issue(name, CardRole.CLIENT, grants))
        with as_holder(tmp_path / "guest.card"):
            async with roq.connect(local.zookeeper) as client:
                with pytest.raises(AccessDenied, match="guest needs the right `admin` to 'orders'"):
                    await client.publisher("orders", create_missing=True).open()
        with as_holder(tmp_path / "maker.card"):
            async with roq.connect(local.zookeeper) as client, client.publisher("orders", create_missing=True):
                pass
        with as_holder(tmp_path / "guest.card"):
            async with roq.connect(local.zookeeper) as client, client.publisher("orders", create_missing=True):
                pass  # it is there: nobody needs the right to make it
