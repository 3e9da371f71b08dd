"""Producers at the leader: up to which number each has stored its messages (held_names.py keeps it).

A record says what was known when it was kept last, and between which times more may have been stored since: who opens the
name next looks there. Each life of a producer has paths above those of the lives before, so that Exchanges and subscribers tell
them apart.
Not covered: the publisher's side (roq/pubsub/producer.py).
"""

from __future__ import annotations

import msgspec

from gcm.held_names import HeldNames, NameKind
from gcm.term import LeaderTerm
from roq.coordination import paths
from roq.coordination.session import Session
from roq.errors import CallError, ProducerFenced
from roq.ids import check_name, new_id
from roq.wire import producers as wire
from roq.wire.gcm import Done
from roq.wire.producers import LEASE_SECONDS, LIFE_BITS, LIVES_MAX

OWNER_CHARACTERS_MAX = 200
KIND = NameKind(paths.PRODUCERS, "producer", "roq queue forget-producer")

ProducerRequest = wire.OpenProducer | wire.KeepProducer | wire.ListProducers | wire.ForgetProducer


class ProducerRecord(msgspec.Struct, frozen=True):
    """The node's value. publisher: the id that stays with the name until it is forgotten. holder: who may keep; owner: the same
    for people; turn: of its last one. path, number, exchange: as in KeepProducer. closed: nothing was sent behind it.
    settled: the holder before had closed it. opened, kept, since: seconds since 1970; what is behind `number` was sent after
    `since`."""

    publisher: int
    holder: str
    owner: str
    opened: float
    settled: bool
    turn: int = 0
    path: int = 0
    number: int = 0
    exchange: str = ""
    closed: bool = False
    since: float = 0.0
    kept: float = 0.0


def open_record(before: ProducerRecord | None, request: wire.OpenProducer, publisher: int, now: float) -> ProducerRecord:
    """Held by who asks, on paths above those of before; as it is if it holds it already. publisher: id of a new one. Raises
    CallError: there were too many lives; ProducerFenced: it says that it holds it, and does not."""
    if request.holds:
        return _held(before, request)
    if before is not None and before.holder == request.holder:
        return before
    owner = request.owner[:OWNER_CHARACTERS_MAX]
    if before is None:
        return ProducerRecord(publisher, request.holder, owner, now, True, since=now, kept=now)
    path = before.path
    clean = before.closed or (before.settled and not before.turn)  # who has kept nothing has sent nothing
    if not before.closed and before.turn:  # it may have gone on, but not into the next life's
        life = (path >> LIFE_BITS) + 1
        if life >= LIVES_MAX:
            raise CallError(f"producer {request.name!r} ended {life} times unclosed: `{KIND.forget}` lets it begin anew")
        path = life << LIFE_BITS
    opened = ProducerRecord(before.publisher, request.holder, owner, now, clean, path=path, number=before.number)
    return msgspec.structs.replace(opened, exchange=before.exchange, since=before.since, kept=before.kept)


def _held(before: ProducerRecord | None, request: wire.OpenProducer | wire.KeepProducer) -> ProducerRecord:
    """By who asks. Raises ProducerFenced."""
    what = f"producer {request.name!r} of queue {request.queue!r}"
    if before is None:
        raise ProducerFenced(f"{what} was forgotten: open it again to begin anew")
    if before.holder != request.holder:
        raise ProducerFenced(f"{what} was opened since by {before.owner or 'somebody else'}: this publisher ends")
    return before


def keep_in(before: ProducerRecord | None, request: wire.KeepProducer, now: float) -> ProducerRecord:
    """With that; as it is if it was overtaken. Raises ProducerFenced."""
    before = _held(before, request)
    if request.turn <= before.turn:
        return before
    return msgspec.structs.replace(
        before,
        turn=request.turn,
        path=max(before.path, request.path),
        number=max(before.number, request.number),
        exchange=request.exchange,
        closed=request.closed,
        since=(before.kept if before.turn else before.opened) if request.fresh else before.since,
        kept=now,
    )


def grant(record: ProducerRecord) -> wire.ProducerGrant:
    """What the record's holder, which has kept nothing yet, is told."""
    place = (record.publisher, record.path, record.number, record.exchange)
    return wire.ProducerGrant(*place, record.settled, record.since, record.kept + LEASE_SECONDS)


class ProducerStore:
    """Of one leader, for one term."""

    def __init__(self, session: Session, term: LeaderTerm) -> None:
        self._names = HeldNames(session, term, KIND, ProducerRecord)
        self.start = self._names.start

    async def handle(self, request: ProducerRequest, now: float) -> msgspec.Struct:
        """The reply. Raises QueueNotFound, NotRecorded, NotLeader, Unavailable, Overloaded, and as each says."""
        return await self._names.admit(self._answer(request, now))

    async def _answer(self, request: ProducerRequest, now: float) -> msgspec.Struct:
        match request:
            case wire.OpenProducer():
                return await self.open_producer(request, now)
            case wire.KeepProducer():
                return await self.keep_producer(request, now)
            case wire.ListProducers():
                return await self.list_producers(request)
            case wire.ForgetProducer():
                return await self.forget_producer(request)

    async def open_producer(self, request: wire.OpenProducer, now: float) -> wire.ProducerGrant:
        """Held by who asks. Raises CallError: the queue has too many, or it had too many lives; ProducerFenced."""
        check_name(request.holder, "holder")
        publisher = new_id()
        return grant(
            await self._names.change(request.queue, request.name, lambda before: open_record(before, request, publisher, now))
        )

    async def keep_producer(self, request: wire.KeepProducer, now: float) -> Done:
        """Kept. Raises ProducerFenced."""
        await self._names.change(request.queue, request.name, lambda before: keep_in(before, request, now))
        return Done()

    async def list_producers(self, request: wire.ListProducers) -> wire.Producers:
        """As many as fit into one answer; one that can't be read has no owner."""
        found, more = await self._names.list(request.queue, request.after)
        return wire.Producers(tuple(_view(name, record) for name, record in found), more)

    async def forget_producer(self, request: wire.ForgetProducer) -> Done:
        """There is none of that name."""
        await self._names.forget(request.queue, request.name)
        return Done()


def _view(name: str, record: ProducerRecord | None) -> wire.ProducerView:
    if record is None:
        return wire.ProducerView(name, 0, False, "", 0.0, 0.0)
    return wire.ProducerView(name, record.number, record.closed, record.owner, record.opened, record.kept)
