"""Lease requests that wait for a task (long polls), in the order in which they came. Pure: no IO, no clock.

One mechanism for all who let leases wait: a master and `memory:` keep the requests they have taken in, a shared log's state the
Pops that its records say wait. What a waiter is, and how it is given a task, is for them to say. Whoever makes a task ready
serves the waiters at once, so no task is ever ready while one waits.
"""

from __future__ import annotations

from collections import OrderedDict
from heapq import heapify, heappop, heappush
from typing import Protocol, TypeVar

ENDS_MIN = 1024  # ends of waits that are over are not looked for among fewer
Key = tuple[int, int]  # instance, nonce of its Pop


class Waiting(Protocol):
    """Who waits."""

    @property
    def until(self) -> int:
        """ms when it is over."""


W = TypeVar("W", bound=Waiting)


class Waiters(OrderedDict[Key, W]):
    """Who waits, by key; the first is served first. To `add` is the only way in. At most `limit` of them."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self._limit = limit
        self._ends: list[tuple[int, Key]] = []  # a heap of (until, key): the end of every wait, and of some that are over

    @property
    def full(self) -> bool:
        """No other can wait."""
        return len(self) >= self._limit

    def add(self, key: Key, waiter: W) -> None:
        """It waits, behind all others."""
        self[key] = waiter
        heappush(self._ends, (waiter.until, key))
        if len(self._ends) > 2 * len(self) + ENDS_MIN:
            self._ends = [(one.until, name) for name, one in self.items()]
            heapify(self._ends)

    def first(self) -> W:
        """Who has waited longest. There must be one."""
        return next(iter(self.values()))

    def take(self) -> tuple[Key, W]:
        """The same, who waits no longer."""
        return self.popitem(last=False)

    def remove(self, key: Key) -> W | None:
        """This one waits no longer; None: it did not."""
        return self.pop(key, None)

    def next_end(self) -> int | None:
        """ms when the next wait ends."""
        while self._ends and not self._is_current(self._ends[0]):
            heappop(self._ends)
        return self._ends[0][0] if self._ends else None

    def over(self, now: int) -> list[tuple[Key, W]]:
        """Those who have waited beyond their time, and wait no longer; the longest over first."""
        found: list[tuple[Key, W]] = []
        while self._ends and self._ends[0][0] < now:
            end = heappop(self._ends)
            if self._is_current(end):
                found.append((end[1], self.pop(end[1])))
        return found

    def _is_current(self, end: tuple[int, Key]) -> bool:
        waiter = self.get(end[1])
        return waiter is not None and waiter.until == end[0]
