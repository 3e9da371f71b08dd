"""A leased task of the asynchronous queue, and the tasks behind `leases` and `run` of both faces, the next one fetched with the
ack of the one before.

What both faces do the same way is written once: a generator that yields what takes time. The asynchronous face yields
awaitables, and `awaited` awaits them; in the plain face the call has been made by then, and `at_once` hands its result back. So
the order of things, and what follows an error, can't differ between the two. Not covered: how settlements and leases travel
(batcher.py), what renews a lease (lease_keeper.py).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable
from typing import Any, Generic, Protocol, TypeVar

from roq.errors import StorageFailed, TemporaryError
from roq.runtime.backoff import delays
from roq.wire.task import LeasedTask, Settlement
from roq.workqueue.contract import RoundTrip
from roq.workqueue.lease_keeper import DONE, HeldTask, LeaseKeeper, Settlements, Target, raise_lost

logger = logging.getLogger(__name__)
T = TypeVar("T")
TaskT = TypeVar("TaskT", bound=HeldTask)
Steps = Generator[Any, Any, T]


def at_once(steps: Steps[T]) -> T:
    """Run the steps of plain code: each has been done when it is yielded."""
    try:
        value = next(steps)
        while True:
            value = steps.send(value)
    except StopIteration as end:
        found: T = end.value
        return found


async def awaited(steps: Steps[T]) -> T:
    """Run the steps of asynchronous code: each is awaited."""
    try:
        step = next(steps)
        while True:
            try:
                value = await step
            except BaseException as error:  # noqa: BLE001  the steps say what follows
                step = steps.throw(error)
            else:
                step = steps.send(value)
    except StopIteration as end:
        found: T = end.value
        return found


class TaskSource(Protocol):
    """What tasks, their prefetch and their transactions need of their queue, of either face; nobody else calls it."""

    address: str
    _keeper: LeaseKeeper

    @property
    def closed(self) -> bool:
        """Whether nothing can be sent any more."""

    def _lease(self, seconds: float, count: int, wait_seconds: float, settle: Settlements = ()) -> Any:
        """One lease, after these settlements: a RoundTrip."""

    def _settle_one(self, target: Target, settlement: Settlement) -> Any:
        """The token from now on."""

    def _commit(self, transaction: Any) -> Any:
        """A CollectedTransaction."""

    def release_many(self, tasks: Iterable[Any], delay_seconds: float = 0.0, error: str = "") -> Any:
        """Give back."""


class TaskPrefetch(Generic[TaskT]):
    """The tasks of one `leases` loop, in the order of things of both faces: the current one, and spare ones that came with an
    ack. `made` makes a face's task; `pause(seconds)` waits in a face's way; slice_seconds: the longest that one call waits for
    tasks."""

    def __init__(
        self,
        queue: TaskSource,
        made: Callable[[LeasedTask[bytes], float], TaskT],
        seconds: float,
        count: int,
        wait_seconds: float | None,
        slice_seconds: float = float("inf"),
    ) -> None:
        self._queue, self._made, self._seconds, self._count = queue, made, seconds, count
        self._wait_seconds = float("inf") if wait_seconds is None else wait_seconds
        self._slice_seconds = slice_seconds
        self._spare: deque[TaskT] = deque()
        self._current: TaskT | None = None
        self.ending = False  # fetch nothing more

    def next_steps(self, pause: Callable[[float], Any]) -> Steps[TaskT | None]:
        """The next task, None when none came in time. While the queue can't be reached, tries again."""
        deadline, pauses = time.monotonic() + self._wait_seconds, delays()
        while not (self._spare or self.ending):
            left = max(0.0, deadline - time.monotonic())
            try:
                self._take((yield self._queue._lease(self._seconds, self._count, min(left, self._slice_seconds))))
            except StorageFailed:
                raise  # a person has to look
            except TemporaryError as error:
                seconds = next(pauses)
                if time.monotonic() + seconds > deadline:
                    raise
                logger.warning("%s: no task for now: %s", self._queue.address, error)
                yield pause(seconds)
                continue
            if not (self._spare or left):
                return None
        return None if self.ending else self.begin()

    def begin(self) -> TaskT | None:
        """The next of the spare tasks, if there is one."""
        if not self._spare or self.ending:
            return None
        self._current = self._spare.popleft()
        self._current.begun = True
        return self._current

    def _take(self, trip: RoundTrip) -> None:
        _, leased, began = trip
        if leased:
            tasks = [self._made(one, began) for one in leased]
            self._queue._keeper.hold(tasks)
            self._spare.extend(tasks)

    def goes_on_after(self, task: HeldTask) -> bool:
        """Whether the ack of this task shall bring the next one."""
        return task is self._current and not self._spare and not self.ending and not task.settled

    def ack_steps(self, task: HeldTask) -> Steps[None]:
        """Ack and fetch in one trip that does not wait."""
        trip = yield self._queue._lease(self._seconds, self._count, 0.0, ((task, DONE),))
        self._current = None
        self._take(trip)
        if trip.settled[0] is None:
            raise_lost(task)

    def leave(self) -> None:
        """The body is through with the current task; if it left it unsettled, its lease runs out."""
        task, self._current = self._current, None
        if task is not None and not (task.settled or task.claimed):
            self._queue._keeper.let_go(task)

    def works_on(self, task: HeldTask) -> bool:
        """Whether the body is still at this task."""
        return task is self._current

    def close_steps(self) -> Steps[int]:
        """Give the spare tasks back; how many."""
        self.ending = True
        self.leave()
        spare, self._spare = list(self._spare), deque()
        if spare and not self._queue.closed:
            yield self._queue.release_many(spare)
        return len(spare)


