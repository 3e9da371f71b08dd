"""Groups in the fold and at their master: feeds, topics that wait, the room that is limited.

Not covered: every interleaving with crashes (tests/model/test_groups.py), what feeds them (tests/integration/test_groups.py).
"""

from __future__ import annotations

import asyncio

import pytest

from roq.wire import master as wire
from roq.wire.task import Settlement, TaskState
from roq.workqueue.fold import Known, TasksChanged
from roq.workqueue.master import intake
from roq.workqueue.master.intake import GroupIntake
from roq.workqueue.master.service import REPLY_BYTES
from roq.workqueue.records import (
    Complete,
    DeadLetter,
    FeedMessage,
    FeedPosition,
    Purge,
    ReleaseAll,
    RemoveDead,
    Requeue,
    RequeueDead,
    Tick,
)
from roq.workqueue.state import GROUP_VERSION, VERSION, State
from tests.unit.test_master_service import Rig
from tests.unit.test_workqueue_state import DONE, Log, W

P = 11


class GroupLog(Log):
    """A log of a group."""

    def feed(self, *topics: str, publisher: int = P, ordered: bool = True) -> None:
        """A message on each topic, whose payload is the topic and its number."""
        for topic in topics:
            self.sequence += 1
            payload = f"{topic}{self.sequence}".encode()
            assert self.apply(FeedMessage(self.now, publisher, self.sequence, payload, topic, self.now, ordered)) == []


def test_of_a_topic_one_message_at_a_time() -> None:
    log = GroupLog()
    log.feed("a", "a", "b", "a")
    first, other = log.pop(count=10)
    assert (first.task.payload, first.task.topic, other.task.payload) == (b"a1", "a", b"b3")
    assert log.pop(count=10) == []
    assert log.payloads() == [b"a2", b"a4"], "those that wait are ready for people who look"
    assert log.state.fold.status(0).ready == 2
    assert log.apply(Complete(0, first.delivery, W)) == DONE
    assert [one.task.payload for one in log.pop(count=10)] == [b"a2"]


def test_what_is_given_back_holds_its_topic() -> None:
    log = GroupLog()
    log.feed("a", "a")
    (first,) = log.pop()
    log.apply(Requeue(0, first.delivery, W, 0, 500))
    assert log.pop() == [], "delayed, and the second one behind it"
    log.apply(Tick(600))
    (again,) = log.pop()
    assert (again.task.payload, again.attempt) == (b"a1", 2)


def test_a_dead_letter_lets_the_next_one_go_and_comes_back_behind_it() -> None:
    log = GroupLog()
    log.feed("a", "a", "a")
    (first,) = log.pop()
    log.apply(DeadLetter(0, first.delivery, W, "bad"))
    (second,) = log.pop()
    assert second.task.payload == b"a2"
    assert log.apply(RequeueDead(0, None)) == [TasksChanged(1)]
    assert log.pop() == []
    log.apply(Complete(0, second.delivery, W))
    assert [one.task.payload for one in log.pop()] == [b"a1"], "the oldest that waits"


def test_letters_that_are_put_back_stand_in_the_order_of_their_messages() -> None:
    log = GroupLog()
    log.feed("a", "a", "a")
    for _ in range(2):
        (one,) = log.pop()
        log.apply(DeadLetter(0, one.delivery, W, "bad"))
    log.apply(RequeueDead(0, ((P, 2),)))
    (third,) = log.pop()
    log.apply(Complete(0, third.delivery, W))
    (second,) = log.pop()
    log.apply(DeadLetter(0, second.delivery, W, "still bad"))  # the first one died before it
    log.apply(RequeueDead(0, None))
    assert log.payloads() == [b"a1", b"a2"]


def test_what_is_dead_takes_room_until_it_is_removed() -> None:
    log = GroupLog()
    log.feed("a", "b")
    (first,) = log.pop()
    log.apply(DeadLetter(0, first.delivery, W, "bad"))
    assert log.state.fold.fed_bytes == 4
    log.apply(Purge(0))
    assert log.state.fold.fed_bytes == 2
    assert log.apply(RemoveDead(0, None)) == [TasksChanged(1)]
    assert log.state.fold.fed_bytes == 0


