"""Many publishers with frames of one message each through one Exchange, beside libzmq's proxy, which is C and promises nothing:
`python -m benchmarks.fan_in [--publishers 256] [--burst 1] [--runs 3]`.

In turn, each with processes of its own: the middle, one subscriber that counts, and one process with all publishers, which
writes frames that were made before, to one connection after the other. Frames are RoQ's, 100 bytes of payload; both ways the
same.
burst: frames a publisher writes at once. Not covered: RoQ's publishers and subscribers (`python -m benchmarks pubsub`).
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import cast

import psutil
import uvloop

from benchmarks import zmq_proxy
from benchmarks.servers import free_ports
from roq.pubsub.exchange.forwarder import Forwarder
from roq.runtime.observe import Counters
from roq.wire import zmtp
from roq.wire.assignment import Overflow, QueueSettings
from roq.wire.frame import encode_data

LOCAL = "127.0.0.1"
TOPIC, PAYLOAD = "fan-in", bytes(100)
FRAMES = 400_000  # of a run; four times as many with bursts
WAIT_SECONDS = 60.0


def exchange(front: int, back: int) -> None:
    """An Exchange's forwarder, until killed."""

    async def forward() -> None:
        made = Forwarder(LOCAL, front, back, "A/1", QueueSettings(overflow=Overflow.BLOCK), Counters())
        await asyncio.Event().wait()
        made.stop()

    uvloop.run(forward())


def proxy(front: int, back: int) -> None:
    """libzmq's, until killed."""
    zmq_proxy.main(LOCAL, str(front), str(back))


MIDDLES: dict[str, Callable[[int, int], None]] = {"RoQ": exchange, "zmq-proxy": proxy}


class Greeted(asyncio.Protocol):
    """A connection. greeted: the other end takes messages; ready: it has sent one."""

    def __init__(self, socket_type: bytes) -> None:
        self.hello = zmtp.hello(socket_type)
        self.greeted, self.ready, self.room = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.room.set()
        self.parser = zmtp.Parser()
        self.counted: Callable[[int], None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """For the loop."""
        self.transport = cast(asyncio.Transport, transport)
        self.transport.write(self.hello)

    def data_received(self, data: bytes) -> None:
        """For the loop."""
        if self.counted is not None:
            self.counted(len(data))
            return
        if self.parser.feed(data):
            self.ready.set()
        if self.parser.ready:
            self.greeted.set()

    def pause_writing(self) -> None:
        """For the loop."""
        self.room.clear()

    def resume_writing(self) -> None:
        """For the loop."""
        self.room.set()


async def connect(socket_type: bytes, port: int) -> Greeted:
    """As soon as the other end listens."""
    async with asyncio.timeout(WAIT_SECONDS):
        while True:
            try:
                _, made = await asyncio.get_running_loop().create_connection(lambda: Greeted(socket_type), LOCAL, port)
            except OSError:
                await asyncio.sleep(0.05)
            else:
                await made.greeted.wait()
                return made


def subscriber(port: int, wanted: int, told: Connection) -> None:
    """Tells when it is ready, then how many seconds all took from the first byte on."""

    async def count() -> None:
        link = await connect(b"SUB", port)
        seen, began, done = 0, 0.0, asyncio.Event()

        def counted(size: int) -> None:
            nonlocal seen, began
            began = began or time.perf_counter()
            seen += size
            if seen >= wanted:
                done.set()

        link.transport.write(zmtp.frame(b"\x01" + TOPIC.encode()))
        await asyncio.sleep(0.5)  # the subscription has no answer
        link.counted = counted
        told.send("ready")
        await done.wait()
        told.send(time.perf_counter() - began)

    uvloop.run(count())


def publishers(port: int, number: int, burst: int, count: int, start: Connection) -> None:
    """All of them. Ends when everything has left."""

    async def publish() -> None:
        links = [await connect(b"PUB", port) for _ in range(number)]
        await asyncio.gather(*(link.ready.wait() for link in links))
        made = [b"".join([one_frame(publisher, place) for place in range(burst)]) for publisher in range(number)]
        start.send("ready")
        await asyncio.to_thread(start.recv)
        for _ in range(count // (number * burst)):
            for link, data in zip(links, made, strict=True):
                link.transport.write(data)
                if not link.room.is_set():
                    await link.room.wait()
            await asyncio.sleep(0)
        await asyncio.to_thread(start.recv)

    uvloop.run(publish())


def one_frame(publisher: int, place: int) -> bytes:
    """Of one message."""
    return zmtp.frame(encode_data(TOPIC.encode(), publisher + 1, 1, place + 1, place, place, [PAYLOAD], time.time_ns()))


def run(middle: str, number: int, burst: int) -> tuple[float, float]:
    """(frames/s at the subscriber, CPU seconds of the middle per million frames)."""
    context = multiprocessing.get_context("spawn")
    front, back = free_ports(2)
    rounds = FRAMES * min(burst, 4) // (number * burst)
    count = rounds * number * burst
    size = len(one_frame(0, 0))
    heard, hears = context.Pipe()
    starts, started = context.Pipe()
    processes = [
        context.Process(target=MIDDLES[middle], args=(front, back)),
        context.Process(target=subscriber, args=(back, count * size, hears)),
        context.Process(target=publishers, args=(front, number, burst, count, started)),
    ]
    for process in processes:
        process.start()
    try:
        for pipe in (heard, starts):
            assert pipe.poll(WAIT_SECONDS), "not ready"
            pipe.recv()
        pid = processes[0].pid
        assert pid is not None
        before = sum(psutil.Process(pid).cpu_times()[:2])
        starts.send("go")
        assert heard.poll(WAIT_SECONDS), "not all of it came"
        seconds = heard.recv()
        used = sum(psutil.Process(pid).cpu_times()[:2]) - before
        return count / seconds, used / count * 1e6
    finally:
        for process in processes:
            process.kill()
            process.join()


def main() -> None:
    """A table on standard output."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--publishers", type=int, default=256)
    parser.add_argument("--burst", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--runs", type=int, default=3)
    asked = parser.parse_args()
    print("| frames at once | middle | frames/s | CPU s per million | of the proxy's |\n|---|---|---|---|---|")
    for burst in asked.burst:
        found: dict[str, list[tuple[float, float]]] = {name: [] for name in MIDDLES}
        for _ in range(asked.runs):
            for name, measured in found.items():
                measured.append(run(name, asked.publishers, burst))
                print(f"{name}, {burst} at once: {measured[-1][0]:,.0f}/s", file=sys.stderr)
        rates = {name: statistics.median(rate for rate, _ in measured) for name, measured in found.items()}
        for name, measured in found.items():
            spread = f"{rates[name]:,.0f} [{min(measured)[0]:,.0f}, {max(measured)[0]:,.0f}]"
            cpu = statistics.median(used for _, used in measured)
            print(f"| {burst} | {name} | {spread} | {cpu:.2f} | {rates[name] / rates['zmq-proxy']:.2f} |")


if __name__ == "__main__":
    main()
