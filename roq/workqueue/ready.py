"""Tasks as the fold keeps them, and the ready ones in their order: higher priority first, then as they were pushed. Pure.

A priority has a lane: pushed tasks stand in a deque, which is in order by itself; those that come back (requeued, or delayed
before) stand in a heap of their orders. Nothing is ever taken out of the middle, so a step costs O(log n) of what came back.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from heapq import heapify, heappop, heappush, merge

import msgspec

from roq.workqueue.records import Payload


class StoredTask(msgspec.Struct, array_like=True, gc=False):
    """A task. order: LSN of its Push. inserted: ms. due: ms when its delay or lease ends, 0 without. delivery, instance, nonce:
    of the Pop that has it, 0 without."""

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


class PriorityBucket:
    """The ready tasks of one priority."""

    __slots__ = ("back", "fresh", "of", "priority")

    def __init__(self, priority: int) -> None:
        self.priority = priority
        self.fresh: deque[StoredTask] = deque()  # orders ascend
        self.back: list[int] = []  # a heap of orders
        self.of: dict[int, StoredTask] = {}  # by order, for those in `back`

    def first(self) -> StoredTask | None:
        """The next to be taken."""
        if self.back and (not self.fresh or self.back[0] < self.fresh[0].order):
            return self.of[self.back[0]]
        return self.fresh[0] if self.fresh else None

    def __iter__(self) -> Iterator[StoredTask]:
        return merge(self.fresh, (self.of[order] for order in sorted(self.back)), key=lambda task: task.order)


class ReadyTasks:
    """All ready tasks."""

    def __init__(self) -> None:
        self.count = 0
        self._lanes: list[PriorityBucket] = []  # highest priority first; an empty one stays
        self._of: dict[int, PriorityBucket] = {}

    def _lane(self, priority: int) -> PriorityBucket:
        lane = self._of.get(priority)
        if lane is None:
            lane = self._of[priority] = PriorityBucket(priority)
            self._lanes.append(lane)
            self._lanes.sort(key=lambda one: -one.priority)
        return lane

    def push(self, task: StoredTask) -> None:
        """A task younger than all others."""
        lane = self._of.get(task.priority) or self._lane(task.priority)
        lane.fresh.append(task)
        self.count += 1

    def put_back(self, task: StoredTask) -> None:
        """A task of any age."""
        lane = self._lane(task.priority)
        heappush(lane.back, task.order)
        lane.of[task.order] = task
        self.count += 1

    def fill(self, tasks: list[StoredTask]) -> None:
        """Many tasks at once, of any age."""
        for task in tasks:
            lane = self._lane(task.priority)
            lane.back.append(task.order)
            lane.of[task.order] = task
        for lane in self._lanes:
            heapify(lane.back)
        self.count += len(tasks)

    def take(self) -> StoredTask:
        """The next task. There must be one."""
        self.count -= 1
        for lane in self._lanes:
            fresh = lane.fresh
            if lane.back and (not fresh or lane.back[0] < fresh[0].order):
                return lane.of.pop(heappop(lane.back))
            if fresh:
                return fresh.popleft()
        raise AssertionError("no task is ready")

    def oldest(self) -> StoredTask | None:
        """The one that was pushed first, whatever its priority."""
        firsts = [task for lane in self._lanes if (task := lane.first()) is not None]
        return min(firsts, key=lambda task: task.order, default=None)

    def __iter__(self) -> Iterator[StoredTask]:
        """In the order in which they will be taken."""
        for lane in self._lanes:
            yield from lane

    def clear(self) -> None:
        """Forget all."""
        self.count = 0
        for lane in self._lanes:
            lane.fresh.clear()
            lane.back.clear()
            lane.of.clear()
