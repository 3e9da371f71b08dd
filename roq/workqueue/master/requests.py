"""Requests as records. What no client of ours would send is refused, before anything is applied: others may ask too. Pure."""

from __future__ import annotations

from roq.errors import InvalidConfiguration
from roq.wire import master as wire
from roq.workqueue import desk
from roq.workqueue.contract import DEDUP_KEY_BYTES_MAX, LEASE_COUNT_MAX, PRIORITIES, PUT_COUNT_MAX
from roq.workqueue.records import Complete, DeadLetter, ExtendLease, Requeue, TaskKey

IDS_MAX = 20_000  # dead letters named at once
MILLISECONDS_MAX = round(desk.SECONDS_MAX * 1000)
ID_MAX, NUMBER_MAX = (1 << 64) - 1, (1 << 62) - 1


def check_put(request: wire.Put) -> None:
    """Raises InvalidConfiguration."""
    if not 0 < request.producer <= ID_MAX or not 0 < request.sequence <= NUMBER_MAX or len(request.tasks) > PUT_COUNT_MAX:
        raise InvalidConfiguration(f"not a put of 1 to {PUT_COUNT_MAX} tasks")


def check_task(task: wire.TaskToPut, length: int, limit: int, blob_bytes: int) -> None:
    """Raises InvalidConfiguration. length: of its payload, from `blob_bytes` on it belongs to the stores."""
    if length > limit or length >= blob_bytes or (task.priority and task.priority not in PRIORITIES):
        raise InvalidConfiguration(f"not a task: {length} bytes, priority {task.priority}")
    if not 0 <= task.delay_ms <= MILLISECONDS_MAX or len(task.dedup_key) > DEDUP_KEY_BYTES_MAX:
        raise InvalidConfiguration("not a task: its delay or its dedup_key is out of range")


def check_stored(request: wire.PayloadStored) -> None:
    """Raises InvalidConfiguration. The payload is elsewhere."""
    check_put(wire.Put(request.producer, request.sequence, [request.task]))
    check_task(request.task, len(request.task.payload), 0, 1)


def check_lease(request: wire.Lease) -> None:
    """Raises InvalidConfiguration."""
    if not 1 <= request.count <= LEASE_COUNT_MAX or not 1 <= request.lease_ms <= MILLISECONDS_MAX or request.wait_ms < 0:
        raise InvalidConfiguration(f"can't lease {request.count} tasks for {request.lease_ms} ms")
    if not 0 < request.nonce <= NUMBER_MAX or not 0 < request.instance <= ID_MAX:
        raise InvalidConfiguration("not a lease request")


def letters(ids: list[str] | None) -> tuple[TaskKey, ...] | None:
    """The dead letters of these ids; None: all. Raises CallError."""
    if ids is not None and len(ids) > IDS_MAX:
        raise InvalidConfiguration(f"at most {IDS_MAX} dead letters can be named at once, got {len(ids)}")
    return desk.chosen(ids)


def settlement(one: wire.Settle, now: int) -> Complete | ExtendLease | Requeue | DeadLetter:
    """The record of a settlement. Raises CallError."""
    delivery, instance = desk.parse_token(one.token)
    if not 0 <= one.milliseconds <= MILLISECONDS_MAX:
        raise InvalidConfiguration(f"{one.milliseconds} ms is out of range")
    if one.kind == wire.ACK:
        return Complete(now, delivery, instance)
    if one.kind == wire.EXTEND:
        if not one.milliseconds:
            raise InvalidConfiguration("a lease is extended by more than 0 ms")
        return ExtendLease(now, delivery, instance, one.milliseconds)
    if one.kind == wire.RELEASE:
        return Requeue(now, delivery, instance, 0, one.milliseconds, desk.cut_error(one.error))
    if one.kind == wire.REJECT:
        return DeadLetter(now, delivery, instance, desk.cut_error(one.error))
    raise InvalidConfiguration(f"no settlement is of kind {one.kind}")
