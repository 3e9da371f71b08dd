"""Groups in the fold and at their master: feeds, topics that wait, the room that is limited.

Not covered: every interleaving with crashes (tests/model/test_groups.py), what feeds them (tests/integration/test_groups.py).
"""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from roq.wire import master as wire
from roq.wire.task import Settlement, Status, TaskState
from roq.workqueue.fold import Known, ManySettled, TasksChanged
from roq.workqueue.master import intake
from roq.workqueue.master.intake import GroupIntake
from roq.workqueue.master.service import REPLY_BYTES
from roq.workqueue.records import (
    Complete,
    CompleteMany,
    DeadLetter,
    FeedMessage,
    FeedMessages,
    FeedPosition,
    Purge,
    ReleaseAll,
    RemoveDead,
    Requeue,
    RequeueDead,
    Tick,
    decode,
    encode,
)
from roq.workqueue.state import GROUP_VERSION, OUTBOX_VERSION, VERSION, State
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


def test_many_are_as_so_many_by_themselves() -> None:
    one, many = GroupLog(), GroupLog()
    for topic, ordered in (("a", True), ("b", False), ("a", True)):
        for log in (one, many):
            log.now += 10
        numbers = [one.sequence + place for place in (1, 2, 3)]
        one.feed(topic, topic, topic, ordered=ordered)
        messages = tuple((number, f"{topic}{number}".encode()) for number in numbers)
        assert many.apply(FeedMessages(many.now, P, topic, many.now, ordered, messages)) == []
    assert many.state.dump() == one.state.dump(), "each has a place of its own"
    again = ((9, b"a9"), (10, b"a10"))
    assert many.apply(FeedMessages(many.now, P, "a", 0, True, again)) == [Known((P, 9))]
    assert many.state.fold.status(0).inserted == 10
    assert many.apply(FeedMessages(many.now, P, "a", 0, True, ())) == []
    for log in (one, many):
        assert len(log.pop(10, lease_ms=50)) == 4


def test_many_with_a_priority_and_an_end() -> None:
    log = GroupLog()
    log.apply(FeedMessages(0, P, "a", 0, False, ((1, b"1"), (2, b"2"))))
    log.apply(FeedMessages(0, P, "a", 0, False, ((3, b"3"), (4, b"4")), 5, 100))
    assert log.payloads() == [b"3", b"4", b"1", b"2"]
    log.apply(Tick(100))
    assert (log.payloads(), log.state.fold.lapsed) == ([b"1", b"2"], 2)
    log.apply(FeedMessages(100, P, "a", 0, False, ((5, b"5"),), 5, 100))
    assert (log.payloads(), log.state.fold.lapsed) == ([b"1", b"2"], 3)


def test_acks_of_runs_end_those_that_are_current_and_no_others() -> None:
    log = GroupLog()
    log.feed("a", "a", "b", "b", "c", "c", ordered=False)
    first = log.pop(4)
    second = log.pop(1)
    third = log.pop(1, instance=W + 1)
    log.apply(Complete(0, first[1].delivery, W))
    log.apply(Requeue(0, first[2].delivery, W))
    runs = ((first[0].delivery, 4), (second[0].delivery, 2), (third[0].delivery, 1), (first[0].delivery, 1))
    (done,) = log.apply(CompleteMany(0, W, runs))
    assert done == ManySettled((True, False, False, True, True, False, False, False))
    status = log.state.fold.status(0)
    assert (status.completed, status.ready, status.leased) == (4, 1, 1)
    assert log.state.fold.fed_bytes == 4


def test_acks_of_runs_let_the_next_of_each_topic_go() -> None:
    log = GroupLog()
    log.feed("a", "a", "b", "b")
    (a, b) = log.pop(10)
    assert b.delivery == a.delivery + 1
    log.apply(CompleteMany(0, W, ((a.delivery, 2),)))
    assert [one.task.payload for one in log.pop(10)] == [b"a2", b"b4"]


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
    assert (loaded.fed, loaded.topics.behind, loaded.fed_bytes) == ({"e-1": 3, "e-2": 7}, 1, 4)


