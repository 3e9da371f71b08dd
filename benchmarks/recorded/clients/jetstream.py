"""NATS JetStream through nats-py: a file stream, pull consumers in batches, an ordered consumer message by message."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from functools import partial
from typing import Any, TypeVar

import nats
import uvloop
from nats.aio.client import Client as NatsClient
from nats.js.api import AckPolicy, ConsumerConfig, DeliverPolicy, StorageType

from benchmarks.recorded.clients.client import POLL_SECONDS, WAIT_SECONDS, Clients, Run
from benchmarks.recorded.workload import WINDOW

T = TypeVar("T")
IN_FLIGHT_MAX = 50_000  # messages a group's members may hold together
PENDING_MESSAGES, PENDING_BYTES = 1 << 30, 1 << 40  # limits of a subscription that never bite


async def _connect(address: str) -> tuple[NatsClient, Any]:
    connection = await nats.connect(address)
    return connection, connection.jetstream(publish_async_max_pending=WINDOW, timeout=WAIT_SECONDS)


def prepare(address: str, queue: str) -> None:
    """Make the stream."""

    async def body() -> None:
        connection, stream = await _connect(address)
        await stream.add_stream(name=queue, subjects=[f"{queue}.in"], storage=StorageType.FILE)
        await connection.close()

    uvloop.run(body())


def _publish(run: Run, send: Callable[[Run, Any], Awaitable[set[int]]]) -> int:
    """send: gives the sequence numbers of what was confirmed."""

    async def body() -> int:
        connection, stream = await _connect(run.address)
        await asyncio.to_thread(run.begin)
        confirmed = await send(run, stream)
        run.end()
        await connection.close()
        return len(confirmed)

    return uvloop.run(body())


async def _in_flight(run: Run, stream: Any) -> set[int]:
    """`publish_async`, 1,000 pending."""
    subject, pending = f"{run.queue}.in", []
    for window in run.timed():
        for payload in window:
            sent = await stream.publish_async(subject, payload, wait_stall=WAIT_SECONDS)
            pending.append(sent)
    await stream.publish_async_completed()
    return {one.result().seq for one in pending}


async def _awaited(run: Run, stream: Any) -> set[int]:
    """1,000 coroutines that await `publish`, one message after the other."""
    payloads: Iterator[bytes] = (payload for window in run.timed() for payload in window)
    subject, confirmed = f"{run.queue}.in", set[int]()

    async def one() -> None:
        for payload in payloads:
            confirmed.add((await stream.publish(subject, payload)).seq)

    await asyncio.gather(*(one() for _ in range(WINDOW)))
    return confirmed


def one_by_one(run: Run) -> list[int]:
    """`await publish`."""

    async def body() -> list[int]:
        connection, stream = await _connect(run.address)
        subject, latencies, clock = f"{run.queue}.in", [], time.monotonic_ns
        await asyncio.to_thread(run.begin)
        for window in run.timed():
            for payload in window:
                before = clock()
                await stream.publish(subject, payload)
                latencies.append(clock() - before)
        run.end()
        await connection.close()
        return latencies

    return uvloop.run(body())


def replay_lists(run: Run) -> list[bytes]:
    """A pull consumer without acks, `fetch(1000)`."""

    async def body() -> list[bytes]:
        connection, stream = await _connect(run.address)
        await asyncio.to_thread(run.begin)
        config = ConsumerConfig(ack_policy=AckPolicy.NONE, deliver_policy=DeliverPolicy.ALL)
        pull = await stream.pull_subscribe(f"{run.queue}.in", stream=run.queue, config=config)
        taken: list[bytes] = []
        while len(taken) < run.count:
            taken += [message.data for message in await pull.fetch(WINDOW, timeout=WAIT_SECONDS)]
        run.end()
        await connection.close()
        return taken

    return uvloop.run(body())


def replay_ordered(run: Run) -> list[bytes]:
    """An ordered consumer, message by message."""

    async def body() -> list[bytes]:
        connection, stream = await _connect(run.address)
        await asyncio.to_thread(run.begin)
        subscription = await stream.subscribe(
            f"{run.queue}.in",
            ordered_consumer=True,
            pending_msgs_limit=PENDING_MESSAGES,
            pending_bytes_limit=PENDING_BYTES,
        )
        taken: list[bytes] = []
        async with asyncio.timeout(WAIT_SECONDS):
            async for message in subscription.messages:
                taken.append(message.data)
                if len(taken) == run.count:
                    break
        run.end()
        await connection.close()
        return taken

    return uvloop.run(body())


class _Loop:
    """A connection and a loop of its own."""

    def __init__(self, address: str, queue: str) -> None:
        self._runner, self._subject = asyncio.Runner(loop_factory=uvloop.new_event_loop), f"{queue}.in"
        self._connection, self._stream = self._run(_connect(address))

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return self._runner.get_loop().run_until_complete(work)

    def close(self) -> None:
        """Disconnect."""
        self._run(self._connection.close())
        self._runner.close()


class ConsumerReader(_Loop):
    """See client.Reader: a pull consumer without acks."""

    def __init__(self, address: str, queue: str, position: object) -> None:
        super().__init__(address, queue)
        begin: dict[str, Any] = {"deliver_policy": DeliverPolicy.ALL}
        if position is not None:
            begin = {"deliver_policy": DeliverPolicy.BY_START_SEQUENCE, "opt_start_seq": position}
        config = ConsumerConfig(ack_policy=AckPolicy.NONE, **begin)
        self._pull = self._run(self._stream.pull_subscribe(self._subject, stream=queue, config=config))
        self._next = 0

    def next(self) -> list[bytes]:
        """See client.Reader."""
        try:
            messages = self._run(self._pull.fetch(WINDOW, timeout=WAIT_SECONDS))
        except TimeoutError:
            return []
        self._next = messages[-1].metadata.sequence.stream + 1
        return [message.data for message in messages]

    def position(self) -> object:
        """The next sequence number."""
        return self._next


class AsyncWriter(_Loop):
    """See client.Writer: `publish_async`."""

    def __init__(self, address: str, queue: str) -> None:
        super().__init__(address, queue)
        self._last: asyncio.Future[Any] | None = None

    def send(self, payloads: list[bytes]) -> None:
        """See client.Writer."""

        async def body() -> None:
            for payload in payloads:
                self._last = await self._stream.publish_async(self._subject, payload, wait_stall=WAIT_SECONDS)

        self._run(body())

    def rest(self, seconds: float) -> None:
        """See client.Writer."""
        self._run(asyncio.sleep(seconds))

    def finish(self) -> None:
        """See client.Writer. A message that was refused is missing where it is read."""
        self._run(self._stream.publish_async_completed())
        self.close()


async def _make_group(stream: Any, run: Run) -> None:
    """A durable pull consumer; asked for again as it is, it is there."""
    config = ConsumerConfig(durable_name=run.group, ack_policy=AckPolicy.EXPLICIT, max_ack_pending=IN_FLIGHT_MAX)
    await stream.add_consumer(run.queue, config)


def unsettled(address: str, queue: str, group: str) -> int:
    """What the consumer has not delivered, and what is not acknowledged."""

    async def body() -> int:
        connection, stream = await _connect(address)
        found = await stream.consumer_info(queue, group)
        await connection.close()
        return int(found.num_pending) + int(found.num_ack_pending)

    return uvloop.run(body())


def member(run: Run, count: int) -> list[bytes]:
    """`fetch` of up to `count`, `ack` of each: the client has no ack of many. They are not awaited; what counts the server has
    read."""

    async def body() -> list[bytes]:
        connection, stream = await _connect(run.address)
        taken: list[bytes] = []
        await asyncio.to_thread(run.begin)
        await _make_group(stream, run)
        pull = await stream.pull_subscribe_bind(durable=run.group, stream=run.queue)
        done = False
        while not done:
            messages = []
            with contextlib.suppress(TimeoutError):
                messages = await pull.fetch(count, timeout=POLL_SECONDS)
            for message in messages:
                taken.append(message.data)
                await message.ack()
            await connection.flush(int(WAIT_SECONDS))
            done = run.took(len(messages))
        await connection.close()
        return taken

    return uvloop.run(body())


CLIENTS = Clients(
    prepare=prepare,
    publish={
        "publish, 1,000 awaited": partial(_publish, send=_awaited),
        "publish_async, 1,000 pending": partial(_publish, send=_in_flight),
    },
    one_by_one={"await publish": one_by_one},
    replay={"pull, fetch(1000)": replay_lists, "ordered consumer, one by one": replay_ordered},
    member={"fetch(1000), ack of each": partial(member, count=WINDOW)},
    member_singly={"fetch(1), ack, flush": partial(member, count=1)},
    unsettled=unsettled,
    reader=ConsumerReader,
    writer=AsyncWriter,
)
