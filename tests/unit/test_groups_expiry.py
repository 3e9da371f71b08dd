"""Messages of a group with a priority and an end: who goes first, and what is gone when its time is over.

Not covered: interleavings with crashes (tests/model/test_groups.py), real processes (tests/integration/test_group_headers.py).
"""

from __future__ import annotations

import random

import pytest

from roq.wire.task import TaskState
from roq.wire.work_queue import TaskSettings
from roq.workqueue import ready, topics
from roq.workqueue.fold import TasksChanged
from roq.workqueue.ready import Expiries, StoredTask
from roq.workqueue.records import (
    Complete,
    Configure,
    DeadLetter,
    ExtendLease,
    FeedMessage,
    FeedPosition,
    Purge,
    Record,
    ReleaseAll,
    RemoveDead,
    Requeue,
    RequeueDead,
    Tick,
)
from roq.workqueue.state import GROUP_VERSION, OUTBOX_VERSION, State
from tests.unit.test_workqueue_state import DONE, LOST, Log, W

P = 11


class GroupLog(Log):
    """A log of a group."""

    def feed(self, topic: str, *, ordered: bool = True, priority: int = 0, expires: int = 0) -> None:
        """A message whose payload is its topic and number."""
        self.sequence += 1
        payload = f"{topic}{self.sequence}".encode()
        record = FeedMessage(self.now, P, self.sequence, payload, topic, self.now, ordered, priority, expires)
        assert self.apply(record) == []

    def leased(self, count: int = 1) -> list[object]:
        """Payloads of what a Pop gets now."""
        return [one.task.payload for one in self.pop(count)]

    def counts(self) -> tuple[int, int, int, int, int]:
        """ready, delayed, leased, dead, expired."""
        status = self.state.fold.status(self.now)
        return status.ready, status.delayed, status.leased, status.dead, status.expired

    def at(self, now: int) -> None:
        """Time has come to there."""
        self.now = now
        self.apply(Tick(now))


# --- priority ---------------------------------------------------------------------------------------------------------


def test_a_higher_priority_is_leased_first() -> None:
    log = GroupLog()
    for priority in (0, 5, -1, 9, 5):
        log.feed("a", ordered=False, priority=priority)
    assert log.leased(10) == [b"a4", b"a2", b"a5", b"a1", b"a3"]


def test_within_an_ordered_topic_the_order_is_the_topics() -> None:
    log = GroupLog()
    log.feed("a")
    log.feed("a", priority=9)
    log.feed("b", priority=1)
    first, second = log.pop(count=10)
    assert [first.task.payload, second.task.payload] == [b"b3", b"a1"], "a2 stands behind a1, whatever its priority"
    log.apply(Complete(0, second.delivery, W))
    log.feed("c", priority=2)
    assert log.leased(10) == [b"a2", b"c4"]


# --- an end -----------------------------------------------------------------------------------------------------------


def test_nobody_gets_what_is_over_and_it_is_no_dead_letter() -> None:
    log = GroupLog()
    for expires in (500, 0, 300):
        log.feed("a", ordered=False, expires=expires)
    assert log.state.fold.next_due() == 300
    log.at(299)
    assert log.counts() == (3, 0, 0, 0, 0)
    log.at(300)
    assert (log.counts(), log.payloads()) == ((2, 0, 0, 0, 1), [b"a1", b"a2"])
    assert log.state.fold.fed_bytes == 4
    log.now = 500  # the Pop itself brings the time
    assert log.leased(10) == [b"a2"]
    assert log.counts() == (0, 0, 1, 0, 2)
    assert log.state.fold.next_due() == 1500


def test_what_is_over_when_it_comes_is_counted_and_its_number_is_used() -> None:
    log = GroupLog()
    log.now = 1000
    log.feed("a", expires=1000)
    assert (log.counts(), log.state.fold.status(0).inserted, log.state.fold.fed_bytes) == ((0, 0, 0, 0, 1), 1, 0)
    assert log.apply(FeedMessage(1000, P, 1, b"again", "a", 0, True)) != []
    log.feed("a")
    assert log.leased() == [b"a2"], "its topic is free"


def test_a_lease_is_not_cut() -> None:
    log = GroupLog()
    log.feed("a", expires=500)
    (one,) = log.pop(lease_ms=1000)
    log.at(700)
    assert log.counts() == (0, 0, 1, 0, 0)
    assert log.apply(ExtendLease(700, one.delivery, W, 5000)) == DONE
    assert log.apply(Complete(800, one.delivery, W)) == DONE
    assert log.state.fold.status(0).completed == 1


@pytest.mark.parametrize("ended", [Requeue(700, 0, W), Requeue(700, 0, W, 0, 0, "bad"), Requeue(700, 0, W, 0, 50)])
def test_what_comes_back_too_late_is_gone_also_at_its_last_attempt(ended: Requeue) -> None:
    log = GroupLog()
    log.apply(Configure(0, TaskSettings(max_attempts=1), 0))
    log.feed("a", expires=500)
    log.feed("a")
    (one,) = log.pop()
    back = Requeue(ended.now, one.delivery, W, ended.due, ended.delay_ms, ended.error)
    assert log.apply(back) == DONE
    assert log.counts() == (1, 0, 0, 0, 1)
    assert log.apply(back) == LOST
    assert log.leased() == [b"a2"], "the next of its topic goes on"


def test_a_lease_that_ran_out_too_late_is_gone() -> None:
    log = GroupLog()
    log.feed("a", expires=500)
    log.pop(lease_ms=600)
    (over,) = log.state.fold.expired(600, 10)
    log.apply(over)
    assert log.counts() == (0, 0, 0, 0, 1)


