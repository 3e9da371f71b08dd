"""Our file queue on a folder, told what to do by JSON lines, as task_queue_program.py. Everything is synced, acks at
most `argv[2]` seconds later."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

from roq.wire.task import NewTask, Settlement
from roq.workqueue.contract import LEASE_COUNT_MAX, PUT_COUNT_MAX
from roq.workqueue.file_queue.queue import FileQueue


def put(queue: FileQueue, count: int) -> float:
    """Seconds to put tasks, at most PUT_COUNT_MAX with one call."""
    tasks = [NewTask(json.dumps({"txt": str(number), "class": "PrintTask"}).encode()) for number in range(count)]
    begun = time.perf_counter()
    for start in range(0, count, PUT_COUNT_MAX):
        queue.put(tasks[start : start + PUT_COUNT_MAX])
    return time.perf_counter() - begun


def lease_ack(queue: FileQueue, count: int) -> list[float]:
    """Seconds of each lease + ack, one at a time, until nothing is ready or `count` are done."""
    took: list[float] = []
    while len(took) < count:
        begun = time.perf_counter()
        _, leases, _ = queue.lease(600.0, 1, 0.0)
        if not leases:
            break
        queue.settle([Settlement.ack(leases[0].token)])
        took.append(time.perf_counter() - begun)
    if took:
        begun = time.perf_counter()
        queue.status()  # what acks left to do
        took[-1] += time.perf_counter() - begun
    return took


def lease_ack_batch(queue: FileQueue, count: int) -> float:
    """Seconds of `count` tasks leased and acked by the hundred."""
    begun = time.perf_counter()
    for _ in range(0, count, 100):
        _, leases, _ = queue.lease(600.0, 100, 0.0)
        queue.settle([Settlement.ack(one.token) for one in leases])
    return time.perf_counter() - begun


def lease(queue: FileQueue, count: int) -> list[float]:
    """Seconds of each lease, one at a time."""
    took = []
    for _ in range(count):
        begun = time.perf_counter()
        queue.lease(86_400.0, 1, 0.0)
        took.append(time.perf_counter() - begun)
    return took


def lease_many(queue: FileQueue, count: int) -> int:
    """How many were leased."""
    left = count
    while left > 0:
        got = len(queue.lease(86_400.0, min(left, LEASE_COUNT_MAX), 10.0)[1])
        if not got:
            break
        left -= got
    return count - left


def status(queue: FileQueue) -> list[float]:
    """Seconds, ready, leased."""
    begun = time.perf_counter()
    found = queue.status()
    return [time.perf_counter() - begun, found.ready, found.leased]


VERBS: dict[str, Callable[..., Any]] = {
    "put": put, "lease_ack": lease_ack, "lease_ack_batch": lease_ack_batch,
    "lease": lease, "lease_many": lease_many, "status": status,
}  # fmt: skip


def main() -> None:
    """Until the pipe ends."""
    queue = FileQueue(sys.argv[1], ack_sync_seconds=float(sys.argv[2]))
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    for line in sys.stdin:
        verb, *arguments = json.loads(line)
        sys.stdout.write(json.dumps(VERBS[verb](queue, *arguments)) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