def test_in_any_order_nobody_waits() -> None:
    log = GroupLog()
    log.feed("a", "a", "a", ordered=False)
    assert len(log.pop(count=10)) == 3


def test_a_message_that_comes_again_changes_nothing_and_numbers_may_be_left_out() -> None:
    log = GroupLog()
    log.apply(FeedMessage(0, P, 7, b"x", "a", 0, False), FeedMessage(0, P, 2_000_000, b"y", "a", 0, False))
    assert log.apply(FeedMessage(0, P, 7, b"x", "a", 0, False)) == [Known((P, 7))]
    assert log.apply(FeedMessage(0, P, 1_999_999, b"x", "a", 0, False)) == [Known((P, 1_999_999))]
    assert log.state.fold.status(0).inserted == 2


def test_commands_of_people_on_a_group() -> None:
    log = GroupLog()
    log.feed("a", "a", "b", "b")
    log.pop(count=10)
    assert log.apply(ReleaseAll(0)) == [TasksChanged(2)]
    assert [one.task.payload for one in log.pop(count=10)] == [b"a1", b"b3"]
    assert log.apply(Purge(0)) == [TasksChanged(4)]
    assert log.state.fold.fed_bytes == 0
    log.feed("a")
    assert len(log.pop()) == 1, "a topic that was emptied is free"


def test_a_group_has_snapshots_of_its_own_and_keeps_its_position() -> None:
    log = GroupLog()
    log.push(b"plain")
    assert log.state.dump()[0] == VERSION
    log.apply(FeedPosition(0, {"e-2": 7, "e-1": 3}))
    log.feed("a", "a")
    assert log.state.dump()[0] == GROUP_VERSION
    loaded = State.load(log.state.dump()).fold
    assert (loaded.fed, loaded.behind, loaded.fed_bytes) == ({"e-1": 3, "e-2": 7}, 1, 4)


def test_the_age_of_the_oldest_is_that_of_the_message() -> None:
    log = GroupLog()
    log.apply(FeedMessage(9_000, P, 1, b"x", "a", 2_000, True), FeedMessage(9_000, P, 2, b"y", "a", 3_000, True))
    assert log.state.fold.status(10_000).oldest_seconds == 8.0
    log.pop()
    assert log.state.fold.status(10_000).oldest_seconds == 7.0, "it waits behind one that is leased"
    assert log.state.fold.first(TaskState.LEASED, 1)[0].inserted == 2_000


# --- at the master ----------------------------------------------------------------------------------------------------


class Term:
    """What a MasterTerm is to an intake: everything is durable at once."""

    def __init__(self, rig: Rig) -> None:
        self._rig = rig

    def turn(self) -> None:
        """See MasterTerm."""
        self._rig.commit()

    async def barrier(self) -> None:
        """See MasterTerm."""


def message(number: int, size: int = 1, topic: str = "a", ordered: bool = False) -> FeedMessage:
    return FeedMessage(0, P, number, bytes(size), topic, 0, ordered)


def tokens(rig: Rig, asked: int) -> list[str]:
    """Of what this request leased."""
    answer = rig.commit()[asked]
    assert isinstance(answer, wire.Leases)
    return [one.token for one in answer.tasks]


async def test_a_full_group_takes_more_when_there_is_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intake, "MESSAGES_MAX", 8)
    rig = Rig()
    room = GroupIntake(rig.service, Term(rig), lambda: rig.now)  # type: ignore[arg-type]
    assert not room.position
    await room.take([message(n) for n in range(1, 9)])
    room.reached({"e-1": 4})
    assert (room.position, rig.service.fold.ready.count) == ({"e-1": 4}, 8)
    waiting = asyncio.create_task(room.take([message(9)]))
    for _ in range(2):
        await asyncio.sleep(0)
        assert not waiting.done()
        asked = rig.ask(wire.Lease(W, rig.service.fold.position, 0, 60_000, 1, 0, []))
        (token,) = tokens(rig, asked)
        rig.ask(wire.SettleAll(W, 0, [Settlement.ack(token)]))
        rig.commit()
    await waiting
    status = rig.service.fold.status(0)
    assert (status.ready, status.completed) == (7, 2)


