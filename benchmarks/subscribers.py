"""What idle subscribers cost an Exchange, and how long a storm of them takes to be attached:
`python -m benchmarks.subscribers [--storm 2000] [--subscribers 10000]`.

The Exchange's forwarder runs in a process of its own, the subscribers are plain connections of this one: each subscribes to a
topic and to control frames, and is attached once the Exchange says so. Memory is the resident one of that process.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import resource
import sys
import time
from collections.abc import AsyncIterator
from typing import cast

import psutil
import uvloop

from roq.pubsub.exchange.forwarder import Forwarder
from roq.runtime.observe import Counters
from roq.wire import frame as frames
from roq.wire import zmtp
from roq.wire.assignment import Overflow, QueueSettings
from roq.wire.frame import CONTROL_PREFIX, FrameKind

TOKEN = "idle"
SPARE_FILES = 500  # descriptors for anything else
GOAL_BYTES, GOAL_SECONDS = 12 * 1024, 5.0
WAIT_SECONDS = 60.0
ATTACHED = frames.control_prefix(FrameKind.ATTACHED)


class IdleSubscriber(asyncio.Protocol):
    """attached: done once the Exchange has said so."""

    def __init__(self) -> None:
        self.attached: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._came = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """For the loop."""
        self.transport = cast(asyncio.Transport, transport)
        self.transport.write(zmtp.hello(b"SUB") + zmtp.frame(b"\x01topic.") + zmtp.frame(b"\x01" + CONTROL_PREFIX))

    def data_received(self, data: bytes) -> None:
        """For the loop."""
        if not self.attached.done():
            self._came += data
            if ATTACHED in self._came:
                self._came = b""
                self.attached.set_result(None)

    def connection_lost(self, error: Exception | None) -> None:
        """For the loop."""
        if not self.attached.done():
            self.attached.set_exception(error or ConnectionError("the Exchange closed the connection"))


async def storm(port: int, count: int) -> tuple[float, list[IdleSubscriber]]:
    """Seconds until all of them are attached."""
    loop, began = asyncio.get_running_loop(), time.monotonic()
    made = await asyncio.gather(*(loop.create_connection(IdleSubscriber, "127.0.0.1", port) for _ in range(count)))
    found = [subscriber for _, subscriber in made]
    async with asyncio.timeout(WAIT_SECONDS):
        await asyncio.gather(*(one.attached for one in found))
    return time.monotonic() - began, found


async def serve() -> None:
    """The Exchange: its port for subscribers on standard output; until standard input ends."""
    settings = QueueSettings(overflow=Overflow.DROP)
    forwarder = Forwarder("127.0.0.1", 0, 0, TOKEN, settings, Counters())
    print(forwarder.back_port, flush=True)
    end = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(end), sys.stdin)
    await end.read()
    forwarder.stop()


@contextlib.asynccontextmanager
async def exchange() -> AsyncIterator[tuple[psutil.Process, int]]:
    """Its process and its port."""
    command = [sys.executable, "-m", "benchmarks.subscribers", "--exchange"]
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe)
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        yield psutil.Process(process.pid), int(await process.stdout.readline())
    finally:
        process.stdin.close()
        await process.wait()


async def measured(stormed: int, total: int) -> tuple[float, float]:
    """Seconds of the storm; bytes of each once all are there."""
    async with exchange() as (process, port):
        before = process.memory_info().rss
        seconds, there = await storm(port, stormed)
        while len(there) < total:
            there += (await storm(port, min(stormed, total - len(there))))[1]
        each = (process.memory_info().rss - before) / len(there)
        for one in there:
            one.transport.abort()
    return seconds, each


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.subscribers", description=__doc__)
    parser.add_argument("--storm", type=int, default=2_000, help="that come at once (2,000)")
    parser.add_argument("--subscribers", type=int, default=10_000, help="in the end (10,000)")
    parser.add_argument("--exchange", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(most, arguments.subscribers + SPARE_FILES), most))
    if arguments.exchange:
        uvloop.run(serve())
        return
    seconds, each = uvloop.run(measured(arguments.storm, arguments.subscribers))
    print(f"| storm of {arguments.storm:,}, s | {seconds:.2f} | goal {GOAL_SECONDS:g} |")
    print(f"| bytes of each of {arguments.subscribers:,} idle ones | {each:,.0f} | goal {GOAL_BYTES:,} |")


if __name__ == "__main__":
    main()
