"""The request codec of a work queue: verbs into records, effects into answers; shared by all backends that fold a log. Pure.

It numbers what one process (or client) writes and checks what it was given; it keeps no task. Whoever uses it appends the
records, applies them, and hands back what `apply` returned for each. Not covered: when to append what (the shells).
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from itertools import count as counter

from roq.errors import CallError, InvalidConfiguration, PayloadTooLarge, TemporaryError
from roq.wire.work_queue import TaskSettings
from roq.workqueue.contract import (
    DEDUP_KEY_BYTES_MAX,
    ERROR_BYTES_MAX,
    LEASE_COUNT_MAX,
    PRIORITIES,
    PUT_COUNT_MAX,
    Ack,
    Extend,
    Leased,
    NewTask,
    Reject,
    Release,
    Settlement,
    TaskState,
    TaskView,
)
from roq.workqueue.fold import Effects, Handed, Known, RecordRefused, Settled, StoredTask
from roq.workqueue.records import (
    POP_SHIFT,
    Cancel,
    Complete,
    DeadLetter,
    Pop,
    Push,
    Record,
    Requeue,
    TaskKey,
)
from roq.workqueue.records import ExtendLease as ExtendRecord

SECONDS_MAX = 10 * 366 * 86_400.0  # of a delay or a lease; more is a mistake
WAIT_SECONDS_MAX = 86_400.0  # a longer wait ends then, with nothing
_TOKEN = re.compile(r"([0-9]{1,19})\.([0-9]{1,4})\.([0-9a-f]{16})")
_ID = re.compile(r"([0-9a-f]{16})-([0-9]{1,19})")


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


def cut_error(text: str) -> str:
    """At most ERROR_BYTES_MAX bytes of an error's text."""
    data = text.encode(errors="replace")
    return data[:ERROR_BYTES_MAX].decode(errors="ignore")


def milliseconds(seconds: float) -> int:
    """Rounded up, so that nothing ends early."""
    return math.ceil(seconds * 1000 - 1e-6)


def check_lease(seconds: float) -> None:
    """Raises InvalidConfiguration."""
    if not 0 < seconds <= SECONDS_MAX:
        raise InvalidConfiguration(f"a lease lasts more than 0 and at most {SECONDS_MAX:.0f} seconds, got {seconds}")


def check_delay(seconds: float) -> None:
    """Raises InvalidConfiguration."""
    if not 0 <= seconds <= SECONDS_MAX:
        raise InvalidConfiguration(f"a delay is 0 to {SECONDS_MAX:.0f} seconds, got {seconds}")


def check_task(task: NewTask, settings: TaskSettings) -> None:
    """Raises PayloadTooLarge or InvalidConfiguration."""
    if len(task.payload) > settings.payload_bytes_max:
        raise PayloadTooLarge(f"a payload has at most {settings.payload_bytes_max} bytes, got {len(task.payload)}")
    if task.delay_seconds:
        check_delay(task.delay_seconds)
    if task.priority and (type(task.priority) is not int or task.priority not in PRIORITIES):
        raise InvalidConfiguration(f"a priority is {PRIORITIES[0]} to {PRIORITIES[-1]}, got {task.priority}")
    if task.dedup_key:
        _check_dedup_key(task.dedup_key)


def _check_dedup_key(key: str) -> None:
    try:
        size = len(key.encode())
    except UnicodeEncodeError as error:
        raise InvalidConfiguration(f"a dedup_key is text, got {key!r}") from error
    if size > DEDUP_KEY_BYTES_MAX:
        raise InvalidConfiguration(f"a dedup_key has at most {DEDUP_KEY_BYTES_MAX} bytes of UTF-8, got {size}")


