"""`roq-hcm --metrics` on real hosts: what is scraped is what was done, over deaths of Exchanges and of the HCM itself."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pytest

import roq
from roq.testing.freezing import freeze
from roq.tools.local.cluster import LocalCluster
from roq.tools.local.daemon import Daemon
from roq.wire.assignment import ProcessKind, ProcessState, RunningProcess
from tests.harness.ports import free_port, own_address
from tests.integration.running import RunningCluster
from tests.integration.test_metrics import BOUND_SECONDS, Scraped

HOSTS = ("host-1", "host-2")
SYNCS = 'roq_store_sync_seconds_count{host="host-1"}'


class MeasuredCluster(LocalCluster):
    """Each host serves metrics, at a port of this test's."""

    ports: ClassVar[dict[str, int]] = {}

    def _daemon(self, module: str, name: str, flags: dict[str, object]) -> Daemon:
        if module == "hcm":
            port = self.ports.setdefault(name, free_port(own_address()))
            flags = {**flags, "--metrics": f"{own_address()}:{port}"}
        return super()._daemon(module, name, flags)


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningCluster]:
    running = RunningCluster(tmp_path_factory.mktemp("hosts"), kind=MeasuredCluster, hosts=2, session_seconds=4.0)
    yield running
    assert running.stop() == []


def scraped_at(host: str, kind: type[MeasuredCluster] = MeasuredCluster) -> Scraped:
    return Scraped(own_address(), kind.ports[host])


class SecuredMeasured(MeasuredCluster):
    """With cards."""

    ports: ClassVar[dict[str, int]] = {}


async def exchange_of(cluster: roq.Cluster, queue: str) -> tuple[str, RunningProcess]:
    """Its host, and the process, once it runs."""
    async with asyncio.timeout(BOUND_SECONDS):
        while True:
            for host in (await cluster.view()).hosts:
                for process in host.report.processes if host.report is not None else ():
                    running = process.state is ProcessState.RUNNING
                    if process.kind is ProcessKind.EXCHANGE and process.queue == queue and running:
                        return host.host, process
            await asyncio.sleep(0.05)


async def grown(scraped: Scraped, sample: str, least: float) -> float:
    """Its value once it is so large."""
    async with asyncio.timeout(BOUND_SECONDS):
        while (value := await scraped.value(sample)) is None or value < least:
            await asyncio.sleep(0.1)
    return value


def killed_and_started(cluster: RunningCluster, host: str) -> None:
    """The HCM; what runs there goes on."""
    cluster.call(cluster.local.kill_hcm(host))
    cluster.call(cluster.local.start_hcm(host))


@pytest.mark.quick
async def test_each_host_tells_what_it_runs_and_an_exchange_s_death_shows(hosts: RunningCluster) -> None:
    queue = f"recorded-{uuid.uuid4().hex[:8]}"
    async with roq.connect(hosts.zookeeper) as cluster:
        await cluster.create_queue(queue, overflow="block", record=roq.Record(days=1))
        host, exchange = await exchange_of(cluster, queue)
        scraped = scraped_at(host)
        for name in HOSTS:
            one = scraped_at(name)
            assert await one.value(f'roq_zookeeper_session{{host="{name}",state="connected"}}') == 1
            assert await one.value(f'roq_gcm_leads{{host="{name}"}}') == 1
            assert await grown(one, f'roq_processes{{host="{name}",kind="store",state="running"}}', 1) == 1
            assert await grown(one, f'roq_store_free_bytes{{host="{name}"}}', 1) > 1
        syncs = await grown(scraped_at("host-1"), SYNCS, 1)
        of_queue = f'{{host="{host}",kind="exchange",queue="{queue}"}}'
        received = f'roq_exchange_received_frames_total{{host="{host}",queue="{queue}"}}'
        async with cluster.publisher(queue, confirm="stored") as publisher:
            for _ in range(20):
                await publisher.publish("t", b"x" * 1000, confirm="stored")
            frames = await grown(scraped, received, 20)
            assert await grown(scraped_at("host-1"), SYNCS, syncs + 10) < syncs + 1000
            assert await grown(scraped, f'roq_tape_bytes_total{{host="{host}",queue="{queue}"}}', 20_000) < 100_000
            assert await grown(scraped_at("host-1"), 'roq_store_entries_total{host="host-1"}', 10) < 1000
            assert await grown(scraped_at("host-1"), 'roq_store_written_bytes_total{host="host-1"}', 20_000) < 1_000_000
            assert await scraped.value(f"roq_process_restarts_total{of_queue}") == 0
            os.kill(exchange.pid, signal.SIGKILL)
            assert await grown(scraped, f"roq_process_restarts_total{of_queue}", 1) == 1
            await publisher.publish("t", b"after", confirm="stored")
            assert await grown(scraped, received, frames + 1) < frames + 100, "the life before still counts"
        await cluster.remove_queue(queue)
        async with asyncio.timeout(BOUND_SECONDS):
            while await scraped.value(received) is not None:
                await asyncio.sleep(0.1)