class QueuedTask(HeldTask):
    """A task with where it came from, of either face: as a transaction that acks it sees it."""

    __slots__ = ("_prefetch", "_queue")
    _queue: TaskSource
    _prefetch: TaskPrefetch[Any] | None


class Task(QueuedTask):
    """A leased task: .id .topic .payload .headers .attempt .priority .inserted .expires .token .lost. Settle it once, by
    ack, release or reject.

    Each raises LeaseLost if the lease has ended before.
    """

    __slots__ = ()
    _prefetch: Prefetch | None

    def __init__(
        self, leased: LeasedTask[bytes], seconds: float, asked: float, queue: TaskSource, prefetch: Prefetch | None = None
    ) -> None:
        super().__init__(leased, seconds, asked)
        self._queue, self._prefetch = queue, prefetch

    async def ack(self) -> None:
        """The task is done, durably when this returns."""
        if self._prefetch is not None and self._prefetch.goes_on_after(self):
            await self._prefetch.ack(self)
        else:
            await self._queue._settle_one(self, DONE)

    async def extend(self, seconds: float) -> None:
        """Keep the lease for `seconds` from now. `leases` and `run` do that by themselves."""
        await self._queue._settle_one(self, Settlement.extend("", seconds))

    async def release(self, delay_seconds: float = 0.0, error: str = "") -> None:
        """Give it back, to be leased again after `delay_seconds`. error: why; "" if it was not tried."""
        await self._queue._settle_one(self, Settlement.release("", delay_seconds, error))

    async def reject(self, error: str) -> None:
        """Never try it again: it becomes a dead letter with this error."""
        await self._queue._settle_one(self, Settlement.reject("", error))

    async def wait_lost(self) -> None:
        """Returns when the lease is lost; never, if it is settled first. For tasks of `leases` and `run`."""
        loop, lost = asyncio.get_running_loop(), asyncio.Event()
        self.watcher = lambda: loop.call_soon_threadsafe(lost.set)
        if not self.lost:
            await lost.wait()


class Prefetch(TaskPrefetch[Task]):
    """Of the asynchronous face."""

    def __init__(self, queue: TaskSource, seconds: float, count: int, wait_seconds: float | None) -> None:
        super().__init__(queue, lambda leased, asked: Task(leased, seconds, asked, queue, self), seconds, count, wait_seconds)

    async def next(self) -> Task | None:
        """The next task, None when none came in time. While the queue can't be reached, tries again."""
        return self.begin() or await awaited(self.next_steps(asyncio.sleep))

    async def ack(self, task: Task) -> None:
        """Ack and fetch in one trip that does not wait."""
        await awaited(self.ack_steps(task))

    async def close(self) -> int:
        """Give the spare tasks back; how many."""
        return await awaited(self.close_steps())
