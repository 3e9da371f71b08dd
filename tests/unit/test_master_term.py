"""A term whose log stands still, and whose clients go: what is answered when, and what is taken at all. The log is a twin."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest

from roq.errors import Overloaded, RoqError
from roq.runtime.observe import Counters
from roq.wire import master as wire
from roq.wire.envelope import EnvelopeKind, error_of, open_envelope
from roq.wire.task import ACK, Settlement, TaskToPut
from roq.wire.work_queue import TaskSettings
from roq.workqueue.fold import Fold
from roq.workqueue.master.recent import Recent
from roq.workqueue.master.service import WAITING_BYTES_MAX, MasterService
from roq.workqueue.master.term import APPENDS_AT_ONCE, MasterTerm, SteadyClock
from roq.workqueue.records import Configure

PEER = b"peer"


class Log:
    """Appends when told to."""

    def __init__(self) -> None:
        self.waiting: list[tuple[bytes, Callable[[int | RoqError], None]]] = []
        self.position = 0

    def write(self, entry: bytes, done: Callable[[int | RoqError], None]) -> None:
        self.waiting.append((entry, done))

    async def go_on(self) -> None:
        for _ in range(20):
            await asyncio.sleep(0)
            while self.waiting:
                self.position += 1
                self.waiting.pop(0)[1](self.position)


class Rig:
    """A term, and what its clients were sent."""

    def __init__(self) -> None:
        self.log, self.counters = Log(), Counters()
        self.gone: set[bytes] = set()
        self.answers: dict[tuple[bytes, int], wire.Reply | RoqError] = {}
        self.service = MasterService(Fold(), Recent(), 1, 65536, lambda hosts: (), here=lambda peer: peer not in self.gone)
        clock = SteadyClock()
        self.term = MasterTerm(self.service, self.log, self._sent, lambda blobs: None, clock, self.counters)
        self.service.apply(Configure(clock.now(), TaskSettings(), 0))
        self.term.look()
        self._ids = 0

    def _sent(self, peer: bytes, message: bytes) -> bool:
        if peer in self.gone:
            return False
        envelope = open_envelope(message)
        error = envelope.kind == EnvelopeKind.ERROR
        self.answers[peer, envelope.id] = error_of(envelope.body) if error else wire.open_answer(message).body
        return True

    def ask(self, request: wire.Request, peer: bytes = PEER) -> tuple[bytes, int]:
        """As the process does with what comes."""
        self._ids += 1
        if not self.term.turned_away(peer, self._ids, request):
            self.term.take(peer, self._ids, request)
        self.term.look()
        return peer, self._ids

    async def answer(self, request: wire.Request, peer: bytes = PEER) -> wire.Reply | RoqError:
        asked = self.ask(request, peer)
        await self.log.go_on()
        return self.answers.pop(asked)


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    made = Rig()
    await made.log.go_on()
    yield made
    made.term.close()


def put(sequence: int, size: int = 60_000) -> wire.Put:
    return wire.Put(7, sequence, [TaskToPut(b"x" * size)])


async def test_a_log_that_stands_still_costs_a_bounded_number_of_bytes(rig: Rig) -> None:
    asked = [rig.ask(put(sequence)) for sequence in range(1, 2 * WAITING_BYTES_MAX // 60_000)]
    assert len(rig.log.waiting) == APPENDS_AT_ONCE
    refused = [one for one in asked if one in rig.answers]
    assert refused == asked[-len(refused) :]
    assert len(refused) == pytest.approx(len(asked) / 2, rel=0.01)
    assert all(isinstance(rig.answers[one], Overloaded) for one in refused), "told at once: the log may never go on"
    waiting = rig.service.waiting.bytes
    again = [rig.ask(put(sequence)) for sequence in range(1, 100)]
    assert not any(one in rig.answers for one in again), "what is on its way is not refused"
    assert rig.service.waiting.bytes < waiting + 100_000
    await rig.log.go_on()
    accepted = [one for one in asked if one not in refused]
    assert all(rig.answers[one] == wire.TasksAdded([]) for one in [*accepted, *again])
    assert rig.service.fold.inserted == len(accepted)
    assert rig.service.waiting.bytes == 0
    assert await rig.answer(put(5000)) == wire.TasksAdded([])


async def test_a_task_whose_lease_nobody_got_is_given_back(rig: Rig) -> None:
    await rig.answer(put(1, 10))
    rig.ask(wire.Lease(8, 1, 0, 60_000, 1, 0, []), b"killed")
    rig.gone.add(b"killed")
    await rig.log.go_on()
    assert rig.service.fold.ready.count == 1
    answer = await rig.answer(wire.Lease(9, 1, 0, 60_000, 1, 0, []))
    assert isinstance(answer, wire.Leases)
    assert len(answer.tasks) == 1


async def test_a_lease_that_was_asked_for_on_two_connections_is_kept_if_one_is_left(rig: Rig) -> None:
    await rig.answer(put(1, 10))
    lease = wire.Lease(8, 1, 0, 60_000, 1, 0, [])
    rig.ask(lease, b"cut")
    again = rig.ask(wire.Lease(8, 1, 1, 60_000, 1, 0, []), PEER)
    rig.gone.add(b"cut")
    await rig.log.go_on()
    answer = rig.answers[again]
    assert isinstance(answer, wire.Leases)
    assert len(answer.tasks) == 1
    assert rig.service.fold.ready.count == 0
    settled = await rig.answer(wire.SettleAll(8, 0, [Settlement(ACK, answer.tasks[0].token)]))
    assert settled == wire.Leases([""], [])
