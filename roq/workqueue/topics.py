"""Messages of an ordered group by topic: of each topic one is open, the others stand behind it. Pure; part of the fold."""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from itertools import chain

from roq.workqueue.ready import GONE, GONE_MIN, Expiries, StoredTask


class Topics:
    """Topics of which a message is ready, delayed or leased, exactly one; heaps by order of those behind it. behind: how many.
    expiring: those of them that have an end."""

    def __init__(self) -> None:
        self.behind = 0
        self.expiring = Expiries()
        self._heaps: dict[str, list[tuple[int, StoredTask]]] = {}
        self._gone = 0  # that are no more, in the heaps

    def __bool__(self) -> bool:
        return bool(self._heaps)

    def names(self) -> list[str]:
        """Topics of which one is open."""
        return list(self._heaps)

    def enter(self, task: StoredTask) -> bool:
        """A message comes, or comes back from the dead: whether it may be taken. If not, it stands behind another."""
        heap = self._heaps.get(task.topic)
        if heap is None:
            self._heaps[task.topic] = []
            return True
        heappush(heap, (task.order, task))
        self.behind += 1
        if task.expires:
            self.expiring.add(task)
        return False

    def go_on(self, topic: str) -> StoredTask | None:
        """The one that was open is not any more: the next, which is."""
        heap = self._heaps[topic]
        while heap:
            task = heappop(heap)[1]
            if task.expires != GONE:
                self.behind -= 1
                if task.expires:
                    self.expiring.remove(task)
                return task
            self._gone -= 1
        del self._heaps[topic]
        return None

    def over(self, clock: int) -> list[StoredTask]:
        """Those behind others whose end has come, taken out."""
        found = list(self.expiring.over(clock))
        self.behind -= len(found)
        self._gone += len(found)
        return found

    def clear_away(self) -> None:
        """Those that were taken out and are GONE by now, if they are the most."""
        if self._gone > self.behind + GONE_MIN:
            self._gone = 0
            for heap in self._heaps.values():
                heap[:] = [one for one in heap if one[1].expires != GONE]
                heapify(heap)

    def all_behind(self) -> list[StoredTask]:
        """In their order."""
        found = sorted(chain.from_iterable(self._heaps.values())) if self.behind else []
        return [task for _, task in found if task.expires != GONE]

    def oldest(self) -> StoredTask | None:
        """Of those behind others."""
        if self._gone:
            return next(iter(self.all_behind()), None)
        firsts = [heap[0][1] for heap in self._heaps.values() if heap] if self.behind else []
        return min(firsts, key=lambda task: task.order, default=None)

    def clear(self) -> None:
        """Forget all."""
        self.behind = self._gone = 0
        self._heaps.clear()
        self.expiring.clear()
