"""A store whose disk is slow: it refuses above a bound, and the writer sends it no more than it takes. The real storage, the
real writer machine, and calls between them."""

from __future__ import annotations

import pytest

from roq.log.replicated import appending as machine
from roq.log.replicated.appending import Appending
from roq.log.store import storage
from roq.log.store.storage import COPY_EPOCH
from roq.runtime import router
from roq.runtime.router import Dealer
from roq.wire.store import Refusal
from tests.unit.test_store_storage import Bench, add, entry

ENTRY_BYTES = 600
FRAME_BYTES = 4 * 1024
BOUND = 32 * 1024


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "PENDING_BYTES_MAX", BOUND)
    monkeypatch.setattr(storage, "BATCH_BYTES", 8 * 1024)
    monkeypatch.setattr(machine, "FRAME_BYTES", FRAME_BYTES)
    monkeypatch.setattr(machine, "PACED_BYTES", 4 * FRAME_BYTES)


class Slow:
    """Appending to `nodes`, of which "c" is a storage that writes one batch per `tick`; the others confirm at once."""

    def __init__(self, nodes: tuple[str, ...]) -> None:
        self.appending = Appending("s", 1, nodes, 2, 1)
        self.bench = Bench()
        self.bench.open()
        self.sent = self.refused = self.most = 0

    def flush(self) -> None:
        for node, frame in list(self.appending.frames()):
            if node != "c":
                self.appending.added(node, frame.first, len(frame.entries))
                continue
            self.sent += sum(map(len, frame.entries))

            def answer(refusal: Refusal | None, first: int = frame.first, count: int = len(frame.entries)) -> None:
                if refusal is None:
                    self.appending.added("c", first, count)
                else:
                    assert refusal is Refusal.OVERLOADED
                    self.refused += 1
                    self.appending.overloaded("c", first)

            self.bench.storage.add(frame, answer)
            self.most = max(self.most, self.bench.storage.pending_bytes)
        self.appending.check()

    def append(self, count: int) -> None:
        for _ in range(count):
            self.appending.append(entry(self.appending.next, ENTRY_BYTES))
            self.flush()

    def tick(self) -> None:
        """The disk is done with a batch, and the writer looks after its nodes."""
        slow = self.bench.storage
        if slow.has_pending and (write := slow.stage()) is not None:
            slow.journal.perform(write)
            slow.committed(write)
        if slow.wants_file:
            slow.journal.adopt(slow.journal.create())
        self.appending.resume()
        self.flush()


def test_a_store_refuses_what_it_could_only_keep_in_memory_but_no_fence_and_no_copy() -> None:
    bench = Bench()
    bench.open()
    answers: list[Refusal | None] = []
    for position in range(1, 500):
        bench.storage.add(add("s", position, entry(position, ENTRY_BYTES)), answers.append)
    assert answers.count(Refusal.OVERLOADED) > 400
    assert bench.storage.pending_bytes < BOUND + 2 * ENTRY_BYTES + 4096
    taken = 499 - len(answers)
    others: list[Refusal | None] = []
    bench.storage.fence("t", 3, others.append)
    bench.storage.add(add("u", 1, entry(1), epoch=COPY_EPOCH), others.append)
    assert not others  # they wait like the rest
    bench.flush()
    assert others == [None, None]
    assert answers.count(None) == taken
    assert bench.add(taken + 1, entry(taken + 1)) is None


def test_a_laggard_that_is_not_needed_holds_up_nobody_and_costs_no_memory() -> None:
    slow = Slow(("a", "b", "c"))
    for _ in range(60):
        slow.append(50)
        slow.tick()
        assert slow.appending.drained
        assert slow.appending.bytes_pending == 0
    assert slow.refused
    assert slow.most < BOUND + 2 * FRAME_BYTES + 8192
    assert slow.sent < 0.5 * 3000 * ENTRY_BYTES, "most of it left for a node that could not take it"
    assert "c" in slow.appending.holed  # it gets the rest from the closed segment
    for _ in range(40):  # the load is over
        slow.append(1)
        slow.tick()
    assert not slow.appending.paced
    assert not slow.appending.behind("c")


def test_a_slow_store_that_is_needed_gets_all_of_it_and_little_twice() -> None:
    slow = Slow(("a", "c"))
    slow.append(1000)
    assert slow.appending.acked == 0
    for _ in range(1000):
        if slow.appending.drained:
            break
        slow.tick()
    assert slow.appending.drained
    assert not slow.appending.holed
    assert slow.most < BOUND + 2 * FRAME_BYTES + 8192
    assert slow.sent < 1.5 * 1000 * ENTRY_BYTES


def test_a_paced_node_that_never_answers_is_late() -> None:
    slow = Slow(("a", "b", "c"))
    slow.append(100)
    assert slow.refused
    assert slow.appending.behind("c"), "or it would never be replaced"
    slow.appending.send_again("c")
    assert "c" in slow.appending.holed


async def test_what_waits_for_a_connection_is_bounded_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router, "WAITING_BYTES_MAX", 1000)
    one = Dealer("tcp://127.0.0.1:1", lambda parts: None, lambda: None)
    assert [one.send(bytes(400)) for _ in range(5)] == [True, True, True, False, False]
    one.close()
