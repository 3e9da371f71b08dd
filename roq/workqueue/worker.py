"""The asynchronous worker behind `WorkQueue.run`: handlers, signals, and a clean end.

Each of `concurrency` coroutines takes tasks from a flow of its own; acks and leases of all of them travel together. On SIGTERM
or SIGINT the idle ones end at once, the busy ones have their grace time. A second signal ends the grace. Not covered: renewal
(lease_keeper.py), whose the signals are (stop_signals.py).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any, Protocol, TypeVar

from roq.workqueue.flow import awaited, handle_steps
from roq.workqueue.handling import Rules, Work
from roq.workqueue.stop_signals import stopped_by_signals

logger = logging.getLogger(__name__)


class Handled(Protocol):
    """What a worker needs of a task."""

    id: str
    attempt: int

    @property
    def settled(self) -> bool:
        """Acked, released or rejected by the handler."""

    @property
    def lost(self) -> bool:
        """Not ours any more."""

    async def ack(self) -> None:
        """Done."""

    async def release(self, delay_seconds: float = 0.0, error: str = "") -> None:
        """Give it back."""


TaskT = TypeVar("TaskT", bound=Handled)
TaskT_co = TypeVar("TaskT_co", bound=Handled, covariant=True)


class TaskStream(Protocol[TaskT_co]):
    """Where a worker's tasks come from."""

    ending: bool

    async def next(self) -> TaskT_co | None:
        """The next task; None: no more."""

    def leave(self) -> None:
        """Through with the current task."""

    async def close(self) -> int:
        """Give back what was fetched and not begun; how many."""


class _Workers:
    def __init__(
        self, queue: str, flow: Callable[[], TaskStream[TaskT]], handler: Callable[[TaskT], Awaitable[object]], rules: Rules
    ) -> None:
        self._queue, self._flow, self._handler, self._rules = queue, flow, handler, rules
        self.work = Work()
        self._flows: list[TaskStream[Any]] = []
        self._busy: set[asyncio.Task[None]] = set()
        self._stop, self._hurry = asyncio.Event(), asyncio.Event()

    def signalled(self) -> None:
        """First: stop. Again: at once."""
        (self._hurry if self._stop.is_set() else self._stop).set()
        self.work.stopped = True

    async def run(self) -> Work:
        """Until there is nothing to do, a signal, a failure or cancellation."""
        workers = [asyncio.create_task(self._one()) for _ in range(self._rules.concurrency)]
        stop = asyncio.create_task(self._stop.wait())
        try:
            waited_for = {stop, *workers}
            while not stop.done() and len(waited_for) > 1:
                ended, waited_for = await asyncio.wait(waited_for, return_when=asyncio.FIRST_COMPLETED)
                for one in ended:
                    one.result()
            await self._wind_up(workers)
        finally:
            for one in (stop, *workers):
                one.cancel()
            results = await asyncio.gather(stop, *workers, return_exceptions=True)
        for result in results:
            if isinstance(result, Exception):
                raise result
        return self.work

    async def _wind_up(self, workers: list[asyncio.Task[None]]) -> None:
        """Idle workers end, busy ones have their grace."""
        for flow in self._flows:
            flow.ending = True
        for worker in workers:
            if worker not in self._busy:
                worker.cancel()
        if self._busy:
            logger.info("worker stops; %d tasks have %.0f s to finish", len(self._busy), self._rules.grace_seconds)
            hurry = asyncio.create_task(self._hurry.wait())
            finished = asyncio.gather(*self._busy, return_exceptions=True)
            await asyncio.wait((hurry, finished), timeout=self._rules.grace_seconds, return_when=asyncio.FIRST_COMPLETED)
            hurry.cancel()

    async def _one(self) -> None:
        flow = self._flow()
        self._flows.append(flow)
        me = asyncio.current_task()
        assert me is not None
        try:
            while not self._stop.is_set() and (task := await flow.next()) is not None:
                self._busy.add(me)
                try:
                    await self._handle(task)
                finally:
                    self._busy.discard(me)
                flow.leave()
        finally:
            unbegun = await flow.close()
            self.work.returned += unbegun

    async def _handle(self, task: Any) -> None:
        steps = handle_steps(self._queue, task, self._handler, self._rules, asyncio.sleep)
        try:
            self.work.count(await awaited(steps))
        except asyncio.CancelledError:
            self.work.returned += 1
            raise


async def work(
    queue: str, flow: Callable[[], TaskStream[TaskT]], handler: Callable[[TaskT], Awaitable[object]], rules: Rules
) -> Work:
    """Run a worker on this queue's address; see WorkQueue.run."""
    workers = _Workers(queue, flow, handler, rules)
    if not rules.handle_signals:
        return await workers.run()
    loop = asyncio.get_running_loop()

    def stop() -> None:
        loop.call_soon_threadsafe(workers.signalled)

    with stopped_by_signals(stop, loop):
        return await workers.run()
