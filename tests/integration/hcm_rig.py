"""One HCM under test, with the test in the GCM's place: writes assignments, reads reports."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec

from roq.coordination import paths
from roq.coordination.link import ANY_VERSION, Node
from roq.coordination.session import Session
from roq.runtime.rpc import RpcClient
from roq.runtime.shutdown import ask
from roq.tools.local import leftovers
from roq.wire import hcm as wire
from roq.wire.assignment import (
    Assignment,
    HostReport,
    Leaving,
    ProcessKind,
    ProcessSpec,
    ProcessState,
    RunningProcess,
    from_json,
    to_json,
)
from roq.wire.policy import Policy
from roq.wire.process import Ping, Pong

ROOT = Path(__file__).parents[2]
HOST = "h1"
WAIT_SECONDS = 15.0
Report = dict[str, RunningProcess]


def queue(name: str, exchange: str = "e1", policy: Policy | None = None) -> tuple[ProcessSpec, ...]:
    """What the GCM assigns for a small queue."""
    return (
        ProcessSpec(ProcessKind.EXCHANGE, name, exchange),
        ProcessSpec(ProcessKind.MONITOR, name),
        ProcessSpec(ProcessKind.SCALING, name, policy=policy or Policy()),
    )


class Rig:
    """One HCM process, and the GCM's side of ZooKeeper."""

    def __init__(self, zookeeper: str, directory: Path, session: Session) -> None:
        self.address = f"127.{84 + secrets.randbelow(100)}.{secrets.randbelow(256)}.{1 + secrets.randbelow(250)}"
        self.zookeeper, self.directory, self.session = zookeeper, directory, session
        self.token = secrets.token_hex(8)
        self.process: asyncio.subprocess.Process | None = None
        self.program = "hcm"  # the module that is run
        self.ready: dict[str, int] = {}
        self.report: HostReport | None = None
        self._reported = asyncio.Event()
        self._revision = 0
        session.watch_data(paths.running(HOST), self._seen)

    def _seen(self, node: Node | None) -> None:
        if node is not None:
            self.report = from_json(node.data, HostReport)
            self._reported.set()

    async def start(self, *flags: str) -> None:
        """Start (again) on the same directory; returns when it says it is ready."""
        await self.spawn(*flags)
        await self.until_ready()

    async def spawn(self, *flags: str, **variables: str) -> None:
        """Start (again) on the same directory, with these environment variables, and wait for nothing."""
        environment = {
            **os.environ,
            **variables,
            **leftovers.mark(self.token, "hcm"),
            "PYTHONPATH": os.pathsep.join([os.environ.get("PYTHONPATH", ""), str(ROOT), str(ROOT / "tests" / "integration")]),
        }
        defaults = {
            "--zookeeper": self.zookeeper,
            "--security": "none",
            "--host": HOST,
            "--address": self.address,
            "--state-dir": str(self.directory),
            "--session-seconds": "2",
            "--process-module": "trivial_programs",
        }
        with (self.directory.parent / "hcm.log").open("ab") as log:
            self.process = await asyncio.create_subprocess_exec(
                sys.executable,
                *("-m", self.program, *(part for pair in defaults.items() for part in pair), *flags),
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                env=environment,
                start_new_session=True,
            )

    async def until_ready(self) -> None:
        """Returns when the HCM says it is ready."""
        assert self.process is not None
        assert self.process.stdout is not None
        line = await asyncio.wait_for(self.process.stdout.readline(), WAIT_SECONDS)
        assert line, self.log()
        self.ready = json.loads(line)

    async def assign(self, *specs: ProcessSpec, epoch: int = 1, leaving: Leaving = Leaving.NOTHING) -> int:
        """Write the assignment as a GCM does; its revision."""
        self._revision += 1
        data = to_json(Assignment(HOST, epoch, self._revision, specs, leaving=leaving))
        path = paths.assignment(HOST)
        if await self.session.get(path) is None:
            await self.session.ensure_path(paths.host_state(HOST))
            await self.session.create(path, data)
        else:
            await self.session.set(path, data, ANY_VERSION)
        return self._revision

    async def until(self, good: Callable[[Report], bool], seconds: float = WAIT_SECONDS) -> Report:
        """The first report that satisfies `good`, by process name."""
        try:
            async with asyncio.timeout(seconds):
                while True:
                    if self.report is not None:
                        found = {process.name: process for process in self.report.processes}
                        if good(found):
                            return found
                    self._reported.clear()
                    await self._reported.wait()
        except TimeoutError:
            raise AssertionError(f"not reached; the last report: {self.report}") from None

    async def running(self, *specs: ProcessSpec, epoch: int = 1) -> Report:
        """Assign, and wait until exactly these run."""
        revision = await self.assign(*specs, epoch=epoch)
        names = {spec.name for spec in specs}

        def good(found: Report) -> bool:
            assert self.report is not None
            return (
                self.report.revision >= revision
                and set(found) == names
                and all(process.state is ProcessState.RUNNING for process in found.values())
            )

        return await self.until(good)

    async def call(self, request: wire.Request) -> msgspec.Struct:
        client = RpcClient(f"tcp://{self.address}:{self.ready['port']}", wire.Reply)
        try:
            return await client.request(request, msgspec.Struct, 5.0)
        finally:
            client.close()

    async def ping(self, process: RunningProcess) -> Pong:
        pong = await ask(self.address, process.ports["control"], Ping())
        assert isinstance(pong, Pong)
        return pong

    async def ended(self, seconds: float = WAIT_SECONDS) -> int:
        assert self.process is not None
        return await asyncio.wait_for(self.process.wait(), seconds)

    def log(self) -> str:
        """The end of the HCM's log."""
        return (self.directory.parent / "hcm.log").read_text()[-3000:]

    async def kill_hcm(self) -> None:
        assert self.process is not None
        self.process.kill()
        await self.ended()

    async def close(self) -> None:
        """Kill whatever is left."""
        if self.process is not None and self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self.process.kill()
            await self.ended()
        for process in leftovers.find(self.token):
            leftovers.kill(process, self.token)
