"""Processes that use a log: work queue: programs, and what tests do with them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from roq.wire.task import LeasedTask
from roq.workqueue.log_queue import LogQueue

ROOT = Path(__file__).parents[2]

PRELUDE = """
import os, random, sys, time
from pathlib import Path
from roq.log.local import shared
from roq.workqueue import log_replica
from roq.wire.task import NewTask, Settlement
from roq.workqueue.log_queue import LogQueue
queue = LogQueue(Path(sys.argv[1]), replay_bytes=100_000)
def say(*words):
    os.write(1, (" ".join(words) + chr(10)).encode())
"""
PRODUCER = (
    PRELUDE
    + """
while True:
    for id in queue.put([NewTask(os.urandom(random.randrange(200))) for _ in range(random.randrange(1, 5))]):
        say("put", id)
    time.sleep(random.uniform(0, 0.01))
"""
)
WORKER = (
    PRELUDE
    + """
acks = []
while True:
    answers, tasks, _ = queue.lease(60, 3, 1.0, [Settlement.ack(token) for _, token in acks])
    for (id, _), answer in zip(acks, answers):
        if answer == "":
            say("acked", id)
    acks = [(task.id, task.token) for task in tasks]
    for id, _ in acks:
        say("tries", id)
    if acks and random.random() < 0.5:
        id, token = acks.pop()
        if queue.settle([Settlement.ack(token)]) == [""]:
            say("acked", id)
"""
)
HOLDER = (
    PRELUDE
    + """
_, tasks, _ = queue.lease(60, 1, 30)
say(tasks[0].token)
if sys.argv[2] == "close":
    queue.close()
    say("closed")
time.sleep(60)
"""
)
WAITER = (
    PRELUDE
    + """
if sys.argv[2:] == ["only the bell"]:
    log_replica.LIVES_SECONDS = shared.LISTEN_SECONDS = 1000
say("waits")
_, tasks, _ = queue.lease(60, 1, 30)
say(tasks[0].id)
"""
)


def start(script: str, *arguments: object) -> subprocess.Popen[str]:
    """A process that runs this program."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [sys.executable, "-c", script, *map(str, arguments)], stdout=subprocess.PIPE, text=True, env=environment
    )


def line(process: subprocess.Popen[str]) -> str:
    """The next it says."""
    assert process.stdout is not None
    return process.stdout.readline().strip()


def kill(process: subprocess.Popen[str]) -> list[str]:
    """What it had said."""
    process.kill()
    return [line.strip() for line in process.communicate()[0].splitlines(keepends=True) if line.endswith("\n")]


def in_line(queue: LogQueue, count: int) -> None:
    """Until so many wait for a task."""
    deadline = time.monotonic() + 20
    while len(queue._replica.state.waiters) < count:
        assert time.monotonic() < deadline
        time.sleep(0.01)
        queue.status()  # reads on


def lease_one(queue: LogQueue, seconds: float = 60, wait_seconds: float = 0) -> LeasedTask[bytes]:
    """Exactly one."""
    [task] = queue.lease(seconds, 1, wait_seconds)[1]
    return task
