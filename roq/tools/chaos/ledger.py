"""What workers did with the tasks of a queue or the messages of a group, and what is wrong with it. Pure: reads no clock.

A task is kept with all its leases until its ack was confirmed and so many others were acked since; of what is older only its
number, in ranges, and the place of the acked lease in the log (8 bytes) are kept. So an hour of 20 tasks a second is less than
a megabyte. A task is known by its publisher's index (0: a work queue) and its number from 1.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable

from roq.tools.chaos.promises import Delivery, TopicOrder, delivery_violations, early, may_be_acked
from roq.tools.chaos.verdict import Numbers
from roq.tools.chaos.worker import WorkerEvent, WorkerEventKind

SETTLED_KEPT = 2_000  # acked tasks whose leases are still at hand: longer than any worker holds an old one
WRONG_MAX = 50  # violations in words; beyond, they are counted

TaskNumber = tuple[int, int]  # publisher, number


class LeaseLedger:
    """`take(event)` for all events of its workers, in their order; `judge()` at the end, and `undone`.

    handed_over(publisher): the highest number so far. ordered: a group with order="topic". clocks_move: of hosts, so leases may
    end before their time.
    """

    def __init__(self, handed_over: Callable[[int], int], *, ordered: bool = False, clocks_move: bool = False) -> None:
        self._handed_over, self._clocks_move = handed_over, clocks_move
        self._order = TopicOrder() if ordered else None
        self._open: dict[TaskNumber, list[Delivery]] = {}
        self._ids: dict[TaskNumber, str] = {}  # of tasks in _open
        self._settled = deque[TaskNumber]()  # in _open, and acked
        self._current: dict[str, tuple[TaskNumber, Delivery]] = {}  # by worker: what it is at
        self._began: dict[str, float] = {}  # by worker: the settlement that is under way
        self._orders: dict[int, array[int]] = {}  # by publisher: of the acked lease of each number; 0: at hand, or not acked
        self._acked: dict[int, Numbers] = {}
        self.leases = self.again = self.lost = 0  # leases in all; of tasks that had one before; that were over when settled
        self.invented = 0
        self.wrong_count = 0
        self.wrong: list[str] = []

    def acked(self, publisher: int) -> Numbers:
        """What was acked, and that was confirmed."""
        return self._acked.setdefault(publisher, Numbers())

    def acked_count(self) -> int:
        """Of all publishers."""
        return sum(len(one) for one in self._acked.values())

    def doubted(self) -> set[TaskNumber]:
        """Not confirmed as acked, but some ack may have taken effect."""
        return {key for key, some in self._open.items() if not _is_acked(some) and may_be_acked(some)}

    def undone(self, publisher: int, first: int, last: int) -> list[tuple[int, int]]:
        """Ranges of first..last that nobody may have acked."""
        doubted = ((number, number) for key, number in self.doubted() if key == publisher)
        return Numbers([*self.acked(publisher).ranges(), *doubted]).missing(first, last)

    # --- what happens ---------------------------------------------------------------------------------------------------

    def take(self, event: WorkerEvent) -> None:
        """One event."""
        match event.kind:
            case WorkerEventKind.TOOK:
                self._took(event)
            case WorkerEventKind.SETTLES:
                self._settles(event)
            case WorkerEventKind.SETTLED | WorkerEventKind.LOST | WorkerEventKind.UNSURE:
                self._answered(event)
            case WorkerEventKind.ENDED:
                if (found := self._current.pop(event.worker, None)) is not None:
                    found[1].open = False  # its lease runs on for a while, but nobody works under it
            case _:
                pass

    def _took(self, event: WorkerEvent) -> None:
        key = event.publisher, event.number
        self.leases += 1
        if not 1 <= event.number <= self._handed_over(event.publisher):
            self.invented += 1
            self._is_wrong(f"{event.worker} got a payload that nobody sent: task {event.id}")
            self._current.pop(event.worker, None)
            return
        ends = event.ends
        delivery = Delivery(event.worker, event.order, event.t, lambda now: ends - now)
        self._current[event.worker] = key, delivery
        if (acked := self._acked_order(key)) > 0:  # too long ago for its leases to be at hand
            self.again += 1
            if acked < event.order:
                self._is_wrong(f"task {_words(key)} was acked and leased again by {event.worker}")
            return
        before = self._open.setdefault(key, [])
        if self._ids.setdefault(key, event.id) != event.id:
            self._is_wrong(f"{_words(key)} became two tasks: {self._ids[key]} and {event.id}")
        self.again += bool(before)
        if not self._clocks_move:
            for text in early(_words(key), delivery, before):
                self._is_wrong(text)
        if not before and self._order is not None:
            for text in self._order.first(event.topic, *key):
                self._is_wrong(text)
        before.append(delivery)

    def _settles(self, event: WorkerEvent) -> None:
        self._began[event.worker] = event.t
        if event.worker not in self._current or event.what == "extend":
            return
        key, delivery = self._current[event.worker]
        delivery.open = False
        if event.what == "ack":
            delivery.acking = True
            if self._order is not None:
                self._order.done(event.topic, *key)

    def _answered(self, event: WorkerEvent) -> None:
        began = self._began.pop(event.worker, event.t)
        if event.worker not in self._current:
            return
        key, delivery = self._current[event.worker]
        if event.kind is WorkerEventKind.SETTLED:
            delivery.kept.append(began)
        else:
            delivery.open = False
            self.lost += event.kind is WorkerEventKind.LOST
        if event.what != "ack":
            return
        if event.kind is WorkerEventKind.LOST:
            delivery.acked = False
        elif event.kind is WorkerEventKind.SETTLED:
            self._acknowledged(key, delivery)

    def _acknowledged(self, key: TaskNumber, delivery: Delivery) -> None:
        delivery.acked = True
        publisher, number = key
        self.acked(publisher).add(number, number)
        if key not in self._open:  # it was acked long ago
            if self._acked_order(key) != delivery.order:
                self._is_wrong(f"task {_words(key)} was acked twice, at last by {delivery.worker}")
            return
        self._settled.append(key)
        if len(self._settled) > SETTLED_KEPT:
            self._forget(self._settled.popleft())

    def _forget(self, key: TaskNumber) -> None:
        deliveries = self._open.pop(key, None)
        if deliveries is None:  # acked twice, which was told
            return
        self._judge_one(key, deliveries)
        del self._ids[key]
        publisher, number = key
        orders = self._orders.setdefault(publisher, array("Q"))
        orders.extend([0] * (number - len(orders)))
        orders[number - 1] = max(one.order for one in deliveries if one.acked)

    def _acked_order(self, key: TaskNumber) -> int:
        orders = self._orders.get(key[0], ())
        return orders[key[1] - 1] if key[1] <= len(orders) else 0

    # --- what is wrong --------------------------------------------------------------------------------------------------

    def judge(self) -> list[str]:
        """Everything that is wrong so far, in words; at the end, once."""
        for key, deliveries in self._open.items():
            self._judge_one(key, deliveries)
        more = self.wrong_count - len(self.wrong)
        return [*self.wrong, *([f"and {more} more of that kind"] if more else [])]

    def _judge_one(self, key: TaskNumber, deliveries: list[Delivery]) -> None:
        for text in delivery_violations(_words(key), deliveries):
            self._is_wrong(text)

    def _is_wrong(self, text: str) -> None:
        self.wrong_count += 1
        if len(self.wrong) < WRONG_MAX:
            self.wrong.append(text)


def _is_acked(deliveries: list[Delivery]) -> bool:
    return any(one.acked for one in deliveries)


def _words(key: TaskNumber) -> str:
    publisher, number = key
    return f"{number} of publisher {publisher}" if publisher else f"{number}"
