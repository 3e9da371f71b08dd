"""What idle subscribers cost an Exchange, and how long they take to be there:
`python -m benchmarks.subscribers [--storm 2000] [--subscribers 10000] [--opens 300] [--ready 2000]`.

Storm and memory: the Exchange's forwarder runs in a process of its own, the subscribers are plain connections of this one:
each subscribes to a topic and to control frames, and is attached once the Exchange says so. Memory is the resident one of that
process.

Opens: subscribers of the SDK in a cluster of this machine (2 hosts, a queue of 2 Exchanges, without cards): `open()` one after
the other while a program publishes 1,000 messages a second; then so many at once of two programs, until all of them are ready,
while nothing is published, as each message would go to all of them. Being connected to the cluster is not in it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import resource
import statistics
import sys
import time
from collections.abc import AsyncIterator
from typing import cast

import psutil
import uvloop

import roq
from roq.pubsub.exchange.forwarder import Forwarder
from roq.runtime.observe import Counters
from roq.testing import LoopbackCluster
from roq.wire import frame as frames
from roq.wire import zmtp
from roq.wire.assignment import Overflow, QueueSettings
from roq.wire.frame import CONTROL_PREFIX, FrameKind

TOKEN = "idle"
SPARE_FILES = 500  # descriptors for anything else
GOAL_BYTES, GOAL_SECONDS = 12 * 1024, 5.0
GOAL_OPEN_SECONDS, GOAL_READY_SECONDS = 0.05, 6.0
SLOW_OPEN_SECONDS = 0.5
QUEUE = "orders"
RATE = 1_000  # messages a second, published meanwhile
PROGRAMS = 2  # that open those at once
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


async def publish(zookeeper: str) -> None:
    """Until it is killed."""
    async with roq.connect(zookeeper) as cluster, cluster.publisher(QUEUE) as publisher:
        print("there", flush=True)
        began = time.monotonic()
        for number in itertools.count(1):
            await publisher.publish("t.some", b"x" * 100)
            await asyncio.sleep(max(0.0, began + number / RATE - time.monotonic()))


async def open_many(zookeeper: str, count: int) -> None:
    """A program: it says that it is there, and, after a line on standard input, that all of its subscribers are ready."""
    async with roq.connect(zookeeper) as cluster, contextlib.AsyncExitStack() as opened:
        await cluster.queue(QUEUE)
        print("there", flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        many = [cluster.subscriber(QUEUE, "t.*") for _ in range(count)]
        await asyncio.gather(*(opened.enter_async_context(one) for one in many))
        print("ready", flush=True)
        await asyncio.to_thread(sys.stdin.readline)


@contextlib.asynccontextmanager
async def program(*words: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """One of these two, once it is there."""
    command, pipe = [sys.executable, "-m", "benchmarks.subscribers", *words], asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe)
    try:
        await said(process, b"there")
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def said(process: asyncio.subprocess.Process, word: bytes) -> None:
    """Until it says so."""
    assert process.stdout is not None
    async with asyncio.timeout(WAIT_SECONDS):
        found = (await process.stdout.readline()).strip()
    if found != word:
        raise RuntimeError(f"a program said {found!r}, not {word!r}")


async def opens(count: int, at_once: int) -> tuple[list[float], float]:
    """Seconds of each open(), sorted; and until so many at once are ready."""
    async with LoopbackCluster(gcms=1, hcms=2) as machines, machines.connect() as cluster:
        await cluster.create_queue(QUEUE)
        await cluster.create_exchange(QUEUE)
        async with program("--publish", machines.zookeeper):
            found = []
            for _ in range(count):
                one, began = cluster.subscriber(QUEUE, "t.*"), time.monotonic()
                await one.open()
                found.append(time.monotonic() - began)
                await one.close()
        async with contextlib.AsyncExitStack() as running:
            words = ["--open", machines.zookeeper, "--ready", str(at_once // PROGRAMS)]
            programs = [await running.enter_async_context(program(*words)) for _ in range(PROGRAMS)]
            began = time.monotonic()
            for each in programs:
                assert each.stdin is not None
                each.stdin.write(b"\n")
            await asyncio.gather(*(said(each, b"ready") for each in programs))
            return sorted(found), time.monotonic() - began


def report(arguments: argparse.Namespace) -> None:
    """All of it."""
    seconds, each = uvloop.run(measured(arguments.storm, arguments.subscribers))
    print(f"| storm of {arguments.storm:,}, s | {seconds:.2f} | goal {GOAL_SECONDS:g} |")
    print(f"| bytes of each of {arguments.subscribers:,} idle ones | {each:,.0f} | goal {GOAL_BYTES:,} |")
    each_open, ready = uvloop.run(opens(arguments.opens, arguments.ready))
    slow = sum(each > SLOW_OPEN_SECONDS for each in each_open)
    median, last = statistics.median(each_open) * 1e3, each_open[len(each_open) * 99 // 100] * 1e3
    print(f"| open(), median of {len(each_open):,}, ms | {median:.1f} | goal {GOAL_OPEN_SECONDS * 1e3:g} |")
    print(f"| p99, ms; over {SLOW_OPEN_SECONDS:g} s | {last:.1f}; {slow} | |")
    print(f"| {arguments.ready:,} at once are ready, s | {ready:.2f} | goal {GOAL_READY_SECONDS:g} |")


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.subscribers", description=__doc__)
    parser.add_argument("--storm", type=int, default=2_000, help="that come at once (2,000)")
    parser.add_argument("--subscribers", type=int, default=10_000, help="in the end (10,000)")
    parser.add_argument("--opens", type=int, default=300, help="one after the other (300)")
    parser.add_argument("--ready", type=int, default=2_000, help="that open at once (2,000)")
    for hidden in ("--publish", "--open"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    parser.add_argument("--exchange", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(most, arguments.subscribers + SPARE_FILES), most))
    if arguments.exchange:
        uvloop.run(serve())
    elif arguments.publish:
        uvloop.run(publish(arguments.publish))
    elif arguments.open:
        uvloop.run(open_many(arguments.open, arguments.ready))
    else:
        report(arguments)


if __name__ == "__main__":
    main()
