"""The tasks of a work queue's fold: the ready ones in the order in which they are leased, and when the time of a lease or of a
message is over. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from heapq import heapify, heappop, heappush, heapreplace, merge, nsmallest
from itertools import islice

import msgspec

from roq.workqueue.records import Payload

GONE = -1  # in place of `expires`: a task that stands somewhere still and is no more
GONE_MIN = 4096  # fewer of them are not cleared away, whatever else there is
ENDS_MIN = 4096  # ends of leases that are over are not looked for among fewer


class StoredTask(msgspec.Struct, array_like=True, gc=False):
    """A task. order: LSN of its record. inserted: ms. due: ms when its delay or lease ends, 0 without. delivery, instance,
    nonce: of the Pop that has it, 0 without. topic, ordered: of a group's message. expires: ms from which on nobody gets it any
    more, 0: never."""

    order: int
    producer: int
    sequence: int
    payload: Payload
    priority: int
    inserted: int
    attempts: int = 0
    error: str = ""
    due: int = 0
    delivery: int = 0
    instance: int = 0
    nonce: int = 0
    topic: str = ""
    ordered: bool = False
    expires: int = 0


def be_gone(task: StoredTask) -> None:
    """It stands where it stood, and is no more."""
    task.expires, task.payload = GONE, b""


class PriorityBucket:
    """The ready tasks of one priority. gone: so many that are no more stand among them, none of which would be the next."""

    __slots__ = ("back", "fresh", "gone", "of", "priority")

    def __init__(self, priority: int) -> None:
        self.priority = priority
        self.fresh: deque[StoredTask] = deque()  # orders ascend
        self.back: list[int] = []  # a heap of orders
        self.of: dict[int, StoredTask] = {}  # by order, for those in `back`
        self.gone = 0

    def first(self) -> StoredTask | None:
        """The next to be taken."""
        if self.back and (not self.fresh or self.back[0] < self.fresh[0].order):
            return self.of[self.back[0]]
        return self.fresh[0] if self.fresh else None

    def drop(self, task: StoredTask) -> None:
        """It is no more."""
        be_gone(task)
        self.gone += 1
        if self.gone > GONE_MIN and 2 * self.gone > len(self.fresh) + len(self.back):
            self.fresh = deque(task for task in self.fresh if task.expires != GONE)
            self.of = {order: task for order, task in self.of.items() if task.expires != GONE}
            self.back = list(self.of)
            heapify(self.back)
            self.gone = 0
        else:
            self.tidy()

    def tidy(self) -> None:
        """Clear away what is no more and would be the next."""
        fresh, back, of = self.fresh, self.back, self.of
        while fresh and fresh[0].expires == GONE:
            fresh.popleft()
            self.gone -= 1
        while back and of[back[0]].expires == GONE:
            del of[heappop(back)]
            self.gone -= 1

    def upcoming(self, count: int) -> Iterator[StoredTask]:
        """The next `count`."""
        of = self.of
        orders = [order for order in self.back if of[order].expires != GONE] if self.gone else self.back
        back = (of[order] for order in nsmallest(count, orders))
        tasks = merge(self.fresh, back, key=lambda task: task.order)
        return islice((task for task in tasks if task.expires != GONE), count)

    def __iter__(self) -> Iterator[StoredTask]:
        tasks = merge(self.fresh, (self.of[order] for order in sorted(self.back)), key=lambda task: task.order)
        return (task for task in tasks if task.expires != GONE)


class ReadyTasks:
    """All ready tasks in their order: higher priority first, then as they were pushed.

    Pushed tasks of a priority stand in a deque, which is in order by itself; those that come back (requeued, or delayed before)
    stand in a heap of their orders. Nothing is ever taken out of the middle, so a step costs O(log n) of what came back; what
    is dropped stays there until it comes to the front, or most are such.
    """

    def __init__(self) -> None:
        self.count = 0
        self._buckets: list[PriorityBucket] = []  # highest priority first; an empty one stays
        self._by_priority: dict[int, PriorityBucket] = {}

    def _bucket(self, priority: int) -> PriorityBucket:
        bucket = self._by_priority.get(priority)
        if bucket is None:
            bucket = self._by_priority[priority] = PriorityBucket(priority)
            self._buckets.append(bucket)
            self._buckets.sort(key=lambda one: -one.priority)
        return bucket

    def push(self, task: StoredTask) -> None:
        """A task younger than all others."""
        bucket = self._by_priority.get(task.priority) or self._bucket(task.priority)
        bucket.fresh.append(task)
        self.count += 1

    def put_back(self, task: StoredTask) -> None:
        """A task of any age."""
        bucket = self._bucket(task.priority)
        heappush(bucket.back, task.order)
        bucket.of[task.order] = task
        self.count += 1

    def fill(self, tasks: list[StoredTask]) -> None:
        """Many tasks at once, of any age."""
        for task in tasks:
            bucket = self._bucket(task.priority)
            bucket.back.append(task.order)
            bucket.of[task.order] = task
        for bucket in self._buckets:
            heapify(bucket.back)
        self.count += len(tasks)

    def take(self) -> StoredTask:
        """The next task. There must be one."""
        self.count -= 1
        for bucket in self._buckets:
            fresh = bucket.fresh
            if bucket.back and (not fresh or bucket.back[0] < fresh[0].order):
                task = bucket.of.pop(heappop(bucket.back))
            elif fresh:
                task = fresh.popleft()
            else:
                continue
            if bucket.gone:
                bucket.tidy()
            return task
        raise AssertionError("no task is ready")

    def drop(self, task: StoredTask) -> None:
        """One of them is no more."""
        self.count -= 1
        self._by_priority[task.priority].drop(task)

    def upcoming(self, count: int) -> Iterator[StoredTask]:
        """The next `count`."""
        for bucket in self._buckets:
            for task in bucket.upcoming(count):
                yield task
                count -= 1

    def oldest(self) -> StoredTask | None:
        """The one that was pushed first, whatever its priority."""
        firsts = [task for bucket in self._buckets if (task := bucket.first()) is not None]
        return min(firsts, key=lambda task: task.order, default=None)

    def __iter__(self) -> Iterator[StoredTask]:
        """In the order in which they will be taken."""
        for bucket in self._buckets:
            yield from bucket

    def clear(self) -> None:
        """Forget all."""
        self.count = 0
        for bucket in self._buckets:
            bucket.fresh.clear()
            bucket.back.clear()
            bucket.of.clear()
            bucket.gone = 0


class Expiries:
    """Tasks that wait, by order, which end at a time: exactly those of them that have one."""

    def __init__(self) -> None:
        self.waiting: dict[int, StoredTask] = {}
        self._ends: list[tuple[int, int]] = []  # a heap of (expires, order), also of some that wait no longer

    def add(self, task: StoredTask) -> None:
        """It waits from now on, and has an end."""
        self.waiting[task.order] = task
        heappush(self._ends, (task.expires, task.order))
        if len(self._ends) > 2 * len(self.waiting) + GONE_MIN:
            self._ends = [(task.expires, order) for order, task in self.waiting.items()]
            heapify(self._ends)

    def remove(self, task: StoredTask) -> None:
        """It waits no longer."""
        self.waiting.pop(task.order, None)

    def next(self) -> int | None:
        """ms when the next one ends."""
        ends = self._ends
        while ends and ends[0][1] not in self.waiting:
            heappop(ends)
        return ends[0][0] if ends else None

    def over(self, clock: int) -> Iterator[StoredTask]:
        """Those whose end has come, taken out."""
        while self._ends and self._ends[0][0] <= clock:  # whoever takes one may add others
            if (task := self.waiting.pop(heappop(self._ends)[1], None)) is not None:
                yield task

    def clear(self) -> None:
        """Forget all."""
        self.waiting.clear()
        self._ends.clear()


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
