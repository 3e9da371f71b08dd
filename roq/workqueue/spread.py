"""Which shard of a work queue gets what: pure decisions of one client, times come in as monotonic seconds.

    put     tasks without a key: all of a batch to the shard with the fewest calls of ours under way, in turn among equals
            a task with a dedup_key: to the shard of its key
    lease   from one shard for STAY_CALLS calls, so that an ack and the next lease are one trip; then from the next one that has
            tasks; and from those behind it, if it has fewer than asked for. So a shard that has some is asked after
            STAY_CALLS * (shards - 1) calls at the latest, whatever the others have: no shard starves, and no task waits longer
            than that for one of a lower priority.

A shard whose call has failed, or is under way for long, is passed over for a while: others go on. Not covered: the calls
(sharded.py), the list of shards (roq/wire/shards.py).
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from typing import TypeVar

from roq.wire.shards import ShardList
from roq.wire.task import Status, TaskState, TaskView

View = TypeVar("View", bound=TaskView)
STAY_CALLS = 8  # leases from one shard in a row, while it has tasks and others may
SLOW_SECONDS = 0.5  # a call that is under way for longer waits for another master
AVOID_SECONDS, AVOID_MAX_SECONDS = 1.0, 30.0  # that a shard is passed over after a failure; doubled with each one in a row


def homes(key: str, shards: ShardList) -> tuple[tuple[int, ...], int]:
    """Where a dedup key belongs: the open shard that takes its tasks, and before it closed ones that may remember it. By
    rendezvous hashing, so that a key whose shard goes moves, and no other."""

    def rank(number: int) -> bytes:
        return blake2b(f"{number} {key}".encode(), digest_size=8).digest()

    closed: list[int] = []
    for number in sorted(shards.keyed, key=rank):
        if number in shards.open:
            return tuple(closed), number
        closed.append(number)
    return tuple(closed), 0


class Rotation:
    """Which shard a lease asks first. One per open queue; any thread. start: drawn anew for each, so that many that are open
    for a short time ask different ones."""

    def __init__(self, start: int = 0) -> None:
        self._current, self._calls, self._start = -1, 0, start
        self._lock = threading.Lock()

    def order(self, shards: Sequence[int]) -> list[int]:
        """All of them, in the order in which the next lease asks until one gives."""
        with self._lock:
            numbers = sorted(shards)
            if self._current < 0:
                self._current = numbers[self._start % len(numbers)]
            if self._calls >= STAY_CALLS or self._current not in numbers:
                self._current, self._calls = next((one for one in numbers if one > self._current), numbers[0]), 0
            self._calls += 1
            at = numbers.index(self._current)
            return numbers[at:] + numbers[:at]

    def gave(self, asked_first: int, shard: int) -> None:
        """That lease got its tasks from `shard`: stay there."""
        with self._lock:
            if shard != asked_first:
                self._current, self._calls = shard, 1


class ShardHealth:
    """What calls of ours are under way at each shard, and which shards failed lately. One per open queue; any thread. start: as
    of a Rotation."""

    def __init__(self, start: int = 0) -> None:
        self._lock = threading.Lock()
        self._under_way: dict[int, dict[int, float]] = {}  # shard -> call -> when it began
        self._calls, self._batches = 0, start
        self._avoided: dict[int, tuple[float, float]] = {}  # shard -> until when; for how long the last time

    @contextmanager
    def call(self, shard: int, now: float) -> Iterator[None]:
        """Around a call that does not wait for tasks."""
        with self._lock:
            self._calls += 1
            id = self._calls
            self._under_way.setdefault(shard, {})[id] = now
        try:
            yield
        finally:
            with self._lock:
                del self._under_way[shard][id]

    def failed(self, shard: int, now: float) -> None:
        """It did not answer."""
        with self._lock:
            until, seconds = self._avoided.get(shard, (0.0, AVOID_SECONDS / 2))
            if until <= now:  # else it is the same failure, seen by another call
                seconds = min(2 * seconds, AVOID_MAX_SECONDS)
                self._avoided[shard] = now + seconds, seconds

    def answered(self, shard: int) -> None:
        """It did."""
        if shard in self._avoided:
            with self._lock:
                self._avoided.pop(shard, None)

    def well(self, shards: Iterable[int], now: float) -> list[int]:
        """Those that are not to be passed over, in the same order; all of them if none is well."""
        shards = list(shards)
        with self._lock:
            good = [one for one in shards if not self._ails(one, now)]
        return good or shards

    def _ails(self, shard: int, now: float) -> bool:
        until, _ = self._avoided.get(shard, (0.0, 0.0))
        oldest = min(self._under_way.get(shard, {}).values(), default=now)
        return until > now or now - oldest > SLOW_SECONDS

    def least_busy(self, shards: Sequence[int], now: float) -> int:
        """For a batch of tasks."""
        good = self.well(shards, now)
        with self._lock:
            self._batches += 1
            at = self._batches % len(good)
            return min(good[at:] + good[:at], key=lambda one: len(self._under_way.get(one, ())))


def joined_status(statuses: Sequence[Status]) -> Status:
    """Of the whole queue. What removed shards had counted is not in it."""
    total = Counter[str]()
    for one in statuses:
        for name in ("ready", "delayed", "leased", "dead", "completed", "inserted", "expired", "outgoing"):
            total[name] += getattr(one, name)
    oldest = max((one.oldest_ms for one in statuses), default=-1)
    return Status(
        total["ready"],
        total["delayed"],
        total["leased"],
        total["dead"],
        total["completed"],
        total["inserted"],
        oldest,
        expired=total["expired"],
        outgoing=total["outgoing"],
    )


def first_views(views: Iterable[View], state: TaskState, count: int) -> list[View]:
    """The first of the whole queue, of the first ones of each shard."""
    if state is TaskState.READY:
        return sorted(views, key=lambda one: (-one.priority, one.inserted_ms))[:count]
    return sorted(views, key=lambda one: (one.due_ms, one.inserted_ms))[:count]
