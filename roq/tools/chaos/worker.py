"""A worker of the load as a process of its own, which can be killed and frozen: `python -m roq.tools.chaos.worker PLAN FD`.

It leases tasks of a work queue, or messages of a group, acks most of them, gives some back, prolongs some and leaves some
alone, and writes what it does to a pipe that all workers share: one line in one write, before it asks and after it was
answered. So the order in which lines come out of the pipe is one in which things may have happened, whoever wrote them. Ends
at SIGTERM, and when nobody reads the pipe any more.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from enum import StrEnum
from random import Random

import msgspec

import roq
from roq.errors import LeaseLost, RoqError, TemporaryError
from roq.tools.chaos.history import STAMP
from roq.workqueue.codec import parse_token

LEASE_SECONDS = 4.0
IDLE_SECONDS = 1.0  # so long it waits for the next task at most, then it begins anew
AGAIN_SECONDS = 0.3
PATIENCE_SECONDS = 10.0
WORK_SECONDS = 0.01  # on one task, at most
BIG_EVERY, BIG_BYTES, SMALL_BYTES = 25, 70_000, 100  # payloads from 64 KiB on go straight to a store
TOPICS = 8  # of the recorded queue


class WorkerPlan(msgspec.Struct, frozen=True):
    """address: of a work queue or group. messages: it is a group."""

    address: str
    worker: str
    seed: int
    messages: bool = False


class WorkerEventKind(StrEnum):
    """What happened to a worker."""

    ASKS = "asks"  # for the next task
    NOTHING = "nothing"  # came
    UNKNOWN = "unknown"  # what came of asking
    TOOK = "took"
    SETTLES = "settles"
    SETTLED = "settled"
    LOST = "lost"  # the lease was, so it was not settled
    UNSURE = "unsure"  # whether it was settled
    FAILED = "failed"  # an error that no fault explains
    ENDED = "ended"  # the process, as its starter saw it


class WorkerEvent(msgspec.Struct, array_like=True):
    """t, ends: monotonic seconds, which all processes of a machine share; the lease holds until `ends` at least. what: "ack",
    "extend" or "release", or the error. number: of the task or of its publisher's message; 0: nobody sent such a payload."""

    kind: WorkerEventKind
    worker: str
    t: float
    what: str = ""
    publisher: int = 0
    number: int = 0
    order: int = 0  # of the delivery in the log
    ends: float = 0.0
    topic: str = ""
    id: str = ""


def task_payload(number: int) -> bytes:
    """Of the task with this number."""
    return b"%d " % number + b"x" * (SMALL_BYTES if number % BIG_EVERY else BIG_BYTES)


def message_payload(publisher: int, number: int) -> bytes:
    """Of a message to the recorded queue. publisher: its index in the load."""
    return STAMP.pack(publisher, number) + bytes(SMALL_BYTES)


def message_topic(number: int) -> str:
    """Of a message to the recorded queue."""
    return f"t{number % TOPICS}"


def identify(payload: bytes, *, messages: bool, sequence: int = 0, topic: str = "") -> tuple[int, int]:
    """(publisher, number) of a payload; number 0 if nobody sent that. sequence, topic: of a message."""
    if messages:
        publisher, number = STAMP.unpack_from(payload) if len(payload) >= STAMP.size else (0, 0)
        good = payload == message_payload(publisher, number) and (number, message_topic(number)) == (sequence, topic)
        return (publisher, number) if good else (0, 0)
    digits = payload.partition(b" ")[0]
    number = int(digits) if digits.isdigit() and len(digits) < len(payload) else 0
    return 0, number if payload == task_payload(number) else 0


class ChaosWorker:
    """`await ChaosWorker(plan, tell).run(stop)`."""

    def __init__(self, plan: WorkerPlan, tell: Callable[[WorkerEvent], None]) -> None:
        self._plan, self._tell = plan, tell
        self._random = Random(plan.seed)

    async def run(self, stop: asyncio.Event) -> None:
        """Lease and settle until `stop`."""
        while not stop.is_set():
            try:
                async with roq.open_queue(self._plan.address, patience_seconds=PATIENCE_SECONDS) as queue:
                    while not stop.is_set():
                        await self._lease(queue, stop)
            except TemporaryError:
                self._say(WorkerEventKind.UNKNOWN)
                await asyncio.sleep(AGAIN_SECONDS)

    async def _lease(self, queue: roq.WorkQueue, stop: asyncio.Event) -> None:
        """Until nothing comes for a while."""
        count = self._random.choice((1, 1, 4))
        async with contextlib.aclosing(queue.leases(LEASE_SECONDS, count=count, wait_seconds=IDLE_SECONDS)) as tasks:
            while not stop.is_set():
                self._say(WorkerEventKind.ASKS)
                task = await anext(tasks, None)
                if task is None:
                    self._say(WorkerEventKind.NOTHING)
                    return
                await self._work_on(task)

    async def _work_on(self, task: roq.Task) -> None:
        messages, now = self._plan.messages, time.monotonic()
        publisher, number = identify(task.payload, messages=messages, sequence=task.sequence, topic=task.topic)
        about = publisher, number, parse_token(task.token)[0], now + task.ends_in(now), task.topic, task.id
        self._tell(WorkerEvent(WorkerEventKind.TOOK, self._plan.worker, now, "", *about))
        await asyncio.sleep(self._random.random() * WORK_SECONDS)
        drawn = self._random.random()
        if drawn < 0.03:
            return  # its lease runs out
        if drawn < 0.08:
            await self._settle("release", lambda: task.release(self._random.choice((0.0, 0.5)), error="try it again"), about)
            return
        if drawn < 0.13 and not await self._settle("extend", lambda: task.extend(LEASE_SECONDS), about):
            return
        await self._settle("ack", task.ack, about)

    async def _settle(self, what: str, call: Callable[[], object], about: tuple[int, int, int, float, str, str]) -> bool:
        """Whether it was settled."""

        def say(kind: WorkerEventKind) -> None:
            self._tell(WorkerEvent(kind, self._plan.worker, time.monotonic(), what, *about))

        say(WorkerEventKind.SETTLES)
        try:
            await call()  # type: ignore[misc]  # it is awaitable
        except LeaseLost:
            say(WorkerEventKind.LOST)
            return False
        except TemporaryError:
            say(WorkerEventKind.UNSURE)
            return False
        say(WorkerEventKind.SETTLED)
        return True

    def _say(self, kind: WorkerEventKind) -> None:
        self._tell(WorkerEvent(kind, self._plan.worker, time.monotonic()))


async def _main(plan: WorkerPlan, pipe: int) -> None:
    def tell(event: WorkerEvent) -> None:
        os.write(pipe, msgspec.json.encode(event) + b"\n")  # below PIPE_BUF: never mixed with another's

    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    try:
        await ChaosWorker(plan, tell).run(stop)
    except RoqError as error:
        tell(WorkerEvent(WorkerEventKind.FAILED, plan.worker, time.monotonic(), f"{type(error).__name__}: {error}"[:1000]))


if __name__ == "__main__":
    logging.getLogger("roq").setLevel(logging.CRITICAL)  # what fails is what the load counts
    with contextlib.suppress(BrokenPipeError):
        asyncio.run(_main(msgspec.json.decode(sys.argv[1], type=WorkerPlan), int(sys.argv[2])))
