"""A work queue's fold for its scenarios: every command is a record of a log.

A task is named by its payload; producers and instances are single letters. A delivery is named by its Pop's position in the log
and its place in that (`3.0`). `ack a by=W` concerns the last delivery of `a` to W, whatever became of the task since.
"""

from __future__ import annotations

from collections.abc import Iterator

from roq.wire.task import TaskState
from roq.wire.work_queue import TaskSettings
from roq.workqueue.fold import Dropped, Effect, Known, ManySettled, RecordRefused, Settled, TasksChanged, TasksDelivered
from roq.workqueue.ready import StoredTask
from roq.workqueue.records import (
    POP_SHIFT,
    Cancel,
    Complete,
    Configure,
    DeadLetter,
    ExtendLease,
    InstanceDead,
    Pop,
    Purge,
    Push,
    Record,
    ReleaseAll,
    RemoveDead,
    Requeue,
    RequeueDead,
    Tick,
    decode,
    encode,
)
from roq.workqueue.state import State


class Machine:
    """One producer P unless another one is named; times in milliseconds."""

    def __init__(self) -> None:
        self._state, self._now = State(), 0
        self._numbers: dict[str, int] = {}  # used by producers and instances
        self._last: dict[str, Record] = {}  # Push or Pop by its sender
        self._deliveries: dict[tuple[str, int], int] = {}  # the last one of a payload to an instance

    def check(self) -> None:
        """Invariants, and that a dump leads to the same state."""
        self._state.check()
        assert State.load(self._state.dump()).digest() == self._state.digest()

    def _write(self, record: Record) -> Iterator[str]:
        (record,) = decode(encode([record]))
        if isinstance(record, Push | Pop):
            self._last[chr(record.producer if isinstance(record, Push) else record.instance)] = record
        yield from map(self._shown_effect, self._state.apply(record))

    def _shown_effect(self, effect: Effect) -> str:
        match effect:
            case TasksDelivered(instance, nonce, handed):
                self._deliveries |= {(_payload(one.task), instance): one.delivery for one in handed}
                leases = [
                    f"{_payload(one.task)} as {one.delivery >> POP_SHIFT}.{one.delivery % (1 << POP_SHIFT)}, "
                    f"attempt {one.attempt}, until {one.due}"
                    for one in handed
                ]
                return f"{chr(instance)}'s Pop {nonce} gets {'; '.join(leases) or 'nothing'}"
            case Settled(applied):
                return "applied" if applied else "no effect: it is not that delivery any more"
            case ManySettled(applied):
                return f"applied: {list(applied)}"
            case Known((producer, sequence)):
                return f"known as {chr(producer)}-{sequence}"
            case RecordRefused():
                return "refused"
            case TasksChanged(tasks):
                return f"tasks: {tasks}"
            case Dropped(blob):
                return f"blob dropped: {blob.blob}"

    def _number(self, sender: str) -> int:
        self._numbers[sender] = self._numbers.get(sender, 0) + 1
        return self._numbers[sender]

    # --- records --------------------------------------------------------------------------------------------------------

    def at(self, now: int) -> None:
        """The clock of those who append."""
        self._now = now

    def settings(self, attempts: int = 0, dedup_seconds: float = 300) -> Iterator[str]:
        """Configure."""
        return self._write(Configure(self._now, TaskSettings(attempts, dedup_seconds), self._state.fold.version))

    def put(self, payload: str, by: str = "P", priority: int = 0, delay: int = 0, key: str = "") -> Iterator[str]:
        """Push."""
        return self._write(Push(self._now, ord(by), self._number(by), str(payload).encode(), priority, delay, key))

    def lease(self, by: str, count: int = 1, ms: int = 1000, wait: int = 0) -> Iterator[str]:
        """Pop."""
        return self._write(Pop(self._now, ord(by), self._number(by), count, ms, wait))

    def again(self, sender: str) -> Iterator[str]:
        """The last Push or Pop of this sender is written a second time."""
        return self._write(self._last[sender])

    def ack(self, task: str, by: str) -> Iterator[str]:
        """Complete."""
        return self._write(Complete(self._now, self._deliveries[task, ord(by)], ord(by)))

    def release(self, task: str, by: str, error: str = "", delay: int = 0) -> Iterator[str]:
        """Requeue, by the holder."""
        return self._write(Requeue(self._now, self._deliveries[task, ord(by)], ord(by), 0, delay, error))

    def reject(self, task: str, by: str, error: str) -> Iterator[str]:
        """DeadLetter."""
        return self._write(DeadLetter(self._now, self._deliveries[task, ord(by)], ord(by), error))

    def extend(self, task: str, by: str, ms: int) -> Iterator[str]:
        """ExtendLease."""
        return self._write(ExtendLease(self._now, self._deliveries[task, ord(by)], ord(by), ms))

    def expire(self, now: int) -> Iterator[str]:
        """A shell appends what ends the leases that are over, as its state says now."""
        self._now = now
        for record in self._state.fold.expired(now, 100):
            yield from self._write(record)

    def expiry_of(self, task: str, by: str, due: int) -> Iterator[str]:
        """Requeue by a shell that saw this end of the lease."""
        return self._write(Requeue(self._now, self._deliveries[task, ord(by)], ord(by), due))

    def tick(self, now: int) -> Iterator[str]:
        """Tick."""
        self._now = now
        return self._write(Tick(now))

    def cancel(self, by: str, pop: int) -> Iterator[str]:
        """Cancel."""
        return self._write(Cancel(self._now, ord(by), pop))

    def died(self, instance: str) -> Iterator[str]:
        """InstanceDead."""
        return self._write(InstanceDead(self._now, ord(instance), "the process died"))

    def redrive(self) -> Iterator[str]:
        """RequeueDead, all of them."""
        return self._write(RequeueDead(self._now, None))

    def remove_dead(self) -> Iterator[str]:
        """RemoveDead, all of them."""
        return self._write(RemoveDead(self._now, None))

    def release_all(self) -> Iterator[str]:
        """ReleaseAll."""
        return self._write(ReleaseAll(self._now))

    def purge(self) -> Iterator[str]:
        """Purge."""
        return self._write(Purge(self._now))

    # --- what can be seen -----------------------------------------------------------------------------------------------

    def state(self) -> Iterator[str]:
        """Tasks by state, in order; who waits; when something happens by itself."""
        fold = self._state.fold
        for state in TaskState:
            if tasks := fold.first(state, 100):
                yield f"{state}: {', '.join(self._shown(state, task) for task in tasks)}"
        if self._state.waiters:
            yield f"waiting: {', '.join(f'{chr(key[0])} until {one.until}' for key, one in self._state.waiters.items())}"
        if (due := fold.next_due()) is not None:
            yield f"next due: {due}"
        if fold.completed or fold.removed:
            yield f"completed: {fold.completed}, removed: {fold.removed}"

    def _shown(self, state: TaskState, task: StoredTask) -> str:
        match state:
            case TaskState.DELAYED:
                return f"{_payload(task)} until {task.due}"
            case TaskState.LEASED:
                return f"{_payload(task)} by {chr(task.instance)} until {task.due}"
            case TaskState.DEAD:
                return f"{_payload(task)} after {task.attempts} attempts ({task.error})"
            case TaskState.READY:
                return _payload(task)


def _payload(task: StoredTask) -> str:
    assert isinstance(task.payload, bytes)
    return task.payload.decode()
