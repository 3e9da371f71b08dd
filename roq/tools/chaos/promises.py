"""What is promised of leases and of an order by topic, held against what clients saw. Pure: shared with roq-sim.

One lease: what was acked is never leased again; at most one lease of a task is valid, and it holds as long as its worker was
told; of two leases of a task the log's own numbers say which is the newer one. Order by topic: a message comes when those of
its topic that came before are done, each publisher's in their order. Not covered: what is kept of a run, and for how long
(ledger.py, the books of roq/tools/simulation); shuffles (shuffle_work.py).
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from roq.wire.task import Status

EARLY_SECONDS = 1.0  # a new master's clock begins with what ZooKeeper said, so a lease may end so much before its time


# --- leases -----------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Delivery:
    """One lease, as its worker knows it. order: of the delivery in the log. ends_in(now): seconds that it holds at least. open:
    its worker means to keep it; acked: the answer to its ack, None if none came. kept: when settlements began that were
    confirmed."""

    worker: str
    order: int
    got: float
    ends_in: Callable[[float], float]
    open: bool = True
    acking: bool = False
    acked: bool | None = None
    kept: list[float] = field(default_factory=list)


def early(task: object, new: Delivery, before: Collection[Delivery]) -> list[str]:
    """A lease began while an older one held, by the clock that both workers share."""
    return [
        f"task {task} came to {new.worker}, {left:.2f} s before the lease of {one.worker} was over"
        for one in before
        if one.open and one.order < new.order and (left := one.ends_in(new.got)) > EARLY_SECONDS
    ]


def may_be_acked(deliveries: Collection[Delivery]) -> bool:
    """Whether some ack of these may have taken effect.

    That of the newest lease may although it was answered as a lost lease: it was sent again, to a master that had begun with a
    snapshot (roq/workqueue/master/recent.py). The queue's own counts tell.
    """
    newest = max(deliveries, key=lambda one: one.order, default=None)
    return any(one.acking and (one is newest or one.acked is not False) for one in deliveries)


def delivery_violations(task: object, deliveries: Collection[Delivery]) -> list[str]:
    """What is wrong with all leases of one task."""
    newest = max(deliveries, key=lambda one: one.order)
    wrong = [
        f"task {task} was acked by {one.worker} and leased again by {newest.worker}"
        for one in deliveries
        if one.acked and one.order < newest.order
    ]
    if len({one.order for one in deliveries}) < len(deliveries):
        wrong.append(f"task {task} was delivered twice in one lease")
    wrong += [
        f"task {task}: {one.worker} settled an old lease while {other.worker} had a newer one"
        for one in deliveries
        for other in deliveries
        if other.order > one.order and any(began > other.got for began in one.kept)
    ]
    return wrong


def count_violations(status: Status, confirmed: int, handed_over: int) -> list[str]:
    """What is wrong with a work queue's own counts when nothing is left to do. confirmed, handed_over: puts."""
    if status.ready or status.delayed or status.leased or status.dead:
        return [f"in the end {status}"]
    if status.completed != status.inserted:
        return [f"in the end {status.inserted} tasks were inserted and {status.completed} completed"]
    if not confirmed <= status.inserted <= handed_over:
        return [f"{confirmed} of {handed_over} puts were confirmed, and the queue counts {status.inserted}"]
    return []


class TopicOrder:
    """Messages of a group with order="topic" as members get them for the first time: `first`, and `done` when it may be done.
    What is kept grows with topics and publishers, not with messages."""

    def __init__(self) -> None:
        self._waiting: dict[str, set[tuple[int, int]]] = {}  # by topic: messages that came and are not done
        self._highest: dict[tuple[str, int], int] = {}  # by topic and publisher

    def first(self, topic: str, publisher: int, number: int) -> list[str]:
        """A member got it; what is wrong with that."""
        message, waiting = (publisher, number), self._waiting.setdefault(topic, set())
        wrong = [f"{_named(*message)} came before {_named(*one)}, of the same topic, was done" for one in sorted(waiting)]
        highest = self._highest.get((topic, publisher), 0)
        if highest > number:
            wrong.append(f"{_named(*message)} came behind its message {highest}, of the same topic")
        self._highest[topic, publisher] = max(highest, number)
        waiting.add(message)
        return wrong

    def done(self, topic: str, publisher: int, number: int) -> None:
        """A member asked for it to be acked: the next one may come."""
        self._waiting.get(topic, set()).discard((publisher, number))


def _named(publisher: int, number: int) -> str:
    return f"message {number} of publisher {publisher:x}"
