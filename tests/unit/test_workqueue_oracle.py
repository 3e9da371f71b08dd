"""Random histories of records: the fold against an oracle that keeps one plain list and searches it for everything.

After each record the answers, the order and the counts are compared; from time to time the state goes through a dump and a
load, and in the end the same records applied without any must lead to the same digest.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roq.wire.task import TaskState
from roq.wire.work_queue import TaskSettings
from roq.workqueue.fold import Known, RecordRefused, Settled, TasksChanged, TasksDelivered
from roq.workqueue.records import (
    Cancel,
    Complete,
    Configure,
    DeadLetter,
    ExtendLease,
    InstanceDead,
    Pop,
    Purge,
    Push,
    Record,
    ReleaseAll,
    RemoveDead,
    Requeue,
    RequeueDead,
    TaskKey,
    Tick,
    decode,
    encode,
)
from roq.workqueue.state import State

Key = tuple[int, int]
Answer = tuple[int, int, tuple[tuple[int, TaskKey, int, int], ...]]  # instance, nonce, (delivery, task, attempt, due)
READY, DELAYED, LEASED, DEAD, GONE = "ready", "delayed", "leased", "dead", "gone"


@dataclass
class Item:
    order: int
    key: TaskKey
    priority: int
    state: str = READY
    attempts: int = 0
    due: int = 0
    delivery: int = 0
    owner: Key = (0, 0)
    died: int = 0


@dataclass
class Waiting:
    key: Key
    position: int
    lease_ms: int
    until: int


class Oracle:
    """The same rules, as slow and plain as can be."""

    def __init__(self) -> None:
        self.items: list[Item] = []
        self.waiting: list[Waiting] = []
        self.pushed: set[TaskKey] = set()
        self.popped: set[Key] = set()
        self.dead: set[int] = set()
        self.keys: list[tuple[str, int, TaskKey]] = []
        self.position = self.clock = 0
        self.max_attempts, self.window, self.version = 0, 300_000, 0

    def apply(self, record: Record) -> tuple[list[Answer], object]:
        """The answers to Pops, and what the record's writer is told."""
        self.position += 1
        self.clock = max(self.clock, record.now)
        for item in self.items:
            if item.state == DELAYED and item.due <= self.clock:
                self._set(item, READY)
        answers = self._serve()
        more, told = getattr(self, type(record).__name__)(record)
        return answers + more + self._serve(), told

    def _set(self, item: Item, state: str, due: int = 0) -> None:
        item.state, item.due, item.delivery, item.owner = state, due, 0, (0, 0)
        item.died = self.position if state == DEAD else 0

    def all(self, *states: str) -> list[Item]:
        return sorted((item for item in self.items if item.state in states), key=lambda item: (-item.priority, item.order))

    def _hand(self, key: Key, position: int, lease_ms: int, items: list[Item]) -> Answer:
        for place, item in enumerate(items):
            item.attempts += 1
            item.state, item.due, item.owner = LEASED, self.clock + lease_ms, key
            item.delivery = position * 1024 + place
        return (*key, tuple((item.delivery, item.key, item.attempts, item.due) for item in items))

    def _serve(self) -> list[Answer]:
        answers = []
        while self.waiting and (ready := self.all(READY)):
            first = self.waiting.pop(0)
            late = first.until < self.clock
            answers.append(self._hand(first.key, first.position, first.lease_ms, [] if late else ready[:1]))
        return answers

    def _found(self, delivery: int, instance: int) -> Item | None:
        return next((i for i in self.all(LEASED) if i.delivery == delivery and i.owner[0] == instance), None)

    def _back(self, item: Item, delay_ms: int, tried: bool) -> None:
        if tried and self.max_attempts and item.attempts >= self.max_attempts:
            self._set(item, DEAD)
        elif delay_ms:
            self._set(item, DELAYED, self.clock + delay_ms)
        else:
            self._set(item, READY)

    def Push(self, record: Push) -> tuple[list[Answer], object]:  # noqa: N802 - named after its record, like those below
        key = (record.producer, record.sequence)
        lasting = [one for one in self.keys if one[1] + self.window > self.clock]
        known = [one[2] for one in lasting if one[0] == record.dedup_key]
        if key in self.pushed:
            return [], known[0] if known else key
        self.pushed.add(key)
        if record.dedup_key:
            self.keys = lasting  # forgotten for good, even if the time they last is made longer later
        if known:
            return [], known[0]
        if record.dedup_key:
            self.keys.append((record.dedup_key, self.clock, key))
        item = Item(self.position, key, record.priority)
        self.items.append(item)
        if record.delay_ms:
            self._set(item, DELAYED, self.clock + record.delay_ms)
        return [], None

    def Pop(self, record: Pop) -> tuple[list[Answer], object]:  # noqa: N802
        key = (record.instance, record.nonce)
        if record.instance in self.dead:
            return [], "refused"
        if key in self.popped:
            if any(one.key == key for one in self.waiting):
                return [], None
            mine = sorted((item for item in self.all(LEASED) if item.owner == key), key=lambda item: item.delivery)
            return [(*key, tuple((item.delivery, item.key, item.attempts, item.due) for item in mine))], None
        self.popped.add(key)
        ready = self.all(READY)
        if ready or not record.wait_ms:
            return [self._hand(key, self.position, record.lease_ms, ready[: record.count])], None
        self.waiting.append(Waiting(key, self.position, record.lease_ms, self.clock + record.wait_ms))
        return [], None

    def Complete(self, record: Complete) -> tuple[list[Answer], object]:  # noqa: N802
        item = self._found(record.delivery, record.instance)
        if item:
            self._set(item, GONE)
        return [], item is not None

    def Requeue(self, record: Requeue) -> tuple[list[Answer], object]:  # noqa: N802
        item = self._found(record.delivery, record.instance)
        if item is None or (record.due and item.due != record.due):
            return [], False
        self._back(item, record.delay_ms, bool(record.error or record.due))
        return [], True

    def ExtendLease(self, record: ExtendLease) -> tuple[list[Answer], object]:  # noqa: N802
        item = self._found(record.delivery, record.instance)
        if item:
            item.due = self.clock + record.lease_ms
        return [], item is not None

    def DeadLetter(self, record: DeadLetter) -> tuple[list[Answer], object]:  # noqa: N802
        item = self._found(record.delivery, record.instance)
        if item:
            self._set(item, DEAD)
        return [], item is not None

    def _leave(self, keys: list[Key]) -> list[Answer]:
        self.waiting = [one for one in self.waiting if one.key not in keys]
        return [(*key, ()) for key in keys]

    def Cancel(self, record: Cancel) -> tuple[list[Answer], object]:  # noqa: N802
        return self._leave([one.key for one in self.waiting if one.key == (record.instance, record.nonce)]), None

    def InstanceDead(self, record: InstanceDead) -> tuple[list[Answer], object]:  # noqa: N802
        self.dead.add(record.instance)
        left = self._leave([one.key for one in self.waiting if one.key[0] == record.instance])
        items = [item for item in self.items if item.owner[0] == record.instance]
        for item in items:
            self._back(item, 0, True)
        return left, len(items)

    def Tick(self, record: Tick) -> tuple[list[Answer], object]:  # noqa: N802
        return self._leave([one.key for one in self.waiting if one.until < self.clock]), None

    def Configure(self, record: Configure) -> tuple[list[Answer], object]:  # noqa: N802
        if record.version != self.version:
            return [], False
        self.version += 1
        self.max_attempts, self.window = record.settings.max_attempts, round(record.settings.dedup_seconds * 1000)
        return [], True

    def _change(self, items: list[Item], state: str) -> tuple[list[Answer], object]:
        for item in items:
            self._set(item, state)
        return [], len(items)

    def Purge(self, record: Purge) -> tuple[list[Answer], object]:  # noqa: N802
        self.keys = []
        return self._change(self.all(READY, DELAYED, LEASED), GONE)

    def ReleaseAll(self, record: ReleaseAll) -> tuple[list[Answer], object]:  # noqa: N802
        return self._change(self.all(DELAYED, LEASED), READY)

    def RequeueDead(self, record: RequeueDead) -> tuple[list[Answer], object]:  # noqa: N802
        items = [item for item in self.all(DEAD) if record.tasks is None or item.key in record.tasks]
        for item in items:
            item.attempts = 0
        return self._change(items, READY)

    def RemoveDead(self, record: RemoveDead) -> tuple[list[Answer], object]:  # noqa: N802
        return self._change([item for item in self.all(DEAD) if record.tasks is None or item.key in record.tasks], GONE)


