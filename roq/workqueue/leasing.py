"""A leased task of the asynchronous queue, and the flow of tasks behind `leases` and `run`.

Not covered: how settlements and leases travel (lanes.py), what renews a lease (lease_keeper.py).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Iterable
from typing import Any, Protocol

from roq.errors import StorageFailed, TemporaryError
from roq.runtime.backoff import delays
from roq.workqueue.contract import Leased
from roq.workqueue.inputs import check_lease
from roq.workqueue.lanes import Trip
from roq.workqueue.lease_keeper import (
    HeldTask,
    LeaseKeeper,
    Wish,
    Wishes,
    done,
    extended,
    raise_lost,
    rejected,
    released,
)

logger = logging.getLogger(__name__)


class TaskSource(Protocol):
    """What tasks and flows need of their queue; nobody else calls it."""

    address: str
    _keeper: LeaseKeeper

    @property
    def closed(self) -> bool:
        """Whether nothing can be sent any more."""

    async def _trip(self, seconds: float, count: int, wait_seconds: float, wishes: Wishes = ()) -> Trip:
        """One lease, after these settlements."""

    async def _settle_one(self, target: HeldTask | str, wish: Wish) -> str:
        """The token from now on."""

    async def release_many(self, tasks: Iterable[Any], delay_seconds: float = 0.0, error: str = "") -> list[Any]:
        """Give back."""


class Task(HeldTask):
    """A leased task: .id .payload .attempt .priority .inserted .expires .token .lost. Settle it once: ack, release or reject.

    Each raises LeaseLost if the lease has ended before.
    """

    __slots__ = ("_flow", "_queue")

    def __init__(self, leased: Leased, seconds: float, asked: float, queue: TaskSource, flow: Prefetch | None = None) -> None:
        super().__init__(leased, seconds, asked)
        self._queue, self._flow = queue, flow

    async def ack(self) -> None:
        """The task is done, durably when this returns."""
        if self._flow is not None and self._flow.goes_on_after(self):
            await self._flow.ack(self)
        else:
            await self._queue._settle_one(self, done)

    async def extend(self, seconds: float) -> None:
        """Keep the lease for `seconds` from now. `leases` and `run` do that by themselves."""
        check_lease(seconds)
        await self._queue._settle_one(self, extended(seconds))

    async def release(self, delay_seconds: float = 0.0, error: str = "") -> None:
        """Give it back, to be leased again after `delay_seconds`. error: why; "" if it was not tried."""
        await self._queue._settle_one(self, released(delay_seconds, error))

    async def reject(self, error: str) -> None:
        """Never try it again: it becomes a dead letter with this error."""
        await self._queue._settle_one(self, rejected(error))

    async def wait_lost(self) -> None:
        """Returns when the lease is lost; never, if it is settled first. For tasks of `leases` and `run`."""
        loop, lost = asyncio.get_running_loop(), asyncio.Event()
        self.watcher = lambda: loop.call_soon_threadsafe(lost.set)
        if not self.lost:
            await lost.wait()


class Prefetch:
    """The tasks of one `leases` loop: the current one, and spare ones that came with an ack."""

    def __init__(self, queue: TaskSource, seconds: float, count: int, wait_seconds: float | None) -> None:
        self._queue, self._seconds, self._count = queue, seconds, count
        self._wait_seconds = float("inf") if wait_seconds is None else wait_seconds
        self._spare: deque[Task] = deque()
        self._current: Task | None = None
        self.ending = False  # fetch nothing more

    async def next(self) -> Task | None:
        """The next task, None when none came in time. While the queue can't be reached, tries again."""
        deadline, pauses = time.monotonic() + self._wait_seconds, delays()
        while not self._spare:
            left = max(0.0, deadline - time.monotonic())
            try:
                self._take(await self._queue._trip(self._seconds, self._count, left))
            except StorageFailed:
                raise  # a person has to look
            except TemporaryError as error:
                pause = next(pauses)
                if time.monotonic() + pause > deadline:
                    raise
                logger.warning("%s: no task for now: %s", self._queue.address, error)
                await asyncio.sleep(pause)
                continue
            if not self._spare:
                return None
        self._current = self._spare.popleft()
        self._current.begun = True
        return self._current

    def _take(self, trip: Trip) -> None:
        tasks = [Task(leased, self._seconds, trip[2], self._queue, self) for leased in trip[1]]
        if tasks:
            self._queue._keeper.hold(tasks)
            self._spare.extend(tasks)

    def goes_on_after(self, task: Task) -> bool:
        """Whether the ack of this task shall bring the next one."""
        return task is self._current and not self._spare and not self.ending and not task.settled

    async def ack(self, task: Task) -> None:
        """Ack and fetch in one trip that does not wait."""
        trip = await self._queue._trip(self._seconds, self._count, 0.0, ((task, done),))
        self._current = None
        self._take(trip)
        if trip[0][0] is None:
            raise_lost(task)

    def leave(self) -> None:
        """The body is through with the current task; if it left it unsettled, its lease runs out."""
        task, self._current = self._current, None
        if task is not None and not task.settled:
            self._queue._keeper.let_go(task)

    async def close(self) -> int:
        """Give the spare tasks back; how many."""
        self.ending = True
        self.leave()
        spare, self._spare = list(self._spare), deque()
        if spare and not self._queue.closed:
            await self._queue.release_many(spare)
        return len(spare)
