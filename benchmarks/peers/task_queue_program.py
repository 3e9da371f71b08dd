"""python-task-queue on a folder, told what to do by JSON lines: run by the interpreter of its own environment (file_queue.py).

`TaskQueue` is what its users call, `FileQueueAPI` the bare layer below, without threads and progress bars.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

from taskqueue import PrintTask, QueueEmptyError, TaskQueue


def put(queue: TaskQueue, layer: str, count: int) -> float:
    """Seconds to put tasks with one call; nothing is synced."""
    tasks = [PrintTask(str(number)) for number in range(count)]
    bodies = [{"payload": task.payload(), "queueName": queue.path.path} for task in tasks]
    begun = time.perf_counter()
    if layer == "bare":
        queue.api.insert(bodies)
    else:
        queue.insert(tasks)
    return time.perf_counter() - begun


def lease_ack(queue: TaskQueue, layer: str, count: int) -> list[float]:
    """Seconds of each lease + delete, one at a time, until the queue is empty or `count` are done."""
    took: list[float] = []
    while len(took) < count:
        begun = time.perf_counter()
        if layer == "bare":
            tasks = queue.api.lease(600, 1)
            if not tasks and queue.is_empty():
                break
            for task in tasks:
                queue.api.delete(task)
        else:
            try:
                queue.delete(queue.lease(600))
            except QueueEmptyError:
                if queue.is_empty():
                    break
        took.append(time.perf_counter() - begun)
    return took


VERBS: dict[str, Callable[..., Any]] = {"put": put, "lease_ack": lease_ack}


def main() -> None:
    """Until the pipe ends."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    queue = TaskQueue(f"fq://{sys.argv[1]}", progress=False)
    answers.write("ready\n")
    for line in sys.stdin:
        verb, *arguments = json.loads(line)
        answers.write(json.dumps(VERBS[verb](queue, *arguments)) + "\n")


if __name__ == "__main__":
    main()
