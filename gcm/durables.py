"""Durable subscribers at the leader: how far each has got with a recorded queue (held_names.py keeps it).

Not covered: the subscriber's side (roq/pubsub/durable.py).
"""

from __future__ import annotations

import msgspec

from gcm.held_names import HeldNames, NameKind
from gcm.term import LeaderTerm
from roq.coordination import paths
from roq.coordination.session import Session
from roq.errors import DurableTaken, InvalidPosition
from roq.ids import check_name
from roq.wire import durables as wire
from roq.wire.gcm import Done
from roq.wire.recording import TapePosition

POSITION_BYTES_MAX = 64 * 1024  # of the text: some 1,800 tapes
OWNER_CHARACTERS_MAX = 200
KIND = NameKind(paths.DURABLES, "durable subscriber", "roq queue forget-durable")

DurableRequest = wire.OpenDurable | wire.KeepPosition | wire.ListDurables | wire.ForgetDurable


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
    TapePosition.parse(text).check_queue(tapes)


class DurableStore:
    """Of one leader, for one term."""

    def __init__(self, session: Session, term: LeaderTerm) -> None:
        self._names = HeldNames(session, term, KIND, DurableRecord)
        self.start = self._names.start

    async def handle(self, request: DurableRequest, now: float) -> msgspec.Struct:
        """The reply. Raises QueueNotFound, NotRecorded, NotLeader, Unavailable, Overloaded, and as each says."""
        return await self._names.admit(self._answer(request, now))

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
        record = await self._names.change(request.queue, request.name, lambda before: open_record(before, request, now))
        return wire.DurablePosition(record.position)

    async def keep_position(self, request: wire.KeepPosition, now: float) -> Done:
        """Kept. Raises DurableTaken, InvalidPosition."""
        check_position(request.position, self._names.tapes(request.queue))
        await self._names.change(request.queue, request.name, lambda before: keep_in(before, request, now))
        return Done()

    async def list_durables(self, request: wire.ListDurables) -> wire.Durables:
        """As many as fit into one answer; one that can't be read has no position and no owner."""
        found, more = await self._names.list(request.queue, request.after)
        return wire.Durables(tuple(_view(name, record) for name, record in found), more)

    async def forget_durable(self, request: wire.ForgetDurable) -> Done:
        """There is none of that name."""
        await self._names.forget(request.queue, request.name)
        return Done()


def _view(name: str, record: DurableRecord | None) -> wire.DurableView:
    if record is None:
        return wire.DurableView(name, "", "", 0.0, 0.0)
    return wire.DurableView(name, record.position, record.owner, record.opened, record.kept)
