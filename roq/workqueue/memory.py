"""memory: a work queue in this process, for tests and for programs that need no more. Nothing outlives the process.

The same fold as the durable backends, without a log. There is no thread of its own: every verb first ends what is over, and a
lease that waits sleeps until something is due, then does it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from threading import Condition, Lock

from roq.errors import Closed, InvalidConfiguration
from roq.ids import new_id
from roq.workqueue import desk
from roq.workqueue.contract import Leased, NewTask, Settings, Settlement, Status, TaskState, TaskView
from roq.workqueue.effects import Counted, Delivered, Effect
from roq.workqueue.records import Cancel, Configure, Payload, Purge, Record, ReleaseAll, RemoveDead, RequeueDead, Tick
from roq.workqueue.state import State

EXPIRED_AT_ONCE = 1000  # leases ended before a verb goes on
CLOCK_STEP = 0.001  # seconds; what is due then is over for a clock in whole milliseconds


class MemoryQueue:
    """A Backend. settings: what it was made with."""

    def __init__(self, settings: Settings | None = None) -> None:
        self.settings = settings or Settings()
        self._desk = desk.Desk(new_id())
        self._state = State()
        self._lock = Lock()
        self._sleepers: dict[int, Condition] = {}  # by nonce of a Pop in line
        self._answers: dict[int, Delivered] = {}  # by nonce
        self._epoch = time.time() - time.monotonic()  # a stepped clock ends no lease
        self._closed = False
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
        with self._lock:
            now = self._now_open()
            pop = self._desk.lease(seconds, count, wait_seconds, now)
            settled = self._settle(settle, now)
            self._end_what_is_over(now)
            delivered = self._answer(self._apply(pop), pop.nonce)
            if delivered is None:
                delivered = self._wait(pop.nonce, time.monotonic() + min(wait_seconds, desk.WAIT_SECONDS_MAX))
            return settled, [desk.leased(one, self._desk.id, _payload(one.task.payload)) for one in delivered.handed]

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
        return sum(effect.tasks for effect in self._apply(command) if type(effect) is Counted)

    def close(self) -> None:
        """Let go; leases that wait end with Closed. What was put is gone."""
        with self._lock:
            self._closed = True
            for sleeper in self._sleepers.values():
                sleeper.notify()

    # --- time and waiting, with the lock held -------------------------------------------------------------------------

    def _now(self) -> int:
        return int((self._epoch + time.monotonic()) * 1000)

    def _now_open(self) -> int:
        if self._closed:
            raise Closed("the work queue was closed")
        return self._now()

    def _apply(self, record: Record) -> Sequence[Effect]:
        due = self._state.next_due() if self._sleepers else None
        effects = self._state.apply(record)
        if self._sleepers:
            self._wake(effects, due)
        return effects

    def _wake(self, effects: Sequence[Effect], due: int | None) -> None:
        for effect in effects:
            if type(effect) is Delivered and effect.nonce in self._sleepers:
                self._answers[effect.nonce] = effect
                self._sleepers[effect.nonce].notify()
        sooner = self._state.next_due()
        if sooner is not None and (due is None or sooner < due):
            next(iter(self._sleepers.values())).notify()  # one that looks at the clock is enough

    def _end_what_is_over(self, now: int) -> None:
        for requeue in self._state.expired(now, EXPIRED_AT_ONCE):
            self._apply(requeue)
        self._apply(Tick(now))

    def _answer(self, effects: Sequence[Effect], nonce: int) -> Delivered | None:
        return next((one for one in effects if type(one) is Delivered and one.nonce == nonce), None)

    def _wait(self, nonce: int, deadline: float) -> Delivered:
        """Sleep until this Pop is answered, or its time is over."""
        sleeper = self._sleepers[nonce] = Condition(self._lock)
        try:
            while nonce not in self._answers:
                left = deadline - time.monotonic()
                if self._closed or left <= 0:
                    self._apply(Cancel(self._now(), self._desk.id, nonce))
                    break
                due = self._state.next_due()
                sleeper.wait(left if due is None else min(left, max(due - self._now(), 0) / 1000 + CLOCK_STEP))
                self._end_what_is_over(self._now())
            answer = self._answers.pop(nonce)
        finally:
            del self._sleepers[nonce]
            for other in self._sleepers.values():
                other.notify()  # it may have to look at the clock in our place
                break
        if self._closed and not answer.handed:
            raise Closed("the work queue was closed")
        return answer


def _payload(payload: Payload) -> bytes:
    assert isinstance(payload, bytes)  # nothing is kept elsewhere here
    return payload
