"""A leader killed at every step of queue creation, Exchange creation and host recovery: its successor finishes, once.

Two GCMs as processes, the leading one armed with a crash point; hosts are played by a test double; the client is the SDK's.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from gcm.crash import POINTS, VARIABLE
from gcm.transactions import exchange_id
from roq.coordination import paths
from roq.coordination.locate import GcmClient
from roq.coordination.session import Session
from roq.wire import gcm as wire
from roq.wire.assignment import Assignment, MonitorRole, ProcessKind, QueueSettings, from_json
from tests.integration.gcm_bench import PATIENCE_SECONDS, SESSION_SECONDS, Bench, FakeHost, eventually

ANSWER_SECONDS = 15.0
HOSTS = ("h1", "h2", "h3", "h4")


def points(of: str) -> list[str]:
    return [point for point in POINTS if point.startswith(f"{of}.")]


class Scene:
    """Two GCMs, the armed one leading, and four hosts."""

    def __init__(self, zookeeper: str, stack: AsyncExitStack) -> None:
        self.zookeeper = zookeeper
        self.bench = Bench(zookeeper, stack)
        self.client = GcmClient(zookeeper)
        self.hosts: dict[str, FakeHost] = {}
        self._stack = stack
        stack.callback(self.client.close)

    async def start(self, point: str) -> None:
        self.armed = await self._gcm(point)
        self.session = await self.bench.session()

        async def leads() -> bool:
            return await self.session.get(paths.LEADER) is not None

        await eventually(leads)
        await self._gcm("")
        for name in HOSTS:
            self.hosts[name] = await self.bench.host(name)
        await self.bench.hosts_alive(len(HOSTS))

    async def _gcm(self, point: str) -> Process:
        command = [
            sys.executable,
            "-m",
            "gcm",
            "--security",
            "none",
            "--zookeeper",
            self.zookeeper,
            "--session-seconds",
            str(SESSION_SECONDS),
        ]
        environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), VARIABLE: point}
        process = await asyncio.create_subprocess_exec(*command, stdout=PIPE, env=environment)

        async def end() -> None:
            if process.returncode is None:
                process.terminate()
            async with asyncio.timeout(PATIENCE_SECONDS):
                await process.wait()

        self._stack.push_async_callback(end)
        assert process.stdout is not None
        async with asyncio.timeout(PATIENCE_SECONDS):
            line = await process.stdout.readline()
            assert line, f"the GCM ended with {await process.wait()} before it was ready; why, it says on standard error"
            assert json.loads(line)["ready"]
        return process

    async def create(self, queue: str, host: str = "") -> wire.QueueInfo:
        request = wire.CreateQueue(queue, f"t-{queue}", QueueSettings(replication=3), host)
        return await self.client.request(request, wire.QueueInfo, ANSWER_SECONDS)

    async def leader_died(self) -> None:
        async with asyncio.timeout(PATIENCE_SECONDS):
            assert await self.armed.wait() == -signal.SIGKILL

    async def ends_whole(self, *queues: str) -> None:
        """Exactly these queues, each process on one host, once, and nothing under way any more."""
        problem = "nothing was read"

        async def whole() -> bool:
            nonlocal problem
            problem = await self.problem(queues)
            return not problem

        try:
            await eventually(whole)
        except TimeoutError:
            raise AssertionError(problem) from None
        assert not await self.problem(queues)

    async def problem(self, queues: tuple[str, ...]) -> str:
        for kind in paths.TransactionKind:
            if left := await self.session.children(paths.transactions(kind)):
                return f"under way: {left}"
        infos = (await self.client.request(wire.ListQueues(), wire.Queues, ANSWER_SECONDS)).queues
        if tuple(info.record.name for info in infos) != queues or not all(info.ready for info in infos):
            return f"queues: {infos}"
        wanted: Counter[tuple[str, str, MonitorRole]] = Counter()
        for record in (info.record for info in infos):
            if len({*record.monitor_hosts}) != record.settings.replication or not {*self.hosts} >= {*record.monitor_hosts}:
                return f"Monitors: {record}"
            wanted[(record.monitor_host, f"{ProcessKind.SCALING}/{record.name}", MonitorRole.ACTIVE)] += 1
            for host in record.monitor_hosts:
                role = MonitorRole.ACTIVE if host == record.monitor_host else MonitorRole.BACKUP
                wanted[(host, f"{ProcessKind.MONITOR}/{record.name}", role)] += 1
            for exchange, host in record.exchanges.items():
                wanted[(host, f"{ProcessKind.EXCHANGE}/{record.name}/{exchange}", MonitorRole.ACTIVE)] += 1
        written = [await read_assignment(self.session, name) for name in HOSTS]
        assigned = Counter((of.host, spec.name, spec.role) for of in written for spec in of.processes)
        running = Counter(
            (host.name, spec.name, spec.role)
            for host in self.hosts.values()
            for spec in (host.assignment.processes if host.assignment is not None else ())
        )
        return "" if wanted == assigned == running else f"wanted {wanted}, assigned {assigned}, running {running}"


async def read_assignment(session: Session, host: str) -> Assignment:
    node = await session.get(paths.assignment(host))
    return from_json(node.data, Assignment) if node is not None else Assignment(host, 0, 0)


@pytest.fixture
async def scene(chroot: str) -> AsyncIterator[Scene]:
    async with AsyncExitStack() as stack:
        yield Scene(chroot, stack)


@pytest.mark.parametrize("point", points("create_queue"))
async def test_queue_creation(scene: Scene, point: str) -> None:
    await scene.start(point)
    info = await scene.create("q")
    await scene.leader_died()
    assert info.record.transaction == "t-q"
    assert len(info.record.exchanges) == 1
    again = await scene.create("q")
    assert again.record == info.record
    await scene.ends_whole("q")


@pytest.mark.parametrize("point", points("create_exchange"))
async def test_exchange_creation(scene: Scene, point: str) -> None:
    await scene.start(point)
    await scene.create("q", "h1")
    request = wire.CreateExchange("q", "x")
    made = await scene.client.request(request, wire.ExchangeCreated, ANSWER_SECONDS)
    await scene.leader_died()
    assert made.exchange == exchange_id("q", "x")
    assert await scene.client.request(request, wire.ExchangeCreated, ANSWER_SECONDS) == made
    info = await scene.client.request(wire.DescribeQueue("q"), wire.QueueInfo, ANSWER_SECONDS)
    assert len(info.record.exchanges) == 2
    assert info.record.exchanges[made.exchange] == made.host
    await scene.ends_whole("q")


@pytest.mark.parametrize("point", points("recover_host"))
async def test_host_recovery(scene: Scene, point: str) -> None:
    """Thesis §10.5.4: a host and the leader die together, at every step of the recovery."""
    await scene.start(point)
    before = await scene.create("q1", "h1")
    await scene.create("q2", "h2")
    await scene.client.request(wire.CreateExchange("q2", "x", "h1"), wire.ExchangeCreated, ANSWER_SECONDS)
    await scene.hosts.pop("h1").stop()
    await scene.leader_died()
    await scene.ends_whole("q1", "q2")
    after = await scene.client.request(wire.DescribeQueue("q1"), wire.QueueInfo, ANSWER_SECONDS)
    assert after.record.term == before.record.term + 1
    assert after.monitors[0].host == after.record.monitor_host != "h1"
    assert len(after.monitors) == 3
    q2 = await scene.client.request(wire.DescribeQueue("q2"), wire.QueueInfo, ANSWER_SECONDS)
    assert (q2.record.term, len(q2.record.exchanges)) == (1, 2)
