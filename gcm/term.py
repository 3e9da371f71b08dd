"""One leadership term: the only writer of the leader's state in ZooKeeper, beside its view of the cluster (watcher.py).

Changes asked for at the same time are written together: each is applied to what the one before it left, then the whole
difference goes out as one fenced multi, or more if it is large. The term ends at the first write that fails for whatever
reason: the next term bumps the epoch, so that a write whose outcome is unknown can't take effect any more, and reads
everything anew.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass

from gcm.cluster import ClusterState, differing
from gcm.reconcile import assign, assign_all, changes, stamp
from gcm.watcher import ClusterWatcher, HostReading, read_snapshot
from roq.coordination import paths
from roq.coordination.election import Fence, fenced
from roq.coordination.link import Create, Delete, NoNode, Op, SetData
from roq.coordination.session import DATA_BYTES_MAX, Session
from roq.errors import CallError, HostFull, NotLeader, RoqError, Unavailable, UnknownFormat
from roq.runtime.backoff import delays
from roq.runtime.installation import installed_version
from roq.runtime.observe import Counters, logger
from roq.runtime.run import Tasks
from roq.wire.assignment import to_json
from roq.wire.tree_format import check_format, raised, read_format

log = logger(__name__)

CHANGES_AT_ONCE = 64  # requests written in one multi: enough to keep up, few enough to answer the first ones soon
PROCESSES_AT_ONCE = 8_000  # on the hosts of one write, 200 to 500 bytes each: whoever comes late shares theirs
CHANGES_WAITING = 10_000  # beyond this requests are refused

PAUSE_SECONDS, PAUSE_SECONDS_MAX = 1.0, 30.0  # before what did not fit is tried again

BYTES_AT_ONCE = 400_000  # of one multi; larger differences go out in parts, the records first (see `_parts`)
OPERATION_BYTES = 100  # around the path and the data of each: header, lengths, access list, chroot

Decide = Callable[[ClusterState], ClusterState]


@dataclass(frozen=True)
class _Change:
    decide: Decide
    subjects: tuple[str, ...]  # whose assignments follow
    done: asyncio.Future[ClusterState]


class LeaderTerm:
    """Made by `begin`, ended by `end`. `ended` has the reason, None if it was asked for."""

    def __init__(
        self,
        session: Session,
        fence: Fence,
        cluster: ClusterState,
        counters: Counters,
        readings: Iterable[HostReading] = (),
    ) -> None:
        self.fence, self.counters = fence, counters
        self.ended: asyncio.Future[BaseException | None] = asyncio.get_running_loop().create_future()
        self.tasks = Tasks(self._finish)
        self.view = ClusterWatcher(session, cluster, readings, self.tasks, self._follow_monitors)
        self._session = session
        self._waiting: deque[_Change] = deque()
        self._under_way: list[_Change] = []  # being written
        self._alone = 0  # of those that wait, to be written each by itself
        self._work = asyncio.Event()
        self.tasks.start(self._write(), "gcm writer")

    @classmethod
    async def begin(cls, session: Session, fence: Fence, counters: Counters) -> LeaderTerm:
        """Read everything, and make the assignments right. Hosts are watched once `view` is started. Raises UnknownFormat,
        before anything is written, if what ZooKeeper has is for newer leaders."""
        await _claim_format(session, fence)
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
        return cls(session, fence, after, counters, snapshot.readings)

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

    async def change_when_it_fits(self, decide: Decide, *subjects: str) -> ClusterState:
        """As `change`, and again after a pause as long as hosts have no room: what a leader does by itself must neither end its
        term nor be forgotten. Raises what else `decide` raises, or NotLeader."""
        pauses = delays(PAUSE_SECONDS, PAUSE_SECONDS_MAX)
        while True:
            try:
                return await self.change(decide, *subjects)
            except HostFull as error:
                log.warning(
                    "no host has room for a change: trying again later",
                    extra={"fields": {"subjects": subjects, "reason": str(error)}},
                )
                await asyncio.sleep(next(pauses))

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
                    self._too_large(accepted, error)
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

    def _too_large(self, accepted: list[_Change], error: CallError) -> None:
        """Of several, each is decided again and written by itself: whoever asked at the same time is not to blame."""
        if len(accepted) > 1:
            self._waiting.extendleft(reversed(accepted))
            self._alone = len(accepted)
            return
        for change in accepted:
            if not change.done.done():
                change.done.set_exception(HostFull(f"no more fits on these hosts: {error}"))

    def _decide(self, before: ClusterState) -> tuple[list[_Change], ClusterState]:
        """Changes that are possible, and the cluster after all of them; impossible ones are answered."""
        after, accepted, touched = before, list[_Change](), set[str]()
        at_once = 1 if self._alone else CHANGES_AT_ONCE
        while self._waiting and len(accepted) < at_once:
            change = self._waiting.popleft()
            self._alone = max(self._alone - 1, 0)
            if change.done.cancelled():
                continue
            try:
                former, after = after, assign(change.decide(after), change.subjects, after)
            except RoqError as error:
                change.done.set_exception(error)
                continue
            except Exception as error:  # a defect that concerns this request only
                fields = {"subjects": list(change.subjects)}
                log.exception("a request could not be decided: answering it with the error", extra={"fields": fields})
                change.done.set_exception(RoqError(f"{type(error).__name__}: {error}"))
                continue
            accepted.append(change)
            touched.update(differing(former.hosts, after.hosts))
            if sum(len(after.host(name).assigned) for name in touched) > PROCESSES_AT_ONCE:
                break
        return accepted, after

    async def logs(self, prefix: str, *, only_asked: bool = False) -> dict[str, bytes]:
        """What is written of the logs whose ids begin like this, by id, as ZooKeeper has it now. only_asked: by somebody who
        gets Unavailable if it can't be read; else the term is over then, as with what it writes itself."""
        try:
            names = sorted(name for name in await self._session.children(paths.LOGS) if name.startswith(prefix))
            nodes = await self._session.get_many([paths.log(name) for name in names])
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
                await self.change_when_it_fits(lambda cluster: cluster, *queues)

        self.tasks.start(follow(), f"follow monitors on {host}")


