"""WorkQueue for plain code: the names of roq/workqueue/queue.py without `await`, straight to the backend.

    with roq.blocking.open_queue("file:///data/tasks") as tasks:
        tasks.put(b"...")
        for task in tasks.leases(seconds=60):
            ...
            task.ack()

No event loop and no other thread is in the way: this is the fast path of a program that does one thing at a time. Objects may
be used from any thread. In `run` the calling thread only waits: for the workers' threads, and for signals. A thread can't be
cancelled: a handler that outlives the grace time goes on, but its task is given back. Leases are renewed by the same thread as
in the asynchronous queue (lease_keeper.py).
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import TypeVar

from roq.errors import Closed, LeaseLost, TemporaryError, WorkQueueNotFound
from roq.wire.headers import Headers
from roq.wire.task import LeasedTask, NewTask, Settlement, Status, TaskState, TaskView
from roq.wire.work_queue import TaskSettings
from roq.workqueue.address import Options, open_backend, without_password
from roq.workqueue.contract import LEASE_COUNT_MAX, Backend, RoundTrip, check_lease, new_task, put_parts
from roq.workqueue.handling import GRACE_SECONDS, Rules, Work, handle_steps, reason
from roq.workqueue.lease_keeper import DONE, HeldTask, LeaseKeeper, LeaseKeepers, Settlements, Target, given_back, raise_lost
from roq.workqueue.prefetch import QueuedTask, TaskPrefetch, at_once
from roq.workqueue.stop_signals import stopped_by_signals
from roq.workqueue.transaction import CollectedTransaction, Failure, commit_all, commit_steps, committing

logger = logging.getLogger(__name__)
Held = TypeVar("Held", bound=HeldTask | str)  # a task, or its token
WAIT_SLICE_SECONDS = 1.0  # one waiting call to the backend; bounds how long `run` takes to stop, and Ctrl-C


class Task(QueuedTask):
    """A leased task: .id .payload .headers .attempt .priority .inserted .expires .token .lost. Settle it once, by ack,
    release or reject.

    Each raises LeaseLost if the lease has ended before.
    """

    __slots__ = ()
    _queue: WorkQueue
    _prefetch: BlockingPrefetch | None

    def __init__(
        self,
        leased: LeasedTask[bytes],
        seconds: float,
        asked: float,
        queue: WorkQueue,
        prefetch: BlockingPrefetch | None = None,
    ) -> None:
        super().__init__(leased, seconds, asked)
        self._queue, self._prefetch = queue, prefetch

    def ack(self) -> None:
        """The task is done, durably when this returns."""
        if self._prefetch is not None and self._prefetch.goes_on_after(self):
            self._prefetch.ack(self)
        else:
            self._queue._settle_one(self, DONE)

    def extend(self, seconds: float) -> None:
        """Keep the lease for `seconds` from now. `leases` and `run` do that by themselves."""
        self._queue._settle_one(self, Settlement.extend("", seconds))

    def release(self, delay_seconds: float = 0.0, error: str = "") -> None:
        """Give it back, to be leased again after `delay_seconds`. error: why; "" if it was not tried."""
        self._queue._settle_one(self, Settlement.release("", delay_seconds, error))

    def reject(self, error: str) -> None:
        """Never try it again: it becomes a dead letter with this error."""
        self._queue._settle_one(self, Settlement.reject("", error))

    def wait_lost(self) -> None:
        """See roq.Task.wait_lost; for a thread of its own."""
        lost = threading.Event()
        self.watcher = lost.set
        if not self.lost:
            lost.wait()


class WorkQueue:
    """See roq.WorkQueue; the same methods, without `await`. Use as a context manager."""

    def __init__(self, address: str, options: Options | None = None) -> None:
        self.address, self._full_address = without_password(address), address
        self._asked = options.checked() if options is not None else None
        self._opened: Backend | None = None
        self._closed = False

    def __enter__(self) -> WorkQueue:
        self.open()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close(reason(error) if isinstance(error, Exception) else "")

    def open(self) -> None:
        """Open, and create it if it is new. Raises InvalidAddress, WorkQueueConflict, WorkQueueNotFound, OSError."""
        self._opened = open_backend(self._full_address, self._asked)
        self._keeper: LeaseKeeper = LeaseKeepers(self._opened.settle)

    def close(self, error: str = "") -> None:
        """Let go. What `leases` and `run` still hold is given back, with `error` if it was worked on; what `lease` gave stays
        leased until it expires."""
        if self._opened is None or self._closed:
            return
        self._closed = True
        try:
            settle = given_back(self._keeper.close(), error)
            for start in range(0, len(settle), LEASE_COUNT_MAX):
                self._keeper.settle(settle[start : start + LEASE_COUNT_MAX])
        except TemporaryError as failure:
            logger.warning("%s: what was held could not be given back and comes back by itself: %s", self.address, failure)
        except WorkQueueNotFound:
            logger.info("%s was removed meanwhile, and with it what was held", self.address)
        finally:
            self._opened.close()

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    @property
    def settings(self) -> TaskSettings:
        """What the queue was created with."""
        return self._backend.settings

    @property
    def _backend(self) -> Backend:
        if self._opened is None or self._closed:
            raise Closed("this work queue is closed" if self._closed else "open this work queue first: with …")
        return self._opened

    # --- putting --------------------------------------------------------------------------------------------------------

    def put(
        self,
        payload: bytes,
        *,
        delay_seconds: float = 0.0,
        priority: int = 0,
        dedup_key: str = "",
        headers: Headers | None = None,
    ) -> str:
        """See roq.WorkQueue.put."""
        return self._backend.put((new_task(payload, delay_seconds, priority, dedup_key, headers),))[0]

    def put_many(self, tasks: Iterable[NewTask | bytes]) -> list[str]:
        """See roq.WorkQueue.put_many."""
        return [task_id for part in put_parts(tasks) for task_id in self._backend.put(part)]

    # --- leasing --------------------------------------------------------------------------------------------------------

    def lease(self, seconds: float = 60.0, count: int = 1, wait_seconds: float = 0.0) -> list[Task]:
        """See roq.WorkQueue.lease."""
        trip = self._lease(seconds, count, wait_seconds)
        return [Task(leased, seconds, trip.began, self) for leased in trip.tasks]

    def leases(self, seconds: float = 60.0, *, count: int = 1, wait_seconds: float | None = None) -> Iterator[Task]:
        """See roq.WorkQueue.leases."""
        check_lease(seconds, count, wait_seconds)
        prefetch = BlockingPrefetch(self, seconds, count, wait_seconds)
        try:
            while (task := prefetch.next()) is not None:
                yield task
                prefetch.leave()
        finally:
            prefetch.close()

    def run(
        self,
        handler: Callable[[Task], object],
        *,
        concurrency: int = 1,
        seconds: float = 60.0,
        wait_seconds: float | None = None,
        grace_seconds: float = GRACE_SECONDS,
        retry_seconds: float = 1.0,
        handle_signals: bool = True,
    ) -> Work:
        """See roq.WorkQueue.run: `handler(task)` in `concurrency` threads. A handler that is not through when the grace time
        ends goes on in its thread, but its task is given back; the program may exit."""
        self._backend  # noqa: B018  raises Closed
        rules = Rules(concurrency, seconds, wait_seconds, grace_seconds, retry_seconds, handle_signals).check()
        return work(self.address, lambda: BlockingPrefetch(self, seconds, 1, wait_seconds), handler, rules)

    def _lease(self, seconds: float, count: int, wait_seconds: float, settle: Settlements = ()) -> RoundTrip:
        """One lease, after these settlements."""
        check_lease(seconds, count, wait_seconds)
        backend = self._backend
        trip = self._keeper.lease(backend.lease, seconds, count, wait_seconds, settle)
        if trip.tasks and self._closed:  # by another thread: nobody is to work on these
            backend.settle([Settlement.release(task.token) for task in trip.tasks])
            raise Closed("this work queue is closed")
        return trip

    # --- settling -------------------------------------------------------------------------------------------------------

    def _settle_one(self, target: Target, settlement: Settlement) -> str:
        """Settle by task or token; the token from now on. Raises LeaseLost."""
        self._backend  # noqa: B018
        token = self._keeper.settle(((target, settlement),))[0]
        return raise_lost(target) if token is None else token

    def _commit(self, transaction: CollectedTransaction) -> None:
        """Raises TransactionAborted, DeadlineExceeded, Overloaded, CallError."""
        sender = committing(self._backend)

        def send() -> list[Failure]:
            return commit_all(self._keeper, self._backend, [transaction])

        at_once(commit_steps(transaction, sender.patience_seconds, send, sender.pause))

    def _settle_many(self, tasks: Iterable[Held], settlement: Settlement) -> list[Held]:
        self._backend  # noqa: B018
        wanted, lost = list(tasks), list[Held]()
        for start in range(0, len(wanted), LEASE_COUNT_MAX):
            part = wanted[start : start + LEASE_COUNT_MAX]
            tokens = self._keeper.settle([(task, settlement) for task in part])
            lost += [task for task, token in zip(part, tokens, strict=True) if token is None]
        return lost

    def ack(self, task: Task | str) -> None:
        """See roq.WorkQueue.ack."""
        if isinstance(task, Task):
            task.ack()
        else:
            self._settle_one(task, DONE)

    def extend(self, task: Task | str, seconds: float) -> str:
        """See roq.WorkQueue.extend."""
        return self._settle_one(task, Settlement.extend("", seconds))

    def release(self, task: Task | str, delay_seconds: float = 0.0, error: str = "") -> None:
        """See roq.WorkQueue.release."""
        self._settle_one(task, Settlement.release("", delay_seconds, error))

    def reject(self, task: Task | str, error: str) -> None:
        """See roq.WorkQueue.reject."""
        self._settle_one(task, Settlement.reject("", error))

    def ack_many(self, tasks: Iterable[Held]) -> list[Held]:
        """See roq.WorkQueue.ack_many."""
        return self._settle_many(tasks, DONE)

    def extend_many(self, tasks: Iterable[Held], seconds: float) -> list[Held]:
        """See roq.WorkQueue.extend_many."""
        return self._settle_many(tasks, Settlement.extend("", seconds))

    def release_many(self, tasks: Iterable[Held], delay_seconds: float = 0.0, error: str = "") -> list[Held]:
        """See roq.WorkQueue.release_many."""
        return self._settle_many(tasks, Settlement.release("", delay_seconds, error))

    def reject_many(self, tasks: Iterable[Held], error: str) -> list[Held]:
        """See roq.WorkQueue.reject_many."""
        return self._settle_many(tasks, Settlement.reject("", error))

    # --- the whole queue ------------------------------------------------------------------------------------------------

    def status(self) -> Status:
        """See roq.WorkQueue.status."""
        return self._backend.status()

    def peek(self, state: TaskState | str = TaskState.READY, count: int = 10) -> list[TaskView]:
        """See roq.WorkQueue.peek."""
        return [view.opened() for view in self._backend.peek(TaskState(state), count)]

    def release_all(self) -> int:
        """See roq.WorkQueue.release_all."""
        return self._backend.release_all()

    def purge(self) -> int:
        """See roq.WorkQueue.purge."""
        return self._backend.purge()

    def dead(self, count: int = 100) -> list[TaskView]:
        """See roq.WorkQueue.dead."""
        return self.peek(TaskState.DEAD, count)

    def requeue_dead(self, ids: Sequence[str] | None = None) -> int:
        """See roq.WorkQueue.requeue_dead."""
        return self._backend.requeue_dead(ids)

    def remove_dead(self, ids: Sequence[str] | None = None) -> int:
        """See roq.WorkQueue.remove_dead."""
        return self._backend.remove_dead(ids)


class BlockingPrefetch(TaskPrefetch[Task]):
    """Of the plain face. One thread, but for `stop`."""

    def __init__(self, queue: WorkQueue, seconds: float, count: int, wait_seconds: float | None) -> None:
        def made(leased: LeasedTask[bytes], asked: float) -> Task:
            return Task(leased, seconds, asked, queue, self)

        super().__init__(queue, made, seconds, count, wait_seconds, WAIT_SLICE_SECONDS)
        self._stopped = threading.Event()

    def stop(self) -> None:
        """Fetch nothing more; a waiting `next` ends with None within a second. From any thread."""
        self.ending = True
        self._stopped.set()

    def next(self) -> Task | None:
        """The next task, None when none came in time. While the queue can't be reached, tries again."""
        return self.begin() or at_once(self.next_steps(self._stopped.wait))

    def ack(self, task: Task) -> None:
        """Ack and fetch in one trip that does not wait."""
        at_once(self.ack_steps(task))

    def close(self) -> int:
        """Give the spare tasks back; how many."""
        return at_once(self.close_steps())


