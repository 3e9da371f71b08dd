"""One leadership term: the only writer of the leader's state in ZooKeeper, beside its view of the cluster (watcher.py).

Changes asked for at the same time are written together: each is applied to what the one before it left, then the whole
difference goes out as one fenced multi, or more if it is large. The term ends at the first write that fails for whatever
reason: the next term bumps the epoch, so that a write whose outcome is unknown can't take effect any more, and reads
everything anew.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass

from gcm.cluster import ClusterState
from gcm.reconcile import assign, assign_all, changed_hosts, changes, stamp
from gcm.watcher import ClusterWatcher, read_each, read_snapshot
from roq.coordination import paths
from roq.coordination.election import Fence, fenced
from roq.coordination.link import Create, Delete, NoNode, Op, SetData
from roq.coordination.session import Session
from roq.errors import CallError, HostFull, NotLeader, RoqError, Unavailable
from roq.runtime.observe import Counters, logger
from roq.runtime.run import Tasks

log = logger(__name__)

CHANGES_AT_ONCE = 64  # requests written in one multi: enough to keep up, few enough to answer the first ones soon
PROCESSES_AT_ONCE = 2_000  # assigned to the hosts of one write: 200 to 500 bytes each, and ZooKeeper takes 1 MB
CHANGES_WAITING = 10_000  # beyond this requests are refused

BYTES_AT_ONCE = 400_000  # of one multi; larger differences go out in parts, the records first (see `_parts`)

Decide = Callable[[ClusterState], ClusterState]


@dataclass(frozen=True)
class _Change:
    decide: Decide
    subjects: tuple[str, ...]  # whose assignments follow
    done: asyncio.Future[ClusterState]


class LeaderTerm:
    """Made by `begin`, ended by `end`. `ended` has the reason, None if it was asked for."""

    def __init__(self, session: Session, fence: Fence, cluster: ClusterState, counters: Counters) -> None:
        self.fence, self.counters = fence, counters
        self.ended: asyncio.Future[BaseException | None] = asyncio.get_running_loop().create_future()
        self.tasks = Tasks(self._finish)
        self.view = ClusterWatcher(session, cluster, self.tasks, self._follow_monitors)
        self._session = session
        self._waiting: deque[_Change] = deque()
        self._under_way: list[_Change] = []  # being written
        self._work = asyncio.Event()
        self.tasks.start(self._write(), "gcm writer")

    @classmethod
    async def begin(cls, session: Session, fence: Fence, counters: Counters) -> LeaderTerm:
        """Read everything, make the assignments right, and watch the hosts from now on."""
        snapshot = await read_snapshot(session, fence.epoch)
        before = snapshot.cluster
        after = stamp(before, assign_all(before))
        repairs = [*changes(before, after), *(Delete(path) for path in snapshot.unreadable)]
        if repairs:
            log.warning(
                "repairing inconsistent metadata", extra={"fields": {"paths": [operation.path for operation in repairs]}}
            )
            for part in _parts(repairs):
                await fenced(session, fence, *part)
        return cls(session, fence, after, counters)

    async def end(self, reason: BaseException | None) -> None:
        """Stop at once; whoever waits for something gets NotLeader."""
        self._finish(reason)
        self.view.close()
        await self.tasks.stop()

    def _finish(self, reason: BaseException | None) -> None:
        if not self.ended.done():
            self.ended.set_result(reason)
        for change in (*self._under_way, *self._waiting):
            if not change.done.done():
                change.done.set_exception(NotLeader("this Global Configuration Manager leads no longer"))
        self._waiting.clear()
        self.view.end()

    # --- changing ----------------------------------------------------------------------------------------------------

    async def change(self, decide: Decide, *subjects: str) -> ClusterState:
        """The cluster after `decide` has been applied, written, and the assignments of `subjects` (queues, work queues) made
        to follow.

        Raises what `decide` raises, or NotLeader if the write failed (it may still have taken effect).
        """
        if self.ended.done() or len(self._waiting) >= CHANGES_WAITING:
            raise NotLeader("this Global Configuration Manager leads no longer")
        done: asyncio.Future[ClusterState] = asyncio.get_running_loop().create_future()
        self._waiting.append(_Change(decide, subjects, done))
        self._work.set()
        return await done

    async def _write(self) -> None:
        while True:
            await self._work.wait()
            self._work.clear()
            while self._waiting:
                before = self.view.cluster
                accepted, after = self._decide(before)
                self._under_way = accepted
                try:
                    after = stamp(before, after)
                    if operations := changes(before, after):
                        self.counters["writes"] += 1
                        for part in _parts(operations):
                            await fenced(self._session, self.fence, *part)
                        self.view.written(before, after)
                except CallError as error:  # too large for ZooKeeper: nothing was written
                    for change in accepted:
                        if not change.done.done():
                            change.done.set_exception(HostFull(f"no more fits on these hosts: {error}"))
                    continue
                except RoqError as error:
                    for change in accepted:
                        if not change.done.done():
                            change.done.set_exception(NotLeader(f"the change could not be written: {error}"))
                    self._finish(error)
                    return
                for change in accepted:
                    if not change.done.done():
                        change.done.set_result(after)

    def _decide(self, before: ClusterState) -> tuple[list[_Change], ClusterState]:
        """Changes that are possible, and the cluster after all of them; impossible ones are answered."""
        after, accepted = before, list[_Change]()
        while self._waiting and len(accepted) < CHANGES_AT_ONCE:
            change = self._waiting.popleft()
            if change.done.cancelled():
                continue
            try:
                after = assign(change.decide(after), change.subjects, after)
            except RoqError as error:
                change.done.set_exception(error)
                continue
            except Exception as error:  # a defect that concerns this request only
                log.exception("a request could not be decided: answering it with the error")
                change.done.set_exception(RoqError(f"{type(error).__name__}: {error}"))
                continue
            accepted.append(change)
            if sum(len(host.assigned) for host in changed_hosts(before, stamp(before, after))) > PROCESSES_AT_ONCE:
                break
        return accepted, after

    async def logs(self, prefix: str, *, only_asked: bool = False) -> dict[str, bytes]:
        """What is written of the logs whose ids begin like this, by id, as ZooKeeper has it now. only_asked: by somebody who
        gets Unavailable if it can't be read; else the term is over then, as with what it writes itself."""
        try:
            names = sorted(name for name in await self._session.children(paths.LOGS) if name.startswith(prefix))
            nodes = await read_each(names, lambda name: self._session.get(paths.log(name)))
        except RoqError as error:
            if only_asked:
                raise Unavailable(f"logs could not be read: {error}") from error
            self._finish(error)
            raise NotLeader(f"logs could not be read: {error}") from error
        return {name: node.data for name, node in zip(names, nodes, strict=True) if node is not None}

    async def remove_log(self, id: str) -> None:
        """Forget the log of a queue or work queue that is gone; its stores drop what they hold of it."""
        try:
            await fenced(self._session, self.fence, Delete(paths.log(id)))
        except NoNode:
            return
        except RoqError as error:
            self._finish(error)
            raise NotLeader(f"a log could not be removed: {error}") from error

    async def write(self, *operations: Op) -> None:
        """One fenced multi of what is not part of the cluster (shuffles). Raises NotLeader if it failed: the term is over;
        CallError if it is too large for ZooKeeper: nothing was written."""
        try:
            await fenced(self._session, self.fence, *operations)
        except CallError:
            raise
        except RoqError as error:
            self._finish(error)
            raise NotLeader(f"the change could not be written: {error}") from error

    def step_down(self, reason: RoqError) -> None:
        """Somebody else leads, as a follower has said."""
        self._finish(reason)

    def _follow_monitors(self, queues: list[str], host: str) -> None:
        async def follow() -> None:
            with suppress(NotLeader):
                await self.change(lambda cluster: cluster, *queues)

        self.tasks.start(follow(), f"follow monitors on {host}")


def _parts(operations: list[Op]) -> Iterator[list[Op]]:
    """The operations in the same order, cut so that each part (but for one single large node) fits into a multi.

    A leader that dies between two parts leaves records without their assignments: the next term begins with repairing them.
    """
    part, size = list[Op](), 0
    for operation in operations:
        data = len(operation.data) if isinstance(operation, Create | SetData) else 0
        if part and size + data > BYTES_AT_ONCE:
            yield part
            part, size = [], 0
        part.append(operation)
        size += data + len(operation.path)
    if part:
        yield part
