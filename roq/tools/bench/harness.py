"""Client processes of one publish/subscribe run against a running system, RoQ or a peer: connect, start gun, count."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from roq.errors import DeadlineExceeded
from roq.tools.bench.children import ClientProcess, ClientProcesses, reports
from roq.tools.bench.cpu import CpuMeter, MachineMeter, Pids
from roq.tools.bench.load import Load
from roq.tools.bench.protocol import (
    ClientReady,
    PublisherFinished,
    PublishersFinished,
    PublishOrder,
    StartPublishing,
    SubscribeOrder,
    SubscriberFinished,
)
from roq.tools.bench.result import PubSubResult, summary

IDLE_SECONDS = 3.0  # what has not come this long after the publishers' end is lost; longer than a process restart
RUN_SECONDS_MAX = 600.0  # a run without --duration ends within this
SPARE_SECONDS = 60.0  # a run with --duration may take this much longer, to start, drain and stop


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
