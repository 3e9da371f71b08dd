"""One publish/subscribe run against a running system, RoQ or a peer: its client processes, each an interpreter of its own, are
started, connected, given the start gun, counted and ended; and what the run showed, added up from their reports."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from asyncio.subprocess import PIPE
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import msgspec

from roq.errors import DeadlineExceeded, ProcessFailed, from_wire
from roq.tools.bench.accounting import latency_us
from roq.tools.bench.cpu import CpuMeter, MachineMeter, Pids
from roq.tools.bench.load import Load
from roq.tools.bench.protocol import (
    LINE_BYTES_MAX,
    ClientFailed,
    ClientReady,
    Order,
    PublisherFinished,
    PublishersFinished,
    PublishOrder,
    StartPublishing,
    SubscribeOrder,
    SubscriberFinished,
    decode_report,
    encode,
)

T = TypeVar("T", bound=msgspec.Struct)
END_SECONDS = 5.0  # a client that has reported is given this long to exit
IDLE_SECONDS = 3.0  # what has not come this long after the publishers' end is lost; longer than a process restart
RUN_SECONDS_MAX = 600.0  # a run without --duration ends within this
SPARE_SECONDS = 60.0  # a run with --duration may take this much longer, to start, drain and stop
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


class Clients:
    """The client processes of one run against `system`, from start to count."""

    def __init__(
        self, children: ClientProcesses, load: Load, system: str, address: str, queue: str, idle_seconds: float
    ) -> None:
        self._children, self._load = children, load
        self._target = (system, address, queue)
        self._idle_seconds = idle_seconds
        self._publishers: list[ClientProcess] = []
        self._subscribers: list[ClientProcess] = []
        self._ids: dict[int, int] = {}

    async def connect(self) -> None:
        """Start all; returns when every subscriber and then every publisher is ready."""
        for index in range(self._load.subscribers):
            order = SubscribeOrder(*self._target, index, self._load, self._idle_seconds)
            self._subscribers.append(await self._children.start(order, f"subscriber {index}"))
        await reports(self._subscribers, ClientReady)
        for index in range(self._load.publishers):
            publish_order = PublishOrder(*self._target, index, self._load)
            self._publishers.append(await self._children.start(publish_order, f"publisher {index}"))
        self._ids = {index: ready.publisher for index, ready in enumerate(await reports(self._publishers, ClientReady))}

    async def run(self) -> tuple[list[PublisherFinished], list[SubscriberFinished]]:
        """Fire the start gun, wait for the end, collect the counts."""
        for index, subscriber in enumerate(self._subscribers):
            await subscriber.send(StartPublishing({heard: self._ids[heard] for heard in self._load.heard_by(index)}))
        for publisher in self._publishers:
            await publisher.send(StartPublishing())
        delivering = asyncio.ensure_future(reports(self._subscribers, SubscriberFinished))
        try:
            published = await _unless_failed(reports(self._publishers, PublisherFinished), delivering)
            for index, subscriber in enumerate(self._subscribers):
                heard = {other: published[other].published for other in self._load.heard_by(index)}
                await subscriber.send(PublishersFinished(heard))
            return published, await delivering
        finally:
            delivering.cancel()


async def _unless_failed(
    wanted: Awaitable[list[PublisherFinished]], watched: asyncio.Future[list[SubscriberFinished]]
) -> list[PublisherFinished]:
    """The wanted result; a failure of the watched future ends the waiting with it."""
    waiting = asyncio.ensure_future(wanted)
    either: set[asyncio.Future[Any]] = {waiting, watched}
    try:
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if watched.done() and not watched.cancelled() and (error := watched.exception()) is not None:
            raise error
        return await waiting
    finally:
        waiting.cancel()


async def drive(
    load: Load, system: str, address: str, queue: str, module: str, pids: Callable[[], Awaitable[Pids]], idle_seconds: float
) -> PubSubResult:
    """One run of client processes against a running system. pids: its processes, asked when the clients are connected."""
    bound = load.duration + SPARE_SECONDS if load.duration else RUN_SECONDS_MAX
    try:
        async with asyncio.timeout(bound), ClientProcesses(module) as children:
            clients = Clients(children, load, system, address, queue, idle_seconds)
            await clients.connect()
            meter, machine = CpuMeter(await pids()), MachineMeter()
            published, delivered = await clients.run()
            cpu = meter.seconds()
            clients_cpu = [report.cpu_seconds for report in published] + [report.cpu_seconds for report in delivered]
            foreign_cores = machine.foreign_cores(sum(clients_cpu) + sum(cpu.values()))
    except TimeoutError:
        raise DeadlineExceeded(f"the run did not end within {bound:g} s") from None
    return summary(load, published, delivered, cpu, foreign_cores)


class PubSubResult(msgspec.Struct, frozen=True):
    """What one run showed; its JSON is the command's last line. throughput: deliveries/s over all subscribers from the first
    publish to the last receipt; publish_rate: messages/s until the last publisher had flushed; foreign: messages from
    publishers that are not ours; reported_lost: the SDK's own count; foreign_cores: what other programs took of the machine."""

    throughput: float
    published: int
    delivered: int
    lost: int
    duplicated: int
    reordered: int
    latency_us: dict[str, float | None]
    cpu_seconds: dict[str, float]
    seconds: float
    publish_rate: float
    reported_lost: int
    foreign: int
    foreign_cores: float
    load: Load
    overflow: str = ""


def summary(
    load: Load,
    published: Sequence[PublisherFinished],
    delivered: Sequence[SubscriberFinished],
    cpu: dict[str, float],
    foreign_cores: float,
) -> PubSubResult:
    """The result of one run. cpu: seconds by kind of every process that is not a client."""
    counts = [report.published for report in published]
    first_ns = min(report.first_ns for report in published)
    arrived = sum(report.delivered for report in delivered)
    seconds = max(0.0, max(report.last_ns for report in delivered) - first_ns) / 1e9
    publishing = max(report.last_ns for report in published) - first_ns
    cpu = {
        "publisher": round(sum(report.cpu_seconds for report in published), 3),
        "subscriber": round(sum(report.cpu_seconds for report in delivered), 3),
        **cpu,
    }
    return PubSubResult(
        throughput=round(arrived / seconds, 1) if seconds > 0 else 0.0,
        published=sum(counts),
        delivered=arrived,
        lost=load.expected(counts) - arrived,
        duplicated=sum(report.duplicated for report in delivered),
        reordered=sum(report.reordered for report in delivered),
        latency_us=latency_us(value for report in delivered for value in report.latencies_ns),
        cpu_seconds=cpu,
        seconds=round(seconds, 6),
        publish_rate=round(sum(counts) * 1e9 / publishing, 1) if publishing > 0 else 0.0,
        reported_lost=sum(report.reported_lost for report in delivered),
        foreign=sum(report.foreign for report in delivered),
        foreign_cores=foreign_cores,
        load=load,
    )
