"""Waiting for a task of any shard: one long poll at each, for all callers of an open queue that lease for the same time.

    caller ──┐                     ┌── poll of shard 0
    caller ──┼── who waits longest ┼── poll of shard 1     (a thread each, which ends when nobody waits)
    caller ──┘                     └── poll of shard 2

A poll asks for as many tasks as the caller that waits longest; what it brings beyond that one's count is the next caller's. It
lasts longer the more shards there are, so that a queue which waits asks about as often as one of a single shard. Tasks that
nobody takes are given back at once, untried; a lease that does not wait and finds too few tasks ends the polls for which nobody
waits first (`recall`), so that none is missed. Any thread. Not covered: leases that do not wait (sharded.py).
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Protocol

from roq.errors import Closed, RoqError, TemporaryError, WorkQueueNotFound
from roq.wire.task import LeasedTask, Settlement
from roq.workqueue.contract import RoundTrip

POLL_SECONDS = 2.0  # of one shard's poll; as many times this as there are shards, at most …
POLL_MAX_SECONDS = 8.0
COMES_SECONDS = 0.1  # that tasks which nobody waits for are held: who waited may be about to wait again
FAILED_SECONDS = 0.2  # from a failure to the next poll of that shard
JOIN_SECONDS = 2.0  # polls end soon after their connections

logger = logging.getLogger(__name__)


class PolledShard(Protocol):
    """One shard, as it is polled: a RemoteQueue."""

    def lease(self, seconds: float, count: int, wait_seconds: float) -> RoundTrip:
        """See Backend."""

    def settle(self, settlements: Sequence[Settlement]) -> list[str | None]:
        """See Backend."""

    def end_waits(self) -> None:
        """Leases that wait in other threads end now."""


class ShardSource(Protocol):
    """Whose shards they are."""

    def polled(self) -> Mapping[int, PolledShard]:
        """All of them, now."""

    def gone(self, number: int) -> None:
        """This one was removed."""


class _Caller:
    """Who waits. failed: shards that gave no answer meanwhile."""

    __slots__ = ("count", "done", "error", "failed", "shard", "trip")

    def __init__(self, count: int) -> None:
        self.count, self.done = count, threading.Event()
        self.trip, self.shard = RoundTrip([], []), 0
        self.error: RoqError | None = None
        self.failed: set[int] = set()

    def end(self, error: RoqError) -> None:
        self.error = error
        self.done.set()


class ShardPolls:
    """All polls of one open queue; `seconds` is the lease time everywhere."""

    def __init__(self, source: ShardSource, name: str) -> None:
        self._source, self._name = source, name
        self._lock = threading.Condition()  # notified when somebody waits, and when tasks are recalled
        self._stop = threading.Event()
        self._recalls = 0
        self._callers: dict[float, deque[_Caller]] = {}  # by lease time, who waits longest first; none that is done
        self._polls: dict[tuple[int, float], threading.Thread] = {}

    @staticmethod
    def poll_seconds(shards: int) -> float:
        """How long one poll waits."""
        return min(POLL_SECONDS * shards, POLL_MAX_SECONDS)

    def running(self, number: int, seconds: float) -> bool:
        """Whether this shard is asked already: what comes ready there is on its way to who waits."""
        return (number, seconds) in self._polls

    def recall(self) -> bool:
        """End the polls for which nobody waits any more, and wait until what they were given is back; whether there was any."""
        with self._lock:
            idle = {number: poll for (number, seconds), poll in self._polls.items() if not self._callers.get(seconds)}
            self._recalls += 1
            self._lock.notify_all()
        shards = self._source.polled()
        for number in idle:
            if (shard := shards.get(number)) is not None:
                with contextlib.suppress(RoqError):
                    shard.end_waits()
        _join(list(idle.values()))
        return bool(idle)

    def wait(self, seconds: float, count: int, deadline: float) -> tuple[int, RoundTrip]:
        """The first tasks that come to any shard until `deadline` (monotonic), `count` at most, and whose; none if none came.
        Raises Closed, or why no shard answers."""
        caller = _Caller(count)
        try:
            with self._lock:
                self._callers.setdefault(seconds, deque()).append(caller)
                self._lock.notify_all()
            self._start(seconds)
            caller.done.wait(max(0.0, deadline - time.monotonic()))
            self._leave(seconds, caller)
        except BaseException:  # of a signal's handler: what was given meanwhile has nobody else
            self._leave(seconds, caller)
            if (shard := self._source.polled().get(caller.shard)) is not None:
                _give_back(shard, caller.trip.tasks)
            raise
        if caller.error is not None:
            raise caller.error
        return caller.shard, caller.trip

    def _leave(self, seconds: float, caller: _Caller) -> None:
        """From now on it is given nothing."""
        with self._lock:
            waiting = self._callers.get(seconds)
            if waiting is not None and caller in waiting:
                waiting.remove(caller)
            if waiting is not None and not waiting:
                del self._callers[seconds]

    def _start(self, seconds: float) -> None:
        shards = self._source.polled()
        with self._lock:
            if self._stop.is_set():
                self._end(seconds, Closed(f"work queue {self._name!r} is closed"))
                return
            for number, shard in shards.items():
                if (number, seconds) not in self._polls:
                    poll = threading.Thread(target=self._poll, args=(number, shard, seconds), daemon=True)
                    poll.name = f"roq {self._name} shard {number}"
                    self._polls[number, seconds] = poll
                    poll.start()

    def _poll(self, number: int, shard: PolledShard, seconds: float) -> None:
        while count := self._wanted(number, seconds):
            try:
                trip = shard.lease(seconds, count, self.poll_seconds(len(self._source.polled())))
                _give_back(shard, self._deliver(number, seconds, trip))
                self._start(seconds)  # at new shards
            except TemporaryError as error:
                logger.info("shard %d of %s does not answer: %s", number, self._name, error)
                self._failed(number, seconds, error)
                self._stop.wait(FAILED_SECONDS)
            except RoqError as error:
                with self._lock:
                    del self._polls[number, seconds]
                    removed = number and isinstance(error, WorkQueueNotFound | Closed) and not self._stop.is_set()
                    if not removed:
                        self._end(seconds, error)
                if removed:
                    self._source.gone(number)
                return

    def _wanted(self, number: int, seconds: float) -> int:
        """How many tasks who waits longest wants. 0: nobody waits, and this poll is over; who waits next starts another."""
        with self._lock:
            if (waiting := self._callers.get(seconds)) and not self._stop.is_set():
                return waiting[0].count
            del self._polls[number, seconds]
            return 0

    def _deliver(self, number: int, seconds: float, trip: RoundTrip) -> list[LeasedTask[bytes]]:
        """To those who wait, longest first, or come soon: a face waits in slices, and nobody does between two of them. What is
        left over, as nobody does."""
        left = trip.tasks
        with self._lock:
            before, until = self._recalls, time.monotonic() + COMES_SECONDS

            def over() -> bool:
                return bool(self._callers.get(seconds)) or self._recalls != before or self._stop.is_set()

            while left:
                self._lock.wait_for(over, until - time.monotonic())
                if not (waiting := self._callers.get(seconds)):
                    break
                caller = waiting.popleft()
                given, left = left[: caller.count], left[caller.count :]
                caller.shard, caller.trip = number, RoundTrip([], given, trip.began)
                caller.done.set()
        return left

    def _failed(self, number: int, seconds: float, error: RoqError) -> None:
        shards = self._source.polled()
        with self._lock:
            for caller in self._callers.get(seconds, ()):
                caller.failed.add(number)
                if caller.failed.issuperset(shards):
                    caller.end(error)

    def _end(self, seconds: float, error: RoqError) -> None:
        for caller in self._callers.get(seconds, ()):
            caller.end(error)

    def stop(self) -> None:
        """No more of them; who waits gets Closed when the shards are closed, which has to follow."""
        with self._lock:
            self._stop.set()
            self._lock.notify_all()

    def join(self) -> None:
        """Wait until they have ended."""
        with self._lock:
            polls = list(self._polls.values())
        _join(polls)


def _give_back(shard: PolledShard, tasks: Sequence[LeasedTask[bytes]]) -> None:
    if tasks:
        with contextlib.suppress(TemporaryError, WorkQueueNotFound, Closed):  # then their leases end by themselves
            shard.settle([Settlement.release(task.token) for task in tasks])


def _join(polls: list[threading.Thread]) -> None:
    deadline = time.monotonic() + JOIN_SECONDS
    for poll in polls:
        poll.join(max(0.0, deadline - time.monotonic()))
