"""`memory:name`: one queue of this process under a name, for all who open it, as long as the process lives.

For programs whose parts speak through a queue, and for their tests. Closing one opening leaves the queue to the others.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from roq.errors import Closed, WorkQueueConflict
from roq.wire.task import NewTask, Settlement, Status, TaskState, TaskView
from roq.wire.work_queue import TaskSettings
from roq.workqueue.contract import Asked, RoundTrip, asked_for, conflict
from roq.workqueue.memory import MemoryQueue

WAIT_SLICE_SECONDS = 0.25  # a close is noticed by a lease that waits

_queues: dict[str, MemoryQueue] = {}
_lock = threading.Lock()


def open_memory(name: str, settings: TaskSettings | Asked | None) -> MemoryQueue | SharedMemory:
    """The queue of this name, or one of its own for an empty name."""
    return SharedMemory(name, settings) if name else MemoryQueue(settings)


class SharedMemory:
    """A Backend: one opening of a named queue. settings: None takes it as it is."""

    def __init__(self, name: str, settings: TaskSettings | Asked | None) -> None:
        with _lock:
            self._queue = _queues.setdefault(name, MemoryQueue(settings))
        if differing := conflict(asked_for(settings), self._queue.settings):
            raise WorkQueueConflict(f"memory:{name} exists with {differing}")
        self.settings = self._queue.settings
        self._closed = False

    @property
    def _open(self) -> MemoryQueue:
        if self._closed:
            raise Closed("this work queue is closed")
        return self._queue

    def put(self, tasks: Sequence[NewTask]) -> list[str]:
        """See MemoryQueue.put."""
        return self._open.put(tasks)

    def lease(self, seconds: float, count: int, wait_seconds: float, settle: Sequence[Settlement] = ()) -> RoundTrip:
        """See MemoryQueue.lease."""
        deadline = time.monotonic() + wait_seconds
        settled, tasks, _ = self._open.lease(seconds, count, min(wait_seconds, WAIT_SLICE_SECONDS), settle)
        while not tasks and (left := deadline - time.monotonic()) > 0:
            tasks = self._open.lease(seconds, count, min(left, WAIT_SLICE_SECONDS)).tasks
        return RoundTrip(settled, tasks)

    def settle(self, settlements: Sequence[Settlement]) -> list[str | None]:
        """See MemoryQueue.settle."""
        return self._open.settle(settlements)

    def release_all(self) -> int:
        """See MemoryQueue.release_all."""
        return self._open.release_all()

    def peek(self, state: TaskState, count: int) -> list[TaskView]:
        """See MemoryQueue.peek."""
        return self._open.peek(state, count)

    def purge(self) -> int:
        """See MemoryQueue.purge."""
        return self._open.purge()

    def status(self) -> Status:
        """See MemoryQueue.status."""
        return self._open.status()

    def requeue_dead(self, ids: Sequence[str] | None) -> int:
        """See MemoryQueue.requeue_dead."""
        return self._open.requeue_dead(ids)

    def remove_dead(self, ids: Sequence[str] | None) -> int:
        """See MemoryQueue.remove_dead."""
        return self._open.remove_dead(ids)

    def close(self) -> None:
        """Leave the queue to the others."""
        self._closed = True
