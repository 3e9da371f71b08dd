"""A leased task of the asynchronous queue, and the tasks behind its `leases` and `run`.

Not covered: how settlements and leases travel (lanes.py), what renews a lease (lease_keeper.py).
"""

from __future__ import annotations

import asyncio

from roq.wire.task import LeasedTask, Settlement
from roq.workqueue.flow import LeaseFlow, TaskSource, awaited
from roq.workqueue.lease_keeper import DONE, HeldTask


class Task(HeldTask):
    """A leased task: .id .payload .attempt .priority .inserted .expires .token .lost. Settle it once: ack, release or reject.

    Each raises LeaseLost if the lease has ended before.
    """

    __slots__ = ("_flow", "_queue")

    def __init__(
        self, leased: LeasedTask[bytes], seconds: float, asked: float, queue: TaskSource, flow: Prefetch | None = None
    ) -> None:
        super().__init__(leased, seconds, asked)
        self._queue, self._flow = queue, flow

    async def ack(self) -> None:
        """The task is done, durably when this returns."""
        if self._flow is not None and self._flow.goes_on_after(self):
            await self._flow.ack(self)
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


class Prefetch(LeaseFlow[Task]):
    """The flow of the asynchronous face (flow.py)."""

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
