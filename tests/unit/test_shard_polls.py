"""Waiting for a task of any shard: many threads, signals, and counts that change, each time without a task that nobody has."""

from __future__ import annotations

import signal
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from types import FrameType

import pytest

from roq.wire.task import LeasedTask, Settlement
from roq.workqueue import shard_polls
from roq.workqueue.contract import RoundTrip
from roq.workqueue.shard_polls import ShardPolls

SECONDS = 60.0  # of a lease
PATIENCE = 10.0  # of a caller: far longer than anything here takes


class QueueShard:
    """A shard whose waiters are served as a master serves them: first come, first served."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.ready, self.leased, self.released = 0, 0, 0
        self.waiters: deque[tuple[threading.Event, int, list[int]]] = deque()

    def put(self, count: int = 1) -> None:
        with self.lock:
            self.ready += count
            self._serve()

    def _serve(self) -> None:
        while self.ready and self.waiters:
            given, count, box = self.waiters.popleft()
            box.append(min(count, self.ready))
            self.ready -= box[0]
            given.set()

    def lease(self, seconds: float, count: int, wait_seconds: float) -> RoundTrip:
        given, box = threading.Event(), list[int]()
        with self.lock:
            self.waiters.append((given, count, box))
            self._serve()
        given.wait(wait_seconds)
        with self.lock:
            self.waiters = deque(one for one in self.waiters if one[2] is not box)
            first, self.leased = self.leased, self.leased + sum(box)
        return RoundTrip([], [LeasedTask(f"1-{one}", f"{one}", b"", 1, 0, 0, 0, "") for one in range(first, first + sum(box))])

    def settle(self, settlements: Sequence[Settlement]) -> list[str | None]:
        with self.lock:
            self.released += len(settlements)
            self.ready += len(settlements)
            self._serve()
        return ["" for _ in settlements]

    def end_waits(self) -> None:
        with self.lock:
            for given, _, _ in self.waiters:
                given.set()
            self.waiters.clear()


class PolledQueue:
    """A ShardSource of shards as above, and the polls of it."""

    def __init__(self, shards: int) -> None:
        self.shards = {number: QueueShard() for number in range(shards)}
        self.polls = ShardPolls(self, "q")

    def polled(self) -> Mapping[int, QueueShard]:
        return self.shards

    def gone(self, number: int) -> None:
        del self.shards[number]

    def wait(self, count: int = 1, seconds: float = PATIENCE) -> list[LeasedTask[bytes]]:
        return self.polls.wait(SECONDS, count, time.monotonic() + seconds)[1].tasks

    @property
    def callers(self) -> int:
        return sum(map(len, self.polls._callers.values()))


@pytest.fixture
def queue() -> Iterator[PolledQueue]:
    made = PolledQueue(4)
    yield made
    made.polls.stop()
    for shard in made.shards.values():
        shard.end_waits()
    made.polls.join()


def until(true: object, seconds: float = PATIENCE) -> None:
    deadline = time.monotonic() + seconds
    while not (callable(true) and true()):
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_threads_that_wait_together_get_a_task_each(queue: PolledQueue) -> None:
    got: list[int] = []

    def lease() -> None:
        got.append(len(queue.wait()))

    for number in range(10):
        threads = [threading.Thread(target=lease) for _ in range(8)]
        for one in threads:
            one.start()
        until(lambda: queue.callers == 8)
        for place in range(8):
            queue.shards[(place + number) % 4].put()
        for one in threads:
            one.join()
    assert got == [1] * 80


def test_who_is_taken_away_by_a_signal_gets_no_task(queue: PolledQueue) -> None:
    class Taken(Exception): ...

    def take(number: int, frame: FrameType | None) -> None:
        raise Taken

    before = signal.signal(signal.SIGALRM, take)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        with pytest.raises(Taken):
            queue.wait()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert queue.callers == 0
    queue.shards[2].put()
    until(lambda: queue.shards[2].released == 1)
    assert len(queue.wait()) == 1


def test_what_came_with_the_signal_is_given_back(queue: PolledQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    class TakenEvent(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            assert super().wait(timeout)
            raise KeyboardInterrupt

    class TakenCaller(shard_polls._Caller):
        def __init__(self, count: int) -> None:
            super().__init__(count)
            self.done = TakenEvent()

    queue.shards[1].put()
    with monkeypatch.context() as patched:
        patched.setattr(shard_polls, "_Caller", TakenCaller)
        with pytest.raises(KeyboardInterrupt):
            queue.wait()
    assert queue.shards[1].released == 1
    assert len(queue.wait()) == 1


def test_one_poll_per_shard_serves_all_counts_and_nothing_goes_back(queue: PolledQueue) -> None:
    """A worker of 16 coroutines asks for 16, then 15, …, as they get work."""
    for count in range(16, 0, -1):
        caller = threading.Thread(target=queue.wait, args=(count,))
        caller.start()
        until(lambda: queue.callers == 1 and sum(len(shard.waiters) for shard in queue.shards.values()) == 4)
        queue.shards[count % 4].put()
        caller.join(PATIENCE)
        assert not caller.is_alive()
    assert sum(shard.leased for shard in queue.shards.values()) == 16
    assert sum(shard.released for shard in queue.shards.values()) == 0


def test_what_one_has_no_room_for_is_the_next_ones_and_the_rest_goes_back(queue: PolledQueue) -> None:
    got: list[int] = []
    first = threading.Thread(target=lambda: got.append(len(queue.wait(5))))
    first.start()
    until(lambda: all(shard.waiters for shard in queue.shards.values()))
    queue.shards[0].put()
    first.join()
    second, third = (threading.Thread(target=lambda: got.append(len(queue.wait(2)))) for _ in range(2))
    second.start()
    until(lambda: queue.callers == 1)
    third.start()
    until(lambda: queue.callers == 2)
    queue.shards[3].put(5)  # to a poll that asked for five
    second.join()
    third.join()
    assert got == [1, 2, 2]
    until(lambda: queue.shards[3].released == 1)