async def test_an_exchange_that_hangs_holds_nobody_up(hosts: RunningCluster) -> None:
    queue = f"hangs-{uuid.uuid4().hex[:8]}"
    async with roq.connect(hosts.zookeeper) as cluster:
        await cluster.create_queue(queue)
        host, exchange = await exchange_of(cluster, queue)
        scraped = scraped_at(host)
        freeze(exchange.pid)  # its HCM kills it after three beats
        began = time.monotonic()
        assert await grown(scraped, f'roq_processes_silent{{host="{host}"}}', 1) == 1
        assert time.monotonic() - began < 6
        assert await grown(scraped, f'roq_process_restarts_total{{host="{host}",kind="exchange",queue="{queue}"}}', 1) == 1
        await scraped.until(f'roq_processes_silent{{host="{host}"}}', 0)
        await cluster.remove_queue(queue)


async def test_an_hcm_that_is_back_serves_again_and_counts_from_now_on(hosts: RunningCluster) -> None:
    queue = f"adopted-{uuid.uuid4().hex[:8]}"
    async with roq.connect(hosts.zookeeper) as cluster:
        await cluster.create_queue(queue, overflow="block")
        host, _ = await exchange_of(cluster, queue)
        received = f'roq_exchange_received_frames_total{{host="{host}",queue="{queue}"}}'
        async with cluster.publisher(queue) as publisher:
            for _ in range(50):
                await publisher.publish("t", b"x")
                await publisher.flush()
            await grown(scraped_at(host), received, 50)
            await asyncio.to_thread(killed_and_started, hosts, host)
            assert await grown(scraped_at(host), received, 0) == 0
            await publisher.publish("t", b"x")
            assert 1 <= await grown(scraped_at(host), received, 1) < 50
        await cluster.remove_queue(queue)


async def test_garbage_and_silence_do_not_disturb_it(hosts: RunningCluster) -> None:
    def disturb() -> None:
        for _ in range(20):
            with socket.create_connection(
                (own_address(), MeasuredCluster.ports["host-1"]), timeout=BOUND_SECONDS
            ) as connection:
                connection.sendall(os.urandom(1000) + b"\r\n\r\n")

    silent = [
        socket.create_connection((own_address(), MeasuredCluster.ports["host-1"]), timeout=BOUND_SECONDS) for _ in range(5)
    ]
    try:
        await asyncio.to_thread(disturb)
        assert await scraped_at("host-1").value('roq_zookeeper_session{host="host-1",state="connected"}') == 1
    finally:
        for connection in silent:
            connection.close()
    for path, status in (("/health", 200), ("/", 404), ("/v1/queues/x/status", 404)):
        assert (await scraped_at("host-1").get(path))[0] == status


async def test_with_cards_its_own_processes_tell_it_all_the_same(tmp_path: Path) -> None:
    running = await asyncio.to_thread(RunningCluster, tmp_path / "c", kind=SecuredMeasured, secured=True, zookeeper=None)
    try:
        scraped = scraped_at("host-1", SecuredMeasured)
        async with roq.connect(running.zookeeper) as cluster:
            await cluster.create_queue("q", record=roq.Record(days=1))
            async with cluster.publisher("q", confirm="stored") as publisher:
                await publisher.publish("t", b"x", confirm="stored")
            await grown(scraped, SYNCS, 1)
            await grown(scraped, 'roq_tape_bytes_total{host="host-1",queue="q"}', 1)
        assert await scraped.value('roq_processes_silent{host="host-1"}') == 0
    finally:
        assert await asyncio.to_thread(running.stop) == []


async def refused(tmp_path: Path, place: str) -> tuple[int, str]:
    """Exit code and what a starting HCM says."""
    flags = ("--zookeeper", "127.0.0.1:1", "--security", "none", "--state-dir", str(tmp_path), "--metrics", place)
    command = (sys.executable, "-m", "hcm", "--host", "h", *flags)
    process = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE)
    async with asyncio.timeout(BOUND_SECONDS):
        _, said = await process.communicate()
    assert process.returncode is not None
    return process.returncode, said.decode()


async def test_a_port_that_is_taken_and_one_that_is_none_are_refused_at_the_start(tmp_path: Path) -> None:
    address = own_address()
    with socket.create_server((address, 0)) as other:
        port = other.getsockname()[1]
        code, said = await refused(tmp_path, f"{address}:{port}")
        assert (code, f"{address}:{port} can't be listened on, choose another place" in said) == (1, True), said
    code, said = await refused(tmp_path, "9464")
    assert (code, "metrics is [HOST]:PORT, got '9464'" in said) == (2, True), said