MS = (0, 0, 1, 5, 40)


class History:
    """A history made of steps with two numbers each, to choose by."""

    def __init__(self) -> None:
        self.state, self.oracle = State(), Oracle()
        self.records: list[Record] = []
        self.sent: list[Record] = []  # Pushes and Pops, to be written once more
        self.deliveries: list[Key] = []  # delivery, instance; old ones too
        self.now = 0
        self.sequences, self.nonces = [0, 0, 0], [0] * 100  # by producer, by instance
        self.life = [1, 2, 3]  # instances in use

    def write(self, record: Record) -> None:
        (record,) = decode(encode([record]))
        self.records.append(record)
        answers, told = self.oracle.apply(record)
        seen: list[Answer] = []
        for effect in self.state.apply(record):
            match effect:
                case TasksDelivered(instance, nonce, handed):
                    tasks = tuple((h.delivery, (h.task.producer, h.task.sequence), h.attempt, h.due) for h in handed)
                    seen.append((instance, nonce, tasks))
                    self.deliveries += [(h.delivery, instance) for h in handed]
                case Settled(applied):
                    assert told is applied
                case Known(task):
                    assert told == task
                case TasksChanged(tasks):
                    assert told == tasks
                case RecordRefused():
                    assert told == "refused"
        assert seen == answers
        self.compare()

    def compare(self) -> None:
        self.state.check()
        for kind in (READY, DELAYED, LEASED, DEAD):
            items = self.oracle.all(kind)
            if kind in (DELAYED, LEASED):
                items.sort(key=lambda item: (item.due, item.delivery, item.order))
            tasks = self.state.fold.first(TaskState(kind), 1000)
            if kind == DEAD:
                tasks.sort(key=lambda task: (-task.priority, task.order))
            assert [(t.producer, t.sequence) for t in tasks] == [item.key for item in items]
            assert [(t.attempts, t.due) for t in tasks] == [(item.attempts, item.due) for item in items]
        dues = [item.due for item in self.oracle.all(LEASED, DELAYED)]
        assert self.state.fold.next_due() == min(dues, default=None)

    def tick(self, a: int, b: int) -> None:
        self.now += a % 30
        self.write(Tick(max(self.now - b % 40, 0)))  # some clocks are behind

    def push(self, a: int, b: int) -> None:
        producer = a % 3
        self.sequences[producer] += 2 if b % 7 == 0 else 1
        key, delay = ("", "", "k", "l")[b % 4], MS[a % 5] if b % 2 else 0
        self.sent.append(Push(self.now, producer, self.sequences[producer], b"x", a % 2, delay, key))
        self.write(self.sent[-1])

    def pop(self, a: int, b: int) -> None:
        instance = self.life[a % 3]
        self.nonces[instance] += 1
        self.sent.append(Pop(self.now, instance, self.nonces[instance], 1 + b % 3, 1 + a % 40, MS[b % 5]))
        self.write(self.sent[-1])

    def again(self, a: int, b: int) -> None:
        if self.sent:
            self.write(self.sent[-1 - a % len(self.sent)])

    def settle(self, a: int, b: int) -> None:
        if not self.deliveries:
            return
        delivery, instance = self.deliveries[-1 - a % min(len(self.deliveries), 5)]
        records: tuple[Record, ...] = (
            Complete(self.now, delivery, instance),
            Requeue(self.now, delivery, instance, 0, MS[a % 5], "it failed" if a % 2 else ""),
            ExtendLease(self.now, delivery, instance, 1 + a % 40),
            DeadLetter(self.now, delivery, instance, "it failed"),
        )
        self.write(records[(0, 0, 1, 1, 1, 2, 2, 2, 3)[b % 9]])

    def expire(self, a: int, b: int) -> None:
        count = 1 + a % 3
        found = self.state.fold.expired(self.now, count)
        over = sorted((item.due, item.delivery) for item in self.oracle.all(LEASED) if item.due <= self.now)
        assert [(one.due, one.delivery) for one in found] == over[:count]
        self.now += MS[b % 5]
        if found and b % 3 == 0:
            self.write(ExtendLease(self.now, found[0].delivery, found[0].instance, 1 + b % 40))
        for record in found:
            self.write(record)

    def leave(self, a: int, b: int) -> None:
        place = a % 3
        if b % 2:
            self.write(Cancel(self.now, self.life[place], self.nonces[self.life[place]] - b % 3))
        else:
            self.write(InstanceDead(self.now, self.life[place], "it died" if b % 3 else ""))
            self.life[place] = min(max(self.life) + 1, 99)

    def command(self, a: int, b: int) -> None:
        keys = None if a % 2 else ((a % 3, 1 + b % 5), (b % 3, 1 + a % 5))
        chosen = TaskSettings(a % 4, MS[b % 5] / 1000)
        records = (
            Configure(self.now, chosen, self.state.fold.version - (b % 3 == 0)),
            Configure(self.now, chosen, self.state.fold.version),
            RequeueDead(self.now, keys),
            RemoveDead(self.now, keys),
            ReleaseAll(self.now),
            Purge(self.now),
        )
        self.write(records[b % len(records)])

    def snapshot(self, a: int, b: int) -> None:
        self.state = State.load(self.state.dump())


KINDS = (
    *(["push"] * 6),
    *(["pop"] * 6),
    *(["settle"] * 6),
    "tick",
    "tick",
    "expire",
    "expire",
    "again",
    "leave",
    "command",
    "snapshot",
)
CHOICES = st.integers(0, 999)


@pytest.mark.timeout(180)
@settings(max_examples=800)
@given(st.lists(st.tuples(st.sampled_from(KINDS), CHOICES, CHOICES), min_size=10, max_size=60))
def test_the_fold_does_what_the_oracle_does(steps: list[tuple[str, int, int]]) -> None:
    history = History()
    for kind, a, b in steps:
        getattr(history, kind)(a, b)
    whole = State()
    for record in history.records:
        whole.apply(record)
    assert whole.digest() == history.state.digest()
