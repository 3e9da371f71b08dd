"""The plain worker behind `roq.blocking`'s `WorkQueue.run`: handlers in threads, signals, and a clean end.

The calling thread only waits: for the workers, and for signals. A thread can't be cancelled: a handler that outlives the grace
time goes on, but its task is given back. Not covered: renewal (lease_keeper.py), whose the signals are (stop_signals.py).
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any, Protocol, TypeVar

from roq.errors import LeaseLost
from roq.workqueue.flow import at_once, handle_steps
from roq.workqueue.handling import Rules, Work
from roq.workqueue.stop_signals import stopped_by_signals

logger = logging.getLogger(__name__)


class BlockingHandled(Protocol):
    """What a worker needs of a task."""

    id: str
    attempt: int

    @property
    def settled(self) -> bool:
        """Acked, released or rejected by the handler."""

    @property
    def lost(self) -> bool:
        """Not ours any more."""

    def ack(self) -> None:
        """Done."""

    def release(self, delay_seconds: float = 0.0, error: str = "") -> None:
        """Give it back."""


TaskT = TypeVar("TaskT", bound=BlockingHandled)
TaskT_co = TypeVar("TaskT_co", bound=BlockingHandled, covariant=True)


class BlockingTaskStream(Protocol[TaskT_co]):
    """Where a worker's tasks come from."""

    def next(self) -> TaskT_co | None:
        """The next task; None: no more."""

    def leave(self) -> None:
        """Through with the current task."""

    def stop(self) -> None:
        """End `next`, from any thread."""

    def close(self) -> int:
        """Give back what was fetched and not begun; how many."""


class _Signalled:
    """A stop signal came."""


class _BlockingWorkers:
    def __init__(
        self, queue: str, flow: Callable[[], BlockingTaskStream[TaskT]], handler: Callable[[TaskT], object], rules: Rules
    ) -> None:
        self._queue, self._handler, self._rules = queue, handler, rules
        self._flows: list[BlockingTaskStream[Any]] = [flow() for _ in range(rules.concurrency)]
        self.work = Work()
        self._lock = threading.Lock()  # of `work` and `_current`
        self._current: dict[BlockingTaskStream[Any], Any] = {}  # the task each busy worker is at
        self._events: SimpleQueue[_Signalled | BaseException | None] = SimpleQueue()  # None: a worker has ended

    def signalled(self) -> None:
        """In the signal handler: SimpleQueue.put may be called there."""
        self._events.put(_Signalled())

    def run(self) -> Work:
        """Until there is nothing to do, a signal or a failure."""
        for number, flow in enumerate(self._flows):
            threading.Thread(target=self._one, args=(flow,), name=f"roq-worker-{number}", daemon=True).start()
        left, failure = len(self._flows), None
        try:
            while left:
                event = self._events.get()
                if isinstance(event, _Signalled):
                    self.work.stopped = True
                    break
                left -= 1
                if event is not None:
                    failure = event
                    break
        finally:  # also when the calling thread is interrupted
            failure = self._wind_up(left) or failure
        if failure is not None:
            raise failure
        return self.work

    def _wind_up(self, left: int) -> BaseException | None:
        """Idle workers end, busy ones have their grace; then their tasks are given back."""
        failure: BaseException | None = None
        for flow in self._flows:
            flow.stop()
        deadline = time.monotonic() + self._rules.grace_seconds
        while left:
            try:
                event = self._events.get(timeout=max(0.0, deadline - time.monotonic()))
            except Empty:
                break
            if isinstance(event, _Signalled):
                break
            left, failure = left - 1, failure or event
        with self._lock:
            unfinished = list(self._current.values())
        for task in unfinished:
            with contextlib.suppress(LeaseLost):
                task.release()
                self.work.returned += 1
        return failure

    def _one(self, flow: BlockingTaskStream[Any]) -> None:
        """A worker thread."""
        failure: BaseException | None = None
        try:
            try:
                while (task := flow.next()) is not None:
                    self._work_on(flow, task)
                    flow.leave()
            finally:
                returned = flow.close()
                with self._lock:
                    self.work.returned += returned
        except BaseException as error:  # noqa: BLE001  the thread's boundary: raised again in the caller's
            failure = error
        self._events.put(failure)

    def _work_on(self, flow: BlockingTaskStream[Any], task: Any) -> None:
        with self._lock:
            self._current[flow] = task
        try:
            outcome = at_once(handle_steps(self._queue, task, self._handler, self._rules, time.sleep))
        finally:
            with self._lock:
                del self._current[flow]
        with self._lock:
            self.work.count(outcome)


def work(queue: str, flow: Callable[[], BlockingTaskStream[TaskT]], handler: Callable[[TaskT], object], rules: Rules) -> Work:
    """Run a worker on this queue's address; see WorkQueue.run."""
    workers = _BlockingWorkers(queue, flow, handler, rules)
    if not rules.handle_signals:
        return workers.run()
    with stopped_by_signals(workers.signalled):
        return workers.run()
