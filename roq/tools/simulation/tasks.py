"""Producers and workers of a simulated work queue, and what their accounts add up to.

What a put confirmed is worked on until it is acked, and in the end the queue has completed all that it inserted; what was acked
is never leased again; at most one lease of a task is valid, and it holds as long as its worker was told; a put makes one task,
whatever was sent again. Deliveries are numbered by the log, so of two leases of a task everybody knows which is the newer one.
Nothing may be reported as lost: no run damages more disks than the quorum bears.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import dataclass, field
from random import Random
from typing import NamedTuple

import roq
from roq.errors import LeaseLost, StorageFull, TemporaryError
from roq.tools.chaos.promises import Delivery, count_violations, delivery_violations, early, may_be_acked
from roq.tools.simulation.loop import SimulatedLoop
from roq.wire.task import Status
from roq.workqueue.codec import parse_token
from roq.workqueue.prefetch import Task

INLINE_BYTES = 2_000  # payloads from this size on go straight to a store
LEASE_SECONDS = 4.0
AGAIN_SECONDS = 0.3
IDLE_SECONDS = 1.0
TOLD_MAX = 5  # of what went wrong alike


class TaskPace(NamedTuple):
    """Bursts a second of a producer, tasks in a burst, of them with a big payload, seconds of work on a task at most."""

    rate: float
    burst: int
    big_share: float
    work_seconds: float


@dataclass(eq=False)
class PutAccount:
    """One task that was handed over. id: once it was confirmed."""

    number: int
    size: int
    began: float
    id: str = ""


@dataclass
class TaskBooks:
    """All accounts of a run. clocks_stepped: the coordinator's and a host's, so that a new master may believe both. status: the
    queue's own in the end."""

    loop: SimulatedLoop
    puts: dict[int, PutAccount] = field(default_factory=dict)
    deliveries: dict[int, list[Delivery]] = field(default_factory=dict)
    ids: dict[int, str] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    clocks_stepped: bool = False
    status: Status | None = None

    def put(self, size: int) -> PutAccount:
        """The next one."""
        one = PutAccount(len(self.puts) + 1, size, self.loop.time())
        self.puts[one.number] = one
        return one

    def delivered(self, worker: str, task: Task) -> Delivery:
        """A worker got it."""
        number = int(task.payload.split(b" ", 1)[0])
        put = self.puts.get(number)
        if put is None or task.payload != payload_of(put):
            self.wrong.append(f"task {number} has another payload than what was put")
        if self.ids.setdefault(number, task.id) != task.id:
            self.wrong.append(f"put {number} became two tasks: {self.ids[number]} and {task.id}")
        now, order = self.loop.time(), parse_token(task.token)[0]
        before = self.deliveries.setdefault(number, [])
        delivery = Delivery(worker, order, now, task.ends_in)
        if not self.clocks_stepped:
            self.wrong += early(number, delivery, before)
        before.append(delivery)
        self.loop.note("task", number, worker)
        return delivery

    def counts(self) -> tuple[int, int, int]:
        """Tasks put, deliveries, acks confirmed."""
        all = [one for some in self.deliveries.values() for one in some]
        return len(self.puts), len(all), sum(one.acked is True for one in all)

    def open_numbers(self) -> list[int]:
        """Puts that were confirmed and that nobody may have acked."""
        return [put.number for put in self.puts.values() if put.id and not may_be_acked(self.deliveries.get(put.number, []))]


def payload_of(put: PutAccount) -> bytes:
    """Its number, and as much as it is to have."""
    return b"%d " % put.number + b"x" * put.size


async def produce(books: TaskBooks, address: str, pace: TaskPace, random: Random, stop: asyncio.Event) -> None:
    """Put tasks until `stop`. What failed is not tried again: whether it took effect is not known."""
    while not stop.is_set():
        try:
            async with roq.open_queue(address, patience_seconds=random.choice((3.0, 30.0))) as queue:
                while not stop.is_set():
                    await _put(books, queue, pace, random)
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(random.expovariate(pace.rate)):
                            await stop.wait()
        except TemporaryError:
            await asyncio.sleep(AGAIN_SECONDS)


