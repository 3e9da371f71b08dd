"""roq.testing without containers: LoopbackCluster, and the fixture as an application's tests use it."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from roq.errors import HostNotFound, ProcessFailed, RoqError
from roq.testing import LoopbackCluster, NotPossible, TestedCluster

ROOT = Path(__file__).parents[2]
CONFTEST = 'pytest_plugins = ["roq.testing.plugin"]\n'
TEST = """
import asyncio

async def test_mine(roq_cluster):
    async with roq_cluster.connect() as cluster:
        await cluster.create_queue("mine")
        async with cluster.subscriber("mine") as sub, cluster.publisher("mine") as pub:
            await roq_cluster.kill_process("gcm-1", "roq-gcm")
            await pub.publish("t", b"1")
            async with asyncio.timeout(10):
                assert (await anext(aiter(sub))).payload == b"1"
        assert (await roq_cluster.wait_queue_ready("mine")).ready
"""


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[TestedCluster]:
    async with LoopbackCluster(gcms=2, hcms=2, session_seconds=6.0, logs=tmp_path) as running:
        yield running


async def test_the_same_operations_without_containers(cluster: TestedCluster) -> None:
    async with cluster.connect() as client:
        await client.create_queue("q", host="host-1")
    await cluster.wait_queue_ready("q")
    before = {process.name: process.pid for process in await cluster.processes("host-1")}
    assert {"roq-hcm", "roq-fork-server", "monitor/q", "scaling/q"} < set(before)
    killed = await cluster.kill_process("host-1", "monitor/q")
    assert (await cluster.wait_process("host-1", "monitor/q", not_pid=killed)).restarts == 1
    await cluster.kill_process("host-1", "roq-hcm")
    assert (await cluster.wait_process("host-1", "scaling/q")).pid == before["scaling/q"]
    leader = await cluster.leader()
    await cluster.kill(leader)
    assert await cluster.wait_leader(set(cluster.gcms) - {leader}) != leader
    await cluster.start(leader)
    await cluster.kill("host-2")
    await cluster.wait_hosts(1)
    await cluster.start("host-2")
    await cluster.wait_hosts(2)


@pytest.mark.quick
async def test_pause_and_what_loopback_can_not_do(cluster: TestedCluster) -> None:
    await cluster.pause("host-2")
    with pytest.raises(RoqError):
        await cluster.reported("host-2")
    await cluster.unpause("host-2")
    assert await cluster.reported("host-2") == ()
    for refused in (cluster.partition("gcm-1", "host-1"), cluster.delay("host-1", 5), cluster.clock("host-1", 5)):
        with pytest.raises(NotPossible):
            await refused
    with pytest.raises(NotPossible):
        await cluster.kill("zookeeper-1")
    with pytest.raises(HostNotFound):
        await cluster.kill("host-3")
    with pytest.raises(ProcessFailed, match="no process x"):
        await cluster.kill_process("host-1", "x")
    with pytest.raises(NotPossible):
        LoopbackCluster(zookeepers=3)


async def test_the_fixture_in_an_applications_own_tests(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_mine.py").write_text(TEST)
    environment = {key: value for key, value in os.environ.items() if not key.startswith("ROQ_")} | {"PYTHONPATH": str(ROOT)}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-c",
        os.devnull,
        "--rootdir",
        str(tmp_path),
        "-o",
        "asyncio_mode=auto",
        str(tmp_path),
    ]
    run = await asyncio.create_subprocess_exec(
        *command, env=environment, cwd=tmp_path, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    async with asyncio.timeout(50):
        output, _ = await run.communicate()
    assert run.returncode == 0, output.decode()
    assert b"1 passed" in output