def numbered(producer: int, first: int, tasks: Sequence[NewTask], settings: TaskSettings, now: int) -> list[Push]:
    """The Pushes of tasks whose numbers the caller chose: first, first + 1, …; put again, they take effect once."""
    if len(tasks) > PUT_COUNT_MAX:
        raise InvalidConfiguration(f"at most {PUT_COUNT_MAX} tasks can be put at once, got {len(tasks)}")
    for task in tasks:
        check_task(task, settings)
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
        if len(tasks) > PUT_COUNT_MAX:
            raise InvalidConfiguration(f"at most {PUT_COUNT_MAX} tasks can be put at once, got {len(tasks)}")
        for task in tasks:
            check_task(task, settings)
        id, numbers = self.id, self._sequences
        return [
            Push(now, id, next(numbers), task.payload, task.priority, milliseconds(task.delay_seconds), task.dedup_key)
            for task in tasks
        ]

    def lease(self, seconds: float, count: int, wait_seconds: float, now: int) -> Pop:
        """The Pop. It waits by itself if wait_seconds is above 0; `cancel` it when that is over, and when nobody wants it."""
        check_lease(seconds)
        if not 1 <= count <= LEASE_COUNT_MAX:
            raise InvalidConfiguration(f"1 to {LEASE_COUNT_MAX} tasks can be leased at once, got {count}")
        if not wait_seconds >= 0:
            raise InvalidConfiguration(f"wait_seconds is at least 0, got {wait_seconds}")
        wait = milliseconds(min(wait_seconds, WAIT_SECONDS_MAX))
        return Pop(now, self.id, next(self._nonces), count, milliseconds(seconds), wait)

    def cancel(self, pop: Pop, now: int) -> Cancel:
        """End a Pop's wait; its answer comes as Delivered, unless it came before."""
        return Cancel(now, pop.instance, pop.nonce)


# --- settlements ------------------------------------------------------------------------------------------------------


def settlement(one: Settlement, now: int) -> Record:
    """The record of a settlement. CallError for what no lease of this kind of work queue can have given."""
    delivery, instance = parse_token(one.token)
    match one:
        case Ack():
            return Complete(now, delivery, instance)
        case Extend(seconds=seconds):
            check_lease(seconds)
            return ExtendRecord(now, delivery, instance, milliseconds(seconds))
        case Release(delay_seconds=delay, error=error):
            check_delay(delay)
            return Requeue(now, delivery, instance, 0, milliseconds(delay), cut_error(error))
        case Reject(error=error):
            return DeadLetter(now, delivery, instance, cut_error(error))


def settled(one: Settlement, effects: Effects) -> str | None:
    """The answer to a settlement: the token from now on, "" when the lease is over, None when it was lost before."""
    if not any(type(effect) is Settled and effect.applied for effect in effects):
        return None
    return one.token if type(one) is Extend else ""


# --- effects into answers ---------------------------------------------------------------------------------------------


def put_id(push: Push, effects: Effects) -> str:
    """The id of the task this Push put, or stands for. TemporaryError: whether it was put is not known."""
    for effect in effects:
        if type(effect) is Known:
            return task_id(effect.task)
        if type(effect) is RecordRefused:
            raise TemporaryError("this put was repeated too late: whether it took effect is unknown")
    return f"{push.producer:016x}-{push.sequence}"


def leased(handed: Handed, instance: int, payload: bytes) -> Leased:
    """The lease as its worker gets it. payload: fetched by the caller where it is kept elsewhere."""
    task = handed.task
    return Leased(
        f"{task.producer:016x}-{task.sequence}",
        token(handed.delivery, instance),
        payload,
        handed.attempt,
        task.priority,
        task.inserted / 1000,
        handed.due / 1000,
    )


def view(task: StoredTask, state: TaskState, payload: bytes) -> TaskView:
    """A task as `peek` shows it."""
    return TaskView(
        id=task_id((task.producer, task.sequence)),
        payload=payload,
        state=state,
        attempts=task.attempts,
        priority=task.priority,
        inserted=task.inserted / 1000,
        due=task.due / 1000,
        error=task.error,
        holder=f"{task.instance:016x}" if task.instance else "",
    )


def chosen(ids: Sequence[str] | None) -> tuple[TaskKey, ...] | None:
    """Ids of dead letters as records name them. CallError: one is no id."""
    return None if ids is None else tuple(parse_task_id(id) for id in ids)
