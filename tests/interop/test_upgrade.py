"""A cluster of version 0.1 becomes one of this version, daemon by daemon, under load, and goes back.

Messages go from members of either version to members of either, and so do tasks; other tasks lie there all the time. No
message is lost, repeated or out of order, and every task is done. Not covered: what only this version has (recorded queues,
groups, cards), which has to be removed before going back.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import secrets
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any

import pytest

import roq
from roq.errors import RoqError
from roq.runtime.rpc import RpcClient
from roq.tools.local import leftovers
from roq.tools.local.loopback import LoopbackSubnet
from roq.wire import hcm as hcm_wire
from tests.interop.environments import Environment
from tests.interop.previous import BOUND_SECONDS, MEMBER, VERSIONS, Process, ended, installed

pytestmark = pytest.mark.timeout(400)
OLD, NEW = VERSIONS
HOSTS, GCMS = 2, 2
DAEMONS = ("roq-gcm", "roq-hcm")
SESSION_SECONDS = 3.0
GAP = 40  # messages between two steps, at least
CAME = re.compile(r"(\d)-(\d+) {}")
__all__ = ["installed"]


class Rolling:
    """A cluster whose daemons are of either version. running: what runs, by name: its process, and its version."""

    def __init__(self, installed: dict[str, Environment], folder: Path, stack: contextlib.AsyncExitStack) -> None:
        self._installed, self._folder, self._stack = installed, folder, stack
        self._subnet = stack.enter_context(contextlib.closing(LoopbackSubnet()))
        self._token = secrets.token_hex(8)
        stack.callback(leftovers.end, self._token)  # what a host leaves running when it is interrupted
        self.address = ""
        self.running: dict[str, tuple[asyncio.subprocess.Process, str]] = {}

    async def run(self, version: str, *words: object) -> Process:
        """A program with its lines."""
        return Process(await self._started(version, *words))

    async def _started(self, version: str, *words: object) -> asyncio.subprocess.Process:
        environment = self._installed[version]
        program, *arguments = map(str, words)
        pipe = asyncio.subprocess.DEVNULL if program in DAEMONS else asyncio.subprocess.PIPE  # children would keep it open
        process = await asyncio.create_subprocess_exec(
            environment.folder / "bin" / program,
            *arguments,
            stdin=pipe,
            stdout=pipe,
            env=environment.activated(XDG_CONFIG_HOME=str(self._folder), **leftovers.mark(self._token, program)),
            cwd=self._folder,
        )
        self._stack.push_async_callback(ended, process)
        return process

    async def start(self, version: str) -> None:
        """Everything of this version, on this version's coordinator."""
        where = ("--data-dir", self._folder / "coordinator", "--port", "0")
        coordinator = await self.run(NEW, "python", "-m", "roq.coordinator", *where)
        self.address = f"127.0.0.1:{json.loads(await coordinator.line())['port']}/RoQ"
        for number in range(GCMS):
            await self.gcm(number, version)
        for number in range(HOSTS):
            await self.host(number, version)
        await self.settled()

    async def gcm(self, number: int, version: str) -> None:
        """A GCM of this version, in place of the one there is."""
        name = f"gcm-{number}"
        await self._end(name)
        flags = ("--address", self._subnet.address(1 + number), "--port", 5500, "--broadcast-port", 5501, "--name", name)
        await self._daemon("roq-gcm", name, version, *flags)

    async def host(self, number: int, version: str) -> None:
        """A host of this version, in place of the one there is, with all its processes."""
        name, address = f"host-{number}", self._subnet.address(11 + number)
        if name in self.running:
            client = RpcClient(f"tcp://{address}:5510", hcm_wire.Reply)
            with contextlib.suppress(RoqError), contextlib.closing(client):
                await client.request(hcm_wire.ShutdownHost("a new version"), hcm_wire.OrderTaken, 10.0)
            await self._end(name)
        flags = ("--host", name, "--address", address, "--port", 5510, "--state-dir", self._folder / name)
        await self._daemon("roq-hcm", name, version, *flags, "--exchanges-max", 4)

    async def _daemon(self, program: str, name: str, version: str, *flags: object) -> None:
        common = ("--zookeeper", self.address, "--session-seconds", SESSION_SECONDS, "--log-path", self._folder / f"{name}.log")
        security = ("--security", "none") if version == NEW else ()
        self.running[name] = await self._started(version, program, *common, *flags, *security), version

    async def _end(self, name: str) -> None:
        if name in self.running:
            await ended(self.running.pop(name)[0])

    async def settled(self) -> None:
        """Every host is there, and every process of every queue runs."""
        problem = ""
        try:
            async with asyncio.timeout(BOUND_SECONDS), roq.connect(self.address) as client:
                while problem := await self._unsettled(client):
                    await asyncio.sleep(0.1)
        except TimeoutError:
            raise AssertionError(f"{problem}: {self.logs()}") from None

    async def _unsettled(self, client: roq.Cluster) -> str:
        try:
            view = await client.view()
            missing = {name for name in self.running if name.startswith("host")} - {one.host for one in view.hosts if one.alive}
            if missing:
                return f"{missing} are missing"
            for queue in await client.queues():
                seen = await client.inspect(queue.record.name)
                if not any(exchange.state == "active" for exchange in seen.exchanges):
                    return f"{queue.record.name} has no active Exchange"
        except RoqError as error:
            return f"{type(error).__name__}: {error}"
        return ""

    def logs(self) -> str:
        """The last lines of each daemon's."""
        return "\n".join(f"{path.name}: {path.read_text()[-1500:]}" for path in sorted(self._folder.glob("*.log")))

    async def check(self) -> list[str]:
        """What `roq upgrade check` finds that is no good, by subject, once nothing stands in the way any more."""
        found = dict[str, Any]()
        try:
            async with asyncio.timeout(BOUND_SECONDS):
                while not found.get("ready"):
                    told = await self.run(NEW, "roq", "upgrade", "check", "--cluster", self.address, "--json")
                    found = json.loads("".join(await told.end()))
        except TimeoutError:
            raise AssertionError([one for one in found["findings"] if one["verdict"] == "wrong"]) from None
        return [one["subject"] for one in found["findings"] if one["verdict"] != "good"]

    async def member(self, version: str, verb: str, *words: str) -> Process:
        """See member.py."""
        return await self.run(version, "python", MEMBER, verb, self.address, *words)


