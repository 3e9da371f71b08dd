"""A member of a group for plain code: the names of roq/client/group.py without `await`, straight to the group's master.

Not covered: its connection to the cluster (roq/blocking.py).
"""

from __future__ import annotations

import contextlib
from types import TracebackType

from roq.client.group import GroupSubscriber as Member
from roq.errors import Closed, WorkQueueNotFound
from roq.runtime.loop_thread import LoopThread
from roq.workqueue.blocking_queue import BlockingPrefetch, Task, WorkQueue
from roq.workqueue.handling import reason


class GroupSubscriber:
    """See roq.GroupSubscriber: iterate over tasks, and settle each."""

    def __init__(self, loop: LoopThread, member: Member) -> None:
        """member: that makes the group, and is not opened."""
        self._loop, self._member = loop, member
        self._queue = WorkQueue(member.queue.address)
        self._prefetch = BlockingPrefetch(self._queue, member.lease_seconds, member.count, None)

    def __enter__(self) -> GroupSubscriber:
        self.open()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close(reason(error) if isinstance(error, Exception) else "")

    def create(self) -> None:
        """See roq.GroupSubscriber.create."""
        self._loop.call(self._member.create())

    def open(self) -> None:
        """See roq.GroupSubscriber.open."""
        self.create()
        self._queue.open()

    def close(self, error: str = "") -> None:
        """Leave; iteration ends. What is leased is given back, with `error` if it was worked on."""
        with contextlib.suppress(WorkQueueNotFound):  # the group was removed, and what we had with it
            self._queue.close(error)

    @property
    def queue(self) -> WorkQueue:
        """The group as a work queue: its status, its dead letters, workers (`run`)."""
        return self._queue

    def __iter__(self) -> GroupSubscriber:
        return self

    def __next__(self) -> Task:
        self._prefetch.leave()
        try:
            task = self._prefetch.next()
        except Closed:
            if not self._queue.closed:
                raise
            task = None
        if task is None:
            raise StopIteration
        return task
