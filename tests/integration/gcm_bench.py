"""What the tests of the GCM stand on: GCMs in this process, hosts played by a test double, and a client that looks again."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any, TypeVar

import msgspec

from gcm.process import GcmReady, serve
from roq.config import GcmConfig
from roq.coordination import paths
from roq.coordination.link import Node
from roq.coordination.locate import read_leader
from roq.coordination.registration import Registration, ServiceInstance
from roq.coordination.session import Session
from roq.errors import (
    HostFull,
    NoHosts,
    NotReady,
    TemporaryError,
)
from roq.runtime.rpc import RpcClient
from roq.wire import gcm as wire
from roq.wire.assignment import (
    Assignment,
    HostReport,
    ProcessKind,
    ProcessState,
    QueueSettings,
    RunningProcess,
    from_json,
    to_json,
)
from roq.wire.hcm import HostPayload

T = TypeVar("T", bound=msgspec.Struct)
SESSION_SECONDS = 2.0
WATCHER_SECONDS = 6.0  # session of hosts played here and of looks at ZooKeeper: they close it when they go
PATIENCE_SECONDS = 10.0


async def eventually(check: Callable[[], Awaitable[bool]], seconds: float = PATIENCE_SECONDS) -> None:
    async with asyncio.timeout(seconds):
        while not await check():
            await asyncio.sleep(0.02)


class FakeHost:
    """The other side: registers as an HCM does, and reports each assignment as running (or as `states` says by kind)."""

    def __init__(self, session: Session, name: str, exchanges_max: int) -> None:
        self.name = name
        self.states: dict[ProcessKind, ProcessState] = {}
        self.ports: dict[ProcessKind, dict[str, int]] = {}  # beside those that every process has
        self.assignment: Assignment | None = None
        self.obeys = asyncio.Event()
        self.obeys.set()
        self.port_base = 7000
        self._session = session
        self._news = asyncio.Event()
        instance = ServiceInstance("hcm", name, "127.0.0.1", 6999, payload=HostPayload("one", exchanges_max))
        self._registration = Registration(session, paths.host(name), instance)
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        await self._session.wait_root()
        await self._session.ensure_path(paths.running(self.name))
        await self._registration.start()
        self._session.watch_data(paths.assignment(self.name), self._assigned)
        self._tasks.append(asyncio.get_running_loop().create_task(self._run()))

    def _assigned(self, node: Node | None) -> None:
        if node is not None:
            self.assignment = from_json(node.data, Assignment)
            self.report()

    def report(self) -> None:
        self._news.set()

    async def _run(self) -> None:
        while True:
            await self._news.wait()
            await self.obeys.wait()
            self._news.clear()
            assignment = self.assignment
            assert assignment is not None
            processes = tuple(
                RunningProcess(
                    spec.name,
                    spec.kind,
                    spec.queue,
                    spec.exchange,
                    self.states.get(spec.kind, ProcessState.RUNNING),
                    4711,
                    {
                        "clients": self.port_base + 2 * number,
                        "kpis": self.port_base + 2 * number + 1,
                        **self.ports.get(spec.kind, {}),
                    },
                    error="no reason" if self.states.get(spec.kind) is ProcessState.FAILED else "",
                )
                for number, spec in enumerate(assignment.processes)
            )
            report = HostReport(self.name, "127.0.0.1", "one", assignment.epoch, assignment.revision, processes)
            await self._session.set(paths.running(self.name), to_json(report), -1)

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await self._registration.stop()
        await self._session.close()


class Bench:
    """One ZooKeeper chroot with GCMs in this process, fake hosts, and clients."""

    def __init__(self, zookeeper: str, stack: AsyncExitStack) -> None:
        self.zookeeper, self._stack = zookeeper, stack
        self._clients: dict[int, RpcClient] = {}

    async def gcm(self, **settings: Any) -> tuple[GcmReady, asyncio.Event]:
        config = GcmConfig(**{"zookeeper": self.zookeeper, "session_seconds": SESSION_SECONDS, **settings})
        stop, ready = asyncio.Event(), asyncio.get_running_loop().create_future()
        task = asyncio.get_running_loop().create_task(serve(config, stop, ready.set_result))

        async def end() -> None:
            stop.set()
            await task

        self._stack.push_async_callback(end)
        await asyncio.wait([ready, task], return_when=asyncio.FIRST_COMPLETED)
        return ready.result(), stop

    async def host(
        self, name: str, exchanges_max: int = 100, ports: dict[ProcessKind, dict[str, int]] | None = None
    ) -> FakeHost:
        host = FakeHost(await self.session(), name, exchanges_max)
        host.ports |= ports or {}
        await host.start()
        self._stack.push_async_callback(host.stop)
        return host

    async def session(self) -> Session:
        session = await Session.connect(self.zookeeper, WATCHER_SECONDS)
        self._stack.push_async_callback(session.close)
        return session

    async def ask_at(self, port: int, request: wire.Request, expect: type[T], seconds: float = PATIENCE_SECONDS) -> T:
        if port not in self._clients:
            self._clients[port] = client = RpcClient(f"tcp://127.0.0.1:{port}", wire.Reply)
            self._stack.callback(client.close)
        return await self._clients[port].request(request, expect, seconds)

    async def ask(self, request: wire.Request, expect: type[T], seconds: float = PATIENCE_SECONDS) -> T:
        """As a client does: find the leader, ask, look again on NotLeader or silence."""
        async with asyncio.timeout(seconds):
            while True:
                try:
                    leader = await read_leader(self.zookeeper)
                    return await self.ask_at(leader.port, request, expect, 2.0)
                except TemporaryError as error:
                    if isinstance(error, HostFull | NoHosts | NotReady):
                        raise
                    await asyncio.sleep(0.05)

    async def next_term(self) -> None:
        """The leader loses the election, and somebody leads anew: what the one before has read is not believed any more."""
        session = await self.session()
        before = await session.get(paths.LEADER)
        assert before is not None
        latch, *_ = sorted(await session.children(paths.LATCH), key=lambda name: name.rpartition("-")[2])
        await session.delete(f"{paths.LATCH}/{latch}")

        async def begun() -> bool:
            node = await session.get(paths.LEADER)
            return node is not None and node.czxid != before.czxid

        await eventually(begun)

    async def hosts_alive(self, count: int) -> None:
        async def seen() -> bool:
            return sum(host.alive for host in (await self.ask(wire.ListHosts(), wire.Hosts)).hosts) == count

        await eventually(seen)

    async def create(self, name: str, transaction: str = "", **settings: Any) -> wire.QueueInfo:
        request = wire.CreateQueue(name, transaction or f"t-{name}", QueueSettings(**settings))
        return await self.ask(request, wire.QueueInfo)