@pytest.fixture
async def rolling(installed: dict[str, Environment], tmp_path: Path) -> AsyncIterator[Rolling]:
    async with contextlib.AsyncExitStack() as stack:
        yield Rolling(installed, tmp_path, stack)


class Load:
    """Members that send, one message or task after the other, until told to end. then: what each is told after each."""

    def __init__(self, senders: list[Process], *then: str) -> None:
        self._senders, self._then = senders, then
        self.sent = [0] * len(senders)
        self._over = False
        self._tasks = [asyncio.create_task(self._send(number)) for number in range(len(senders))]

    async def _send(self, number: int) -> None:
        while not self._over:
            await self._senders[number].done(f"{number}-{self.sent[number]}", *self._then)
            self.sent[number] += 1

    async def goes_on(self) -> None:
        """Return when each has sent some more."""
        wanted = [sent + GAP for sent in self.sent]
        async with asyncio.timeout(BOUND_SECONDS):
            while any(sent < want for sent, want in zip(self.sent, wanted, strict=True)):
                for task in self._tasks:
                    if task.done():
                        task.result()
                await asyncio.sleep(0.05)

    async def end(self) -> list[int]:
        """How many each has sent."""
        self._over = True
        await asyncio.gather(*self._tasks)
        assert [await sender.end() for sender in self._senders] == [["closed"]] * len(self._senders)
        return self.sent


async def go_on(loads: Iterable[Load]) -> None:
    for load in loads:
        await load.goes_on()


class DoneTasks:
    """What workers have acked, as they say it."""

    def __init__(self, workers: list[Process]) -> None:
        self._counts = Counter[str]()
        self._tasks = [asyncio.create_task(self._follow(worker)) for worker in workers]

    async def _follow(self, worker: Process) -> None:
        while True:
            with contextlib.suppress(TimeoutError):  # while another worker has everything
                if not (line := await worker.line()):
                    return
                self._counts[line] += 1

    async def all_of(self, put: list[int]) -> None:
        """Return when every task was done. At least once: a put that was tried again, or an ack of a master that left, may have
        made it two."""
        wanted = {f"{number}-{place}" for number, count in enumerate(put) for place in range(count)}
        try:
            async with asyncio.timeout(BOUND_SECONDS):
                while wanted - self._counts.keys():
                    await asyncio.sleep(0.05)
        except TimeoutError:
            raise AssertionError(f"of {put} tasks these were never done: {sorted(wanted - self._counts.keys())}") from None
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
        assert self._counts.keys() == wanted


async def test_up_and_down_daemon_by_daemon(rolling: Rolling) -> None:
    await rolling.start(OLD)
    async with roq.connect(rolling.address) as client:
        await client.create_queue("q", overflow="block")
    worker = await rolling.member(OLD, "work", "tasks", "1", "2", "3")
    assert await worker.line() == "1 2 3"
    subscribers, publishers, workers, producers = [
        [await rolling.member(version, verb, name) for version in VERSIONS]
        for verb, name in (("subscribe", "q"), ("publish", "q"), ("take", "jobs"), ("put", "jobs"))
    ]
    assert [await one.line() for one in (*subscribers, *publishers, *workers, *producers)] == ["ready"] * 8
    done = DoneTasks(workers)
    loads = Load(publishers, "flush"), Load(producers)
    for version in (NEW, OLD):
        assert "Versions" not in await rolling.check()
        for number in range(HOSTS):
            await rolling.host(number, version)
            await rolling.settled()
            assert ("Versions" in await rolling.check()) == (number < HOSTS - 1)
            await go_on(loads)
        for number in range(GCMS):
            await rolling.gcm(number, version)
            await rolling.settled()
            await go_on(loads)
        for member in VERSIONS:
            worker = await rolling.member(member, "work", "tasks", version, "5", "6")
            assert await worker.line() == f"{version} 5 6"
    sent, put = [await load.end() for load in loads]
    await done.all_of(put)
    for member, subscriber in zip(VERSIONS, subscribers, strict=True):
        came, others = [list[int]() for _ in sent], list[str]()
        with contextlib.suppress(TimeoutError):
            while sum(map(len, came)) < sum(sent):
                line = await subscriber.line()
                if (found := CAME.fullmatch(line)) is not None:
                    came[int(found[1])].append(int(found[2]))
                else:
                    others.append(line)
        missing = [sorted({*range(count)} - {*some}) for count, some in zip(sent, came, strict=True)]
        told = f"version {member}: of {sent}, {missing} are missing; {others}; {rolling.logs()}"
        assert came == [[*range(count)] for count in sent], told
