"""What callers give, made into what backends take: for the asynchronous and the plain face alike.

Limits of single tasks (payload, delay, priority, key) are checked by the backends, which know the queue's settings.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from roq.wire.task import NewTask
from roq.workqueue.contract import PUT_COUNT_MAX

PUT_BYTES = 4 * 1024 * 1024  # payload bytes that travel together; more only for one payload larger than this


def new_task(payload: bytes, delay_seconds: float, priority: int, dedup_key: str) -> NewTask:
    """A task to put. Raises TypeError for a payload that is not bytes."""
    if type(payload) is not bytes:
        payload = _as_bytes(payload)
    return NewTask(payload, delay_seconds, priority, dedup_key)


def _as_bytes(payload: object) -> bytes:
    if isinstance(payload, (bytes, bytearray, memoryview)):
        return bytes(payload)
    raise TypeError(f"a payload is bytes, got {type(payload).__name__}")


def put_parts(tasks: Iterable[NewTask | bytes]) -> Iterator[list[NewTask]]:
    """Any number of tasks in parts that travel together."""
    part: list[NewTask] = []
    size = 0
    for given in tasks:
        task = given if isinstance(given, NewTask) else NewTask(_as_bytes(given))
        if part and (len(part) == PUT_COUNT_MAX or size + len(task.payload) > PUT_BYTES):
            yield part
            part, size = [], 0
        part.append(task)
        size += len(task.payload)
    if part:
        yield part
