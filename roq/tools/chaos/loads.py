"""What all loads have in common, and what the task and message loads write into a history about their workers."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from types import TracebackType
from typing import NamedTuple, Protocol

import roq
from roq.client.cluster import Cluster
from roq.errors import RoqError
from roq.pubsub.publisher import Publisher
from roq.tools.chaos.edn import EdnHistory, OperationType
from roq.tools.chaos.verdict import LoadVerdict
from roq.tools.chaos.worker import WorkerEvent, WorkerEventKind
from roq.tools.chaos.workers import WorkerProcesses

AGAIN_SECONDS = 0.3  # after an error that passes
LOOK_SECONDS = 0.3  # between two looks at whether all is done
ANSWER_SECONDS = 10.0  # one look
ANSWERS = {
    WorkerEventKind.SETTLED: OperationType.OK,
    WorkerEventKind.LOST: OperationType.FAIL,
    WorkerEventKind.UNSURE: OperationType.INFO,
}


class LoadContext(NamedTuple):
    """What a load stands on. seed: the same one makes the same payloads and pauses, not the same run. clocks_move: of hosts."""

    client: Cluster
    zookeeper: str
    pool: WorkerProcesses
    history: EdnHistory
    seed: int
    clocks_move: bool


class ChaosLoad(Protocol):
    """`async with load:` flows from then on until `stop`; then `drain`, then leave."""

    failures: list[str]  # what a client met that it should not have

    def unhealthy(self) -> list[str]:
        """Clients that are not ready now."""

    async def stop(self, timeout_seconds: float) -> None:
        """Hand over nothing more; what was handed over is confirmed, if that can be had within the time."""

    async def drain(self, timeout_seconds: float) -> None:
        """Until nothing is left to be done, for so long at most."""


class JudgedLoad(ChaosLoad, Protocol):
    """One that has workers, or does other work, and judges it by itself."""

    async def __aenter__(self) -> JudgedLoad:
        """It flows."""

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        """It ends at once."""

    def verdict(self) -> LoadVerdict:
        """What became of it all. After `drain`, and when the workers have ended."""


class ClientsLoad:
    """What loads with clients in this process are built on. `_producing`: tasks that hand over until `_ending`; `_following`:
    tasks that go on until the load is left; `_open`: what is closed then; publishers: what they are called."""

    def __init__(self, publishers: str = "") -> None:
        self.failures: list[str] = []
        self._called = publishers
        self._publishers: list[Publisher] = []
        self._ending = asyncio.Event()
        self._producing: list[asyncio.Task[None]] = []
        self._following: list[asyncio.Task[None]] = []
        self._open = AsyncExitStack()

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._ending.set()
        tasks = [*self._producing, *self._following]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._open.aclose()

    async def _close(self, at: int) -> None:
        """The publisher with this number; one that can't be is a failure."""
        try:
            await self._publishers[at].close()
        except RoqError as error:
            self._failed(f"{self._called} {at} closing", error)

    def _failed(self, who: str, error: RoqError) -> None:
        self.failures.append(f"{who}: {type(error).__name__}: {error}")

    def unhealthy(self) -> list[str]:
        """Publishers that are not ready now; whoever works on a work queue tries again."""
        named = [(f"{self._called} {at}", one.health()) for at, one in enumerate(self._publishers)]
        return [f"{name}: {', '.join(health.problems)}" for name, health in named if not health.ready]


async def end_tasks(tasks: list[asyncio.Task[None]], timeout_seconds: float) -> list[str]:
    """Wait for them, and cancel those that take longer; what went wrong, in words."""
    if not tasks:
        return []
    done, late = await asyncio.wait(tasks, timeout=timeout_seconds)
    for task in late:
        task.cancel()
    await asyncio.gather(*late, return_exceptions=True)
    wrong = [f"{task.get_name()} was stuck for {timeout_seconds:g} s" for task in late]
    for task in done:
        if not task.cancelled() and (error := task.exception()) is not None:
            if not isinstance(error, RoqError):
                raise error
            wrong.append(f"{task.get_name()}: {type(error).__name__}: {error}")
    return wrong


async def await_empty(
    address: str, timeout_seconds: float, nothing_missing: Callable[[], bool], *, group: bool
) -> roq.Status | None:
    """Until a work queue, or a group, has nothing to do any more and nothing is missing; its counts at last, None if it gave
    none. (A group may not have seen yet what was stored a moment ago.)"""
    status: roq.Status | None = None
    until = time.monotonic() + timeout_seconds
    while time.monotonic() < until:
        with contextlib.suppress(RoqError):
            async with roq.open_queue(address, patience_seconds=ANSWER_SECONDS) as queue:
                while time.monotonic() < until:
                    status = await queue.status()
                    if is_empty(status, group=group) and nothing_missing():
                        return status
                    await asyncio.sleep(LOOK_SECONDS)
        await asyncio.sleep(AGAIN_SECONDS)
    return status


def is_empty(status: roq.Status, *, group: bool) -> bool:
    """Nothing is left to be done, and all that is stored is in the group."""
    return not (status.ready or status.delayed or status.leased) and (not group or status.behind_seconds == 0.0)


def write_event(history: EdnHistory, event: WorkerEvent, *, messages: bool) -> None:
    """A worker's event as operations: `lease`, and `dequeue` or `deliver` for the ack of a task or message."""
    match event.kind:
        case WorkerEventKind.ASKS:
            history.invoke(event.worker, "lease", None, event.t)
        case WorkerEventKind.TOOK:
            history.complete(event.worker, OperationType.OK, event.t, _value(event, messages=messages))
        case WorkerEventKind.NOTHING:
            history.complete(event.worker, OperationType.FAIL, event.t)
        case WorkerEventKind.SETTLES:
            acks = "deliver" if messages else "dequeue"
            history.invoke(event.worker, acks if event.what == "ack" else event.what, _value(event, messages=messages), event.t)
        case WorkerEventKind.SETTLED | WorkerEventKind.LOST | WorkerEventKind.UNSURE:
            history.complete(event.worker, ANSWERS[event.kind], event.t)
        case _:  # it is gone, and what came of it is unknown
            history.complete(event.worker, OperationType.INFO, event.t)


def _value(event: WorkerEvent, *, messages: bool) -> object:
    return [event.publisher, event.number] if messages else event.number