async def _put(books: TaskBooks, queue: roq.WorkQueue, pace: TaskPace, random: Random) -> None:
    puts = [books.put(INLINE_BYTES if random.random() < pace.big_share else 0) for _ in range(random.randint(1, pace.burst))]
    tasks = [roq.NewTask(payload_of(put), random.choice((0.0, 0.0, 0.0, 0.5)), random.choice((0, 0, 0, 1))) for put in puts]
    try:
        ids = await queue.put_many(tasks)
    except StorageFull:
        return
    for put, id in zip(puts, ids, strict=True):
        put.id = id
        if books.ids.setdefault(put.number, id) != id:
            books.wrong.append(f"put {put.number} was confirmed as {id}, and came as {books.ids[put.number]}")


async def work(books: TaskBooks, address: str, label: str, pace: TaskPace, random: Random, stop: asyncio.Event) -> None:
    """Lease tasks and settle them until `stop`."""
    while not stop.is_set():
        mine: list[Delivery] = []
        try:
            async with roq.open_queue(address, patience_seconds=random.choice((3.0, 30.0))) as queue:
                while not stop.is_set():
                    count = random.choice((1, 1, 4))
                    leases = queue.leases(LEASE_SECONDS, count=count, wait_seconds=IDLE_SECONDS)
                    async with contextlib.aclosing(leases) as tasks:
                        async for task in tasks:
                            mine.append(books.delivered(label, task))
                            await _work_on(books, mine[-1], task, pace, random)
                            if stop.is_set():
                                break
                for one in mine:  # what is held still is given back
                    one.open = False
        except TemporaryError:
            for one in mine:
                one.open = False
            await asyncio.sleep(AGAIN_SECONDS)


async def _work_on(books: TaskBooks, one: Delivery, task: Task, pace: TaskPace, random: Random) -> None:
    await asyncio.sleep(random.random() * random.choice((0.1, 0.1, 1.0)) * pace.work_seconds)
    drawn, began = random.random(), books.loop.time()
    try:
        if drawn < 0.04:
            return  # its lease runs out
        if drawn < 0.1:
            one.open = False
            await task.release(random.choice((0.0, 1.0)), error="try it again")
        else:
            if drawn < 0.15:
                await task.extend(LEASE_SECONDS)
                one.kept.append(began)
                began = books.loop.time()
            one.open, one.acking = False, True
            await task.ack()
            one.acked = True
        one.kept.append(began)
    except LeaseLost:
        one.open = False
        if one.acking:
            one.acked = False
    except TemporaryError:
        one.open = False  # nobody knows


async def look(books: TaskBooks, address: str, seconds: float) -> None:
    """When everything is healed: wait until everything is done, for so long at most, and note the queue's own counts."""
    until = time.monotonic() + seconds
    async with roq.open_queue(address) as queue:
        while True:
            with contextlib.suppress(TemporaryError):
                books.status = status = await queue.status()
                if not (status.ready or status.delayed or status.leased):
                    return
            if time.monotonic() > until:
                return
            await asyncio.sleep(AGAIN_SECONDS)


def judge_tasks(books: TaskBooks) -> list[str]:
    """What is wrong, in words; empty if nothing is."""
    wrong = books.wrong[:TOLD_MAX]
    if left := books.open_numbers():
        wrong.append(f"{len(left)} tasks were put and never acked: {left[:TOLD_MAX]}")
    for number, deliveries in books.deliveries.items():
        wrong += delivery_violations(number, deliveries)
    confirmed = sum(bool(put.id) for put in books.puts.values())
    status = books.status
    if status is None:
        wrong.append("the queue gave no answer after everything was healed")
    else:
        wrong += count_violations(status, confirmed, len(books.puts))
    return wrong
