"""The parent's side of the client processes: start them, talk to them, end them. Each is an interpreter of its own."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from asyncio.subprocess import PIPE
from collections.abc import Sequence
from typing import TypeVar

import msgspec

from roq.errors import ProcessFailed, from_wire
from roq.tools.bench.protocol import LINE_BYTES_MAX, ClientFailed, Order, decode_report, encode

T = TypeVar("T", bound=msgspec.Struct)
END_SECONDS = 5.0  # a client that has reported is given this long to exit
CLIENT_MODULE = "roq.tools.bench.client"


class ClientProcess:
    """One client process."""

    def __init__(self, process: asyncio.subprocess.Process, name: str) -> None:
        self._process, self.name = process, name

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    async def send(self, line: msgspec.Struct) -> None:
        """Hand it an order or a command. One that has ended already does not hear it; its report tells how it ended."""
        assert self._process.stdin is not None
        if self._process.stdin.is_closing():
            return
        with contextlib.suppress(ConnectionError):
            self._process.stdin.write(encode(line))
            await self._process.stdin.drain()

    async def report(self, expect: type[T]) -> T:
        """Its next report; raises what it failed with, or ProcessFailed if it died."""
        assert self._process.stdout is not None
        line = await self._process.stdout.readline()
        if not line:
            raise ProcessFailed(f"{self.name} ended without a report (exit status {await self._process.wait()})")
        report = decode_report(line)
        if isinstance(report, ClientFailed):
            raise from_wire(report.error, f"{self.name}: {report.message}")
        if not isinstance(report, expect):
            raise ProcessFailed(f"{self.name} reported {type(report).__name__} where {expect.__name__} was due")
        return report

    async def end(self) -> None:
        """Wait for its exit, kill it when that takes too long."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            async with asyncio.timeout(END_SECONDS):
                await self._process.wait()
        except TimeoutError:
            self.kill()
            await self._process.wait()

    def kill(self) -> None:
        """End it now."""
        if self._process.returncode is None:
            self._process.send_signal(signal.SIGKILL)


class ClientProcesses:
    """All client processes of one run; none outlives the `async with`."""

    def __init__(self, module: str = CLIENT_MODULE) -> None:
        self._module = module
        self._children: list[ClientProcess] = []

    async def __aenter__(self) -> ClientProcesses:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if kind is not None:
            for child in self._children:
                child.kill()
        await asyncio.gather(*(child.end() for child in self._children))

    async def start(self, order: Order, name: str) -> ClientProcess:
        """A new client with its order."""
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", self._module, stdin=PIPE, stdout=PIPE, limit=LINE_BYTES_MAX
        )
        child = ClientProcess(process, name)
        self._children.append(child)
        await child.send(order)
        return child


async def reports(children: Sequence[ClientProcess], expect: type[T]) -> list[T]:
    """The next report of each; the first failure is raised."""
    tasks = [asyncio.ensure_future(child.report(expect)) for child in children]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
