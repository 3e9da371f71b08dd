"""Work: what `run` does with a task and its handler's outcome, for both faces, and the asynchronous worker.

Each of `concurrency` coroutines takes tasks from a prefetch of its own; acks and leases of all of them travel together. On
SIGTERM or SIGINT the idle ones end at once, the busy ones have their grace time. A second signal ends the grace. Not covered:
renewal (lease_keeper.py), whose the signals are (stop_signals.py), the plain worker (blocking_queue.py).
"""

from __future__ import annotations

import asyncio
import math
import random
import traceback
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from roq.errors import InvalidConfiguration, LeaseLost, TemporaryError
from roq.runtime import observe
from roq.runtime.backoff import delays
from roq.wire.task import ERROR_BYTES_MAX
from roq.workqueue.contract import check_lease
from roq.workqueue.prefetch import Prefetch, Steps, Task, awaited
from roq.workqueue.stop_signals import stopped_by_signals

logger = observe.logger(__name__)
RETRY_SECONDS_MAX = 300.0  # longest back-off of a task that fails again and again
GRACE_SECONDS = 10.0  # default time a handler has to finish once the worker was told to stop
CONCURRENCY_MAX = 10_000
PART_CHARACTERS = 512  # of one frame or message of a traceback: a huge message must not push out the place


class Work(msgspec.Struct):
    """What a `run` did. failed: handlers that raised; their tasks were given back. lost: leases that ended before their
    handler did. returned: tasks given back untried or unfinished because the worker stopped. stopped: by a signal."""

    done: int = 0
    failed: int = 0
    lost: int = 0
    returned: int = 0
    stopped: bool = False

    def count(self, outcome: str) -> None:
        """One more that is `done`, `failed` or `lost`."""
        setattr(self, outcome, getattr(self, outcome) + 1)


class Rules(msgspec.Struct, frozen=True):
    """How a worker works. wait_seconds: end when there was nothing to do for so long; None: never. handle_signals: SIGTERM and
    SIGINT stop it."""

    concurrency: int = 1
    seconds: float = 60.0
    wait_seconds: float | None = None
    grace_seconds: float = GRACE_SECONDS
    retry_seconds: float = 1.0
    handle_signals: bool = True

    def check(self) -> Rules:
        """Itself. Raises InvalidConfiguration."""
        check_lease(self.seconds, 1, self.wait_seconds)
        if not 1 <= self.concurrency <= CONCURRENCY_MAX:
            raise InvalidConfiguration(f"concurrency is 1 to {CONCURRENCY_MAX}, got {self.concurrency}")
        if not (self.grace_seconds >= 0 and self.retry_seconds >= 0):
            raise InvalidConfiguration("grace_seconds and retry_seconds are at least 0")
        return self

    def retry_delay(self, attempt: int) -> float:
        """Seconds until a task is tried again whose attempt number `attempt` failed: doubling, with jitter."""
        if not self.retry_seconds:
            return 0.0
        doublings = min(attempt - 1, max(0, math.ceil(math.log2(RETRY_SECONDS_MAX / self.retry_seconds))))
        return min(RETRY_SECONDS_MAX, self.retry_seconds * 2.0**doublings) * random.uniform(0.75, 1.25)


def reason(error: BaseException) -> str:
    """The text kept with a failed task: one line that tells what, then where."""
    what = f"{type(error).__name__}: {error}".split("\n", 1)[0][: ERROR_BYTES_MAX // 4]
    parts = traceback.format_exception(error)
    where = "".join(part if len(part) <= PART_CHARACTERS else f"{part[:PART_CHARACTERS]}…\n" for part in parts)
    return f"{what}\n\n{where[-ERROR_BYTES_MAX // 2 :]}"


def log_failure(queue: str, task: str, attempt: int, error: Exception) -> str:
    """One log line with the traceback, cut to ERROR_BYTES_MAX characters; the text to keep with the task."""
    text = reason(error)
    fields = {"queue": queue, "task": task, "attempt": attempt, "error": text}
    logger.warning("handler failed", extra={"fields": fields})
    return text


# --- one task ---------------------------------------------------------------------------------------------------------


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


# --- the asynchronous worker ------------------------------------------------------------------------------------------


class _Workers:
    def __init__(
        self, queue: str, prefetch: Callable[[], Prefetch], handler: Callable[[Task], Awaitable[object]], rules: Rules
    ) -> None:
        self._queue, self._prefetch, self._handler, self._rules = queue, prefetch, handler, rules
        self.work = Work()
        self._open: list[Prefetch] = []
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
        for one in self._open:
            one.ending = True
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
        prefetch = self._prefetch()
        self._open.append(prefetch)
        me = asyncio.current_task()
        assert me is not None
        try:
            while not self._stop.is_set() and (task := await prefetch.next()) is not None:
                self._busy.add(me)
                try:
                    await self._handle(task)
                finally:
                    self._busy.discard(me)
                prefetch.leave()
        finally:
            unbegun = await prefetch.close()
            self.work.returned += unbegun

    async def _handle(self, task: Task) -> None:
        steps = handle_steps(self._queue, task, self._handler, self._rules, asyncio.sleep)
        try:
            self.work.count(await awaited(steps))
        except asyncio.CancelledError:
            self.work.returned += 1
            raise


async def work(
    queue: str, prefetch: Callable[[], Prefetch], handler: Callable[[Task], Awaitable[object]], rules: Rules
) -> Work:
    """Run a worker on this queue's address; see WorkQueue.run."""
    workers = _Workers(queue, prefetch, handler, rules)
    if not rules.handle_signals:
        return await workers.run()
    loop = asyncio.get_running_loop()

    def stop() -> None:
        loop.call_soon_threadsafe(workers.signalled)

    with stopped_by_signals(stop, loop):
        return await workers.run()
