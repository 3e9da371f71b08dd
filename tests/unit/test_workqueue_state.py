"""The fold of a work queue, rule by rule. Every record goes through its encoding, and `check` runs after each.

Not covered: interleavings of many instances (tests/model), random histories against an oracle (test_workqueue_oracle.py).
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest

from roq.errors import UnknownFormat
from roq.wire.task import TaskState
from roq.wire.work_queue import TaskSettings
from roq.workqueue.fold import Dropped, Effect, Handed, Known, RecordRefused, Settled, TasksChanged, TasksDelivered
from roq.workqueue.records import (
    VERSION,
    BlobRef,
    Cancel,
    Complete,
    Configure,
    DeadLetter,
    ExtendLease,
    HoldersReplaced,
    InstanceDead,
    Pop,
    Purge,
    Push,
    Record,
    ReleaseAll,
    RemoveDead,
    Requeue,
    RequeueDead,
    Tick,
    decode,
    encode,
)
from roq.workqueue.state import WAITERS_MAX, State

P, W, V = 11, 21, 22  # a producer, two workers
DONE, LOST = [Settled(True)], [Settled(False)]


class Log:
    """A state and the records that led to it."""

    def __init__(self) -> None:
        self.state = State()
        self.sequence = self.nonce = self.now = 0

    def apply(self, *records: Record) -> list[Effect]:
        effects: list[Effect] = []
        for record in decode(encode(records)):
            effects += self.state.apply(record)
            self.state.check()
        loaded = State.load(self.state.dump())
        loaded.check()
        assert loaded.dump() == self.state.dump()
        assert loaded.fold.next_due() == self.state.fold.next_due()
        return effects

    def push(self, payload: bytes = b"", priority: int = 0, delay_ms: int = 0, dedup_key: str = "") -> list[Effect]:
        self.sequence += 1
        return self.apply(Push(self.now, P, self.sequence, payload, priority, delay_ms, dedup_key))

    def pop(self, count: int = 1, lease_ms: int = 1000, instance: int = W) -> list[Handed]:
        self.nonce += 1
        return handed(self.apply(Pop(self.now, instance, self.nonce, count, lease_ms)))

    def wait(self, instance: int = W, wait_ms: int = 1000) -> list[Effect]:
        self.nonce += 1
        return self.apply(Pop(self.now, instance, self.nonce, 1, 1000, wait_ms))

    def payloads(self, state: TaskState = TaskState.READY) -> list[object]:
        return [task.payload for task in self.state.fold.first(state, 100)]


def handed(effects: Sequence[Effect]) -> list[Handed]:
    return [one for effect in effects if isinstance(effect, TasksDelivered) for one in effect.handed]


def test_a_task_lives_from_put_to_ack() -> None:
    log = Log()
    log.now = 5000
    assert log.push(b"a") == []
    (one,) = log.pop(lease_ms=700)
    assert (one.attempt, one.due, one.task.payload, one.task.inserted) == (1, 5700, b"a", 5000)
    assert log.apply(Complete(5100, one.delivery, W)) == DONE
    assert log.apply(Complete(5100, one.delivery, W)) == LOST
    status = log.state.fold.status(5100)
    assert (status.inserted, status.completed, status.ready, status.leased) == (1, 1, 0, 0)


def test_higher_priority_first_then_the_order_of_the_pushes() -> None:
    log = Log()
    for payload, priority in ((b"a", 0), (b"b", -3), (b"c", 7), (b"d", 0), (b"e", 7)):
        log.push(payload, priority)
    assert log.payloads() == [b"c", b"e", b"a", b"d", b"b"]
    assert [one.task.payload for one in log.pop(count=10)] == [b"c", b"e", b"a", b"d", b"b"]


def test_a_requeued_task_stands_where_it_was_pushed() -> None:
    log = Log()
    for payload in (b"a", b"b", b"c"):
        log.push(payload)
    first, second = log.pop(count=2)
    log.apply(Requeue(0, second.delivery, W), Requeue(0, first.delivery, W))
    assert log.payloads() == [b"a", b"b", b"c"]
    assert log.pop()[0].attempt == 2


def test_only_the_current_delivery_settles() -> None:
    log = Log()
    log.push()
    (old,) = log.pop()
    assert log.apply(Requeue(0, old.delivery, W)) == DONE
    (new,) = log.pop(instance=V)
    before = log.state.fold.leased[new.delivery]
    stale: list[Record] = [
        Complete(0, old.delivery, W),
        Requeue(0, old.delivery, W),
        ExtendLease(0, old.delivery, W, 5),
        DeadLetter(0, old.delivery, W, "x"),
        Complete(0, new.delivery, W),  # another's number
    ]
    for record in stale:
        assert log.apply(record) == LOST
    assert log.state.fold.leased == {new.delivery: before}
    assert log.apply(Complete(0, new.delivery, V)) == DONE


def test_an_expiry_does_not_undo_an_extension() -> None:
    log = Log()
    log.push()
    (one,) = log.pop(lease_ms=100)
    assert log.state.fold.next_due() == 100
    assert log.state.fold.expired(99, 10) == []
    (expiry,) = log.state.fold.expired(100, 10)
    assert log.apply(ExtendLease(90, one.delivery, W, 100)) == DONE
    assert log.apply(expiry) == LOST
    assert log.state.fold.next_due() == 190
    (expiry,) = log.state.fold.expired(190, 10)
    assert log.apply(expiry) == DONE
    assert log.apply(expiry) == LOST  # a second monitor
    assert log.state.fold.next_due() is None


def test_extending_to_the_same_end_expires_once() -> None:
    log = Log()
    log.push()
    (one,) = log.pop(lease_ms=100)
    log.apply(ExtendLease(0, one.delivery, W, 100), ExtendLease(0, one.delivery, W, 100))
    assert len(log.state.fold.expired(100, 10)) == 1


def test_a_delayed_task_becomes_ready_with_any_record_of_its_time() -> None:
    log = Log()
    log.push(b"late", delay_ms=100)
    log.push(b"now")
    assert log.state.fold.next_due() == 100
    assert log.payloads() == [b"now"]
    assert log.payloads(TaskState.DELAYED) == [b"late"]
    log.now = 100
    assert [one.task.payload for one in log.pop(count=2)] == [b"late", b"now"], "its place is that of its push"


def test_waiting_pops_are_served_in_turn_by_whatever_comes() -> None:
    log = Log()
    log.push(b"kept")
    (kept,) = log.pop()
    assert log.wait(W) == log.wait(V) == log.wait(W) == []
    log.push(b"late", delay_ms=50)
    assert [(e.instance, e.nonce) for e in log.push(b"a") if isinstance(e, TasksDelivered)] == [(W, 2)]
    settled, delivered = log.apply(Requeue(0, kept.delivery, W))
    assert settled == Settled(True)
    assert isinstance(delivered, TasksDelivered)
    assert delivered.nonce == 3, "a requeue is handed on at once"
    assert handed(log.apply(Tick(50)))[0].task.payload == b"late"
    assert not log.state.waiters


def test_a_wait_ends_with_its_time_by_cancel_or_with_its_instance() -> None:
    log = Log()
    log.wait(W, wait_ms=100)
    log.wait(V, wait_ms=500)
    log.wait(W, wait_ms=500)
    assert log.apply(Tick(101)) == [TasksDelivered(W, 1, ())]
    assert log.apply(Cancel(101, V, 2)) == [TasksDelivered(V, 2, ())]
    assert log.apply(Cancel(101, V, 2)) == []
    assert log.apply(InstanceDead(101, W)) == [TasksDelivered(W, 3, ()), TasksChanged(0)]
    assert log.push() == []
    assert log.payloads() == [b""]


def test_a_pop_that_waited_too_long_takes_no_task() -> None:
    log = Log()
    log.wait(W, wait_ms=100)
    log.now = 200
    assert log.push() == [TasksDelivered(W, 1, ())]
    assert log.state.fold.ready.count == 1


def test_no_more_than_waiters_max_wait() -> None:
    state = State()
    for nonce in range(1, WAITERS_MAX + 1):
        assert not state.apply(Pop(0, W, nonce, 1, 1000, 1000))
    assert list(state.apply(Pop(0, V, 1, 1, 1000, 1000))) == [TasksDelivered(V, 1, ())]


def test_the_deliveries_of_a_dead_instance_are_handed_on() -> None:
    log = Log()
    log.push(b"a")
    log.push(b"b")
    log.pop(count=2, instance=W)
    log.wait(V)
    effects = log.apply(InstanceDead(0, W, "killed"))
    assert [one.task.payload for one in handed(effects)] == [b"a"]
    assert log.payloads() == [b"b"]
    assert log.state.fold.first(TaskState.READY, 1)[0].error == "killed"
    assert log.apply(Pop(0, W, 99, 1, 1000)) == [RecordRefused()], "it was declared dead, so it may not lease"


def test_a_record_written_twice_takes_effect_once() -> None:
    log = Log()
    push = Push(0, P, 1, b"a")
    assert log.apply(push) == []
    assert log.apply(push) == [Known((P, 1))]
    assert log.payloads() == [b"a"]
    log.push(b"skipped over")  # sequence 1 of the helper: known as well
    pop = Pop(0, W, 1, 5, 1000)
    first, second = log.apply(pop, pop)
    assert first == second, "the second answer is what the Pop still has"
    assert log.apply(Complete(0, handed([first])[0].delivery, W), pop)[1] == TasksDelivered(W, 1, ())
    wait = Pop(0, W, 2, 1, 1000, 1000)
    assert log.apply(wait, wait) == []
    assert len(log.state.waiters) == 1


def test_a_dedup_key_stands_for_one_task_within_its_window() -> None:
    log = Log()
    log.apply(Configure(0, TaskSettings(dedup_seconds=10), 0))
    assert log.push(b"a", dedup_key="k") == []
    assert log.push(b"b", dedup_key="k") == [Known((P, 1))]
    assert log.push(b"c", dedup_key="other") == []
    (one,) = log.pop()
    log.apply(Complete(0, one.delivery, W))
    assert log.apply(Push(0, P, 2, b"b", 0, 0, "k")) == [Known((P, 1))], "a repeated put has the first answer"
    log.now = 9_999
    assert log.push(b"d", dedup_key="k") == [Known((P, 1))], "also when it was acked"
    log.now = 10_000
    assert log.push(b"e", dedup_key="k") == []
    assert log.payloads() == [b"c", b"e"]


def test_a_task_leased_too_often_is_dead() -> None:
    log = Log()
    log.apply(Configure(0, TaskSettings(max_attempts=2), 0))
    log.push(b"poison")
    log.apply(Requeue(0, log.pop()[0].delivery, W, error="first"))
    log.now = 5000
    (one,) = log.pop()
    assert log.apply(*log.state.fold.expired(6000, 1)) == DONE
    (dead,) = log.state.fold.first(TaskState.DEAD, 9)
    assert (dead.attempts, dead.error) == (2, "first")
    assert log.apply(Complete(0, one.delivery, W)) == LOST
    assert log.apply(RequeueDead(0, ((9, 9),))) == [TasksChanged(0)]
    assert log.apply(RequeueDead(0, ((P, 1),))) == [TasksChanged(1)]
    (one,) = log.pop()
    assert one.attempt == 1
    assert log.apply(DeadLetter(0, one.delivery, W, "no use")) == DONE
    assert log.state.fold.first(TaskState.DEAD, 9)[0].error == "no use"
    assert log.apply(RemoveDead(0, None)) == [TasksChanged(1)]
    assert log.state.fold.removed == 1


def test_a_task_that_was_not_tried_does_not_die() -> None:
    log = Log()
    log.apply(Configure(0, TaskSettings(max_attempts=1), 0))
    log.push()
    log.apply(Requeue(0, log.pop()[0].delivery, W))
    assert log.state.fold.ready.count == 1


def test_commands_for_all_tasks() -> None:
    log = Log()
    for payload in (b"a", b"b", b"c"):
        log.push(payload)
    log.push(b"d", delay_ms=500)
    (one,) = log.pop()
    log.wait(V)  # takes b
    assert log.apply(ReleaseAll(0)) == [TasksChanged(3)]
    assert log.payloads() == [b"a", b"b", b"c", b"d"]
    assert log.apply(Complete(0, one.delivery, W)) == LOST
    (one,) = log.pop()
    log.apply(DeadLetter(0, one.delivery, W, ""))
    (one,) = log.pop()
    assert log.apply(Purge(0)) == [TasksChanged(3)]
    assert log.apply(Complete(0, one.delivery, W)) == LOST
    assert (log.state.fold.removed, len(log.state.fold.dead), log.state.fold.next_due()) == (3, 1, None)


def test_settings_change_by_compare_and_set() -> None:
    log = Log()
    assert log.apply(Configure(0, TaskSettings(max_attempts=3), 0)) == DONE
    assert log.apply(Configure(0, TaskSettings(max_attempts=9), 0)) == LOST
    assert log.apply(Configure(0, TaskSettings(max_attempts=4), 1)) == DONE
    assert (log.state.fold.settings.max_attempts, log.state.fold.version) == (4, 2)


def test_a_blob_is_dropped_with_its_task() -> None:
    log = Log()
    blobs = [BlobRef(f"blob{n}", 9, n, ("h1", "h2")) for n in range(5)]
    for n in range(4):
        log.apply(Push(0, P, n + 1, blobs[n], 0, 0, "key" if n == 0 else ""))
    assert log.apply(Push(0, P, 5, blobs[4], 0, 0, "key")) == [Known((P, 1)), Dropped(blobs[4])]
    assert log.apply(HoldersReplaced(0, (P, 1), "blob0", ("h3",))) == DONE
    assert log.apply(HoldersReplaced(0, (P, 1), "blob9", ("h4",))) == LOST
    first, second, _ = log.pop(count=3)
    moved = BlobRef("blob0", 9, 0, ("h3",))
    assert first.task.payload == moved
    assert log.apply(Complete(0, first.delivery, W)) == [Settled(True), Dropped(moved)]
    log.apply(DeadLetter(0, second.delivery, W, ""))
    assert log.apply(Purge(0)) == [TasksChanged(2), Dropped(blobs[3]), Dropped(blobs[2])]
    assert log.apply(RemoveDead(0, None)) == [TasksChanged(1), Dropped(blobs[1])]
    assert log.state.fold.blobs == {}


def test_the_oldest_ready_task_tells_the_age() -> None:
    log = Log()
    assert log.state.fold.status(0).oldest_seconds is None
    log.push(b"old")
    log.now = 4000
    log.push(b"urgent", priority=5)
    assert log.state.fold.status(5000).oldest_seconds == 5.0
    log.now = 3000  # a clock behind: time does not go back
    log.push(b"c")
    assert log.state.fold.clock == 4000


@pytest.mark.parametrize(
    "entry",
    [
        b"",
        bytes((VERSION + 1,)) + msgspec.msgpack.encode([]),
        bytes((VERSION,)) + msgspec.msgpack.encode([[99, 0]]),
        bytes((VERSION,)) + msgspec.msgpack.encode([[9, 0, "a field to come"]]),
        encode([Push(0, P, 1, b"abc")])[:-1],
    ],
)
def test_what_is_not_understood_is_never_skipped(entry: bytes) -> None:
    with pytest.raises(UnknownFormat):
        decode(entry)


def test_a_snapshot_of_another_format_is_refused() -> None:
    for data in (b"", b"\x00" + State().dump()[1:], State().dump()[:-1]):
        with pytest.raises(UnknownFormat):
            State.load(data)


def test_ends_of_old_leases_do_not_pile_up() -> None:
    state = State()
    for n in range(1, 20_001):
        state.apply(Push(0, P, n, b""))
        (delivered,) = state.apply(Pop(0, W, n, 1, 600_000))
        assert isinstance(delivered, TasksDelivered)
        state.apply(Complete(0, delivered.handed[0].delivery, W))
    assert len(state.fold.ends) < 5000
    assert state.fold.next_due() is None
