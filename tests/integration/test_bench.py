"""The load generator against a real cluster: every way to load it, everything accounted for, one JSON line as promised."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from roq.client.cluster import connect
from roq.errors import CallError
from roq.tools.bench.cpu import CpuMeter
from roq.tools.bench.load import Load
from roq.tools.bench.pubsub import run_on
from roq.tools.local.cluster import JAVA, LocalCluster
from roq.wire.assignment import Overflow

RUN_SECONDS = 50.0
PROCESS_KINDS = {"publisher", "subscriber", "exchange", "monitor", "scaling", "hcm", "gcm", "zookeeper"}


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[LocalCluster]:
    async with LocalCluster(tmp_path, zookeeper=JAVA) as found:
        yield found


@pytest.mark.timeout(120)
async def test_every_kind_of_load_is_accounted_for(cluster: LocalCluster) -> None:
    loads = [
        Load(messages=20_000),
        Load(messages=20_000, batch=100),
        Load(messages=3_000, publishers=2, subscribers=2, topics=3),
        Load(messages=3_000, publishers=2, subscribers=2, pairs=True),
        Load(messages=500, rate=1_000, topics=2),
        Load(messages=500, rate=1_000, batch=10),
        Load(messages=300, rate=1_000, size=10),
        Load(duration=0.5, rate=500),
        Load(messages=5, size=2_000_000),
    ]
    for load in loads:
        async with asyncio.timeout(RUN_SECONDS):
            result = await run_on(cluster.zookeeper, load, Overflow.BLOCK, zookeeper_pid=cluster.zookeeper_pid)
        assert (result.lost, result.duplicated, result.reordered, result.foreign) == (0, 0, 0, 0), load
        assert result.delivered == load.expected([result.published // load.publishers] * load.publishers)
        assert result.published == load.messages * load.publishers or load.duration
        assert result.throughput > 0
        assert set(result.cpu_seconds) == PROCESS_KINDS
        assert result.latency_us["p50"] is not None
        assert result.latency_us["p50"] <= (result.latency_us["p99"] or 0) <= (result.latency_us["p999"] or 0)
    async with connect(cluster.zookeeper) as found:
        assert await found.queues() == []


@pytest.mark.timeout(120)
async def test_drop_mode_adds_up_too(cluster: LocalCluster) -> None:
    load = Load(messages=30_000, subscribers=2)
    async with asyncio.timeout(RUN_SECONDS):
        result = await run_on(cluster.zookeeper, load, Overflow.DROP, idle_seconds=2.0)
    assert result.delivered + result.lost == 2 * result.published
    assert (result.duplicated, result.reordered) == (0, 0)


@pytest.mark.quick
@pytest.mark.timeout(120)
async def test_the_command_prints_one_json_line_last() -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("ROQ_")}
    words = ["bench", "pubsub", "--publishers", "1", "--subscribers", "2", "--size", "100", "--messages", "5000", "--json"]
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "roq.cli", *words, stdin=DEVNULL, stdout=PIPE, stderr=PIPE, env=environment
    )
    async with asyncio.timeout(RUN_SECONDS):
        output, errors = await process.communicate()
    assert process.returncode == 0, errors.decode()
    found = json.loads(output.decode().splitlines()[-1])
    assert found["published"] == 5000
    assert found["delivered"] == 10_000
    assert (found["lost"], found["duplicated"], found["reordered"]) == (0, 0, 0)
    assert found["throughput"] > 0
    assert set(found["latency_us"]) == {"p50", "p99", "p999"}
    assert set(found["cpu_seconds"]) == PROCESS_KINDS


@pytest.mark.timeout(120)
async def test_cpu_is_found_for_every_kind_of_process(cluster: LocalCluster) -> None:
    assert cluster.zookeeper_pid
    meter = CpuMeter({"zookeeper": {cluster.zookeeper_pid}, "gone": {2**22 - 1}})
    assert meter.seconds()["gone"] == 0.0
    with pytest.raises(CallError):
        await run_on(cluster.zookeeper, Load(), Overflow.BLOCK)