# --- the worker -------------------------------------------------------------------------------------------------------


class _Signalled:
    """A stop signal came."""


class _BlockingWorkers:
    def __init__(
        self, queue: str, prefetch: Callable[[], BlockingPrefetch], handler: Callable[[Task], object], rules: Rules
    ) -> None:
        self._queue, self._handler, self._rules = queue, handler, rules
        self._open = [prefetch() for _ in range(rules.concurrency)]
        self.work = Work()
        self._lock = threading.Lock()  # of `work` and `_current`
        self._current: dict[BlockingPrefetch, Task] = {}  # the task each busy worker is at
        self._events: SimpleQueue[_Signalled | BaseException | None] = SimpleQueue()  # None: a worker has ended

    def signalled(self) -> None:
        """In the signal handler: SimpleQueue.put may be called there."""
        self._events.put(_Signalled())

    def run(self) -> Work:
        """Until there is nothing to do, a signal or a failure."""
        for number, prefetch in enumerate(self._open):
            threading.Thread(target=self._one, args=(prefetch,), name=f"roq-worker-{number}", daemon=True).start()
        left, failure = len(self._open), None
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
        for prefetch in self._open:
            prefetch.stop()
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

    def _one(self, prefetch: BlockingPrefetch) -> None:
        """A worker thread."""
        failure: BaseException | None = None
        try:
            try:
                while (task := prefetch.next()) is not None:
                    self._work_on(prefetch, task)
                    prefetch.leave()
            finally:
                returned = prefetch.close()
                with self._lock:
                    self.work.returned += returned
        except BaseException as error:  # noqa: BLE001  the thread's boundary: raised again in the caller's
            failure = error
        self._events.put(failure)

    def _work_on(self, prefetch: BlockingPrefetch, task: Task) -> None:
        with self._lock:
            self._current[prefetch] = task
        try:
            outcome = at_once(handle_steps(self._queue, task, self._handler, self._rules, time.sleep))
        finally:
            with self._lock:
                del self._current[prefetch]
        with self._lock:
            self.work.count(outcome)


def work(queue: str, prefetch: Callable[[], BlockingPrefetch], handler: Callable[[Task], object], rules: Rules) -> Work:
    """Run a worker on this queue's address; see WorkQueue.run."""
    workers = _BlockingWorkers(queue, prefetch, handler, rules)
    if not rules.handle_signals:
        return workers.run()
    with stopped_by_signals(workers.signalled):
        return workers.run()


def open_queue(  # noqa: PLR0913  one argument per option
    address: str,
    *,
    max_attempts: int | None = None,
    dedup_seconds: float | None = None,
    payload_bytes_max: int | None = None,
    write_quorum: int | None = None,
    ack_quorum: int | None = None,
    standbys: int | None = None,
    inline_bytes: int | None = None,
    patience_seconds: float | None = None,
    ack_sync_seconds: float | None = None,
    trust_functions: bool | None = None,
    shards: int | None = None,
) -> WorkQueue:
    """See roq.open_queue."""
    return WorkQueue(
        address,
        Options(
            max_attempts,
            dedup_seconds,
            payload_bytes_max,
            write_quorum,
            ack_quorum,
            standbys,
            inline_bytes,
            patience_seconds,
            ack_sync_seconds,
            trust_functions,
            shards,
        ),
    )