def test_gaps_are_counted_and_kept() -> None:
    log = GroupLog()
    log.apply(FeedPosition(0, {"e": 7}), FeedPosition(0, {"e": 9}, 2), FeedPosition(0, {"e": 9}, 1))
    assert log.state.fold.status(0).missed == 3
    assert log.state.dump()[0] == OUTBOX_VERSION, "what came before knows no gaps"
    assert State.load(log.state.dump()).fold.status(0).missed == 3


def test_what_knows_no_gaps_is_read_and_reads_what_does() -> None:
    def cut(data: bytes) -> bytes:
        """As it was written without the field, which comes last."""
        return msgspec.msgpack.encode(msgspec.msgpack.decode(data)[:-1])

    log = GroupLog()
    log.apply(FeedPosition(0, {"e": 7}, 2))
    with_gaps = log.state.dump()
    assert State.load(with_gaps[:1] + cut(with_gaps[1:])).fold.missed == 0
    entry = encode([FeedPosition(5, {"e": 7})])
    ((kind, *fields),) = msgspec.msgpack.decode(entry[1:])
    assert decode(entry[:1] + msgspec.msgpack.encode([[kind, *fields[:-1]]])) == [FeedPosition(5, {"e": 7}, 0)]
    told = Status(1, 2, 3, 4, 5, 6, missed=7)
    assert msgspec.msgpack.decode(cut(msgspec.msgpack.encode(told)), type=Status) == msgspec.structs.replace(told, missed=0)
    names = [name for name in Status.__struct_fields__ if name != "missed"]
    older = msgspec.defstruct("Older", [(name, int) for name in names], array_like=True, tag=6)
    read = msgspec.msgpack.decode(msgspec.msgpack.encode(told), type=older)
    assert [getattr(read, name) for name in names] == [getattr(told, name) for name in names]


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


def message(number: int, size: int = 1, topic: str = "a", ordered: bool = False) -> FeedMessages:
    return FeedMessages(0, P, topic, 0, ordered, ((number, bytes(size)),))


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


async def test_a_group_that_nobody_asks_rests_until_somebody_does() -> None:
    rig, told = Rig(), list[int]()
    room = GroupIntake(rig.service, Term(rig), lambda: rig.now)  # type: ignore[arg-type]
    room.read_on = lambda: told.append(rig.now)
    rig.now += intake.ASKED_MS
    assert not room.rests(), "its master has just begun"
    rig.now += 1
    assert (room.rests(), room.has_enough()) == (True, False)
    await room.take([message(1), message(2)])
    assert room.has_enough(), "for whoever comes first"
    (token,) = tokens(rig, rig.ask(wire.Lease(W, 1, 0, 60_000, 1, 0, [])))
    assert (room.rests(), room.has_enough(), told) == (False, False, [rig.now]), "somebody asks"
    rig.now += intake.ASKED_MS + 1
    assert room.rests()
    tokens(rig, rig.ask(wire.Lease(W, 2, 0, 60_000, 1, 0, [])))
    rig.ask(wire.Lease(W, 3, 0, 60_000, 1, 10_000, []))
    rig.now += intake.ASKED_MS + 1
    assert not room.rests(), "somebody waits"
    rig.service.tick(rig.now)
    assert (room.rests(), room.has_enough()) == (True, True), "what is leased counts: it may come back"
    told.clear()
    rig.ask(wire.SettleAll(W, 0, [Settlement.ack(token)]))
    rig.commit()
    assert told == [rig.now], "none may be left"


def test_who_asks_a_group_that_rests_gets_what_is_stored() -> None:
    """Without waiting, as it says; but nothing was looked for."""
    rig = Rig()
    GroupIntake(rig.service, Term(rig), lambda: rig.now)  # type: ignore[arg-type]
    at_once = rig.ask(wire.Lease(W, 1, 0, 60_000, 5, 0, []))
    assert tokens(rig, at_once) == [], "it does not rest"
    rig.now += intake.ASKED_MS + 1
    first = rig.ask(wire.Lease(W, 2, 0, 60_000, 5, 0, []))
    second = rig.ask(wire.Lease(W + 1, 1, 0, 60_000, 5, 0, []))
    assert rig.commit() == {}
    rig.service.feed([message(1), message(2)], rig.now)
    assert len(tokens(rig, first)) == 2
    rig.now += intake.WAKING_MS + 1
    rig.service.tick(rig.now)
    assert tokens(rig, second) == []


