"""Names of a recorded queue that somebody holds: durable subscribers, producers. Kept in ZooKeeper beside the cluster.

    <root>/<tapes>           empty; tapes: the queue's part of the names of its tapes, drawn anew with every queue
    <root>/<tapes>/<name>    JSON of the kind's record

Not part of the leader's view: read when it is asked for, and written with the version that was read. Nodes are made, and the
folder of a queue that is gone is removed, by one at a time, so none is made behind a removal. A leader that dies before it has
removed them leaves a folder of no queue, which the next one finds when its term begins. What a record says is decided in
durables.py and producers.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, NamedTuple, TypeVar

import msgspec

from gcm import transactions
from gcm.cluster import ClusterState, differing
from gcm.term import LeaderTerm
from roq.coordination import paths
from roq.coordination.election import fenced
from roq.coordination.link import CoordinationError, Create, Delete, Node, NodeExists, NoNode, Op, SetData, VersionConflict
from roq.coordination.session import Session
from roq.errors import CallError, FrameError, NotLeader, NotRecorded, Overloaded, RoqError, Unavailable, UnknownFormat
from roq.ids import check_name, is_reserved
from roq.runtime.observe import logger
from roq.wire.assignment import from_json, to_json
from roq.wire.master import OUTBOX_PREFIX
from roq.wire.recording import tapes_of

log = logger(__name__)
NAMES_MAX = 1_000  # of a kind, of one queue, beside the cluster's own: each is written once a second while it is busy
LEFTOVERS_AT_ONCE = 100
LIST_BYTES = 1024 * 1024  # of records in one answer, but for the last one
LIST_AT_ONCE = 100
AT_ONCE_MAX = 200  # requests: the leader has other work
R = TypeVar("R", bound=msgspec.Struct)
V = TypeVar("V")


class NameKind(NamedTuple):
    """root: folder of all of this kind. what: one of it, for people. forget: the command that removes one."""

    root: str
    what: str
    forget: str


class HeldNames(Generic[R]):
    """All names of one kind, of one leader, for one term."""

    def __init__(self, session: Session, term: LeaderTerm, kind: NameKind, record: type[R]) -> None:
        self._session, self._term, self._kind, self._record = session, term, kind, record
        self._making = asyncio.Lock()  # nodes are made and removed by one at a time
        self._forgotten = self._under_way = 0  # how many; requests
        term.view.on_change.append(self._changed)

    def start(self) -> None:
        """Remove what leaders before have left of queues that are gone."""
        self._term.tasks.start(self._sweep(), f"leftover {self._kind.what}s")

    async def admit(self, answering: Awaitable[V]) -> V:
        """The answer, unless too many are waited for: then Overloaded."""
        if self._under_way >= AT_ONCE_MAX:
            if asyncio.iscoroutine(answering):
                answering.close()
            raise Overloaded(f"too many {self._kind.what}s are being written just now: try again")
        self._under_way += 1
        try:
            return await answering
        finally:
            self._under_way -= 1

    def tapes(self, queue: str) -> str:
        """The queue's part of the names of its tapes. Raises QueueNotFound, NotRecorded."""
        recording = transactions.record_of(self._term.view.cluster, check_name(queue)).recording
        if recording is None:
            raise NotRecorded(f"queue {queue!r} is not recorded: `roq queue record` switches that on")
        return recording.tapes

    async def change(self, queue: str, name: str, decide: Callable[[R | None], R]) -> R:
        """The record that `decide` makes of the one that is there, written. Raises what it does; QueueNotFound, NotRecorded,
        NotLeader, Unavailable, UnknownFormat; CallError: the queue has too many."""
        check_name(name, self._kind.what)
        while True:
            tapes, forgotten = self.tapes(queue), self._forgotten
            path = paths.held_name(self._kind.root, tapes, name)
            node = await self._read(self._session.get(path))
            before = self._decode(name, node)
            after = decide(before)
            if after is before:
                return after
            if node is None:
                done = await self._create(queue, tapes, Create(path, to_json(after)))
            else:  # not the node of that version that was made since in place of one that was forgotten
                done = forgotten == self._forgotten and await self._write(SetData(path, to_json(after), node.version))
            if done:
                return after

    async def list(self, queue: str, after: str) -> tuple[list[tuple[str, R | None]], bool]:
        """Behind that name, as many as fit into one answer, None for one that can't be read; whether there are more."""
        tapes = self.tapes(queue)
        names = await self._read(self._session.children(paths.held_names(self._kind.root, tapes)))
        rest = sorted(name for name in names if name > after)
        found, size, done = list[tuple[str, R | None]](), 0, 0
        while done < len(rest) and size < LIST_BYTES:
            part = rest[done : done + LIST_AT_ONCE]
            reading = self._session.get_many([paths.held_name(self._kind.root, tapes, name) for name in part])
            for name, node in zip(part, await self._read(reading), strict=True):
                if node is not None:
                    found.append((name, self._readable(name, node)))
                    size += len(node.data)
            done += len(part)
        return found, done < len(rest)

    async def forget(self, queue: str, name: str) -> None:
        """There is none of that name."""
        path = paths.held_name(self._kind.root, self.tapes(queue), check_name(name, self._kind.what))
        async with self._making:
            self._forgotten += 1
            await self._write(Delete(path))

    async def _create(self, queue: str, tapes: str, node: Create) -> bool:
        """False: look again. Raises CallError: the queue has too many."""
        folder = paths.held_names(self._kind.root, tapes)
        async with self._making:
            if self.tapes(queue) != tapes:
                return False
            names = await self._read(self._session.children(folder))
            count, is_own = sum(not is_reserved(name) for name in names), is_reserved(node.path.rpartition("/")[2])
            if count >= NAMES_MAX and not is_own:
                raise CallError(f"queue {queue!r} has {count} {self._kind.what}s: `{self._kind.forget}` makes room")
            there = names or await self._read(self._session.get(folder)) is not None
            gone = self._leftovers(names) if is_own else []
            self._forgotten += len(gone)
            deletions = [Delete(paths.held_name(self._kind.root, tapes, name)) for name in gone]
            return await self._write(*([] if there else [Create(folder)]), *deletions, node)

    def _leftovers(self, names: Sequence[str]) -> Sequence[str]:
        """Those that published for work queues which are gone."""
        cluster = self._term.view.cluster
        if cluster.unreadable:  # it may be there
            return []
        known = {OUTBOX_PREFIX + record.spec.log for record in cluster.work_queues.values()}
        return [name for name in names if name.startswith(OUTBOX_PREFIX) and name not in known][:LEFTOVERS_AT_ONCE]

    def _decode(self, name: str, node: Node | None) -> R | None:
        """Raises UnknownFormat."""
        try:
            return from_json(node.data, self._record) if node is not None else None
        except FrameError as error:
            raise UnknownFormat(f"{self._kind.what} {name!r}: {error}; `{self._kind.forget}` lets it begin anew") from None

    def _readable(self, name: str, node: Node) -> R | None:
        try:
            return from_json(node.data, self._record)
        except FrameError as error:
            log.error("a %s is unreadable", self._kind.what, extra={"fields": {"name": name, "reason": str(error)}})
            return None

    # --- removed with their queue ---------------------------------------------------------------------------------------

    def _changed(self, before: ClusterState, after: ClusterState) -> None:
        for name in differing(before.queues, after.queues):
            record, now = before.queues.get(name), after.queues.get(name)
            if record is None or (now is not None and now.transaction == record.transaction):
                continue
            if record.recording is not None:
                self._term.tasks.start(self._remove(record.recording.tapes), f"{self._kind.what}s of {name}")

    async def _sweep(self) -> None:
        try:
            folders = await self._session.children(self._kind.root)
            written = await self._session.children(paths.QUEUES)
        except RoqError as error:
            self._term.step_down(error)
            return
        queues = self._term.view.cluster.queues
        strange = [name for name in written if name not in queues]
        if folders and strange:  # what is kept of a queue that is there must not go
            fields = {"queues": strange}
            log.warning(
                "%ss were not looked through: a queue's record is unreadable", self._kind.what, extra={"fields": fields}
            )
            return
        known = {tapes_of(name, record.transaction) for name, record in queues.items()}
        for tapes in folders:
            if tapes not in known:
                await self._remove(tapes)

    async def _remove(self, tapes: str) -> None:
        root = self._kind.root
        folder = paths.held_names(root, tapes)
        try:
            async with self._making:
                while await self._session.get(folder) is not None:
                    names = await self._session.children(folder)
                    await self._write(*(Delete(paths.held_name(root, tapes, name)) for name in names), Delete(folder))
        except RoqError as error:  # the next leader finds the folder
            self._term.step_down(error)

    # --- ZooKeeper ------------------------------------------------------------------------------------------------------

    async def _read(self, reading: Awaitable[V]) -> V:
        try:
            return await reading
        except RoqError as error:
            raise Unavailable(f"{self._kind.what}s could not be read: {error}") from error

    async def _write(self, *operations: Op) -> bool:
        """All of them; False if what was read has changed since. Raises NotLeader: the term is over."""
        try:
            await fenced(self._session, self._term.fence, *operations)
        except (VersionConflict, NodeExists, NoNode):
            return False
        except CoordinationError as error:  # ZooKeeper refuses this very write, and would refuse it of the next leader
            raise CallError(f"the {self._kind.what} can't be written: {error}") from error
        except RoqError as error:
            self._term.step_down(error)
            raise NotLeader(f"the {self._kind.what} could not be written: {error}") from error
        return True
