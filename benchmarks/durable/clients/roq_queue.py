"""RoQ's work queue through roq.blocking, whatever the address. `leases` acknowledges a task and leases the next in one trip."""

from __future__ import annotations

import roq.blocking
from roq.wire.task import NewTask

LEASE_SECONDS, WAIT_SECONDS = 60.0, 20.0


def prepare(address: str, queue: str) -> None:
    """Create the queue. address: of any scheme, up to the queue's name."""
    with roq.blocking.open_queue(f"{address}{queue}"):
        pass


class RoqQueue:
    """See clients.client."""

    def __init__(self, address: str, queue: str, index: int) -> None:
        self._queue = roq.blocking.open_queue(f"{address}{queue}")
        self._queue.open()
        self._tasks = self._queue.leases(seconds=LEASE_SECONDS)

    def put(self, payload: bytes) -> None:
        self._queue.put(payload)

    def take(self) -> bytes:
        task = next(self._tasks)
        task.ack()
        return task.payload

    def put_many(self, count: int, payload: bytes, window: int) -> None:
        tasks = [NewTask(payload)] * window
        for start in range(0, count, window):
            self._queue.put_many(tasks[: count - start])

    def take_many(self, count: int, window: int) -> None:
        taken = 0
        while taken < count:
            tasks = self._queue.lease(LEASE_SECONDS, count=min(window, count - taken), wait_seconds=WAIT_SECONDS)
            self._queue.ack_many(tasks)
            taken += len(tasks)

    def close(self) -> None:
        self._queue.close()
