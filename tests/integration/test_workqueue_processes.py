"""Work queues shared by processes: many at once, workers that are killed, workers that are asked to stop.

`memory:` is not here: no other process can see it.
"""

from __future__ import annotations

import json
import select
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest

from roq import blocking
from roq.testing.freezing import freeze
from tests.integration.workqueue_rig import SHARED_BY_PROCESSES, program

pytestmark = [pytest.mark.timeout(60), pytest.mark.parametrize("work_address", SHARED_BY_PROCESSES, indirect=True)]
PROCESSES = 3
TASKS = 150  # per process
SPEAKS_SECONDS = 30.0

PUT_AND_WORK = """
import json, sys
from roq import blocking
address, name, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
with blocking.open_queue(address) as queue:
    put, acked = [], []
    for start in range(0, count, 10):
        put += queue.put_many(f"{name} {number}".encode() for number in range(start, start + 10))
        for task in queue.lease(60, 7):
            task.ack()
            acked.append(task.id)
    for task in queue.leases(60, wait_seconds=2):
        task.ack()
        acked.append(task.id)
print(json.dumps([put, acked]))
"""

HOLD = """
import sys, time
from roq import blocking
with blocking.open_queue(sys.argv[1]) as queue:
    for task in queue.leases(float(sys.argv[2]), wait_seconds=10):
        print(task.id, task.attempt, flush=True)
        time.sleep(1000)
"""

ASYNC_WORKER = """
import asyncio, sys, roq
async def handler(task):
    print("begun", task.payload.decode(), flush=True)
    await asyncio.sleep(float(task.payload))
    print("ended", task.payload.decode(), flush=True)
async def main():
    async with roq.open_queue(sys.argv[1]) as queue:
        work = await queue.run(handler, concurrency=2, grace_seconds=3.0)
        print("work", work.done, work.returned, work.stopped, flush=True)
asyncio.run(main())
"""

BLOCKING_WORKER = """
import sys, time
from roq import blocking
def say(text):
    sys.stdout.write(text + "\\n")  # one write: threads speak at the same time
    sys.stdout.flush()
def handler(task):
    say("begun " + task.payload.decode())
    time.sleep(float(task.payload))
    say("ended " + task.payload.decode())
with blocking.open_queue(sys.argv[1]) as queue:
    work = queue.run(handler, concurrency=2, grace_seconds=3.0)
    print("work", work.done, work.returned, work.stopped, flush=True)
"""


@pytest.fixture
def queue(work_address: str) -> Iterator[blocking.WorkQueue]:
    with blocking.open_queue(work_address) as opened:
        yield opened


def line(process: Any) -> str:
    """The next line a program prints; fails rather than hangs."""
    assert select.select([process.stdout], [], [], SPEAKS_SECONDS)[0], "nothing was said in time"
    return bytes(process.stdout.readline()).decode().strip()


def test_processes_share_a_queue_and_no_task_is_lost(work_address: str, queue: blocking.WorkQueue) -> None:
    with (
        program(PUT_AND_WORK, work_address, "a", str(TASKS)) as first,
        program(PUT_AND_WORK, work_address, "b", str(TASKS)) as second,
    ):
        mine = queue.put_many(f"me {number}".encode() for number in range(TASKS))
        acked = []
        for task in queue.leases(60, wait_seconds=3):
            task.ack()
            acked.append(task.id)
        told = [json.loads(process.communicate(timeout=SPEAKS_SECONDS)[0]) for process in (first, second)]
    put = [*mine, *(task_id for put, _ in told for task_id in put)]
    done = [*acked, *(task_id for _, acked in told for task_id in acked)]
    assert len(put) == len(set(put)) == PROCESSES * TASKS
    assert sorted(done) == sorted(put), "every task was acked, and no lease ended, so each by one process only"
    status = queue.status()
    assert (status.ready, status.leased, status.completed, status.inserted) == (0, 0, len(put), len(put))


@pytest.mark.quick
def test_a_killed_worker_s_task_comes_back(work_address: str, queue: blocking.WorkQueue) -> None:
    task_id = queue.put(b"x")
    with program(HOLD, work_address, "2") as worker:
        assert line(worker) == f"{task_id} 1"
        assert queue.lease(60, 1, 3.0) == [], "its lease is renewed while it lives"
        worker.kill()
        [task] = queue.lease(60, 1, 10.0)
        assert (task.id, task.payload, task.attempt) == (task_id, b"x", 2)
        task.ack()


def test_a_stopped_worker_loses_its_lease_and_learns_it(work_address: str, queue: blocking.WorkQueue) -> None:
    task_id = queue.put(b"x")
    with program(HOLD, work_address, "2") as worker:
        assert line(worker) == f"{task_id} 1"
        freeze(worker.pid)  # as a paused virtual machine
        [task] = queue.lease(60, 1, 10.0)
        worker.send_signal(signal.SIGCONT)
        time.sleep(1.0)  # it renews in vain
        task.ack()
        assert queue.status().completed == 1


def test_a_waiting_lease_wakes_when_another_process_puts(work_address: str, queue: blocking.WorkQueue) -> None:
    source = """
import sys, time
from roq import blocking
with blocking.open_queue(sys.argv[1]) as queue:
    sys.stdin.readline()
    queue.put(repr(time.time()).encode())
"""
    with program(source, work_address) as putter:
        assert putter.stdin is not None
        putter.stdin.write(b"go\n")
        putter.stdin.flush()
        [task] = queue.lease(60, 1, 20.0)
        assert time.time() - float(task.payload) < 1.5


@pytest.mark.parametrize(  # test_workqueue_signals.py has each with each
    ("source", "number"), [(ASYNC_WORKER, signal.SIGTERM), (BLOCKING_WORKER, signal.SIGINT)], ids=["asynchronous", "blocking"]
)
def test_a_worker_told_to_stop_finishes_or_gives_back(
    work_address: str, queue: blocking.WorkQueue, source: str, number: signal.Signals
) -> None:
    queue.put_many([b"2.0", b"30", b"31", b"32"])
    with program(source, work_address) as worker:
        assert {line(worker), line(worker)} == {"begun 2.0", "begun 30"}
        worker.send_signal(number)
        began = time.monotonic()
        assert line(worker) == "ended 2.0"
        assert line(worker) == "work 1 1 True"
        assert worker.wait(10) == 0
        assert 2.0 < time.monotonic() - began < 6.0
    tasks = queue.lease(60, 10, 2.0)
    assert sorted(task.payload for task in tasks) == [b"30", b"31", b"32"], "at once, not after its lease"
    assert queue.status().completed == 1
