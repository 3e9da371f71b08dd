"""python-task-queue at the other end of a pipe: run by its own interpreter, one JSON command per line, one JSON answer each.

Not covered: `ptq`, which the tests start as users do.
"""

from __future__ import annotations

import json
import os
import sys
import time
from functools import partial
from typing import Any

from taskqueue import QueueEmptyError, RegisteredTask, TaskQueue, queueable

WORK_SECONDS = 0.015  # so that no worker runs everything while another one starts


class MarkTask(RegisteredTask):  # type: ignore[misc]  # of a package our type checker does not see
    """Leaves a file behind each time it runs."""

    def __init__(self, folder: str, number: int) -> None:
        super().__init__(folder, number)

    def execute(self) -> None:
        mark(self.folder, self.number, "upstream")


@queueable  # type: ignore[untyped-decorator]  # of a package our type checker does not see
def mark_function(folder: str, number: int = 0) -> None:
    mark(folder, number, "upstream")


def mark(folder: str, number: int, who: str) -> None:
    """One file per run, which takes a while."""
    time.sleep(WORK_SECONDS)
    with open(f"{folder}/{number}--{who}--{os.getpid()}--{time.time_ns()}", "x"):
        pass


def poll(queue: TaskQueue, seconds: float, lease_seconds: int) -> int:
    """Work until nothing was found for `seconds`; how many tasks ran."""
    last = time.monotonic()

    def ran(_task: object) -> None:
        nonlocal last
        last = time.monotonic()

    def stop() -> bool:
        return time.monotonic() - last > seconds

    return int(queue.poll(lease_seconds=lease_seconds, stop_fn=stop, after_fn=ran, tally=True, min_backoff_window=0))


def lease(queue: TaskQueue, seconds: int, count: int, leased: dict[str, Any]) -> list[str]:
    """Ids of what was leased."""
    try:
        tasks = queue.lease(seconds=seconds, num_tasks=count)
    except QueueEmptyError:
        return []
    tasks = tasks if isinstance(tasks, list) else [tasks]
    leased.update({task.id: task for task in tasks})
    return [task.id for task in tasks]


def obey(queue: TaskQueue, command: list[Any], leased: dict[str, Any]) -> Any:
    """One command."""
    answer: Any = None
    match command:
        case ["insert", folder, first, count]:
            answer = queue.insert([MarkTask(folder, number) for number in range(first, first + count)])
        case ["insert delayed", folder, number, seconds]:
            answer = queue.insert(MarkTask(folder, number), delay_seconds=seconds)
        case ["insert function", folder, number]:
            answer = queue.insert(partial(mark_function, folder, number=number))
        case ["lease", seconds, count]:
            answer = lease(queue, seconds, count, leased)
        case ["execute", id]:
            leased[id].execute()
        case ["renew", id, seconds]:
            queue.renew(leased[id], seconds)
        case ["cancel", id]:
            queue.cancel(leased[id])
        case ["delete", id]:
            queue.delete(leased[id], tally=True)
        case ["poll", seconds, lease_seconds]:
            answer = poll(queue, seconds, lease_seconds)
        case ["numbers"]:
            answer = {
                "inserted": queue.inserted,
                "enqueued": queue.enqueued,
                "leased": queue.leased,
                "done": queue.completed,
            }
        case ["empty"]:
            answer = queue.is_empty()
        case _:
            raise ValueError(command)
    return answer


def main() -> None:
    """Until the pipe ends."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what tasks and progress bars print goes elsewhere
    queue = TaskQueue(f"fq://{sys.argv[1]}", progress=False)
    leased: dict[str, Any] = {}
    answers.write("ready\n")
    for line in sys.stdin:
        answers.write(json.dumps(obey(queue, json.loads(line), leased)) + "\n")


if __name__ == "__main__":
    main()