async def _claim_format(session: Session, fence: Fence) -> None:
    """Look at the format of the tree, and make it ours if it is older."""
    node = await session.get(paths.FORMAT)
    found = read_format(node.data if node is not None else None)
    try:
        check_format(found)
    except UnknownFormat as error:
        log.error("this GCM can't lead: it stands for no election until it can", extra={"fields": {"reason": str(error)}})
        raise
    if (ours := raised(found, installed_version())) != found:
        data = to_json(ours)
        await fenced(session, fence, Create(paths.FORMAT, data) if node is None else SetData(paths.FORMAT, data))
        log.info("the format of ZooKeeper's tree was raised", extra={"fields": {"from": found.format, "to": ours.format}})


def _parts(operations: list[Op]) -> list[list[Op]]:
    """The operations in the same order, cut so that each part fits into a multi. Raises CallError if a node alone does not, so
    that nothing is written of a difference that can't be.

    A leader that dies between two parts leaves records without their assignments, and some of what a removal names: the next
    term begins with repairing the first, and its Finisher removes the second.
    """
    parts, size = list[list[Op]](), 0
    for operation in operations:
        count = _bytes(operation)
        if count > DATA_BYTES_MAX - OPERATION_BYTES:  # the fence goes with each part
            raise CallError(f"{count} bytes in {operation.path} of ZooKeeper: at most {DATA_BYTES_MAX}")
        if not parts or size + count > BYTES_AT_ONCE:
            parts.append([])
            size = 0
        parts[-1].append(operation)
        size += count
    return parts


def _bytes(operation: Op) -> int:
    data = len(operation.data) if isinstance(operation, Create | SetData) else 0
    return data + len(operation.path.encode()) + OPERATION_BYTES
