"""Durable subscribers: how far each has got with a recorded queue, kept in ZooKeeper beside the cluster.

    durables/<tapes>           empty; tapes: the queue's part of the names of its tapes, drawn anew with every queue
    durables/<tapes>/<name>    JSON of DurableRecord

Not part of the leader's view: read when it is asked for, and written with the version that was read. Nodes are made, and the
folder of a queue that is gone is removed, by one at a time, so none is made behind a removal. A leader that dies before it has
removed them leaves a folder of no queue, which the next one finds when its term begins. Not covered: the subscriber's side
(roq/pubsub/durable.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

import msgspec

from gcm import transactions
from gcm.cluster import ClusterState
from gcm.term import LeaderTerm
from gcm.watcher import read_each
from roq.coordination import paths
from roq.coordination.election import fenced
from roq.coordination.link import CoordinationError, Create, Delete, Node, NodeExists, NoNode, Op, SetData, VersionConflict
from roq.coordination.session import Session
from roq.errors import (
    CallError,
    DurableTaken,
    FrameError,
    InvalidPosition,
    NotLeader,
    NotRecorded,
    Overloaded,
    RoqError,
    Unavailable,
    UnknownFormat,
)
from roq.ids import check_name
from roq.runtime.observe import logger
from roq.wire import durables as wire
from roq.wire.assignment import from_json, to_json
from roq.wire.gcm import Done
from roq.wire.recording import TapePosition, tapes_of

log = logger(__name__)
DURABLES_MAX = 1_000  # of one queue: each writes once a second while it reads
POSITION_BYTES_MAX = 64 * 1024  # of the text: some 1,800 tapes
OWNER_CHARACTERS_MAX = 200
LIST_BYTES = 1024 * 1024  # of positions in one answer, but for the last one
LIST_AT_ONCE = 100
AT_ONCE_MAX = 200  # requests: the leader has other work

DurableRequest = wire.OpenDurable | wire.KeepPosition | wire.ListDurables | wire.ForgetDurable
V = TypeVar("V")


class DurableRecord(msgspec.Struct, frozen=True):
    """The node's value. holder: who may keep positions; owner: the same for people. number: of its last position. opened, kept:
    seconds since 1970."""

    holder: str
    owner: str
    opened: float
    position: str = ""
    number: int = 0
    kept: float = 0.0


def open_record(before: DurableRecord | None, request: wire.OpenDurable, now: float) -> DurableRecord:
    """Held by who asks, with the position of before; as it is if it holds it already."""
    if before is not None and before.holder == request.holder:
        return before
    opened = DurableRecord(request.holder, request.owner[:OWNER_CHARACTERS_MAX], now)
    return opened if before is None else msgspec.structs.replace(opened, position=before.position, kept=before.kept)


def keep_in(before: DurableRecord | None, request: wire.KeepPosition, now: float) -> DurableRecord:
    """With that position; as it is if a later one is kept already. Raises DurableTaken."""
    what = f"durable subscriber {request.name!r} of queue {request.queue!r}"
    if before is None:
        raise DurableTaken(f"{what} was forgotten: open it again to begin anew")
    if before.holder != request.holder:
        raise DurableTaken(f"{what} was opened since by {before.owner or 'somebody else'}: open it again to take it back")
    if request.number <= before.number:
        return before
    return msgspec.structs.replace(before, position=request.position, number=request.number, kept=now)


def check_position(text: str, tapes: str) -> None:
    """Raises InvalidPosition: it is none of this queue, or too long to be kept."""
    if len(text) > POSITION_BYTES_MAX:
        raise InvalidPosition(f"a position of {len(text)} characters: at most {POSITION_BYTES_MAX} are kept")
    if TapePosition.parse(text).tapes != tapes:
        raise InvalidPosition("the position is of another queue, or of one that was removed and created anew")


class DurableStore:
    """Of one leader, for one term."""

    def __init__(self, session: Session, term: LeaderTerm) -> None:
        self._session, self._term = session, term
        self._making = asyncio.Lock()  # nodes are made and removed by one at a time
        self._forgotten = self._under_way = 0  # how many; requests
        term.view.on_change.append(self._changed)

    def start(self) -> None:
        """Remove what leaders before have left of queues that are gone."""
        self._term.tasks.start(self._sweep(), "leftover durable subscribers")

    async def handle(self, request: DurableRequest, now: float) -> msgspec.Struct:
        """The reply. Raises QueueNotFound, NotRecorded, NotLeader, Unavailable, Overloaded, and as each says."""
        if self._under_way >= AT_ONCE_MAX:
            raise Overloaded("too many durable subscribers keep their positions just now: try again")
        self._under_way += 1
        try:
            return await self._answer(request, now)
        finally:
            self._under_way -= 1

    async def _answer(self, request: DurableRequest, now: float) -> msgspec.Struct:
        match request:
            case wire.OpenDurable():
                return await self.open_durable(request, now)
            case wire.KeepPosition():
                return await self.keep_position(request, now)
            case wire.ListDurables():
                return await self.list_durables(request)
            case wire.ForgetDurable():
                return await self.forget_durable(request)

    async def open_durable(self, request: wire.OpenDurable, now: float) -> wire.DurablePosition:
        """Held by who asks. Raises CallError: the queue has too many."""
        check_name(request.holder, "holder")
        record = await self._change(request.queue, request.name, lambda before: open_record(before, request, now))
        return wire.DurablePosition(record.position)

    async def keep_position(self, request: wire.KeepPosition, now: float) -> Done:
        """Kept. Raises DurableTaken, InvalidPosition."""
        check_position(request.position, self._tapes(request.queue))
        await self._change(request.queue, request.name, lambda before: keep_in(before, request, now))
        return Done()

    async def list_durables(self, request: wire.ListDurables) -> wire.Durables:
        """As many as fit into one answer; one that can't be read has no position and no owner."""
        tapes = self._tapes(request.queue)
        names = await self._read(self._session.children(paths.durables(tapes)))
        rest = sorted(name for name in names if name > request.after)
        views, size, done = list[wire.DurableView](), 0, 0
        while done < len(rest) and size < LIST_BYTES:
            part = rest[done : done + LIST_AT_ONCE]
            nodes = await self._read(read_each(part, lambda name: self._session.get(paths.durable(tapes, name))))
            views += [_view(name, node) for name, node in zip(part, nodes, strict=True) if node is not None]
            size += sum(len(node.data) for node in nodes if node is not None)
            done += len(part)
        return wire.Durables(tuple(views), done < len(rest))

    async def forget_durable(self, request: wire.ForgetDurable) -> Done:
        """There is none of that name."""
        check_name(request.name, "durable subscriber")
        path = paths.durable(self._tapes(request.queue), request.name)
        async with self._making:
            self._forgotten += 1
            await self._write(Delete(path))
        return Done()

    def _tapes(self, queue: str) -> str:
        """The queue's part of the names of its tapes. Raises QueueNotFound, NotRecorded."""
        recording = transactions.record_of(self._term.view.cluster, check_name(queue)).recording
        if recording is None:
            raise NotRecorded(f"queue {queue!r} is not recorded: `roq queue record` switches that on")
        return recording.tapes

    async def _change(self, queue: str, name: str, decide: Callable[[DurableRecord | None], DurableRecord]) -> DurableRecord:
        check_name(name, "durable subscriber")
        while True:
            tapes, forgotten = self._tapes(queue), self._forgotten
            path = paths.durable(tapes, name)
            node = await self._read(self._session.get(path))
            before = _decode(name, node)
            after = decide(before)
            if after is before:
                return after
            if node is None:
                done = await self._create(queue, tapes, Create(path, to_json(after)))
            else:  # not the node of that version that was made since in place of one that was forgotten
                done = forgotten == self._forgotten and await self._write(SetData(path, to_json(after), node.version))
            if done:
                return after

    async def _create(self, queue: str, tapes: str, node: Create) -> bool:
        """False: look again. Raises CallError: the queue has too many."""
        folder = paths.durables(tapes)
        async with self._making:
            if self._tapes(queue) != tapes:
                return False
            count = len(await self._read(self._session.children(folder)))
            if count >= DURABLES_MAX:
                raise CallError(f"queue {queue!r} has {count} durable subscribers: `roq queue forget-durable` makes room")
            there = count or await self._read(self._session.get(folder)) is not None
            return await self._write(*([] if there else [Create(folder)]), node)

    # --- removed with their queue ---------------------------------------------------------------------------------------

    def _changed(self, before: ClusterState, after: ClusterState) -> None:
        if before.queues is after.queues:
            return
        for name, record in before.queues.items():
            now = after.queues.get(name)
            gone = now is None or now.transaction != record.transaction
            if gone and record.recording is not None:
                self._term.tasks.start(self._remove(record.recording.tapes), f"durable subscribers of {name}")

    async def _sweep(self) -> None:
        try:
            folders = await self._session.children(paths.DURABLES)
            written = await self._session.children(paths.QUEUES)
        except RoqError as error:
            self._term.step_down(error)
            return
        queues = self._term.view.cluster.queues
        strange = [name for name in written if name not in queues]
        if folders and strange:  # positions of a queue that is there must not go
            log.warning(
                "durable subscribers were not looked through: a queue's record is unreadable",
                extra={"fields": {"queues": strange}},
            )
            return
        known = {tapes_of(name, record.transaction) for name, record in queues.items()}
        for tapes in folders:
            if tapes not in known:
                await self._remove(tapes)

    async def _remove(self, tapes: str) -> None:
        folder = paths.durables(tapes)
        try:
            async with self._making:
                while await self._session.get(folder) is not None:
                    names = await self._session.children(folder)
                    await self._write(*(Delete(paths.durable(tapes, name)) for name in names), Delete(folder))
        except RoqError as error:  # the next leader finds the folder
            self._term.step_down(error)

    # --- ZooKeeper ------------------------------------------------------------------------------------------------------

    async def _read(self, reading: Awaitable[V]) -> V:
        try:
            return await reading
        except RoqError as error:
            raise Unavailable(f"durable subscribers could not be read: {error}") from error

    async def _write(self, *operations: Op) -> bool:
        """All of them; False if what was read has changed since. Raises NotLeader: the term is over."""
        try:
            await fenced(self._session, self._term.fence, *operations)
        except (VersionConflict, NodeExists, NoNode):
            return False
        except CoordinationError as error:  # ZooKeeper refuses this very write, and would refuse it of the next leader
            raise CallError(f"the position can't be written: {error}") from error
        except RoqError as error:
            self._term.step_down(error)
            raise NotLeader(f"the position could not be written: {error}") from error
        return True


def _decode(name: str, node: Node | None) -> DurableRecord | None:
    """Raises UnknownFormat."""
    try:
        return from_json(node.data, DurableRecord) if node is not None else None
    except FrameError as error:
        raise UnknownFormat(f"durable subscriber {name!r}: {error}; `roq queue forget-durable` lets it begin anew") from None


def _view(name: str, node: Node) -> wire.DurableView:
    try:
        record = from_json(node.data, DurableRecord)
    except FrameError as error:
        log.error("durable subscriber is unreadable", extra={"fields": {"name": name, "reason": str(error)}})
        return wire.DurableView(name, "", "", 0.0, 0.0)
    return wire.DurableView(name, record.position, record.owner, record.opened, record.kept)
