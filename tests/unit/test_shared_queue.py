"""Work queues over a shared log whose server is unreliable: appends that are refused, done but not confirmed, done twice or
late, and reads that fail; and what a process knows of the log's clock.

Not covered: real servers (tests/integration/test_shared_logs.py, test_shared_log_queues.py).
"""

from __future__ import annotations

import itertools
import random
import time
from collections import Counter
from threading import Event

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roq.errors import AppendUnknown, Closed, LogUnavailable, StorageFull, WorkQueueConflict
from roq.log.clock import DRIFT, AppendTimes, LogClock
from roq.log.contract import READ_BYTES, LogEntry
from roq.log.memory import MemoryLog
from roq.wire.task import ERROR_BYTES_MAX, NewTask, Settlement, TaskState
from roq.workqueue.records import Pop, Push, Requeue, encode
from roq.workqueue.shared_queue import SharedQueue

ROUNDS = 60
QUEUES = 3


class Opening:
    """One opening of a log that others have open too."""

    def __init__(self, log: MemoryLog) -> None:
        self.log = log
        self.name, self.entry_bytes_max = log.name, log.entry_bytes_max
        self.now, self.latest, self.wait = log.now, log.latest, log.wait
        self.snapshot, self.newest_snapshot, self.load_snapshot = log.snapshot, log.newest_snapshot, log.load_snapshot

    def append(self, entry: bytes) -> int:
        return self.log.append(entry)

    def end(self) -> int:
        return self.log.end()

    def read(self, after: int, bytes_max: int = READ_BYTES) -> list[LogEntry]:
        return self.log.read(after, bytes_max)

    def close(self) -> None:
        pass


