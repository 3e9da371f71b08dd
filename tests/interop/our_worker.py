"""A worker of ours for mark tasks, as the tests of both programs on one folder start it."""

from __future__ import annotations

import json
import os
import sys
import time

from roq.wire.task import Settlement
from roq.workqueue.file_queue.queue import FileQueue

WORK_SECONDS = 0.015  # as upstream.py


def work(folder: str, seconds: float) -> int:
    """Run mark tasks until nothing came for `seconds`; how many."""
    queue = FileQueue(folder)
    done = 0
    while True:
        _, leases, _ = queue.lease(60.0, 1, seconds)
        if not leases:
            return done
        task = json.loads(leases[0].payload)
        where, number = (task["folder"], task["number"]) if isinstance(task, dict) else (task[1][0], task[2]["number"])
        time.sleep(WORK_SECONDS)
        with open(f"{where}/{number}--ours--{os.getpid()}--{time.time_ns()}", "x"):
            pass
        assert queue.settle([Settlement.ack(leases[0].token)]) == [""]
        done += 1


if __name__ == "__main__":
    sys.stdout.write(f"{work(sys.argv[1], float(sys.argv[2]))}\n")