def test_a_gap_counts_once_with_the_position_behind_it() -> None:
    rig = Rig()
    room = GroupIntake(rig.service, Term(rig), lambda: rig.now)  # type: ignore[arg-type]
    room.reached({"e-1": 4})
    room.missed()
    room.missed()
    assert rig.service.fold.status(0).missed == 0, "whoever reads from here is told again"
    room.reached({"e-1": 9})
    room.reached({"e-1": 9})
    assert rig.service.fold.status(0).missed == 2


async def test_a_full_group_whose_messages_are_all_over_takes_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """By itself: nobody asks for any."""
    monkeypatch.setattr(intake, "MESSAGES_MAX", 8)
    rig = Rig()
    room = GroupIntake(rig.service, Term(rig), lambda: rig.now)  # type: ignore[arg-type]
    ends = rig.now + 500
    await room.take([msgspec.structs.replace(message(n), expires=ends) for n in range(1, 9)])
    waiting = asyncio.create_task(room.take([message(9)]))
    await asyncio.sleep(0)
    assert not waiting.done()
    rig.now = ends
    rig.service.tick(rig.now)
    async with asyncio.timeout(5):
        await waiting
    assert rig.service.fold.status(0).ready == 1


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


def test_acks_of_a_group_are_one_record_and_are_answered_again_as_they_were() -> None:
    rig = Rig()
    rig.service.feed_position({"e-1": 1}, rig.now)
    rig.service.feed([FeedMessages(0, P, "a", 0, False, tuple((n, b"x") for n in range(1, 9)))], rig.now)
    leased = tokens(rig, rig.ask(wire.Lease(W, 1, 0, 60_000, 5, 0, [])))
    more = tokens(rig, rig.ask(wire.Lease(W, 2, 0, 60_000, 2, 0, [])))
    entries = len(rig.entries)
    settle = [Settlement.ack(token) for token in (*leased, more[1], more[0], "1.0.0000000000000007")]
    asked = rig.ask(wire.SettleAll(W, 0, settle))
    assert rig.commit()[asked] == wire.Leases(["", "", "", "", "", "", "", None], [])
    assert {type(record) for record in decode(rig.entries[entries])} == {Complete}, "of another instance: each by itself"
    assert rig.service.fold.completed == 7
    third = tokens(rig, rig.ask(wire.Lease(W, 3, 0, 60_000, 5, 0, [])))
    rig.service.feed([FeedMessages(0, P, "a", 0, False, tuple((n, b"x") for n in range(9, 12)))], rig.now)
    third += tokens(rig, rig.ask(wire.Lease(W, 4, 0, 60_000, 5, 0, [])))
    settle = [Settlement.ack(token) for token in third]
    rig.ask(wire.SettleAll(W, 0, settle))
    rig.commit()
    assert [type(record) for record in decode(rig.entries[-1])] == [CompleteMany]
    again = rig.ask(wire.SettleAll(W, 1, [*settle, Settlement.ack(f"{1 << 40}.0.{W:016x}")]))
    assert rig.commit()[again] == wire.Leases(["", "", "", "", None], [])
    fresh = rig.ask(wire.SettleAll(W, 0, settle))
    assert rig.commit()[fresh] == wire.Leases([None] * 4, [])
    mixed = rig.ask(wire.SettleAll(W, 1, [*settle, Settlement.release(third[0])]))
    assert rig.commit()[mixed] == wire.Leases(["", "", "", "", ""], [])


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
    for known, told in ((-1, -1), (30, 30)):
        room.lag = known
        asked = rig.ask(wire.GetStatus())
        assert rig.commit()[asked].lag == told  # type: ignore[union-attr]


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
