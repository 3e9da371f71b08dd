"""`roq metrics` beside a real cluster and folders: what is scraped is what was done, and what does not answer is told."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

import roq
from roq.cli.metrics_server import Sources, serving_sources
from roq.errors import PortTaken
from tests.harness.ports import free_port, own_address
from tests.integration.running import RunningCluster
from tests.integration.test_cli import environment

BOUND_SECONDS = 20


def fetched(address: str, port: int, path: str, method: str = "GET") -> tuple[int, str]:
    """Status and body."""
    request = urllib.request.Request(f"http://{address}:{port}{path}", method=method)
    try:
        with urllib.request.urlopen(request, timeout=BOUND_SECONDS) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


class Scraped:
    """What is served at a port."""

    def __init__(self, address: str, port: int) -> None:
        self._address, self._port = address, port

    async def get(self, path: str, method: str = "GET") -> tuple[int, str]:
        return await asyncio.to_thread(fetched, self._address, self._port, path, method)

    async def value(self, sample: str) -> float | None:
        """Of a sample with its labels as they are written; None: there is none."""
        _, text = await self.get("/metrics")
        return next((float(line.split()[-1]) for line in text.splitlines() if line.startswith(sample + " ")), None)

    async def until(self, sample: str, value: float) -> None:
        async with asyncio.timeout(BOUND_SECONDS):
            while await self.value(sample) != value:
                await asyncio.sleep(0.1)


@contextlib.asynccontextmanager
async def scraped(cluster: str | None, *queues: str) -> AsyncIterator[Scraped]:
    address = own_address()
    async with serving_sources(Sources(cluster, queues), address, 0) as port:
        yield Scraped(address, port)


@pytest.mark.quick
async def test_a_cluster_with_its_work_queues(client: roq.Cluster, cluster: RunningCluster, queue: str) -> None:
    work = f"jobs-{queue}"
    async with (
        scraped(cluster.zookeeper) as served,
        client.subscriber(queue) as subscriber,
        client.publisher(queue) as publisher,
        roq.open_queue(f"roq://{cluster.zookeeper}/{work}") as tasks,
    ):
        for number in range(100):
            await publisher.publish("t", b"%d" % number)
        async with asyncio.timeout(BOUND_SECONDS):
            for _ in range(100):
                await anext(subscriber)
        await tasks.put_many([b"1", b"2", b"3"])
        (task,) = await tasks.lease()
        await served.until(f'roq_messages_published_total{{queue="{queue}"}}', 100)
        await served.until(f'roq_messages_delivered_total{{queue="{queue}"}}', 100)
        await served.until(f'roq_tasks{{queue="{work}",state="leased"}}', 1)
        assert await served.value(f'roq_queue_subscribers{{queue="{queue}"}}') == 1
        assert await served.value(f'roq_queue_ready{{queue="{queue}"}}') == 1
        assert [await served.value(f'roq_host_up{{host="host-{number}"}}') for number in (1, 2)] == [1, 1]
        status, text = await served.get(f"/v1/work-queues/{work}/status")
        assert (status, json.loads(text)["ready"]) == (200, 2)
        await task.ack()
        await served.until(f'roq_tasks_completed_total{{queue="{work}"}}', 1)
        status, text = await served.get(f"/v1/queues/{queue}/status")
        assert (status, json.loads(text)["publishers"]) == (200, 1)
    await client.remove_work_queue(work)


async def test_a_group_and_how_far_it_is_behind(client: roq.Cluster, cluster: RunningCluster) -> None:
    await client.create_queue("grouped", record=roq.Record(days=1))
    async with client.publisher("grouped", confirm="stored") as publisher:
        for number in range(5):
            await publisher.publish(f"t.{number}", b"x")
        await publisher.flush()
    await client.create_group("grouped", "billing")
    async with scraped(cluster.zookeeper) as served:
        await served.until('roq_tasks{queue="grouped@billing",state="ready"}', 5)
        await served.until('roq_group_behind_seconds{queue="grouped@billing"}', 0)
        status, text = await served.get("/v1/work-queues/grouped%40billing/status")
        assert (status, json.loads(text)["ready"], json.loads(text)["behind_seconds"]) == (200, 5, 0)
    await client.remove_group("grouped", "billing")
    await client.remove_queue("grouped")


async def test_a_work_queue_that_is_removed_is_served_no_more(client: roq.Cluster, cluster: RunningCluster) -> None:
    await client.create_work_queue("short-lived")
    async with scraped(cluster.zookeeper) as served:
        await served.until('roq_up{source="short-lived"}', 1)
        await client.remove_work_queue("short-lived")
        async with asyncio.timeout(BOUND_SECONDS):
            while await served.value('roq_up{source="short-lived"}') is not None:
                await asyncio.sleep(0.1)


async def test_folders_and_logs(tmp_path: Path) -> None:
    addresses = [f"file://{tmp_path}/folder", f"log://{tmp_path}/log"]
    for address in addresses:
        async with roq.open_queue(address) as tasks:
            await tasks.put_many([b"1", b"2"])
    missing = f"file://{tmp_path}/missing"
    async with scraped(None, *addresses, missing) as served:
        for address in addresses:
            assert await served.value(f'roq_tasks{{queue="{address}",state="ready"}}') == 2
            assert await served.value(f'roq_up{{source="{address}"}}') == 1
        assert await served.value(f'roq_up{{source="{missing}"}}') == 0
        assert not (tmp_path / "missing").exists(), "asking makes none"
        async with roq.open_queue(missing) as tasks:
            await tasks.put(b"1")
        await served.until(f'roq_tasks{{queue="{missing}",state="ready"}}', 1)
        assert (await served.get("/v1/work-queues/x/status"))[0] == 404
        assert await served.get("/health", "HEAD") == (200, "")
        assert (await served.get("/metrics", "POST"))[0] == 405
        assert (await served.get("/health"))[0] == 200


async def test_a_cluster_that_is_away_is_told() -> None:
    address = own_address()
    away = f"{address}:{free_port(address)}"
    async with scraped(away) as served:
        assert await served.value(f'roq_up{{source="{away}"}}') == 0
        assert (await served.get("/health"))[0] == 200


async def test_a_port_that_is_taken() -> None:
    address = own_address()
    async with serving_sources(Sources(None, []), address, 0) as port:
        with pytest.raises(PortTaken, match=str(port)):
            async with serving_sources(Sources(None, []), address, port):
                pass


@pytest.mark.parametrize("how", ["the cluster in use", "as an address", "as roq:"])
def test_the_command_says_where_and_ends_well(cluster: RunningCluster, tmp_path: Path, how: str) -> None:
    address, place = own_address(), cluster.zookeeper
    with roq.blocking.open_queue(f"file://{tmp_path}/folder") as folder:
        folder.put(b"1")
    given = {"the cluster in use": [], "as an address": [place], "as roq:": [f"roq://{place.partition('/')[0]}"]}[how]
    if how == "as roq:" and "/" in place:
        given = [place]  # a chroot has no place in there
    with_folder = [*given, f"{tmp_path}/folder"] if given else []
    command = [sys.executable, "-m", "roq.cli", "metrics", "--listen", f"{address}:0", *with_folder]
    in_use = environment(place) if not given else environment()
    with subprocess.Popen(command, stderr=subprocess.PIPE, env=in_use) as process:
        try:
            assert process.stderr is not None
            said = process.stderr.readline().decode().split()
            port = int(said[-1].removesuffix("/metrics").rpartition(":")[2])
            status, text = fetched(address, port, "/metrics")
            assert (status, "roq_gcm_epoch" in text) == (200, True)
            assert (f'{{queue="file://{tmp_path}/folder",state="ready"}}' in text) == bool(given)
            process.send_signal(signal.SIGTERM)
            assert process.wait(BOUND_SECONDS) == 0
        finally:
            process.kill()


async def test_a_stopped_queue_has_no_totals(client: roq.Cluster, cluster: RunningCluster) -> None:
    await client.create_queue("stopped-soon")
    async with scraped(cluster.zookeeper) as served:
        await served.until('roq_messages_published_total{queue="stopped-soon"}', 0)
        await client.stop_queue("stopped-soon")
        await served.until('roq_queue_running{queue="stopped-soon"}', 0)
        assert await served.value('roq_messages_published_total{queue="stopped-soon"}') is None
    await client.remove_queue("stopped-soon")


async def test_watching_creates_no_work_queue(client: roq.Cluster, cluster: RunningCluster) -> None:
    async with scraped(cluster.zookeeper) as served:
        assert (await served.get("/v1/work-queues/never-made/status"))[0] == 404
    assert "never-made" not in {info.record.name for info in await client.work_queues()}
