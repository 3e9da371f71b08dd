"""memory: a work queue in this process, for tests and for programs that need no more. Nothing outlives the process.

The same fold as the durable backends, without a log. There is no thread of its own: every verb first ends what is over, and a
lease that waits (waiters.py) sleeps until something is due, then does it.

A signal handler that raises (Ctrl-C, an alarm) may break off a verb anywhere. A lease that waits gives back what it was given.
If it hits the few microseconds in which the state changes, there is no log to make it anew from: every later verb is refused.

`memory:name` is one queue under a name, for all who open it, as long as the process lives. Closing one opening leaves it to the
others.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from threading import Lock

from roq.errors import Closed, StorageFailed, WorkQueueConflict
from roq.ids import new_id
from roq.wire.task import NewTask, Settlement, Status, TaskState, TaskView
from roq.wire.work_queue import TaskSettings
from roq.workqueue import codec
from roq.workqueue.contract import Asked, RoundTrip, asked_for, check_peek, conflict, of_new
from roq.workqueue.fold import Effects, Fold, Handed, TasksChanged, TasksDelivered
from roq.workqueue.records import (
    Configure,
    Pop,
    Purge,
    Record,
    ReleaseAll,
    RemoveDead,
    Requeue,
    RequeueDead,
    Tick,
)
from roq.workqueue.waiters import Waiters

EXPIRED_AT_ONCE = 1000  # leases ended before a verb goes on
WAITERS_MAX = 10_000  # threads in a lease that waits; one more is answered at once, with nothing
CLOCK_STEP = 0.001  # seconds; what is due then is over for a clock in whole milliseconds
WAIT_SLICE_SECONDS = 0.25  # a close is noticed by a lease that waits


@dataclass(slots=True)
class _Waiter:
    """A thread in a lease that waits. until: ms. handed: its tasks; wake: look at them, and at the clock."""

    until: int
    lease_ms: int
    handed: tuple[Handed, ...] = ()
    wake: SimpleQueue[None] = field(default_factory=SimpleQueue)


class MemoryQueue:
    """A Backend. settings: what it was made with."""

    def __init__(self, settings: TaskSettings | Asked | None = None) -> None:
        self.settings = of_new(asked_for(settings))
        self._codec = codec.RequestCodec(new_id())
        self._fold = Fold()
        self._lock = Lock()
        self._waiters: Waiters[_Waiter] = Waiters(WAITERS_MAX)
        self._epoch = time.time() - time.monotonic()  # a stepped clock ends no lease
        self._closed = False
        self._whole = True  # False: a change was broken off
        self._apply(Configure(self._now(), self.settings, 0))

    # --- tasks --------------------------------------------------------------------------------------------------------

    def put(self, tasks: Sequence[NewTask]) -> list[str]:
        """Store tasks, all or none; their ids."""
        with self._lock:
            pushes = self._codec.put(tasks, self.settings, self._now_open())
            return [codec.put_id(push, self._apply(push)) for push in pushes]

    def lease(self, seconds: float, count: int, wait_seconds: float, settle: Sequence[Settlement] = ()) -> RoundTrip:
        """First `settle`, then up to `count` tasks."""
        pop: Pop | None = None
        deadline = time.monotonic() + min(wait_seconds, codec.WAIT_SECONDS_MAX)
        try:
            with self._lock:
                now = self._now_open()
                pop = self._codec.lease(seconds, count, wait_seconds, now)
                settled = self._settle(settle, now)
                self._end_what_is_over(now)
                handed, waiter = _handed(self._apply(pop)) if self._fold.ready.count else (), None
                if not handed and pop.wait_ms and not self._waiters.full:
                    waiter = _Waiter(now + pop.wait_ms, pop.lease_ms)
                    self._waiters.add((pop.instance, pop.nonce), waiter)
            if waiter is not None:
                handed = self._wait(pop, waiter, deadline)
            return RoundTrip(settled, codec.leased(handed, self._codec.id, codec.inline))
        except BaseException:
            if pop is not None:
                self._give_up(pop)
            raise

    def settle(self, settlements: Sequence[Settlement]) -> list[str | None]:
        """Per settlement: the token from now on, "" when the lease is over, None when it was lost before."""
        with self._lock:
            return self._settle(settlements, self._now_open())

    def _settle(self, settlements: Sequence[Settlement], now: int) -> list[str | None]:
        records = [codec.settlement(one, now) for one in settlements]
        return [codec.settled(one, self._apply(record)) for one, record in zip(settlements, records, strict=True)]

    def peek(self, state: TaskState, count: int) -> list[TaskView]:
        """The first tasks of a state."""
        check_peek(count)
        with self._lock:
            self._end_what_is_over(self._now_open())
            return codec.views(self._fold, state, count)

    def status(self) -> Status:
        """Counts, as of now."""
        with self._lock:
            now = self._now_open()
            self._end_what_is_over(now)
            return self._fold.status(now)

    # --- commands -----------------------------------------------------------------------------------------------------

    def release_all(self) -> int:
        """Make every leased and delayed task ready; how many."""
        with self._lock:
            return self._count(ReleaseAll(self._now_open()))

    def purge(self) -> int:
        """Remove every task that is not dead; how many."""
        with self._lock:
            return self._count(Purge(self._now_open()))

    def requeue_dead(self, ids: Sequence[str] | None) -> int:
        """Make dead letters ready again; how many."""
        keys = codec.chosen(ids)
        with self._lock:
            return self._count(RequeueDead(self._now_open(), keys))

    def remove_dead(self, ids: Sequence[str] | None) -> int:
        """Forget dead letters; how many."""
        keys = codec.chosen(ids)
        with self._lock:
            return self._count(RemoveDead(self._now_open(), keys))

    def _count(self, command: Record) -> int:
        return sum(effect.tasks for effect in self._apply(command) if type(effect) is TasksChanged)

    def close(self) -> None:
        """Let go; leases that wait end with Closed. What was put is gone."""
        with self._lock:
            self._closed = True
            for waiter in self._waiters.values():
                waiter.wake.put(None)

    # --- time and waiting, with the lock held -------------------------------------------------------------------------

    def _now(self) -> int:
        return int((self._epoch + time.monotonic()) * 1000)

    def _now_open(self) -> int:
        if self._closed:
            raise Closed("the work queue was closed")
        self._check_whole()
        return self._now()

    def _check_whole(self) -> None:
        if not self._whole:
            raise StorageFailed("a signal handler's exception broke off a change of this work queue in memory: open a new one")

    def _apply(self, record: Record) -> Effects:
        self._whole = False
        due = self._fold.next_due() if self._waiters else None
        effects = self._fold.apply(record)
        if self._waiters:
            self._serve(record.now, due)
        self._whole = True
        return effects

    def _serve(self, now: int, due: int | None) -> None:
        """Hand ready tasks to those who wait, one each. due: of the first end before what has just changed."""
        fold, waiters = self._fold, self._waiters
        while waiters and fold.ready.count:
            (instance, nonce), waiter = waiters.take()
            waiter.handed = _handed(fold.apply(Pop(now, instance, nonce, 1, waiter.lease_ms)))
            waiter.wake.put(None)
        sooner = fold.next_due()
        if sooner is not None and (due is None or sooner < due):
            self._wake_first()

    def _wake_first(self) -> None:
        """One that looks at the clock is enough."""
        if self._waiters:
            self._waiters.first().wake.put(None)

    def _end_what_is_over(self, now: int) -> None:
        self._whole = False
        over = self._fold.expired(now, EXPIRED_AT_ONCE)
        self._whole = True
        for requeue in over:
            self._apply(requeue)
        self._apply(Tick(now))

    # --- waiting, without the lock ------------------------------------------------------------------------------------

    def _wait(self, pop: Pop, waiter: _Waiter, deadline: float) -> tuple[Handed, ...]:
        """Sleep until this Pop is given a task, or its time is over."""
        while True:
            with self._lock:
                self._check_whole()
                self._end_what_is_over(self._now())
                left = deadline - time.monotonic()
                if waiter.handed or self._closed or left <= 0:
                    self._waiters.remove((pop.instance, pop.nonce))
                    self._wake_first()  # it may have to look at the clock in our place
                    break
                due = self._fold.next_due()
                seconds = left if due is None else min(left, max(due - self._now(), 0) / 1000 + CLOCK_STEP)
            with contextlib.suppress(Empty):
                waiter.wake.get(timeout=seconds)
        if self._closed and not waiter.handed:
            raise Closed("the work queue was closed")
        return waiter.handed

    def _give_up(self, pop: Pop) -> None:
        """Nobody waits for this Pop any more: leave nothing in line, and nothing leased to nobody."""
        with self._lock:
            self._waiters.remove((pop.instance, pop.nonce))
            self._wake_first()
            if self._whole:
                now = self._now()
                for one in self._fold.held_by(pop.instance, pop.nonce).handed:
                    self._apply(Requeue(now, one.delivery, pop.instance))


def _handed(effects: Effects) -> tuple[Handed, ...]:
    """What the Pop was given that had these effects."""
    return next((one.handed for one in effects if type(one) is TasksDelivered), ())


# --- queues with a name -----------------------------------------------------------------------------------------------

_queues: dict[str, MemoryQueue] = {}
_lock = Lock()


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
