"""Groups of recorded queues as their members see them: each message is leased by one of them at a time.

    async with cluster.subscriber("orders", "eu.>", group="billing") as messages:
        async for message in messages:
            ...
            await message.ack()

A group is a work queue of the cluster (roq/workqueue/queue.py) that its master fills from the queue's tapes, and a message of
it a task. Not covered: what fills it (roq/groups), plain code (roq/blocking.py).
"""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Iterable
from datetime import UTC, datetime
from types import TracebackType

from roq.errors import Closed, InvalidConfiguration, WorkQueueNotFound
from roq.ids import group_name
from roq.pubsub.start import Start, group_start
from roq.pubsub.subscription import check_filter
from roq.wire import gcm
from roq.wire.where import Where
from roq.wire.work_queue import GroupOrder, GroupSource
from roq.workqueue.contract import check_lease
from roq.workqueue.handling import reason
from roq.workqueue.prefetch import Prefetch, Task
from roq.workqueue.queue import WorkQueue

LEASE_SECONDS = 60.0


def check_kind(group: str | None, order: str | None, leased: tuple[float, int], *, alone: bool) -> None:
    """Raises InvalidConfiguration for what only a member of a group has, or only a subscriber of its own. leased:
    lease_seconds, count. alone: it was asked for the latter's."""
    if group is None and (order, *leased) != (None, LEASE_SECONDS, 1):
        raise InvalidConfiguration("order, lease_seconds and count are for members of a group: group= names it")
    if group is not None and alone:
        raise InvalidConfiguration("follow, durable, on_lost are for lone subscribers; a group's master logs what it lost")


def group_source(queue: str, topics: Iterable[str], order: str, start: Start, where: str, now: datetime) -> GroupSource:
    """What is asked of a group. now: what a timedelta counts back from. Raises InvalidTopic, InvalidFilter,
    InvalidConfiguration."""
    if order not in tuple(GroupOrder):
        raise InvalidConfiguration(f"order is 'topic' or 'none', got {order!r}")
    if where:
        Where(where)
    filters = tuple(check_filter(topic) for topic in topics) or (">",)
    return GroupSource(queue, "", filters, GroupOrder(order), group_start(start, now), where)


def join_request(
    queue: str, topics: tuple[str, ...], group: str, order: str | None, start: Start | None, where: str
) -> gcm.CreateWorkQueue:
    """Of a member that makes its group if it is missing; an existing one need only be as is said here. Without a transaction.
    Raises as group_source, InvalidName."""
    said = {"topics": topics, "order": order, "where": where}
    asked = tuple(name for name, value in said.items() if value)
    begin: Start = "earliest" if start is None else start
    source = group_source(queue, topics, order or GroupOrder.TOPIC, begin, where, datetime.now(UTC))
    return gcm.CreateWorkQueue(group_name(queue, group), "", asked=asked, source=source)


class GroupSubscriber:
    """A member of a group: use as an async context manager and iterate over `roq.Task`s, each to be settled by `ack`, `release`
    or `reject`. While the loop's body works on one its lease is renewed, however long it takes. What it leaves unsettled comes
    again when its lease ends; what is leased when the context ends is given back at once.

    One coroutine iterates; it may be cancelled, and go on. For more at a time: more members, or `queue.run`. A task has a
    message's .topic .payload .headers .publisher .sequence .timestamp, and a lease's .attempt .expires .lost. lease_seconds,
    count: as it was made.
    """

    def __init__(self, address: str, create: Callable[[], Awaitable[object]], lease_seconds: float, count: int) -> None:
        """create: makes the group, unless there is one."""
        check_lease(lease_seconds, count)
        self.lease_seconds, self.count = lease_seconds, count
        self._create = create
        self._queue = WorkQueue(address)
        self._prefetch = Prefetch(self._queue, lease_seconds, count, None)

    async def __aenter__(self) -> GroupSubscriber:
        await self.open()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        await self.close(reason(error) if isinstance(error, Exception) else "")

    async def create(self) -> None:
        """Make the group unless there is one; take no part in it yet. Raises QueueNotFound, NotRecorded, WorkQueueConflict: the
        group has another order, other topics or another condition than was said."""
        await self._create()

    async def open(self) -> None:
        """Make the group unless there is one, and take part in it. Raises as `create`, Unavailable."""
        await self.create()
        await self._queue.open()

    async def close(self, error: str = "") -> None:
        """Leave; iteration ends. What is leased is given back, with `error` if it was worked on."""
        with contextlib.suppress(WorkQueueNotFound):  # the group was removed, and what we had with it
            await self._queue.close(error)

    @property
    def queue(self) -> WorkQueue:
        """The group as a work queue: its status, its dead letters, workers (`run`)."""
        return self._queue

    def __aiter__(self) -> GroupSubscriber:
        return self

    async def __anext__(self) -> Task:
        self._prefetch.leave()
        try:
            task = await self._prefetch.next()
        except Closed:
            if not self._queue.closed:
                raise
            task = None
        if task is None:
            raise StopAsyncIteration
        return task