class Unreliable(Opening):
    """Whatever may go wrong does, by chance."""

    def __init__(self, log: MemoryLog, chance: random.Random, late: list[bytes]) -> None:
        super().__init__(log)
        self._chance, self._late = chance, late
        self.reliable = False
        self.fate = 1.0  # of appends while it is reliable

    def append(self, entry: bytes) -> int:
        fate = self.fate if self.reliable else self._chance.random()
        while self._late and (self.reliable or self._chance.random() < 0.3):
            self.log.append(self._late.pop(0))
        if fate < 0.1:
            raise LogUnavailable("the server is away")
        if fate < 0.2:
            self._late.append(entry)
            raise AppendUnknown("on its way for long")
        position = self.log.append(entry)
        if fate < 0.3:
            raise AppendUnknown("written, and nobody was told")
        return self.log.append(entry) if fate < 0.4 else position

    def end(self) -> int:
        self._may_fail()
        return self.log.end()

    def read(self, after: int, bytes_max: int = READ_BYTES) -> list[LogEntry]:
        self._may_fail()
        return self.log.read(after, self._chance.choice((1, 300, bytes_max)))

    def _may_fail(self) -> None:
        if not self.reliable and self._chance.random() < 0.1:
            raise LogUnavailable("the server is away")


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever tries again does so at once."""
    monkeypatch.setattr("roq.workqueue.shared_queue.delays", lambda *_: itertools.repeat(0.0))


def opened(log: MemoryLog, **options: float) -> SharedQueue:
    return SharedQueue(lambda: Opening(log), options)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("seed", range(20))
def test_each_task_is_acked_once_over_an_unreliable_log(seed: int) -> None:
    log, chance, late = MemoryLog(), random.Random(seed), list[bytes]()
    logs = [Unreliable(log, chance, late) for _ in range(QUEUES)]
    queues = [SharedQueue(lambda one=one: one, replay_bytes=5000) for one in logs]  # type: ignore[misc]
    put: list[str] = []
    acked: Counter[str] = Counter()
    for number in range(ROUNDS):
        queue = chance.choice(queues)
        key = f"key {number % 50}"  # some again
        ids = queue.put([NewTask(b"a" * chance.randrange(100)), NewTask(b"b", 0.0, 0, key)])
        put += ids
        if number >= 50:
            assert ids[1] == put[2 * (number - 50) + 1], "the same key is the same task"
        tasks = chance.choice(queues).lease(60.0, chance.randrange(1, 5), 0.0).tasks
        kept = [task for task in tasks if chance.random() < 0.8]
        answers = chance.choice(queues).settle([Settlement.ack(task.token) for task in kept])
        assert answers == [""] * len(kept), "nobody else has them, however often the entry was written"
        acked.update(task.id for task in kept)
        back = [task for task in tasks if task not in kept]
        assert queue.settle([Settlement.release(task.token, 0.0, "again") for task in back]) == [""] * len(back)
    for one in logs:
        one.reliable = True
    while tasks := queues[0].lease(60.0, 100, 0.0).tasks:
        acked.update(task.id for task in tasks)
        assert queues[1].settle([Settlement.ack(task.token) for task in tasks]) == [""] * len(tasks)
    assert set(acked) == set(put)
    assert set(acked.values()) == {1}
    assert queues[2].status().completed == queues[2].status().inserted == len(set(put))
    for queue in queues:
        queue._caught_up()
        queue._replica.state.check()
    assert len({queue._replica.state.digest() for queue in queues}) == 1
    assert log.newest_snapshot()[0] > 0
    for queue in queues:
        queue.close()


@pytest.mark.usefixtures("impatient")
def test_a_command_of_unknown_outcome_is_not_repeated() -> None:
    log = MemoryLog()
    one = Unreliable(log, random.Random(1), [])
    one.reliable = True
    queue = SharedQueue(lambda: one)
    queue.put([NewTask(b"a"), NewTask(b"b")])
    one.fate = 0.25
    assert queue.purge() == 2, "it was written: reading on tells"
    one.fate, before = 0.15, log.end()
    with pytest.raises(AppendUnknown, match="whether Purge takes effect is unknown"):
        queue.purge()
    assert log.end() == before, "perhaps it comes later; a second one would be one too many"
    one.fate = 1.0
    queue.close()


def test_a_lease_ends_by_the_log_s_clock_not_by_a_writer_s() -> None:
    """Somebody whose clock is ahead writes that a lease is over: for nobody it is."""
    log = MemoryLog()
    queue, other = opened(log), opened(log)
    queue.put([NewTask(b"x")])
    [task] = queue.lease(60.0, 1, 0.0).tasks
    leased = queue._replica.state.fold.leased
    [(delivery, stored)] = leased.items()
    log.append(encode([Requeue(stored.due + 1, delivery, stored.instance, stored.due)]))
    assert other.lease(60.0, 1, 0.2).tasks == []
    assert queue.settle([Settlement.ack(task.token)]) == [""]
    [mine] = [opened(log).status().completed]
    assert mine == 1
    for each in (queue, other):
        each.close()


def test_records_time_is_not_believed() -> None:
    log = MemoryLog()
    queue = opened(log)
    year = 365 * 86_400_000
    log.append(encode([Push(0, 7, 1, b"x", 0, 1000)]))
    log.append(encode([Pop(0, 9, 1, 1, 60_000)]))
    assert queue.status().delayed == 1
    [view] = queue.peek(TaskState.DELAYED, 1)
    assert abs(view.due - time.time()) < year / 1000
    queue.close()


def test_an_expired_lease_goes_to_who_waits_and_says_when_it_began() -> None:
    log = MemoryLog()
    queue, other = opened(log), opened(log)
    queue.put([NewTask(b"x")])
    [first] = queue.lease(0.5, 1, 0.0).tasks
    asked = time.monotonic()
    trip = other.lease(60.0, 1, 10.0)
    assert [task.id for task in trip.tasks] == [first.id]
    assert 0.3 < time.monotonic() - asked < 3.0
    assert asked + 0.3 < trip.began <= time.monotonic()
    assert queue.settle([Settlement.ack(first.token)]) == [None]
    for each in (queue, other):
        each.close()


def test_long_lists_go_in_several_entries() -> None:
    log = MemoryLog()
    log.entry_bytes_max = 1_000_000
    queue = SharedQueue(lambda: Opening(log), replay_bytes=1 << 40)
    ids = queue.put([NewTask(b"x" * 1000) for _ in range(2000)])
    tokens = [task.token for _ in range(2) for task in queue.lease(60.0, 1000, 0.0).tasks]
    assert queue.settle([Settlement.reject(token, "e" * ERROR_BYTES_MAX) for token in tokens[:1000]]) == [""] * 1000
    trip = queue.lease(60.0, 1, 0.0, [Settlement.release(token, 0.0, "e" * ERROR_BYTES_MAX) for token in tokens[1000:]])
    assert (trip.settled, [task.id for task in trip.tasks]) == ([""] * 1000, [ids[1000]])
    assert queue.requeue_dead(ids) == 1000
    assert max(len(entry.data) for entry in log.read(0, 1 << 30)) <= 1_000_000
    queue.close()


def test_settings_belong_to_the_queue() -> None:
    log = MemoryLog()
    queue = opened(log, max_attempts=4)
    assert opened(log).settings == queue.settings
    with pytest.raises(WorkQueueConflict, match="max_attempts 4, not 5"):
        opened(log, max_attempts=5)


class Losing(Opening):
    """Of a server that confirms and then loses."""

    losing = False

    def append(self, entry: bytes) -> int:
        return self.log.end() + 1 if self.losing else self.log.append(entry)


@pytest.mark.timeout(30)
def test_a_confirmed_entry_that_the_log_has_lost_is_told_and_the_queue_goes_on() -> None:
    log = MemoryLog()
    one = Losing(log)
    queue = SharedQueue(lambda: one, patience_seconds=0.3)
    queue.put([NewTask(b"x")])
    one.losing, began = True, time.monotonic()
    with pytest.raises(AppendUnknown, match="ends at position 2, before 3, which was confirmed"):
        queue.lease(60.0, 1, 0.0)
    assert time.monotonic() - began < 5
    one.losing = False
    assert len(queue.lease(60.0, 1, 0.0).tasks) == 1
    queue.close()


class Astray(Opening):
    """The next entry is under way for long."""

    waiting: bytes | None = None

    def append(self, entry: bytes) -> int:
        if self.waiting == b"":
            self.waiting = entry
            raise AppendUnknown("on its way")
        return self.log.append(entry)


@pytest.mark.parametrize("closed", [False, True])
def test_a_lease_that_failed_takes_no_task_when_its_entry_comes_late(closed: bool) -> None:
    log = MemoryLog()
    one, queue = Astray(log), opened(log)
    failing = SharedQueue(lambda: one, patience_seconds=0.0)
    ids = queue.put([NewTask(b"a"), NewTask(b"b")])
    one.waiting = b""
    with pytest.raises(AppendUnknown):
        failing.lease(60.0, 2, 5.0)
    if closed:
        failing.close()
    assert one.waiting
    log.append(one.waiting)
    assert [task.id for task in queue.lease(60.0, 2, 0.0).tasks] == ids
    for each in (failing, queue):
        each.close()


class Full(Opening):
    """A log that takes so many bytes between two snapshots."""

    limit = 20_000

    def append(self, entry: bytes) -> int:
        if sum(len(one.data) for one in self.log._entries) + len(entry) > self.limit:
            raise StorageFull("the stream is full")
        return self.log.append(entry)


def test_a_full_log_refuses_puts_until_leases_and_acks_make_room() -> None:
    log = MemoryLog()
    queue, putting = (SharedQueue(lambda: Full(log), replay_bytes=1 << 40) for _ in range(2))

    def fill(size: int, key: str) -> None:
        for number in range(1000):
            putting.put([NewTask(b"x" * size, dedup_key=key and f"{key} {number}")])

    for size, key in ((1000, ""), (1, ""), (1, "key")):
        with pytest.raises(StorageFull):
            fill(size, key)
    assert log.newest_snapshot() == (0, 0)
    tokens = [task.token for task in queue.lease(60.0, 1000, 0.0).tasks]
    assert queue.settle([Settlement.ack(token) for token in tokens]) == [""] * len(tokens)
    assert log.newest_snapshot()[0] > 0
    putting.put([NewTask(b"x" * 1000)])
    assert (queue.status().ready, putting.status().completed) == (1, len(tokens))
    assert queue._replica.state.digest() == putting._replica.state.digest()
    for each in (queue, putting):
        each.close()


class Hanging(Opening):
    """Of a server that hangs while a snapshot is written, until the log is closed."""

    def __init__(self, log: MemoryLog) -> None:
        super().__init__(log)
        self.writing, self.ended = Event(), Event()
        self.snapshot = self._hang

    def _hang(self, position: int, data: bytes) -> None:
        self.writing.set()
        assert self.ended.wait(30)
        raise Closed("the log was closed")

    def close(self) -> None:
        self.ended.set()


def test_closing_does_not_wait_long_for_a_snapshot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("roq.workqueue.shared_queue.CHORE_SECONDS", 0.1)
    one = Hanging(MemoryLog())
    queue = SharedQueue(lambda: one, replay_bytes=1)
    queue.put([NewTask(b"x" * 1000)])
    queue.status()
    assert one.writing.wait(5)
    began = time.monotonic()
    queue.close()
    assert time.monotonic() - began < 5


# --- the log's clock --------------------------------------------------------------------------------------------------------

seconds = st.floats(0.001, 100.0)


@given(
    offset=st.integers(-(10**9), 10**9),
    rate=st.floats(-DRIFT / 4, DRIFT / 4),
    steps=st.lists(st.tuples(seconds, seconds, seconds, st.booleans()), min_size=1, max_size=30),
)
def test_the_clock_lies_between_its_bounds(offset: int, rate: float, steps: list[tuple[float, float, float, bool]]) -> None:
    ours = 1000.0

    def theirs() -> float:
        return (ours * (1 + rate) + offset) * 1000

    clock = LogClock(lambda: ours)
    both = False
    for pause, there, back, is_answer in steps:
        ours += pause
        sent = ours
        ours += there
        ms = int(theirs() // 1)
        ours += back
        clock.observe(ms, sent if is_answer else None)
        both = both or is_answer
        ours += pause
        assert clock.now() <= theirs() + 2
        if both:
            assert theirs() <= clock.latest() + 2


@given(order=st.permutations(range(6)), ours=st.sets(st.sampled_from((1, 2, 3))))
def test_appends_and_their_deliveries_bound_the_clock_in_any_order(order: list[int], ours: set[int]) -> None:
    """Three deliveries in order, and the confirmations of ours among them."""
    now = 100.0
    clock = LogClock(lambda: now)
    times, delivered, confirmed = AppendTimes(clock), 0, set[int]()
    assert clock.latest() > 1 << 60, "nothing is known: not an earlier time than there may be"
    for step in order:
        if step < 3:
            delivered += 1
            times.came(delivered, 5000)
        elif step - 2 in ours:
            confirmed.add(step - 2)
            times.confirmed(step - 2, 100.0)
        known = [one for one in confirmed if one <= delivered]
        assert (clock.latest() < 1 << 60) == bool(known)
    if ours:
        assert clock.now() <= 5000 <= clock.latest() <= 5002


def test_a_lease_began_no_earlier_than_it_was_asked_for() -> None:
    """However little is known of the log's clock, a lease that was just given is not taken for one that is over."""
    log = MemoryLog()
    one = Opening(log)
    one.latest = lambda: log.now() + 72_000
    queue = SharedQueue(lambda: one)
    queue.put([NewTask(b"x")])
    asked = time.monotonic()
    assert asked <= queue.lease(60.0, 1, 0.0).began <= time.monotonic()
    queue.close()
