"""The request codec of a work queue: verbs into records, effects into answers; shared by all backends that fold a log. Pure.

It numbers what one process (or client) writes and checks what it was given; it keeps no task. Whoever uses it appends the
records, applies them, and hands back what `apply` returned for each. Not covered: when to append what (the shells).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from itertools import count as counter
from typing import Any, TypeVar

from roq.errors import CallError, InvalidConfiguration, TemporaryError
from roq.wire.task import (
    ACK,
    EXTEND,
    REJECT,
    RELEASE,
    SECONDS_MAX,
    LeasedTask,
    NewTask,
    PayloadReference,
    Settlement,
    TaskState,
    TaskView,
    cut_error,
    milliseconds,
)
from roq.wire.work_queue import TaskSettings
from roq.workqueue.contract import check_lease, check_put
from roq.workqueue.fold import APPLIED, Effects, Fold, Handed, Known, RecordRefused, Settled
from roq.workqueue.ready import StoredTask
from roq.workqueue.records import (
    POP_SHIFT,
    Cancel,
    Complete,
    CompleteMany,
    DeadLetter,
    ExtendLease,
    Pop,
    Push,
    Requeue,
    TaskKey,
)

MILLISECONDS_MAX = round(SECONDS_MAX * 1000)
WAIT_SECONDS_MAX = 86_400.0  # a longer wait ends then, with nothing
LEAST_MS = 1000  # lease of a Pop that asks for nothing
_TOKEN = re.compile(r"([0-9]{1,19})\.([0-9]{1,4})\.([0-9a-f]{16})")
_ID = re.compile(r"([0-9a-f]{16})-([0-9]{1,19})")

PayloadT = TypeVar("PayloadT", bound=bytes | PayloadReference)
ViewT = TypeVar("ViewT", bound=TaskView)


def task_id(key: TaskKey) -> str:
    """A task's id as users see it: `<producer, 16 hex>-<sequence>`."""
    return f"{key[0]:016x}-{key[1]}"


def parse_task_id(id: str) -> TaskKey:
    """What `task_id` wrote. CallError: it did not."""
    match = _ID.fullmatch(id)
    if match is None:
        raise CallError(f"{id!r} is not the id of a task of this kind of work queue")
    return int(match[1], 16), int(match[2])


def token(delivery: int, instance: int) -> str:
    """The right of one delivery: `<LSN of the Pop>.<place in it>.<instance, 16 hex>`."""
    return f"{delivery >> POP_SHIFT}.{delivery & ((1 << POP_SHIFT) - 1)}.{instance:016x}"


def parse_token(text: str) -> tuple[int, int]:
    """Delivery and instance. CallError: no token of this kind of work queue."""
    match = _TOKEN.fullmatch(text)
    if match is None or int(match[2]) >> POP_SHIFT or int(match[1]) >> (64 - POP_SHIFT):
        raise CallError(f"{text!r} is not the token of a lease of this kind of work queue")
    return int(match[1]) << POP_SHIFT | int(match[2]), int(match[3], 16)


def numbered(producer: int, first: int, tasks: Sequence[NewTask], settings: TaskSettings, now: int) -> list[Push]:
    """The Pushes of tasks whose numbers the caller chose: first, first + 1, …; put again, they take effect once."""
    check_put(tasks, settings)
    return [
        Push(now, producer, number, task.payload, task.priority, milliseconds(task.delay_seconds), task.dedup_key)
        for number, task in enumerate(tasks, first)
    ]


class RequestCodec:
    """One producer and instance. id: random, 64 bits, for one life only. Any thread: numbers are drawn one by one."""

    def __init__(self, id: int) -> None:
        self.id = id
        self._sequences = counter(1)
        self._nonces = counter(1)

    # --- verbs into records; `now`: ms --------------------------------------------------------------------------------

    def put(self, tasks: Sequence[NewTask], settings: TaskSettings, now: int) -> list[Push]:
        """The Pushes of these tasks, all of them or an error. They are numbered: append them in any order, but do append."""
        check_put(tasks, settings)
        id, numbers = self.id, self._sequences
        return [
            Push(now, id, next(numbers), task.payload, task.priority, milliseconds(task.delay_seconds), task.dedup_key)
            for task in tasks
        ]

    def lease(self, seconds: float, count: int, wait_seconds: float, now: int) -> Pop:
        """The Pop. It waits by itself if wait_seconds is above 0; `cancel` it when that is over, and when nobody wants it."""
        check_lease(seconds, count, wait_seconds)
        wait = milliseconds(min(wait_seconds, WAIT_SECONDS_MAX))
        return Pop(now, self.id, next(self._nonces), count, milliseconds(seconds), wait)

    def nothing(self, now: int) -> Pop:
        """A Pop that asks for no task: it says whose request it ends."""
        return Pop(now, self.id, next(self._nonces), 0, LEAST_MS)

    def cancel(self, pop: Pop, now: int) -> Cancel:
        """End a Pop's wait; its answer comes as Delivered, unless it came before."""
        return Cancel(now, pop.instance, pop.nonce)


