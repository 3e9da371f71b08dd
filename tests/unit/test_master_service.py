"""What a master answers, and when: requests in, batches for the log and answers out. No sockets, no log."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest

from roq.errors import CallError, PayloadTooLarge, RoqError
from roq.wire import master as wire
from roq.wire.task import ACK, EXTEND, REJECT, RELEASE, PayloadReference, Settlement, StoreAddress, TaskToPut
from roq.wire.work_queue import TaskSettings
from roq.workqueue import codec
from roq.workqueue.fold import Fold
from roq.workqueue.master.recent import Recent
from roq.workqueue.master.service import (
    ENTRY_BYTES,
    PROOF_MS,
    REPLY_BYTES,
    WAITING_BYTES_MAX,
    EntryBatch,
    MasterService,
)
from roq.workqueue.records import BlobRef, Configure, Push, decode, encode
from roq.workqueue.state import State

PEER = b"peer"
BLOB_BYTES = 64 * 1024
Answer = wire.Reply | RoqError


class Rig:
    """A service, and a log that takes what it is told to."""

    def __init__(self, max_attempts: int = 0) -> None:
        self.now = 1_000_000
        self.service = MasterService(
            Fold(),
            Recent(),
            1,
            BLOB_BYTES,
            lambda hosts: tuple(StoreAddress(h, f"tcp://{h}") for h in hosts),
            here=lambda peer: peer not in self.gone,
        )
        self.gone: set[bytes] = set()
        self.service.apply(Configure(self.now, TaskSettings(max_attempts=max_attempts), 0))
        self.entries: list[bytes] = []
        self.dropped: list[BlobRef] = []
        self._ids = 0
        self.commit()

    def ask(self, request: wire.Request) -> int:
        """Hand a request over; its id."""
        self._ids += 1
        self.service.take(PEER, self._ids, request, self.now)
        return self._ids

    def cut(self) -> list[EntryBatch]:
        """What is on its way to the log from now on."""
        taken = list(self.service.cut())
        self.service.batches.clear()
        return taken

    def commit(self) -> dict[int, Answer]:
        """Everything becomes durable; the answers by id."""
        answers: dict[int, Answer] = {}
        batches = self.service.cut()
        while batches:
            answers |= self.durable(batches.popleft())
        return answers

    def durable(self, batch: EntryBatch) -> dict[int, Answer]:
        if batch.records:
            self.entries.append(encode(batch.records))
        self.dropped += batch.dropped
        for call in batch.then:
            call()
        self.service.waiting.durable(batch)
        found: dict[int, Answer] = {}
        for peer, id, body in batch.answers:
            assert peer == PEER
            found[id] = body if isinstance(body, RoqError) else wire.open_answer(wire.seal_answer(id, body)).body
        return found

    def answer(self, request: wire.Request) -> Answer:
        """The one answer to a request."""
        id = self.ask(request)
        return self.commit()[id]

    def put(self, *payloads: bytes, sequence: int = 1) -> Answer:
        return self.answer(wire.Put(7, sequence, [TaskToPut(payload) for payload in payloads]))

    def lease(self, count: int = 1, nonce: int = 1, wait_ms: int = 0, lease_ms: int = 1000) -> wire.Leases:
        answer = self.answer(wire.Lease(9, nonce, 0, lease_ms, count, wait_ms, []))
        assert isinstance(answer, wire.Leases)
        return answer

    def follower(self) -> State:
        """The state of one who reads the log."""
        state = State()
        for entry in self.entries:
            for record in decode(entry):
                state.apply(record)
        return state


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig()
    yield made
    made.commit()
    made.service.fold.check()
    assert made.follower().digest() == State(made.service.fold).digest(), "whoever follows the log is in the same state"


def test_requests_of_one_turn_are_one_entry(rig: Rig) -> None:
    before = len(rig.entries)
    ids = [rig.ask(wire.Put(7, number, [TaskToPut(b"x")])) for number in range(1, 6)]
    ids.append(rig.ask(wire.Lease(9, 1, 0, 1000, 2, 0, [])))
    assert rig.commit().keys() == {*ids}
    assert len(rig.entries) == before + 1


def test_nothing_is_answered_before_it_is_durable(rig: Rig) -> None:
    rig.ask(wire.Put(7, 1, [TaskToPut(b"x")]))
    seen = rig.ask(wire.GetStatus())
    batches = rig.service.cut()
    assert [len(batch.records) > 0 for batch in batches] == [True]
    assert [id for _, id, _ in batches[0].answers] == [1, seen], "who reads it waits for the same entry"


def test_a_lease_request_waits_here_and_not_in_the_log(rig: Rig) -> None:
    waiting = [rig.ask(wire.Lease(9, nonce, 0, 60_000, 1, 5000, [])) for nonce in (1, 2)]
    rig.now += 1000
    assert rig.commit() == {}
    stored = rig.ask(wire.Put(7, 1, [TaskToPut(b"x")]))
    answers = rig.commit()
    first = answers[waiting[0]]
    assert isinstance(first, wire.Leases)
    assert [given.payload for given in first.tasks] == [b"x"]
    assert answers.keys() == {waiting[0], stored}
    rig.now += 4001
    rig.service.tick(rig.now)
    second = rig.commit()[waiting[1]]
    assert second == wire.Leases([], [])
    assert rig.service.due() == rig.now - 4001 + 60_000, "the lease that was given"


def test_settlements_do_not_wait_with_the_lease_they_came_with(rig: Rig) -> None:
    rig.put(b"x")
    (given,) = rig.lease().tasks
    answer = rig.answer(wire.Lease(9, 2, 0, 1000, 1, 5000, [Settlement(ACK, given.token)]))
    assert answer == wire.Leases([""], [])


def test_a_lease_that_ends_is_given_to_who_waits(rig: Rig) -> None:
    rig.put(b"x")
    (given,) = rig.lease(lease_ms=100).tasks
    waiting = rig.ask(wire.Lease(10, 1, 0, 1000, 1, 5000, []))
    rig.now += 101
    rig.service.tick(rig.now)
    answer = rig.commit()[waiting]
    assert isinstance(answer, wire.Leases)
    assert [(task.id, task.attempt) for task in answer.tasks] == [(given.id, 2)]
    assert rig.answer(wire.SettleAll(9, 0, [Settlement(ACK, given.token)])) == wire.Leases([None], [])


def test_after_a_take_over_no_lease_ends_for_a_while() -> None:
    rig = Rig()
    rig.put(b"x")
    rig.lease(lease_ms=100)
    rig.service = MasterService(rig.follower().fold, Recent(), 2, BLOB_BYTES, lambda hosts: (), quiet_until=rig.now + 2000)
    assert rig.service.due() == rig.now + 2000
    rig.now += 1999
    rig.service.tick(rig.now)
    assert len(rig.service.fold.leased) == 1
    rig.now += 1
    rig.service.tick(rig.now)
    assert not rig.service.fold.leased


def test_a_short_wait_behind_a_long_one_ends_in_time(rig: Rig) -> None:
    long = rig.ask(wire.Lease(9, 1, 0, 1000, 1, 5000, []))
    short = rig.ask(wire.Lease(9, 2, 0, 1000, 1, 100, []))
    assert rig.service.due() == rig.now + 100
    rig.now += 101
    rig.service.tick(rig.now)
    assert rig.commit() == {short: wire.Leases([], [])}
    rig.now += 5000
    rig.service.tick(rig.now)
    assert rig.commit() == {long: wire.Leases([], [])}


def test_a_repeated_request_takes_the_waiting_one_out(rig: Rig) -> None:
    rig.ask(wire.Lease(9, 1, 0, 1000, 1, 5000, []))
    again = rig.ask(wire.Lease(9, 1, 1, 1000, 1, 0, []))
    assert rig.commit()[again] == wire.Leases([], [])
    rig.put(b"x")
    assert rig.service.fold.ready.count == 1, "nobody waits any more"


def test_a_repeated_settlement_is_told_what_it_did(rig: Rig) -> None:
    rig.put(b"x", b"y", b"z")
    a, b, c = rig.lease(3).tasks
    kinds = [Settlement(ACK, a.token), Settlement(RELEASE, b.token, 0, "why"), Settlement(REJECT, c.token)]
    assert rig.answer(wire.SettleAll(9, 0, kinds)) == wire.Leases(["", "", ""], [])
    assert rig.answer(wire.SettleAll(9, 1, kinds)) == wire.Leases(["", "", ""], [])
    assert rig.answer(wire.SettleAll(9, 0, kinds)) == wire.Leases([None, None, None], [])


def test_a_settlement_that_is_repeated_too_late_changes_nothing(rig: Rig) -> None:
    rig.put(b"x", b"y")
    a, b = rig.lease(2).tasks
    kinds = [Settlement(ACK, a.token), Settlement(RELEASE, b.token)]
    assert rig.answer(wire.SettleAll(9, 0, kinds)) == wire.Leases(["", ""], [])
    (again,) = rig.lease(2, nonce=2).tasks
    rig.service.recent = Recent()  # forgotten, or never known to this master
    assert rig.answer(wire.SettleAll(9, 1, kinds)) == wire.Leases([None, None], [])
    assert [task.delivery for task in rig.service.fold.leased.values()] == [codec.parse_token(again.token)[0]]
    assert (rig.service.fold.completed, rig.service.fold.ready.count) == (1, 0)


def test_one_reply_fits_into_a_frame(rig: Rig) -> None:
    for sequence in range(1, 200, 20):
        rig.put(*(b"x" * (BLOB_BYTES - 1) for _ in range(20)), sequence=sequence)
    leases = rig.lease(1000)
    assert 1 < len(leases.tasks) * BLOB_BYTES <= REPLY_BYTES
    assert len(msgspec.msgpack.encode(leases)) < 2 * REPLY_BYTES


def test_a_large_batch_is_cut(rig: Rig) -> None:
    for sequence in range(1, 9):
        rig.ask(wire.Put(7, sequence * 100, [TaskToPut(b"x" * 60_000)] * 9))
    batches = rig.service.cut()
    assert len(batches) > 2
    assert all(batch.size < 2 * ENTRY_BYTES for batch in batches)


@pytest.mark.parametrize(
    "request_",
    [
        wire.Put(0, 1, [TaskToPut(b"x")]),
        wire.Put(7, 0, [TaskToPut(b"x")]),
        wire.Put(7, 1, [TaskToPut(b"x", -1)]),
        wire.Put(7, 1, [TaskToPut(b"x", 0, 500)]),
        wire.Put(7, 1, [TaskToPut(b"x" * BLOB_BYTES)]),
        wire.Put(7, 1, [TaskToPut(b"x", 0, 0, "k" * 300)]),
        wire.Lease(9, 1, 0, 0, 1, 0, []),
        wire.Lease(9, 1, 0, 1000, 0, 0, []),
        wire.Lease(9, 0, 0, 1000, 1, 0, []),
        wire.Lease(0, 1, 0, 1000, 1, 0, []),
        wire.SettleAll(9, 0, [Settlement(ACK, "x")]),
        wire.SettleAll(9, 0, [Settlement(9, f"1.0.{9:016x}")]),
        wire.SettleAll(9, 0, [Settlement(EXTEND, f"1.0.{9:016x}", 0)]),
        wire.RequeueLetters(["x"]),
        wire.Peek("nowhere", 1),
    ],
)
def test_what_no_client_of_ours_sends_is_refused_and_changes_nothing(rig: Rig, request_: wire.Request) -> None:
    assert isinstance(rig.answer(request_), CallError)
    status = rig.service.fold.status(rig.now)
    assert (status.inserted, status.leased) == (0, 0)


def test_a_replaced_master_says_nothing_for_long(rig: Rig) -> None:
    """What reads the queue goes through the log; that there is no task may be said without, but not for ever."""
    for request in (wire.GetStatus(), wire.Peek("ready", 1), wire.Hello()):
        rig.ask(request)
        assert rig.service.cut()[0].records
        rig.commit()
    rig.ask(wire.Lease(9, 1, 0, 1000, 1, 0, []))
    assert not rig.service.cut()[0].records
    rig.commit()
    rig.now += PROOF_MS + 1
    rig.ask(wire.Lease(9, 2, 0, 1000, 1, 0, []))
    assert rig.service.cut()[0].records


# --- a log that stands still ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("under_way", [False, True])
def test_what_is_sent_again_while_the_log_stands_still_is_logged_once(rig: Rig, under_way: bool) -> None:
    put = wire.Put(7, 1, [TaskToPut(b"x" * 1000), TaskToPut(b"y")])
    first = rig.ask(put)
    taken = rig.cut() if under_way else []
    waiting = rig.service.waiting.bytes
    again = [rig.ask(put) for _ in range(50)]
    assert rig.service.waiting.bytes - waiting < 50 * 100, "no payload a second time"
    assert len(rig.service.waiting.open.records) == (0 if under_way else 2)
    answers: dict[int, Answer] = {}
    for batch in taken:
        answers |= rig.durable(batch)
    answers |= rig.commit()
    assert answers == dict.fromkeys((first, *again), wire.TasksAdded([]))
    assert rig.service.waiting.bytes == 0


def test_a_lease_and_an_ack_sent_again_join_the_first_ones(rig: Rig) -> None:
    rig.put(b"x", b"y")
    (given,) = rig.lease().tasks
    lease = wire.Lease(9, 2, 0, 1000, 1, 0, [Settlement(ACK, given.token)])
    first = rig.ask(lease)
    (batch,) = rig.cut()
    again = [rig.ask(msgspec.structs.replace(lease, again=1)) for _ in range(3)]
    assert not rig.service.cut()
    answers = rig.durable(batch)
    leases = answers[first]
    assert isinstance(leases, wire.Leases)
    assert [answers[id] for id in again] == [leases] * 3
    (second,) = leases.tasks
    settle = wire.SettleAll(9, 0, [Settlement(RELEASE, second.token, 0, "why")])
    first = rig.ask(settle)
    (batch,) = rig.cut()
    again = [rig.ask(msgspec.structs.replace(settle, again=1))]
    other = rig.ask(wire.SettleAll(9, 1, [Settlement(ACK, second.token)]))
    assert rig.durable(batch) == {first: wire.Leases([""], []), again[0]: wire.Leases([""], [])}
    assert other in rig.commit(), "it was another settlement"


def test_what_waits_is_counted_until_it_is_durable(rig: Rig) -> None:
    puts = 0
    while not rig.service.waiting.full:
        puts += 1
        rig.ask(wire.Put(7, puts, [TaskToPut(b"x" * 60_000)]))
    assert puts == pytest.approx(WAITING_BYTES_MAX / 60_000, rel=0.01)
    rig.commit()
    assert rig.service.waiting.bytes == 0


def test_an_answer_without_a_record_is_told_with_what_is_under_way(rig: Rig) -> None:
    put = rig.ask(wire.Put(7, 1, [TaskToPut(b"x")]))
    (batch,) = rig.cut()
    empty = rig.ask(wire.SettleAll(9, 0, []))
    (second,) = rig.cut()
    rig.service.waiting.follow(second, batch)
    assert rig.durable(batch).keys() == {put, empty}
    assert rig.service.waiting.bytes == 0


# --- who is gone --------------------------------------------------------------------------------------------------------


def test_who_is_gone_gets_no_task(rig: Rig) -> None:
    rig.service.take(b"killed", 1, wire.Lease(8, 1, 0, 60_000, 1, 5000, []), rig.now)
    waiting = rig.ask(wire.Lease(9, 1, 0, 60_000, 1, 5000, []))
    rig.gone.add(b"killed")
    rig.put(b"x")
    assert [task.instance for task in rig.service.fold.leased.values()] == [9]
    assert waiting


def test_a_lease_says_how_long_its_request_waited(rig: Rig) -> None:
    waiting = rig.ask(wire.Lease(9, 1, 0, 60_000, 1, 5000, []))
    rig.now += 1234
    rig.ask(wire.Put(7, 1, [TaskToPut(b"x")]))
    answer = rig.commit()[waiting]
    assert isinstance(answer, wire.Leases)
    assert answer.waited == 1234
    assert answer.tasks[0].expires_ms == rig.now + 60_000


# --- big payloads -----------------------------------------------------------------------------------------------------


def blob(name: str) -> BlobRef:
    return BlobRef(name, 100_000, 1, ("h1", "h2"))


def test_a_blob_lives_as_long_as_its_task(rig: Rig) -> None:
    rig.service.add_big([(PEER, 50)], Push(rig.now, 7, 1, blob("a")))
    assert rig.commit()[50] == wire.TasksAdded([])
    (given,) = rig.lease().tasks
    assert isinstance(given.payload, PayloadReference)
    assert [store.host for store in given.payload.stores] == ["h1", "h2"]
    assert rig.dropped == []
    rig.ask(wire.SettleAll(9, 0, [Settlement(ACK, given.token)]))
    assert rig.dropped == [], "not before the ack is durable"
    rig.commit()
    assert rig.dropped == [blob("a")]


def test_a_big_payload_told_of_again_on_its_way_to_the_log_is_known(rig: Rig) -> None:
    rig.service.add_big([(PEER, 50)], Push(rig.now, 7, 1, blob("a")))
    (batch,) = rig.cut()
    assert rig.service.waiting.join(PEER, 51, wire.PayloadStored(7, 1, "a", TaskToPut(b"")))
    assert not rig.service.waiting.join(PEER, 52, wire.PayloadStored(7, 2, "b", TaskToPut(b"")))
    assert rig.durable(batch) == {50: wire.TasksAdded([]), 51: wire.TasksAdded([])}


def test_another_task_under_the_same_number_is_no_repeat_of_one_on_its_way(rig: Rig) -> None:
    """As after a fork: both are at the same number."""
    mine, theirs, again = (rig.ask(wire.Put(7, 1, [TaskToPut(payload)])) for payload in (b"mine", b"theirs", b"mine"))
    answers = rig.commit()
    assert [answers[id] for id in (mine, theirs, again)] == [wire.TasksAdded(), wire.TasksAdded([], [0]), wire.TasksAdded()]


def test_a_second_copy_of_a_task_is_dropped(rig: Rig) -> None:
    rig.service.add_big([(PEER, 50)], Push(rig.now, 7, 1, blob("a")))
    rig.service.add_big([(PEER, 51), (PEER, 52)], Push(rig.now, 7, 1, blob("b")))
    answers = rig.commit()
    assert [answers[id] for id in (50, 51, 52)] == [wire.TasksAdded(), wire.TasksAdded([], [0]), wire.TasksAdded([], [0])]
    assert rig.dropped == [blob("b")]
    rig.service.add_big([(PEER, 53)], Push(rig.now, 7, 1, blob("a")))
    rig.commit()
    assert rig.dropped == [blob("b")], "the same one again is no second copy"


def test_holders_are_replaced_only_while_the_task_is_there(rig: Rig) -> None:
    rig.service.add_big([], Push(rig.now, 7, 1, blob("a")))
    assert rig.service.replace((7, 1), blob("a"), ("h2", "h3"), rig.now)
    assert not rig.service.replace((7, 1), blob("b"), ("h2",), rig.now)
    (given,) = rig.lease().tasks
    assert isinstance(given.payload, PayloadReference)
    assert [store.host for store in given.payload.stores] == ["h2", "h3"]
    rig.answer(wire.PurgeQueue())
    assert not rig.service.replace((7, 1), blob("a"), ("h1",), rig.now)


def test_a_payload_over_the_limit_is_refused(rig: Rig) -> None:
    with pytest.raises(PayloadTooLarge):
        rig.service.check_big(2 * 1024 * 1024)
    rig.service.check_big(1024 * 1024)


def test_what_waits_is_told_when_the_term_ends(rig: Rig) -> None:
    parked = rig.ask(wire.Lease(9, 1, 0, 1000, 1, 5000, []))
    open_ = rig.ask(wire.GetStatus())
    rig.commit()
    assert rig.service.unanswered() == [(PEER, parked)]
    assert open_ != parked
