"""When leases end: a heap of runs of deliveries that were handed out together. Pure; part of the fold."""

from __future__ import annotations

from collections.abc import Mapping
from heapq import heapify, heappop, heappush, heapreplace

from roq.workqueue.ready import StoredTask

ENDS_MIN = 4096  # ends of leases that are over are not looked for among fewer
Leased = Mapping[int, StoredTask]  # by delivery


class LeaseEnds:
    """The end of every lease, and of some that are over or end later: a delivery's is the one that its task says."""

    def __init__(self) -> None:
        self._runs: list[tuple[int, int, int]] = []  # a heap of (due, first delivery, how many)

    def __len__(self) -> int:
        return len(self._runs)

    def add(self, due: int, first: int, count: int, leased: Leased) -> None:
        """The leases of so many deliveries in a row end then."""
        heappush(self._runs, (due, first, count))
        if len(self._runs) > 2 * len(leased) + ENDS_MIN:
            self.load(leased)

    def load(self, leased: Leased) -> None:
        """These, and no others."""
        self._runs = [(task.due, delivery, 1) for delivery, task in leased.items()]
        heapify(self._runs)

    def next(self, leased: Leased) -> int | None:
        """ms when the first lease ends."""
        runs = self._runs
        while runs:
            due, first, count = runs[0]
            left = _current(due, first, count, leased)
            if left is None:
                heappop(runs)
                continue
            if left[1] != first:
                heapreplace(runs, left)
            return due
        return None

    def over(self, now: int, count: int, leased: Leased) -> dict[int, int]:
        """Deliveries whose lease is over at `now`, at most `count`, the longest over first, and when it ended."""
        found: dict[int, int] = {}
        kept: list[tuple[int, int, int]] = []
        runs = self._runs
        while runs and runs[0][0] <= now and len(found) < count:
            left = _current(*heappop(runs), leased)
            if left is not None:
                due, first, many = left
                kept.append(left)
                found |= {one: due for one in range(first, first + many) if _ends(leased, one, due)}
        for run in kept:
            heappush(runs, run)  # they are over when that is applied, not before
        return dict(list(found.items())[:count])

    def clear(self) -> None:
        """Forget all."""
        self._runs.clear()

    def covers(self, delivery: int, due: int) -> bool:
        """For `Fold.check`. O(n)."""
        return any(end == due and first <= delivery < first + count for end, first, count in self._runs)


def _ends(leased: Leased, delivery: int, due: int) -> bool:
    task = leased.get(delivery)
    return task is not None and task.due == due


def _current(due: int, first: int, count: int, leased: Leased) -> tuple[int, int, int] | None:
    """The run from the first of its leases on that ends then; None: none does."""
    for delivery in range(first, first + count):
        if _ends(leased, delivery, due):
            return due, delivery, first + count - delivery
    return None
