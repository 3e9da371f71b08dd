"""Ways to hurt a ZooKeeper session, and a collector of what it tells; conftest.py makes fixtures of them."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Awaitable, Callable
from typing import Any, cast

from kazoo.client import KazooClient  # type: ignore[import-untyped]

from roq.coordination.kazoo_link import KazooLink
from roq.coordination.session import Session

Connect = Callable[..., Awaitable[Session]]
Expire = Callable[[Session], Awaitable[None]]


class Seen:
    """Collects what callbacks tell."""

    def __init__(self) -> None:
        self.values: list[Any] = []
        self._more = asyncio.Event()

    def __call__(self, value: Any) -> None:
        self.values.append(value)
        self._more.set()

    async def until(self, wanted: Callable[[Any], bool], seconds: float = 10.0) -> None:
        """Wait for a value `wanted` accepts, among all so far."""
        async with asyncio.timeout(seconds):
            while not any(wanted(value) for value in self.values):
                self._more.clear()
                await self._more.wait()


def roq_threads() -> list[str]:
    """Names of kazoo's threads that still run."""
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("roq-zookeeper")]


async def expire(session: Session) -> None:
    """End the session at ZooKeeper, behind the back of its owner."""
    client = cast(KazooLink, session._link)._client

    def take_over_and_close() -> None:
        thief = KazooClient(hosts=session.address.hosts, client_id=client.client_id)
        thief.start(timeout=5)
        thief.stop()
        thief.close()

    await asyncio.get_running_loop().run_in_executor(None, take_over_and_close)


class Wire:
    """A TCP connection that can be cut: bytes stop, nobody is told."""

    def __init__(self, target: str) -> None:
        host, _, port = target.partition(":")
        self._target = (host, int(port))
        self._open = asyncio.Event()
        self._open.set()
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._writers: set[asyncio.StreamWriter] = set()
        self.address = ""

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        host, port = self._server.sockets[0].getsockname()
        self.address = f"{host}:{port}"

    def cut(self) -> None:
        """No byte passes, in either direction; connections stay open."""
        self._open.clear()

    def heal(self) -> None:
        """Bytes pass again."""
        self._open.set()

    def reset(self) -> None:
        """Close all current connections."""
        for writer in list(self._writers):
            writer.transport.abort()

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        self.reset()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        with contextlib.suppress(OSError):
            far_reader, far_writer = await asyncio.open_connection(*self._target)
            self._writers.add(far_writer)
            for source, sink in ((reader, far_writer), (far_reader, writer)):
                task = asyncio.get_running_loop().create_task(self._pump(source, sink))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                await self._open.wait()
                writer.write(data)
        writer.close()
        self._writers.discard(writer)