def test_what_comes_back_in_time_ends_later() -> None:
    log = GroupLog()
    log.feed("a", expires=500)
    (one,) = log.pop()
    log.apply(Requeue(100, one.delivery, W))
    assert log.counts() == (1, 0, 0, 0, 0)
    log.at(500)
    assert log.counts() == (0, 0, 0, 0, 1)


def test_a_delay_ends_with_the_message() -> None:
    log = GroupLog()
    log.feed("a", expires=500)
    log.feed("a", expires=600)
    log.feed("a", expires=400)
    (one,) = log.pop()
    log.apply(Requeue(0, one.delivery, W, 0, 10_000))
    assert log.state.fold.next_due() == 400
    log.at(550)
    assert (log.counts(), log.payloads()) == ((1, 0, 0, 0, 2), [b"a2"])


def test_of_a_topic_all_that_are_over_go_at_once() -> None:
    log = GroupLog()
    for expires in (100, 100, 0, 100):
        log.feed("a", expires=expires)
    log.at(100)
    assert (log.payloads(), log.counts()) == ([b"a3"], (1, 0, 0, 0, 3))
    (third,) = log.pop()
    log.apply(Complete(100, third.delivery, W))
    log.feed("a")
    assert log.leased() == [b"a5"]


def test_a_dead_letter_stays_and_is_gone_when_it_is_put_back_too_late() -> None:
    log = GroupLog()
    log.feed("a", expires=500)
    log.feed("a", expires=700)
    for _ in range(2):
        (one,) = log.pop()
        log.apply(DeadLetter(0, one.delivery, W, "bad"))
    log.at(600)
    assert (log.counts(), log.payloads(TaskState.DEAD)) == ((0, 0, 0, 2, 0), [b"a1", b"a2"])
    assert log.apply(RequeueDead(600, None)) == [TasksChanged(2)]
    assert (log.counts(), log.payloads()) == ((1, 0, 0, 0, 1), [b"a2"])
    log.at(700)
    assert (log.counts(), log.state.fold.fed_bytes) == ((0, 0, 0, 0, 2), 0)


def test_commands_of_people() -> None:
    log = GroupLog()
    log.feed("a", expires=500)
    log.feed("a", expires=900)
    log.feed("b", expires=900)
    log.pop(count=10)
    log.now = 600
    assert log.apply(ReleaseAll(600)) == [TasksChanged(2)]
    assert (log.counts(), sorted(map(str, log.payloads()))) == ((2, 0, 0, 0, 1), ["b'a2'", "b'b3'"])
    assert log.apply(Purge(600)) == [TasksChanged(2)]
    log.at(1000)
    assert (log.counts(), log.state.fold.next_due()) == ((0, 0, 0, 0, 1), None)


def test_a_snapshot_with_ends_has_a_version_of_its_own_and_older_ones_are_read() -> None:
    log = GroupLog()
    log.apply(FeedPosition(0, {"e": 1}))
    log.feed("a")
    before = log.state.dump()
    assert before[0] == GROUP_VERSION
    assert State.load(before).fold.lapsed == 0
    log.feed("a", expires=500)
    assert log.state.dump()[0] == OUTBOX_VERSION
    log.at(500)
    loaded = State.load(log.state.dump()).fold
    assert (loaded.lapsed, loaded.topics.behind, loaded.status(0).expired) == (1, 0, 1)


def test_what_is_over_does_not_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ready, "GONE_MIN", 8)
    monkeypatch.setattr(topics, "GONE_MIN", 8)
    log = GroupLog()
    log.feed("a", ordered=False)
    log.feed("b")
    for now in range(1, 300):
        log.now = now
        log.feed("a", ordered=False, expires=now + 2)
        log.feed("b", expires=now + 2)
    bucket = log.state.fold.ready._by_priority[0]
    assert len(bucket.fresh) + len(bucket.back) < 40
    assert sum(map(len, log.state.fold.topics._heaps.values())) < 40
    assert log.counts() == (6, 0, 0, 0, 2 * 297)
    ends = Expiries()
    for number in range(1000):
        task = StoredTask(number, 1, number, b"", 0, 0, expires=10**6)
        ends.add(task)
        ends.remove(task)
    assert len(ends._ends) < 40


@pytest.mark.parametrize("seed", range(20))
def test_whatever_happens_nothing_waits_longer_than_it_may(seed: int) -> None:
    """`check` says so after every record; each message is counted once at the end."""
    draw, log = random.Random(seed), GroupLog()
    log.apply(Configure(0, TaskSettings(max_attempts=3), 0))
    for _ in range(300):
        log.now += draw.randrange(20)
        now, leased = log.now, list(log.state.fold.leased)
        match draw.randrange(9):
            case 0 | 1 | 2:
                expires = draw.choice([0, now + draw.randrange(-20, 300)])
                log.feed(draw.choice("abc"), ordered=draw.random() < 0.7, priority=draw.randrange(3), expires=max(expires, 0))
            case 3:
                assert all(not one.task.expires or one.task.expires > now for one in log.pop(draw.randrange(1, 4), 100))
            case 4 if leased:
                log.apply(Complete(now, draw.choice(leased), W))
            case 5 if leased:
                error = draw.choice(["", "bad"])
                log.apply(Requeue(now, draw.choice(leased), W, 0, draw.choice([0, 200]), error))
            case 6:
                log.apply(*log.state.fold.expired(now, 10))
            case 7 if leased and draw.random() < 0.4:
                log.apply(DeadLetter(now, draw.choice(leased), W, "bad"))
            case 8 if draw.random() < 0.2:
                commands: list[Record] = [ReleaseAll(now), RequeueDead(now, None), RemoveDead(now, None), Purge(now)]
                log.apply(draw.choice(commands))
    status = log.state.fold.status(log.now)
    assert status.expired > 0
    assert status.completed > 0