# --- settlements ------------------------------------------------------------------------------------------------------


def settlement(one: Settlement, now: int) -> Complete | ExtendLease | Requeue | DeadLetter:
    """The record of a settlement, also of one that no client of ours would send. CallError for what no lease of this kind of
    work queue can have given, or InvalidConfiguration."""
    delivery, instance = parse_token(one.token)
    kind, ms = one.kind, one.milliseconds
    if not 0 <= ms <= MILLISECONDS_MAX:
        raise InvalidConfiguration(f"{ms} ms is out of range")
    if kind == ACK:
        return Complete(now, delivery, instance)
    if kind == EXTEND:
        if not ms:
            raise InvalidConfiguration("a lease is extended by more than 0 ms")
        return ExtendLease(now, delivery, instance, ms)
    if kind == RELEASE:
        return Requeue(now, delivery, instance, 0, ms, cut_error(one.error))
    if kind == REJECT:
        return DeadLetter(now, delivery, instance, cut_error(one.error))
    raise InvalidConfiguration(f"no settlement is of kind {kind}")


def acks(settlements: Sequence[Settlement], now: int) -> CompleteMany | None:
    """One record for all; None: they are not all acks of one instance. CallError as above."""
    runs: list[tuple[int, int]] = []
    first = end = holder = 0
    behind = ""  # the end of the token before, from its second point on
    expected = None  # the token that follows it in its run
    for one in settlements:
        if one.token == expected:
            end += 1
        else:
            if end != first:
                runs.append((first, end - first))
            first, instance = parse_token(one.token)
            if holder and instance != holder:
                return None
            holder, end, behind = instance, first + 1, one.token[one.token.rindex(".") :]
        if one.kind != ACK:
            return None
        expected = f"{end >> POP_SHIFT}.{end & ((1 << POP_SHIFT) - 1)}{behind}"
    if end != first:
        runs.append((first, end - first))
    return CompleteMany(now, holder, tuple(runs))


def settled(one: Settlement, effects: Effects) -> str | None:
    """The answer to a settlement: the token from now on, "" when the lease is over, None when it was lost before."""
    if effects is not APPLIED and not any(type(effect) is Settled and effect.applied for effect in effects):
        return None
    return one.token if one.kind == EXTEND else ""


# --- effects into answers ---------------------------------------------------------------------------------------------


def put_id(push: Push, effects: Effects) -> str:
    """The id of the task this Push put, or stands for. TemporaryError: whether it was put is not known."""
    for effect in effects:
        if type(effect) is Known:
            return task_id(effect.task)
        if type(effect) is RecordRefused:
            raise TemporaryError("this put was repeated too late: whether it took effect is unknown")
    return f"{push.producer:016x}-{push.sequence}"


def inline(task: StoredTask) -> bytes:
    """The payload of a task of a queue that keeps none elsewhere."""
    assert isinstance(task.payload, bytes)
    return task.payload


def leased(handed: Iterable[Handed], instance: int, payload: Callable[[StoredTask], PayloadT]) -> list[LeasedTask[PayloadT]]:
    """What a Pop of this instance got, as its worker gets it."""
    tasks: list[LeasedTask[PayloadT]] = []
    before, behind = "", f".{instance:016x}"
    pop = producer = -1
    prefix = ""
    for delivery, attempt, due, task in handed:
        if delivery >> POP_SHIFT != pop:
            pop = delivery >> POP_SHIFT
            before = f"{pop}."
        if task.producer != producer:
            producer = task.producer
            prefix = f"{producer:016x}-"
        token = f"{before}{delivery & ((1 << POP_SHIFT) - 1)}{behind}"
        id, shown = f"{prefix}{task.sequence}", (payload(task), attempt, task.priority, task.inserted, due, task.topic)
        tasks.append(LeasedTask(id, token, *shown))
    return tasks


def view(kind: type[ViewT], task: StoredTask, state: TaskState, payload: Any) -> ViewT:
    """A task as `peek` shows it. payload: one that this kind of view can have."""
    return kind(
        task_id((task.producer, task.sequence)),
        payload,
        state,
        task.attempts,
        task.priority,
        task.inserted,
        task.due,
        task.error,
        f"{task.instance:016x}" if task.instance else "",
        None,
        task.topic,
    )


def views(fold: Fold, state: TaskState, count: int) -> list[TaskView]:
    """The first tasks of a state, of a queue that keeps no payload elsewhere."""
    return [view(TaskView, task, state, inline(task)) for task in fold.first(state, count)]


def chosen(ids: Sequence[str] | None) -> tuple[TaskKey, ...] | None:
    """Ids of dead letters as records name them. CallError: one is no id."""
    return None if ids is None else tuple(parse_task_id(id) for id in ids)
