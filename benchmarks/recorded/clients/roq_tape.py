"""RoQ's recorded queues through `roq`, asynchronous face: publishers that confirm what is stored, subscribers with a start, and
groups."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from functools import partial
from typing import Any, TypeVar

import uvloop

import roq
from benchmarks.recorded.clients.client import POLL_SECONDS, WAIT_SECONDS, Clients, Run
from benchmarks.recorded.workload import QUEUE_TOPIC, WINDOW

T = TypeVar("T")
LEASE_SECONDS = 60.0
STORED = "stored"


def prepare(address: str, queue: str) -> None:
    """Make the recorded queue."""

    async def body() -> None:
        async with roq.connect(address) as cluster:
            await cluster.create_queue(queue, overflow=roq.Overflow.BLOCK, record=roq.Record())

    uvloop.run(body())


def _publish(run: Run, send: Callable[[Run, roq.Publisher], Awaitable[int]]) -> int:
    async def body() -> int:
        async with roq.connect(run.address) as cluster, cluster.publisher(run.queue, confirm=STORED) as publisher:
            await asyncio.to_thread(run.begin)
            confirmed = await send(run, publisher)
            run.end()
            return confirmed

    return uvloop.run(body())


async def _flushed(run: Run, publisher: roq.Publisher) -> int:
    """`publish`, `flush` after every 1,000."""
    confirmed = 0
    for window in run.timed():
        for payload in window:
            await publisher.publish(QUEUE_TOPIC, payload)
        confirmed += len(window) * ((await publisher.flush()).level == STORED)
    return confirmed


async def _many(run: Run, publisher: roq.Publisher) -> int:
    """`publish_many` of 1,000, confirmed."""
    confirmed = 0
    for window in run.timed():
        receipt = await publisher.publish_many(QUEUE_TOPIC, window, confirm=STORED)
        confirmed += len(window) * (receipt is not None and receipt.level == STORED)
    return confirmed


async def _awaited(run: Run, publisher: roq.Publisher) -> int:
    """1,000 coroutines that await `publish(confirm="stored")`, one message after the other."""
    payloads: Iterator[bytes] = (payload for window in run.timed() for payload in window)

    async def one() -> int:
        confirmed = 0
        for payload in payloads:
            receipt = await publisher.publish(QUEUE_TOPIC, payload, confirm=STORED)
            confirmed += receipt is not None and receipt.level == STORED
        return confirmed

    return sum(await asyncio.gather(*(one() for _ in range(WINDOW))))


def one_by_one(run: Run) -> list[int]:
    """Each is awaited until it is stored."""
    latencies: list[int] = []

    async def send(run: Run, publisher: roq.Publisher) -> int:
        clock = time.monotonic_ns
        for window in run.timed():
            for payload in window:
                before = clock()
                await publisher.publish(QUEUE_TOPIC, payload, confirm=STORED)
                latencies.append(clock() - before)
        return len(latencies)

    _publish(run, send)
    return latencies


def _replay(run: Run, read: Callable[[Run, roq.Subscriber], Awaitable[list[bytes]]]) -> list[bytes]:
    async def body() -> list[bytes]:
        async with roq.connect(run.address) as cluster:
            await asyncio.to_thread(run.begin)
            past = cluster.subscriber(run.queue, start="earliest", follow=False, on_lost=roq.raise_lost)
            async with past as messages:
                taken = await read(run, messages)
                run.end()
        return taken

    return uvloop.run(body())


async def _lists(run: Run, messages: roq.Subscriber) -> list[bytes]:
    """`batches()`."""
    taken: list[bytes] = []
    async for batch in messages.batches():
        taken += [message.payload for message in batch]
        if len(taken) >= run.count:
            break
    return taken


async def _iterated(run: Run, messages: roq.Subscriber) -> list[bytes]:
    """`async for message`."""
    taken: list[bytes] = []
    async for message in messages:
        taken.append(message.payload)
        if len(taken) == run.count:
            break
    return taken


class _Loop:
    """A cluster and a loop of its own."""

    def __init__(self, address: str) -> None:
        self._runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
        self._cluster = self._run(roq.connect(address).__aenter__())

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return self._runner.get_loop().run_until_complete(work)

    def close(self) -> None:
        """See client.Reader."""
        self._run(self._cluster.close())
        self._runner.close()


class TapeReader(_Loop):
    """See client.Reader: a subscriber's `batches()`, from the tapes into the present."""

    def __init__(self, address: str, queue: str, position: object) -> None:
        super().__init__(address)

        async def subscribed() -> roq.Subscriber:
            start = "earliest" if position is None else str(position)
            return await self._cluster.subscriber(queue, start=start, on_lost=roq.raise_lost).open()

        self._subscriber = self._run(subscribed())
        self._batches = self._subscriber.batches()

    def next(self) -> list[bytes]:
        """See client.Reader."""

        async def batch() -> list[roq.Message]:
            async with asyncio.timeout(WAIT_SECONDS):
                return await anext(self._batches)

        return [message.payload for message in self._run(batch())]

    def position(self) -> object:
        """Its position, as a program would keep it."""
        return str(self._subscriber.position)


