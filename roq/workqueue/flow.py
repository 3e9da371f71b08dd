"""What both faces of a work queue do the same way, written once: the tasks of a `leases` loop, and a worker's handling of one.

Each is a generator that yields what takes time. The asynchronous face yields awaitables, and `awaited` awaits them; in the
plain face the call has been made by then, and `at_once` hands its result back. So the order of things, and what follows an
error, can't differ between the two.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable
from typing import Any, Generic, Protocol, TypeVar

from roq.errors import LeaseLost, StorageFailed, TemporaryError
from roq.runtime.backoff import delays
from roq.wire.task import LeasedTask, Settlement
from roq.workqueue.contract import RoundTrip
from roq.workqueue.handling import Rules, log_failure
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
    """What tasks and their flow need of their queue, of either face; nobody else calls it."""

    address: str
    _keeper: LeaseKeeper

    @property
    def closed(self) -> bool:
        """Whether nothing can be sent any more."""

    def _lease(self, seconds: float, count: int, wait_seconds: float, settle: Settlements = ()) -> Any:
        """One lease, after these settlements: a RoundTrip."""

    def _settle_one(self, target: Target, settlement: Settlement) -> Any:
        """The token from now on."""

    def release_many(self, tasks: Iterable[Any], delay_seconds: float = 0.0, error: str = "") -> Any:
        """Give back."""


class LeaseFlow(Generic[TaskT]):
    """The tasks of one `leases` loop: the current one, and spare ones that came with an ack. `made` makes a face's task;
    `pause(seconds)` waits in a face's way; slice_seconds: the longest that one call waits for tasks."""

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
        if task is not None and not task.settled:
            self._queue._keeper.let_go(task)

    def close_steps(self) -> Steps[int]:
        """Give the spare tasks back; how many."""
        self.ending = True
        self.leave()
        spare, self._spare = list(self._spare), deque()
        if spare and not self._queue.closed:
            yield self._queue.release_many(spare)
        return len(spare)


def handle_steps(
    queue: str, task: Any, handler: Callable[[Any], Any], rules: Rules, pause: Callable[[float], Any]
) -> Steps[str]:
    """A worker's handling of one task; which count of `Work` grows. A handler that is cancelled has its task given back."""
    try:
        yield handler(task)
    except asyncio.CancelledError:
        yield from _settle_steps(task, task.release, pause)
        raise
    except Exception as error:  # noqa: BLE001  a stranger's code: its error is logged and kept with the task
        text = log_failure(queue, task.id, task.attempt, error)
        delay = rules.retry_delay(task.attempt)
        settled = yield from _settle_steps(task, lambda: task.release(delay, text), pause)
        return "failed" if settled else "lost"
    return "done" if (yield from _settle_steps(task, task.ack, pause)) else "lost"


def _settle_steps(task: Any, settle: Callable[[], Any], pause: Callable[[float], Any]) -> Steps[bool]:
    """Tries while the lease holds: the handler's work is not thrown away because a master changes just now."""
    pauses = delays()
    while not task.settled:
        try:
            yield settle()
        except TemporaryError as error:
            if task.lost:
                return False
            logger.warning("task %s can't be settled yet: %s", task.id, error)
            yield pause(next(pauses))
        except LeaseLost:
            logger.warning("task %s: its lease was lost before it was settled; it is or was worked on again", task.id)
            return False
    return True