async def test_a_group_of_dead_letters_takes_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intake, "DEAD_MAX", 2)
    rig = Rig()
    room = GroupIntake(rig.service, Term(rig), lambda: rig.now)  # type: ignore[arg-type]
    await room.take([message(n) for n in range(1, 4)])
    for nonce in (1, 2):
        (token,) = tokens(rig, rig.ask(wire.Lease(W, nonce, 0, 60_000, 1, 0, [])))
        rig.ask(wire.SettleAll(W, 0, [Settlement.reject(token, "bad")]))
    rig.commit()
    waiting = asyncio.create_task(room.take([message(4)]))
    await asyncio.sleep(0)
    assert not waiting.done()
    rig.ask(wire.RemoveLetters(None))
    rig.commit()
    await waiting
    assert rig.service.fold.status(0).inserted == 4


def test_one_large_message_makes_no_lease_small_that_is_not_its_own() -> None:
    rig = Rig()
    rig.service.feed_position({"e-1": 1}, rig.now)
    rig.service.feed([message(n, size=REPLY_BYTES // 2 if n == 5 else 10) for n in range(1, 10)], rig.now)
    rig.commit()
    assert len(tokens(rig, rig.ask(wire.Lease(W, 1, 0, 60_000, 100, 0, [])))) == 9
    rig.service.feed([message(n, size=REPLY_BYTES * 2 // 3) for n in range(10, 14)], rig.now)
    rig.commit()
    assert len(tokens(rig, rig.ask(wire.Lease(W, 2, 0, 60_000, 100, 0, [])))) == 1


def test_nor_one_that_waited_for_the_next_ones() -> None:
    rig = Rig()
    rig.service.feed_position({"e-1": 1}, rig.now)
    rig.service.feed([message(1, size=REPLY_BYTES // 2)], rig.now)
    rig.commit()
    assert len(tokens(rig, rig.ask(wire.Lease(W, 1, 0, 60_000, 100, 0, [])))) == 1
    waits = rig.ask(wire.Lease(W, 2, 0, 60_000, 100, 5_000, []))
    assert rig.commit() == {}
    rig.service.feed([message(n) for n in range(2, 12)], rig.now)
    assert len(tokens(rig, waits)) == 10


async def test_a_group_that_is_behind_says_by_how_much() -> None:
    rig = Rig()
    room = GroupIntake(rig.service, Term(rig), lambda: rig.now)  # type: ignore[arg-type]

    def behind() -> float | None:
        asked = rig.ask(wire.GetStatus())
        return rig.commit()[asked].behind_seconds  # type: ignore[union-attr]

    assert behind() is None
    room.waiting_since = rig.now - 5_000
    assert behind() == 5.0
    room.waiting_since = 0
    assert behind() == 0.0


def test_who_waits_gets_the_next_of_a_topic_when_the_one_before_is_done_by_another() -> None:
    rig = Rig()
    rig.service.feed([message(1, ordered=True), message(2, ordered=True)], rig.now)
    asked = rig.ask(wire.Lease(W, 1, 0, 60_000, 1, 0, []))
    (first,) = tokens(rig, asked)
    waits = rig.ask(wire.Lease(W + 1, 1, 0, 60_000, 1, 5_000, []))
    assert rig.commit() == {}
    rig.ask(wire.SettleAll(W, 0, [Settlement.ack(first)]))
    answer = rig.commit()[waits]
    assert isinstance(answer, wire.Leases)
    assert [(one.id, one.topic) for one in answer.tasks] == [(f"{P:016x}-2", "a")]


def test_settlements_that_free_more_than_their_request_takes_serve_others() -> None:
    rig = Rig()
    rig.service.feed([message(n, topic=f"t{(n + 1) // 2}", ordered=True) for n in range(1, 5)], rig.now)
    asked = rig.ask(wire.Lease(W, 1, 0, 60_000, 2, 0, []))
    leased = tokens(rig, asked)
    waits = rig.ask(wire.Lease(W + 1, 1, 0, 60_000, 1, 5_000, []))
    acked = rig.ask(wire.Lease(W, 2, 0, 60_000, 1, 0, [Settlement.ack(token) for token in leased]))
    answers = rig.commit()
    assert [len(one.tasks) for id in (acked, waits) if isinstance(one := answers[id], wire.Leases)] == [1, 1]
