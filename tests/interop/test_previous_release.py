"""Programs of version 0.1 in a cluster of this version, and programs of this version in a cluster of 0.1."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

import roq
from tests.interop.environments import Environment
from tests.interop.previous import BOUND_SECONDS, MEMBER, VERSIONS, Process, ended, installed

pytestmark = pytest.mark.timeout(300)
MESSAGES = 50
__all__ = ["installed"]


class Cluster:
    """One of either version; `start` starts its members, which may be of the other."""

    def __init__(self, installed: dict[str, Environment], folder: Path, stack: contextlib.AsyncExitStack) -> None:
        self._installed, self._folder, self._stack = installed, folder, stack
        self.address = ""

    async def run(self, version: str, *words: object, **variables: str) -> Process:
        environment = self._installed[version]
        program, *arguments = map(str, words)
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            environment.folder / "bin" / program,
            *arguments,
            stdin=pipe,
            stdout=pipe,
            env=environment.activated(XDG_CONFIG_HOME=str(self._folder), **variables),
            cwd=self._folder,
        )
        self._stack.push_async_callback(ended, process)
        return Process(process)

    async def start(self, version: str) -> None:
        """A host and a GCM."""
        common = ("up", "--dir", self._folder / "cluster", "--json")
        if version == VERSIONS[0]:  # it needs a ZooKeeper; this version's coordinator is one
            where = ("--data-dir", self._folder / "coordinator", "--port", "0")
            coordinator = await self.run(VERSIONS[1], "python", "-m", "roq.coordinator", *where)
            port = json.loads(await coordinator.line())["port"]
            up = await self.run(version, "roq", *common, "--zookeeper", f"127.0.0.1:{port}")
        else:
            up = await self.run(version, "roq", *common, "--security", "none")
        self.address = json.loads(await up.line())["cluster"]

    async def member(self, version: str, verb: str, *words: str) -> Process:
        """See member.py."""
        return await self.run(version, "python", MEMBER, verb, self.address, *words)

    async def subscriber(self, version: str, queue: str) -> Process:
        found = await self.member(version, "subscribe", queue)
        assert await found.line() == "ready"
        return found

    async def publisher(self, version: str, queue: str) -> Process:
        found = await self.member(version, "publish", queue)
        assert await found.line() == "ready"
        return found


@pytest.fixture(params=VERSIONS)
async def cluster(
    request: pytest.FixtureRequest, installed: dict[str, Environment], tmp_path: Path
) -> AsyncIterator[tuple[str, Cluster]]:
    """Its version, and the cluster."""
    async with contextlib.AsyncExitStack() as stack:
        made = Cluster(installed, tmp_path, stack)
        await made.start(request.param)
        yield request.param, made


async def test_all_read_all_in_order_also_after_an_exchange_died(cluster: tuple[str, Cluster]) -> None:
    _, there = cluster
    async with roq.connect(there.address) as client:
        await client.create_queue("q", overflow="block")
        subscribers = [await there.subscriber(version, "q") for version in VERSIONS]
        publishers = [await there.publisher(version, "q") for version in VERSIONS]
        for number, publisher in enumerate(publishers):
            await publisher.done(*(f"{number}-{message}" for message in range(MESSAGES)), "flush")
        (host,) = await client.hosts()
        assert host.report is not None
        view = await client.view()  # a GCM of 0.1 tells all at once, though it is asked for a part
        assert [one.host for one in view.hosts] == [host.host]
        assert [one.record.name for one in view.queues] == [one.record.name for one in await client.queues()] == ["q"]
        assert await client.work_queues() == [*view.work_queues] == []
        exchange = next(one for one in host.report.processes if one.exchange)
        os.kill(exchange.pid, signal.SIGKILL)
        for number, publisher in enumerate(publishers):
            await publisher.done(*(f"{number}-{message}" for message in range(MESSAGES, 2 * MESSAGES)), "flush")
        assert [await publisher.end() for publisher in publishers] == [["closed"], ["closed"]]
    for subscriber in subscribers:
        lines = [await subscriber.line() for _ in range(len(publishers) * 2 * MESSAGES)]
        for number in range(len(publishers)):
            assert [line for line in lines if line.startswith(f"{number}-")] == [
                f"{number}-{message} {{}}" for message in range(2 * MESSAGES)
            ]


async def test_headers_are_for_those_who_can_read_them(cluster: tuple[str, Cluster]) -> None:
    version, there = cluster
    async with roq.connect(there.address) as client:
        await client.create_queue("q")
    old, new = [await there.subscriber(one, "q") for one in VERSIONS]
    publisher = await there.publisher(VERSIONS[1], "q")
    await publisher.done("1")
    publisher.tell("headers 2")
    assert await publisher.line() == "IncompatibleVersion"
    await ended(old.process)
    assert await new.line() == "1 {}"
    if version == VERSIONS[0]:
        return
    async with asyncio.timeout(BOUND_SECONDS):
        while True:  # it is told once a second, once the Monitor knows that the other one is gone
            publisher.tell("headers 3")
            if await publisher.line() == "headers 3":
                break
    assert await new.line() == '3 {"n": "3"}'
    refused = await there.member(VERSIONS[0], "subscribe", "q")
    assert "publishers of this queue send headers" in await refused.line()


async def test_a_work_queue(cluster: tuple[str, Cluster]) -> None:
    _, there = cluster
    for version in VERSIONS:
        worker = await there.member(version, "work", "tasks", "1", "2", "3")
        assert await worker.line() == "1 2 3"
        assert await worker.end() == []
