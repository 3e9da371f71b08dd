"""memory: a work queue in this process, for tests and for programs that need no more. Nothing outlives the process.

The same fold as the durable backends, without a log. There is no thread of its own: every verb first ends what is over, and a
lease that waits sleeps until something is due, then does it.

A signal handler that raises (Ctrl-C, an alarm) may break off a verb anywhere. A lease that waits gives back what it was given.
If it hits the few microseconds in which the state changes, there is no log to make it anew from: every later verb is refused.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from queue import Empty, SimpleQueue
from threading import Lock

from roq.errors import Closed, InvalidConfiguration, StorageFailed
from roq.ids import new_id
from roq.wire.work_queue import TaskSettings
from roq.workqueue import desk
from roq.workqueue.contract import Asked, Leased, NewTask, Settlement, Status, TaskState, TaskView, asked_for, of_new
from roq.workqueue.effects import Effect, TasksChanged, TasksDelivered
from roq.workqueue.records import (
    Cancel,
    Configure,
    Payload,
    Pop,
    Purge,
    Record,
    ReleaseAll,
    RemoveDead,
    Requeue,
    RequeueDead,
    Tick,
)
from roq.workqueue.state import State

EXPIRED_AT_ONCE = 1000  # leases ended before a verb goes on
CLOCK_STEP = 0.001  # seconds; what is due then is over for a clock in whole milliseconds


class MemoryQueue:
    """A Backend. settings: what it was made with."""

    def __init__(self, settings: TaskSettings | Asked | None = None) -> None:
        self.settings = of_new(asked_for(settings))
        self._desk = desk.Desk(new_id())
        self._state = State()
        self._lock = Lock()
        self._sleepers: dict[int, SimpleQueue[None]] = {}  # by nonce of a Pop in line
        self._answers: dict[int, TasksDelivered] = {}  # by nonce
        self._epoch = time.time() - time.monotonic()  # a stepped clock ends no lease
        self._closed = False
        self._whole = True  # False: a change was broken off
        self._apply(Configure(self._now(), self.settings, 0))

    # --- tasks --------------------------------------------------------------------------------------------------------

    def put(self, tasks: Sequence[NewTask]) -> list[str]:
        """Store tasks, all or none; their ids."""
        with self._lock:
            pushes = self._desk.put(tasks, self.settings, self._now_open())
            return [desk.put_id(push, self._apply(push)) for push in pushes]

    def lease(
        self, seconds: float, count: int, wait_seconds: float, settle: Sequence[Settlement] = ()
    ) -> tuple[list[str | None], list[Leased]]:
        """First `settle`, then up to `count` tasks."""
        pop: Pop | None = None
        deadline = time.monotonic() + min(wait_seconds, desk.WAIT_SECONDS_MAX)
        try:
            with self._lock:
                now = self._now_open()
                pop = self._desk.lease(seconds, count, wait_seconds, now)
                settled = self._settle(settle, now)
                self._end_what_is_over(now)
                delivered = self._answer(self._apply(pop), pop.nonce)
                if delivered is None:
                    self._sleepers[pop.nonce] = SimpleQueue()
            if delivered is None:
                delivered = self._wait(pop.nonce, deadline)
            return settled, [desk.leased(one, self._desk.id, _payload(one.task.payload)) for one in delivered.handed]
        except BaseException:
            if pop is not None:
                self._give_up(pop.nonce)
            raise

    def settle(self, settlements: Sequence[Settlement]) -> list[str | None]:
        """Per settlement: the token from now on, "" when the lease is over, None when it was lost before."""
        with self._lock:
            return self._settle(settlements, self._now_open())

    def _settle(self, settlements: Sequence[Settlement], now: int) -> list[str | None]:
        records = [desk.settlement(one, now) for one in settlements]
        return [desk.settled(one, self._apply(record)) for one, record in zip(settlements, records, strict=True)]

    def peek(self, state: TaskState, count: int) -> list[TaskView]:
        """The first tasks of a state."""
        if count < 0:
            raise InvalidConfiguration(f"count is at least 0, got {count}")
        with self._lock:
            self._end_what_is_over(self._now_open())
            return [desk.view(task, state, _payload(task.payload)) for task in self._state.first(state, count)]

    def status(self) -> Status:
        """Counts, as of now."""
        with self._lock:
            now = self._now_open()
            self._end_what_is_over(now)
            return self._state.status(now)

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
        keys = desk.chosen(ids)
        with self._lock:
            return self._count(RequeueDead(self._now_open(), keys))

    def remove_dead(self, ids: Sequence[str] | None) -> int:
        """Forget dead letters; how many."""
        keys = desk.chosen(ids)
        with self._lock:
            return self._count(RemoveDead(self._now_open(), keys))

    def _count(self, command: Record) -> int:
        return sum(effect.tasks for effect in self._apply(command) if type(effect) is TasksChanged)

    def close(self) -> None:
        """Let go; leases that wait end with Closed. What was put is gone."""
        with self._lock:
            self._closed = True
            for bell in self._sleepers.values():
                bell.put(None)

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

    def _apply(self, record: Record) -> Sequence[Effect]:
        self._whole = False
        due = self._state.next_due() if self._sleepers else None
        effects = self._state.apply(record)
        if self._sleepers:
            self._wake(effects, due)
        self._whole = True
        return effects

    def _wake(self, effects: Sequence[Effect], due: int | None) -> None:
        for effect in effects:
            if type(effect) is TasksDelivered and effect.nonce in self._sleepers:
                self._answers[effect.nonce] = effect
                self._sleepers[effect.nonce].put(None)
        sooner = self._state.next_due()
        if sooner is not None and (due is None or sooner < due):
            next(iter(self._sleepers.values())).put(None)  # one that looks at the clock is enough

    def _end_what_is_over(self, now: int) -> None:
        self._whole = False
        over = self._state.expired(now, EXPIRED_AT_ONCE)
        self._whole = True
        for requeue in over:
            self._apply(requeue)
        self._apply(Tick(now))

    def _answer(self, effects: Sequence[Effect], nonce: int) -> TasksDelivered | None:
        return next((one for one in effects if type(one) is TasksDelivered and one.nonce == nonce), None)

    # --- waiting, without the lock ------------------------------------------------------------------------------------

    def _wait(self, nonce: int, deadline: float) -> TasksDelivered:
        """Sleep until this Pop is answered, or its time is over."""
        bell = self._sleepers[nonce]
        while True:
            with self._lock:
                self._check_whole()
                self._end_what_is_over(self._now())
                left = deadline - time.monotonic()
                if nonce not in self._answers and (self._closed or left <= 0):
                    self._apply(Cancel(self._now(), self._desk.id, nonce))
                if nonce in self._answers:
                    answer = self._leave_line(nonce)
                    break
                due = self._state.next_due()
                seconds = left if due is None else min(left, max(due - self._now(), 0) / 1000 + CLOCK_STEP)
            with contextlib.suppress(Empty):
                bell.get(timeout=seconds)
        if self._closed and not answer.handed:
            raise Closed("the work queue was closed")
        return answer

    def _leave_line(self, nonce: int) -> TasksDelivered:
        """The answer to a Pop, nothing if there is none yet. Lock held."""
        if self._sleepers.pop(nonce, None) is not None and self._sleepers:
            next(iter(self._sleepers.values())).put(None)  # it may have to look at the clock in our place
        return self._answers.pop(nonce, TasksDelivered(self._desk.id, nonce, ()))

    def _give_up(self, nonce: int) -> None:
        """Nobody waits for this Pop any more: leave nothing in line, and nothing leased to nobody."""
        with self._lock:
            self._leave_line(nonce)
            if self._whole:
                now, me = self._now(), self._desk.id
                self._apply(Cancel(now, me, nonce))
                mine = [task for task in self._state.leased.values() if (task.instance, task.nonce) == (me, nonce)]
                for task in mine:
                    self._apply(Requeue(now, task.delivery, me))


def _payload(payload: Payload) -> bytes:
    assert isinstance(payload, bytes)  # nothing is kept elsewhere here
    return payload
