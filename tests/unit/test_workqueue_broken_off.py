"""memory: work queues when a call is broken off by a signal handler that raises, wherever Python runs one."""

from __future__ import annotations

import signal
import threading

import pytest

from roq.errors import StorageFailed
from roq.wire.task import LeasedTask, NewTask, Settlement
from roq.workqueue.memory import MemoryQueue
from tests.harness.breaking_off import Stop, broken_off

POINTS_MAX = 1000


def after(point: int) -> tuple[MemoryQueue, set[bytes]] | None:
    """A queue whose ack and lease was broken off at this point, and what was leased all the same; None: it has fewer."""
    queue = MemoryQueue()
    queue.put([NewTask(b"x"), NewTask(b"y")])
    [held] = queue.lease(60, 1, 0)[1]
    got: list[LeasedTask[bytes]] = []
    broken = broken_off(lambda: got.extend(queue.lease(60, 1, 0, [Settlement.ack(held.token)])[1]), point)
    return (queue, {task.payload for task in got}) if broken else None


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # broken off in a generator's end
def test_a_call_broken_off_anywhere_leaves_a_whole_state_or_is_the_last() -> None:
    refused = point = 0
    while (found := after(point)) is not None:
        queue, leased = found
        point += 1
        assert point < POINTS_MAX
        try:
            queue.status()
        except StorageFailed:
            refused += 1
            continue
        queue._fold.check()
        assert {task.payload for task in queue._fold.leased.values()} <= {b"x"} | leased, "nothing is leased to nobody"
    assert 0 < refused < point


def test_an_interrupted_wait_leaves_nothing_in_line() -> None:
    queue = MemoryQueue()

    def stop(*_: object) -> None:
        raise Stop

    before = signal.signal(signal.SIGUSR1, stop)
    timer = threading.Timer(0.1, signal.pthread_kill, (threading.main_thread().ident, signal.SIGUSR1))
    try:
        timer.start()
        with pytest.raises(Stop):
            queue.lease(60, 1, 20)
    finally:
        timer.join()
        signal.signal(signal.SIGUSR1, before)
    queue.put([NewTask(b"x")])
    assert queue.status().ready == 1
