"""memory: waits, time and threads. The verbs themselves: the contract suite and test_workqueue_state.py."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from roq.errors import CallError, Closed
from roq.wire.task import LeasedTask, NewTask, Settlement, TaskState
from roq.wire.work_queue import TaskSettings
from roq.workqueue.contract import Backend
from roq.workqueue.memory import MemoryQueue

SOON = 10.0  # seconds; never reached when all is well


@pytest.fixture
def queue() -> Iterator[MemoryQueue]:
    one = MemoryQueue(TaskSettings(max_attempts=3))
    yield one
    one._fold.check()
    one.close()


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(40) as pool:
        yield pool


def waiting(queue: MemoryQueue, count: int) -> None:
    """Until so many Pops stand in line."""
    end = time.monotonic() + SOON
    while len(queue._waiters) < count:
        assert time.monotonic() < end
        threading.Event().wait(0.005)


def lease(queue: MemoryQueue, seconds: float = 60.0, wait_seconds: float = SOON, count: int = 1) -> list[LeasedTask[bytes]]:
    return queue.lease(seconds, count, wait_seconds)[1]


def test_it_is_a_backend(queue: Backend) -> None:
    (id,) = queue.put([NewTask(b"a")])
    _, (one,), _ = queue.lease(60.0, 5, 0.0)
    assert (one.id, one.payload, one.attempt) == (id, b"a", 1)
    assert queue.lease(60.0, 1, 0.0, [Settlement.ack(one.token), Settlement.ack(one.token)])[:2] == (["", None], [])
    assert queue.status().completed == 1


def test_a_waiting_lease_gets_what_is_put(queue: MemoryQueue, threads: ThreadPoolExecutor) -> None:
    waits = [threads.submit(lease, queue) for _ in range(20)]
    waiting(queue, 20)
    queue.put([NewTask(bytes((n,))) for n in range(20)])
    assert sorted(one.payload[0] for wait in waits for one in wait.result(SOON)) == list(range(20))


def test_a_lease_waits_no_longer_than_it_said(queue: MemoryQueue) -> None:
    begun = time.monotonic()
    assert lease(queue, wait_seconds=0.1) == []
    assert 0.1 <= time.monotonic() - begun < 5
    assert not queue._waiters


def test_a_waiting_lease_is_the_timer_for_delays_and_expiries(queue: MemoryQueue, threads: ThreadPoolExecutor) -> None:
    queue.put([NewTask(b"a")])
    lease(queue, seconds=0.2)
    waits = [threads.submit(lease, queue) for _ in range(3)]
    waiting(queue, 3)
    queue.put([NewTask(b"b", delay_seconds=0.1), NewTask(b"c", delay_seconds=0.05)])
    payloads = [one.payload for wait in waits for one in wait.result(SOON)]
    assert sorted(payloads) == [b"a", b"b", b"c"]


def test_the_next_sleeper_keeps_the_time_when_the_first_leaves(queue: MemoryQueue, threads: ThreadPoolExecutor) -> None:
    first = threads.submit(lease, queue, wait_seconds=1.0)
    waiting(queue, 1)
    second = threads.submit(lease, queue)
    waiting(queue, 2)
    queue.put([NewTask(b"a", delay_seconds=1.5)])  # told to the first, who leaves before
    assert first.result(SOON) == []
    assert [one.payload for one in second.result(SOON)] == [b"a"]


def test_closing_ends_waits(queue: MemoryQueue, threads: ThreadPoolExecutor) -> None:
    waits: list[Future[list[LeasedTask[bytes]]]] = [threads.submit(lease, queue) for _ in range(3)]
    waiting(queue, 3)
    queue.close()
    for wait in waits:
        with pytest.raises(Closed):
            wait.result(SOON)
    with pytest.raises(Closed):
        queue.put([])


def test_a_wrong_settlement_changes_nothing(queue: MemoryQueue) -> None:
    queue.put([NewTask(b"a")])
    (one,) = lease(queue)
    with pytest.raises(CallError):
        queue.lease(60.0, 1, 0.0, [Settlement.ack(one.token), Settlement.ack("nonsense")])
    with pytest.raises(CallError):
        queue.lease(0.0, 1, 0.0, [Settlement.ack(one.token)])
    assert queue.status().leased == 1


def test_many_threads_do_every_task_once(threads: ThreadPoolExecutor) -> None:
    queue, tasks = MemoryQueue(), 4000

    def produce(part: int) -> None:
        for n in range(part, tasks, 8):
            queue.put([NewTask(b"%d" % n)])

    def consume() -> list[bytes]:
        done: list[bytes] = []
        acks: list[Settlement] = []
        while got := queue.lease(60.0, 7, 0.5, acks)[1]:
            done += [one.payload for one in got]
            acks = [Settlement.ack(one.token) for one in got]
        return done

    workers = [threads.submit(consume) for _ in range(8)]
    for one in [threads.submit(produce, part) for part in range(8)]:
        one.result(SOON)
    done = [payload for worker in workers for payload in worker.result(SOON)]
    assert sorted(map(int, done)) == list(range(tasks))
    assert queue.status().completed == tasks
    queue._fold.check()
    queue.close()


def test_expired_tasks_die_in_the_end(queue: MemoryQueue) -> None:
    queue.put([NewTask(b"a")])
    for attempt in (1, 2, 3):
        assert [one.attempt for one in lease(queue, seconds=0.01)] == [attempt]
    assert lease(queue, wait_seconds=0.2) == []
    assert [(view.payload, view.attempts) for view in queue.peek(TaskState.DEAD, 5)] == [(b"a", 3)]
    assert queue.requeue_dead(None) == 1
    assert [one.attempt for one in lease(queue)] == [1]