class TapeWriter(_Loop):
    """See client.Writer: `publish_many` of what is due, everything flushed in the end."""

    def __init__(self, address: str, queue: str) -> None:
        super().__init__(address)

        async def opened() -> roq.Publisher:
            return await self._cluster.publisher(queue, confirm=STORED).open()

        self._publisher = self._run(opened())

    def send(self, payloads: list[bytes]) -> None:
        """See client.Writer."""
        self._run(self._publisher.publish_many(QUEUE_TOPIC, payloads))

    def rest(self, seconds: float) -> None:
        """See client.Writer."""
        self._run(asyncio.sleep(seconds))

    def finish(self) -> None:
        """See client.Writer."""
        receipt = self._run(self._publisher.flush(WAIT_SECONDS))
        if receipt.level != STORED:
            raise RuntimeError(f"what was published is {receipt.level}, not stored")
        self.close()


async def _make_group(cluster: roq.Cluster, run: Run) -> None:
    """Of which whoever asks gets the next one, as in the other systems."""
    await cluster.create_group(run.queue, run.group, order="none")


@contextlib.asynccontextmanager
async def _opened_group(run: Run) -> AsyncIterator[roq.WorkQueue]:
    """Made by whoever comes first, when the clock runs."""
    async with roq.connect(run.address) as cluster:
        await asyncio.to_thread(run.begin)
        await _make_group(cluster, run)
        async with roq.open_queue(f"roq://{run.address}/{run.queue}@{run.group}") as group:
            yield group


async def _ack(run: Run, group: roq.WorkQueue, tasks: list[roq.Task]) -> bool:
    """Whether all members have all."""
    if lost := await group.ack_many(tasks):
        raise RuntimeError(f"{len(lost)} acks came too late")
    return run.took(len(tasks))


def member_lists(run: Run) -> list[bytes]:
    """`lease` of 1,000, `ack_many`."""

    async def body() -> list[bytes]:
        taken: list[bytes] = []
        async with _opened_group(run) as group:
            done = False
            while not done:
                tasks = await group.lease(LEASE_SECONDS, count=WINDOW, wait_seconds=POLL_SECONDS)
                taken += [task.payload for task in tasks]
                done = await _ack(run, group, tasks)
        return taken

    return uvloop.run(body())


def member_overlapped(run: Run) -> list[bytes]:
    """`lease` of 1,000 while the 1,000 before them are acknowledged: two syncs of the disk at a time."""

    async def body() -> list[bytes]:
        taken: list[bytes] = []
        async with _opened_group(run) as group:
            acking = asyncio.create_task(_ack(run, group, []))
            while True:
                tasks = await group.lease(LEASE_SECONDS, count=WINDOW, wait_seconds=POLL_SECONDS)
                taken += [task.payload for task in tasks]
                if await acking:
                    return taken
                acking = asyncio.create_task(_ack(run, group, tasks))

    return uvloop.run(body())


def member_iterated(run: Run) -> list[bytes]:
    """`async for`, `await ack()` of each."""

    async def body() -> list[bytes]:
        taken: list[bytes] = []
        acked = told = 0

        async def watch(member: roq.GroupSubscriber) -> None:
            nonlocal told
            done = False
            while not done:
                await asyncio.sleep(POLL_SECONDS)
                news, told = acked - told, acked
                done = run.took(news)
            await member.close()

        async with roq.connect(run.address) as cluster:
            await asyncio.to_thread(run.begin)
            await _make_group(cluster, run)
            subscriber = cluster.subscriber(run.queue, group=run.group, order="none", lease_seconds=LEASE_SECONDS)
            ended_ns = 0
            async with subscriber as member, asyncio.TaskGroup() as tasks:
                tasks.create_task(watch(member))
                async for task in member:
                    await task.ack()
                    taken.append(task.payload)
                    acked, ended_ns = acked + 1, time.monotonic_ns()
            run.ended_ns = ended_ns
        return taken

    return uvloop.run(body())


def unsettled(address: str, queue: str, group: str) -> int:
    """What is in the group and not done, dead letters included; what is not in it yet is missing where members' numbers are
    looked at."""

    async def body() -> int:
        async with roq.open_queue(f"roq://{address}/{queue}@{group}") as opened:
            status = await opened.status()
            return status.ready + status.delayed + status.leased + status.dead

    return uvloop.run(body())


CLIENTS = Clients(
    prepare=prepare,
    publish={
        "publish_many of 1,000, confirmed": partial(_publish, send=_many),
        "publish, flush every 1,000": partial(_publish, send=_flushed),
        'publish(confirm="stored"), 1,000 awaited': partial(_publish, send=_awaited),
    },
    one_by_one={'await publish(confirm="stored")': one_by_one},
    replay={"batches()": partial(_replay, read=_lists), "async for message": partial(_replay, read=_iterated)},
    member={"lease of 1,000, ack_many": member_lists, "lease of 1,000 beside ack_many": member_overlapped},
    member_singly={"async for, await ack()": member_iterated},
    unsettled=unsettled,
    reader=TapeReader,
    writer=TapeWriter,
)
