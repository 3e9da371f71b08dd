"""How a work queue's tasks follow from its records: the fold. Pure: no IO, no clock, no setting but those in the records.

Theory of operation (RDSQ). All who read the same log are in the same state after the same record.

    Push ──► delayed ── time ──► ready ── Pop ──► leased ── Complete ──► gone
               ▲                   ▲                │
               └──── delay ────────┴─── Requeue ────┤
                                   ▲                └─ too many attempts, or DeadLetter ──► dead
                                   └─────────────────────────── RequeueDead ─────────────────┘

The rules that keep this right whoever crashes when, each of them with its counterexample in tests/model:
    a delivery is named by the LSN of its Pop, so a late record about an older delivery of a task does nothing;
    the first record that ends a delivery decides, the others do nothing; an expiry names the end it saw, so it can't undo an
    extension; a task that comes back stands where it was pushed;
    Pushes and Pops carry numbers of their sender, so a record written twice takes effect once.

A group's messages come by FeedMessage, numbered by their publishers. Of ordered ones only the first of each topic is among
those above; the others stand behind it until it is gone or dead.

The shell appends Tick and Requeue when `next_due` has come; this file only says what is due. What a record means: records.py.
Not here: lease requests that wait for a task (waiters.py), and Pops that a log says wait (state.py, with dump and load). Limits
here cut by the records alone: DEDUP_KEYS_MAX, SENDERS_MAX.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from heapq import heapify, heappop, heappush, merge, nsmallest
from itertools import chain, islice
from typing import Any, NamedTuple

import msgspec

from roq.wire.task import Status, TaskState
from roq.wire.work_queue import TaskSettings
from roq.workqueue.records import (
    POP_SHIFT,
    BlobRef,
    Cancel,
    Complete,
    Configure,
    DeadLetter,
    ExtendLease,
    FeedMessage,
    FeedPosition,
    HoldersReplaced,
    InstanceDead,
    Payload,
    Pop,
    Purge,
    Push,
    Record,
    ReleaseAll,
    RemoveDead,
    Requeue,
    RequeueDead,
    Senders,
    TaskKey,
    Tick,
    Use,
)

ENDS_MIN = 4096  # ends of leases that are over are not looked for among fewer
DEDUP_KEYS_MAX = 1_000_000  # remembered at once; above it the oldest are forgotten early


# --- tasks ------------------------------------------------------------------------------------------------------------


class StoredTask(msgspec.Struct, array_like=True, gc=False):
    """A task. order: LSN of its record. inserted: ms. due: ms when its delay or lease ends, 0 without. delivery, instance,
    nonce: of the Pop that has it, 0 without. topic, ordered: of a group's message."""

    order: int
    producer: int
    sequence: int
    payload: Payload
    priority: int
    inserted: int
    attempts: int = 0
    error: str = ""
    due: int = 0
    delivery: int = 0
    instance: int = 0
    nonce: int = 0
    topic: str = ""
    ordered: bool = False


class PriorityBucket:
    """The ready tasks of one priority."""

    __slots__ = ("back", "fresh", "of", "priority")

    def __init__(self, priority: int) -> None:
        self.priority = priority
        self.fresh: deque[StoredTask] = deque()  # orders ascend
        self.back: list[int] = []  # a heap of orders
        self.of: dict[int, StoredTask] = {}  # by order, for those in `back`

    def first(self) -> StoredTask | None:
        """The next to be taken."""
        if self.back and (not self.fresh or self.back[0] < self.fresh[0].order):
            return self.of[self.back[0]]
        return self.fresh[0] if self.fresh else None

    def __iter__(self) -> Iterator[StoredTask]:
        return merge(self.fresh, (self.of[order] for order in sorted(self.back)), key=lambda task: task.order)


class ReadyTasks:
    """All ready tasks in their order: higher priority first, then as they were pushed.

    Pushed tasks of a priority stand in a deque, which is in order by itself; those that come back (requeued, or delayed before)
    stand in a heap of their orders. Nothing is ever taken out of the middle, so a step costs O(log n) of what came back.
    """

    def __init__(self) -> None:
        self.count = 0
        self._buckets: list[PriorityBucket] = []  # highest priority first; an empty one stays
        self._by_priority: dict[int, PriorityBucket] = {}

    def _bucket(self, priority: int) -> PriorityBucket:
        bucket = self._by_priority.get(priority)
        if bucket is None:
            bucket = self._by_priority[priority] = PriorityBucket(priority)
            self._buckets.append(bucket)
            self._buckets.sort(key=lambda one: -one.priority)
        return bucket

    def push(self, task: StoredTask) -> None:
        """A task younger than all others."""
        bucket = self._by_priority.get(task.priority) or self._bucket(task.priority)
        bucket.fresh.append(task)
        self.count += 1

    def put_back(self, task: StoredTask) -> None:
        """A task of any age."""
        bucket = self._bucket(task.priority)
        heappush(bucket.back, task.order)
        bucket.of[task.order] = task
        self.count += 1

    def fill(self, tasks: list[StoredTask]) -> None:
        """Many tasks at once, of any age."""
        for task in tasks:
            bucket = self._bucket(task.priority)
            bucket.back.append(task.order)
            bucket.of[task.order] = task
        for bucket in self._buckets:
            heapify(bucket.back)
        self.count += len(tasks)

    def take(self) -> StoredTask:
        """The next task. There must be one."""
        self.count -= 1
        for bucket in self._buckets:
            fresh = bucket.fresh
            if bucket.back and (not fresh or bucket.back[0] < fresh[0].order):
                return bucket.of.pop(heappop(bucket.back))
            if fresh:
                return fresh.popleft()
        raise AssertionError("no task is ready")

    def upcoming(self, count: int) -> Iterator[StoredTask]:
        """The next `count`."""
        for bucket in self._buckets:
            back = (bucket.of[order] for order in nsmallest(count, bucket.back))
            for task in islice(merge(bucket.fresh, back, key=lambda task: task.order), count):
                yield task
                count -= 1

    def oldest(self) -> StoredTask | None:
        """The one that was pushed first, whatever its priority."""
        firsts = [task for bucket in self._buckets if (task := bucket.first()) is not None]
        return min(firsts, key=lambda task: task.order, default=None)

    def __iter__(self) -> Iterator[StoredTask]:
        """In the order in which they will be taken."""
        for bucket in self._buckets:
            yield from bucket

    def clear(self) -> None:
        """Forget all."""
        self.count = 0
        for bucket in self._buckets:
            bucket.fresh.clear()
            bucket.back.clear()
            bucket.of.clear()


# --- effects: what a record did, told to the shell that applied it ---------------------------------------------------------
# An effect of a Push, a settlement or a command concerns the record that was just applied, so whoever wrote that record takes
# it from what `apply` returned for it. TasksDelivered names the Pop it answers: where Pops wait (state.py), any record has it.


class Handed(NamedTuple):
    """A task as it was when it was leased. due: ms when the lease ends."""

    delivery: int
    attempt: int
    due: int
    task: StoredTask


class TasksDelivered(NamedTuple):
    """The answer to a Pop; nothing in it: there was no task in time. A Pop may be answered twice when its record was written
    twice; the second answer has what it still leases of the first."""

    instance: int
    nonce: int
    handed: tuple[Handed, ...]


class Settled(NamedTuple):
    """Whether the record with a delivery, or Configure or HoldersReplaced, did anything."""

    applied: bool


class Known(NamedTuple):
    """The Push added nothing: it is this task, by its number or its dedup key."""

    task: TaskKey


class RecordRefused(NamedTuple):
    """The record did nothing, and whether one like it did before is not known: a Push or Pop with a number from too long ago,
    or a Pop of an instance that was declared dead."""


class TasksChanged(NamedTuple):
    """How many tasks a command changed."""

    tasks: int


class Dropped(NamedTuple):
    """No task has this blob any more."""

    blob: BlobRef


Effect = TasksDelivered | Settled | Known | RecordRefused | TasksChanged | Dropped
Effects = Sequence[Effect]
APPLIED: tuple[Effect, ...] = (Settled(True),)
LOST: tuple[Effect, ...] = (Settled(False),)
_new = tuple.__new__  # a named tuple's own constructor takes twice as long


# --- the fold ---------------------------------------------------------------------------------------------------------


class Fold:
    """A work queue's tasks after `position` records. Beside each field what always holds of it; `check` asserts that."""

    def __init__(self) -> None:
        self.position = 0  # records applied; their LSNs are 1, 2, …
        self.clock = 0  # the highest time in the records, ms
        self.settings = TaskSettings()
        self.version = 0  # how often it was configured
        # Every task that was inserted is completed, removed, or in exactly one of the next four. No two have one order.
        self.inserted = self.completed = self.removed = 0
        self.ready = ReadyTasks()  # by priority, then order; none has a due time, a delivery or a holder
        self.delayed: list[tuple[int, int, StoredTask]] = []  # a heap by due, order; every due is the task's and after `clock`
        self.leased: dict[int, StoredTask] = {}  # by delivery, which is the task's and of a Pop at or before `position`
        self.dead: dict[TaskKey, StoredTask] = {}  # in the order of their deaths; as the ready ones none is leased
        self.producers, self.instances = Senders(), Senders()  # numbers used by Pushes, by Pops
        self.keys: OrderedDict[str, tuple[int, TaskKey]] = OrderedDict()  # dedup key -> time, task; times ascend
        self.blobs: dict[TaskKey, StoredTask] = {}  # exactly the tasks whose payload is elsewhere
        # Topics of which an ordered task is ready, delayed or leased, exactly one; heaps by order of the tasks behind it.
        self.topics: dict[str, list[tuple[int, StoredTask]]] = {}
        self.behind = self.fed_bytes = 0  # tasks there; payload bytes of all messages of a group that are not done
        self.fed: dict[str, int] | None = None  # entries of tapes up to which everything came, by Exchange; None: no group
        self._ends: list[tuple[int, int]] = []  # a heap of (due, delivery): the end of every lease, and of some that are over
        self._handlers: dict[type, Callable[[Any], Effects]] = {
            Push: self._push,
            Pop: self._pop,
            Complete: self._complete,
            Requeue: self._requeue,
            ExtendLease: self._extend,
            DeadLetter: self._dead_letter,
            Cancel: _nothing,
            InstanceDead: self._instance_dead,
            Tick: _nothing,
            Configure: self._configure,
            Purge: self._purge,
            ReleaseAll: self._release_all,
            RequeueDead: self._requeue_dead,
            RemoveDead: self._remove_dead,
            HoldersReplaced: self._replaced,
            FeedMessage: self._feed,
            FeedPosition: self._feed_position,
        }

    def apply(self, record: Record) -> Effects:
        """Take the next record of the log."""
        self.position += 1
        if record.now > self.clock:  # noqa: PLR1730 - max() takes longer, and this runs for every record
            self.clock = record.now
        if self.delayed and self.delayed[0][0] <= self.clock:
            self._promote()
        return self._handlers[type(record)](record)

    def advance(self, now: int) -> None:
        """Time has come to `now`, as the next record will say."""
        self.clock = max(self.clock, now)
        self._promote()

    # --- what is due --------------------------------------------------------------------------------------------------

    def next_due(self) -> int | None:
        """ms when the next delay or lease ends. None: nothing will happen by itself."""
        ends = self._ends
        while ends and not self._is_current(ends[0]):
            heappop(ends)
        if self.delayed:
            due = self.delayed[0][0]
            return min(ends[0][0], due) if ends else due
        return ends[0][0] if ends else None

    def expired(self, now: int, count: int) -> list[Requeue]:
        """The records for a log: deliveries whose lease is over at `now`, at most `count`, the longest over first."""
        found: dict[int, int] = {}
        ends = self._ends
        while ends and ends[0][0] <= now and len(found) < count:
            due, delivery = heappop(ends)
            if self._is_current((due, delivery)):
                found[delivery] = due
        for delivery, due in found.items():
            heappush(ends, (due, delivery))  # it is over when the record is applied, not before
        return [Requeue(now, delivery, self.leased[delivery].instance, due) for delivery, due in found.items()]

    def _is_current(self, end: tuple[int, int]) -> bool:
        task = self.leased.get(end[1])
        return task is not None and task.due == end[0]

    # --- tasks come ---------------------------------------------------------------------------------------------------

    def _push(self, record: Push) -> Effects:
        key = (record.producer, record.sequence)
        use = self.producers.use(record.producer, record.sequence, self.clock)
        if use is not Use.NEW:
            return self._again(record, use)
        if record.dedup_key and (same := self._same(record.dedup_key, key)) is not None:
            dropped = (Dropped(record.payload),) if isinstance(record.payload, BlobRef) else ()
            return (Known(same), *dropped)
        self.inserted += 1
        task = StoredTask(self.position, record.producer, record.sequence, record.payload, record.priority, self.clock)
        if type(record.payload) is BlobRef:
            self.blobs[key] = task
        if record.delay_ms > 0:
            self._delay(task, record.delay_ms)
            return ()
        self.ready.push(task)
        return ()

    def _feed(self, record: FeedMessage) -> Effects:
        if not self.producers.ascend(record.publisher, record.sequence, self.clock):
            return (Known((record.publisher, record.sequence)),)
        self.inserted += 1
        self.fed_bytes += len(record.payload)
        task = StoredTask(self.position, record.publisher, record.sequence, record.payload, 0, record.published)
        task.topic, task.ordered = record.topic, record.ordered
        if self._is_first(task):
            self.ready.push(task)
        return ()

    def _feed_position(self, record: FeedPosition) -> Effects:
        self.fed = record.done
        return ()

    def _is_first(self, task: StoredTask) -> bool:
        """A group's message comes, or comes back from the dead: whether it may be taken. If not, it stands behind another."""
        if not task.ordered:
            return True
        others = self.topics.get(task.topic)
        if others is None:
            self.topics[task.topic] = []
            return True
        heappush(others, (task.order, task))
        self.behind += 1
        return False

    def _go_on_behind(self, task: StoredTask) -> None:
        """A message of an ordered group is done or dead: the next of its topic is ready."""
        if others := self.topics[task.topic]:
            self.ready.put_back(heappop(others)[1])
            self.behind -= 1
        else:
            del self.topics[task.topic]

    def all_behind(self) -> list[StoredTask]:
        """Tasks behind others of their topic, in their order."""
        return [task for _, task in sorted(chain.from_iterable(self.topics.values()))] if self.behind else []

    def stand_behind(self, behind: list[StoredTask]) -> None:
        """Of a group that was loaded: what follows from its other tasks, and these behind them."""
        tasks = [*self.ready, *(entry[2] for entry in self.delayed), *self.leased.values(), *behind]
        for task in tasks:
            self._is_first(task)
        self.fed_bytes = sum(map(_fed_bytes, chain(tasks, self.dead.values())))

    def _again(self, record: Push, use: Use) -> Effects:
        if use is Use.FORGOTTEN:
            return (RecordRefused(),)
        known = self.keys.get(record.dedup_key) if record.dedup_key else None
        if known is None or known[0] <= self._over():
            return (Known((record.producer, record.sequence)),)
        return (Known(known[1]),)

    def _over(self) -> int:
        """Deduplication keys that were first used then, or earlier, stand for nothing any more."""
        return self.clock - round(self.settings.dedup_seconds * 1000)

    def _same(self, dedup_key: str, task: TaskKey) -> TaskKey | None:
        """The task this key stands for; None: from now on it is `task`."""
        keys, over = self.keys, self._over()
        while keys and (len(keys) >= DEDUP_KEYS_MAX or next(iter(keys.values()))[0] <= over):
            keys.popitem(last=False)
        known = keys.get(dedup_key)
        if known is not None:
            return known[1]
        keys[dedup_key] = (self.clock, task)
        return None

    def _delay(self, task: StoredTask, delay_ms: int) -> None:
        task.due = self.clock + delay_ms
        heappush(self.delayed, (task.due, task.order, task))

    def _promote(self) -> None:
        """Delayed tasks whose time has come."""
        delayed, clock = self.delayed, self.clock
        while delayed and delayed[0][0] <= clock:
            task = heappop(delayed)[2]
            task.due = 0
            self.ready.put_back(task)

    # --- tasks go to Pops ---------------------------------------------------------------------------------------------

    def _pop(self, record: Pop) -> Effects:
        """Nothing at all where no task is ready: whether the Pop waits is not for the fold to say."""
        use = self.instances.use(record.instance, record.nonce, self.clock)
        if use is not Use.NEW:
            return self._pop_again(record.instance, record.nonce, use)
        if self.ready.count and record.count > 0:
            count = 1 if record.count == 1 else min(record.count, self.ready.count, 1 << POP_SHIFT)
            return (self.hand(record.instance, record.nonce, self.position, record.lease_ms, count),)
        return ()

    def _pop_again(self, instance: int, nonce: int, use: Use) -> Effects:
        if use is Use.FORGOTTEN:
            return (RecordRefused(),)
        return (self.held_by(instance, nonce),)

    def held_by(self, instance: int, nonce: int) -> TasksDelivered:
        """What a Pop was given and still has."""
        mine = [task for task in self.leased.values() if task.instance == instance and task.nonce == nonce]
        mine.sort(key=lambda task: task.delivery)
        return TasksDelivered(instance, nonce, tuple(Handed(task.delivery, task.attempts, task.due, task) for task in mine))

    def hand(self, instance: int, nonce: int, position: int, lease_ms: int, count: int) -> TasksDelivered:
        """Lease so many ready tasks, which there are, to the Pop at `position`."""
        handed: list[Handed] = []
        due, delivery = self.clock + lease_ms, position << POP_SHIFT
        take, leased, ends = self.ready.take, self.leased, self._ends
        for _ in range(count):
            task = take()
            task.attempts += 1
            task.due, task.delivery, task.instance, task.nonce = due, delivery, instance, nonce
            leased[delivery] = task
            heappush(ends, (due, delivery))
            handed.append(_new(Handed, (delivery, task.attempts, due, task)))
            delivery += 1
        if len(ends) > ENDS_MIN:
            self._forget_ends()
        return _new(TasksDelivered, (instance, nonce, tuple(handed)))

    def _forget_ends(self) -> None:
        """Of leases that are over, when they are the most."""
        if len(self._ends) > 2 * len(self.leased) + ENDS_MIN:
            self._ends = [(task.due, delivery) for delivery, task in self.leased.items()]
            heapify(self._ends)

    # --- deliveries end -----------------------------------------------------------------------------------------------

    def _current(self, delivery: int, instance: int) -> StoredTask | None:
        """The task of this delivery, if that is the one it is in."""
        task = self.leased.get(delivery)
        return task if task is not None and task.instance == instance else None

    def _complete(self, record: Complete) -> Effects:
        task = self._current(record.delivery, record.instance)
        if task is None:
            return LOST
        del self.leased[record.delivery]
        self.completed += 1
        if task.topic:
            self.fed_bytes -= _fed_bytes(task)
            if task.ordered:
                self._go_on_behind(task)
        return APPLIED if type(task.payload) is bytes else (*APPLIED, *self._drop((task,)))

    def _requeue(self, record: Requeue) -> Effects:
        task = self._current(record.delivery, record.instance)
        if task is None or (record.due and record.due != task.due):
            return LOST
        tried = bool(record.error or record.due)
        self._give_back(task, record.error, record.delay_ms, may_die=tried)
        return APPLIED

    def _extend(self, record: ExtendLease) -> Effects:
        task = self._current(record.delivery, record.instance)
        if task is None:
            return LOST
        task.due = self.clock + record.lease_ms
        heappush(self._ends, (task.due, task.delivery))
        self._forget_ends()
        return APPLIED

    def _dead_letter(self, record: DeadLetter) -> Effects:
        task = self._current(record.delivery, record.instance)
        if task is None:
            return LOST
        task.error = record.error
        self._end(task)
        self._bury(task)
        return APPLIED

    def _end(self, task: StoredTask) -> None:
        """It is leased no longer."""
        del self.leased[task.delivery]
        task.due = task.delivery = task.instance = task.nonce = 0

    def _give_back(self, task: StoredTask, error: str, delay_ms: int, *, may_die: bool) -> None:
        task.error = error or task.error
        self._end(task)
        if may_die and 0 < self.settings.max_attempts <= task.attempts:
            self._bury(task)
        elif delay_ms > 0:
            self._delay(task, delay_ms)
        else:
            self.ready.put_back(task)

    def _bury(self, task: StoredTask) -> None:
        self.dead[task.producer, task.sequence] = task
        if task.ordered:
            self._go_on_behind(task)

    def _instance_dead(self, record: InstanceDead) -> Effects:
        self.instances.of(record.instance, self.clock).ended = True
        tasks = [task for task in self.leased.values() if task.instance == record.instance]
        for task in sorted(tasks, key=lambda task: task.order):
            self._give_back(task, record.error, 0, may_die=True)
        return (TasksChanged(len(tasks)),)

    # --- commands -----------------------------------------------------------------------------------------------------

    def _configure(self, record: Configure) -> Effects:
        if record.version != self.version:
            return LOST
        self.settings = record.settings
        self.version += 1
        return APPLIED

    def _purge(self, record: Purge) -> Effects:
        tasks = [*self.ready, *(entry[2] for entry in sorted(self.delayed)), *self.leased.values(), *self.all_behind()]
        dropped = self._drop(task for task in tasks if type(task.payload) is BlobRef)
        self.ready.clear()
        self.delayed.clear()
        self.leased.clear()
        self._ends.clear()
        self.keys.clear()
        self.topics.clear()
        self.behind, self.fed_bytes = 0, sum(map(_fed_bytes, self.dead.values()))
        self.removed += len(tasks)
        return (TasksChanged(len(tasks)), *dropped)

    def _release_all(self, record: ReleaseAll) -> Effects:
        tasks = [*(entry[2] for entry in self.delayed), *self.leased.values()]
        self.delayed.clear()
        self.leased.clear()
        self._ends.clear()
        for task in tasks:
            task.due = task.delivery = task.instance = task.nonce = 0
        self.ready.fill(tasks)
        return (TasksChanged(len(tasks)),)

    def _chosen(self, tasks: tuple[TaskKey, ...] | None) -> list[StoredTask]:
        """Take these out of the dead letters."""
        keys = list(self.dead) if tasks is None else tasks
        return [task for key in keys if (task := self.dead.pop(key, None)) is not None]

    def _requeue_dead(self, record: RequeueDead) -> Effects:
        tasks = self._chosen(record.tasks)
        for task in tasks:
            task.attempts = 0
        tasks.sort(key=lambda task: task.order)
        self.ready.fill([task for task in tasks if self._is_first(task)])
        return (TasksChanged(len(tasks)),)

    def _remove_dead(self, record: RemoveDead) -> Effects:
        tasks = self._chosen(record.tasks)
        self.removed += len(tasks)
        self.fed_bytes -= sum(map(_fed_bytes, tasks))
        return (TasksChanged(len(tasks)), *self._drop(task for task in tasks if type(task.payload) is BlobRef))

    def _replaced(self, record: HoldersReplaced) -> Effects:
        task = self.blobs.get(record.task)
        if task is None or not isinstance(task.payload, BlobRef) or task.payload.blob != record.blob:
            return LOST
        task.payload = BlobRef(task.payload.blob, task.payload.size, task.payload.crc, record.holders)
        return APPLIED

    def _drop(self, tasks: Iterable[StoredTask]) -> Effects:
        """These tasks with blobs are gone for ever."""
        out: list[Effect] = []
        for task in tasks:
            del self.blobs[task.producer, task.sequence]
            assert isinstance(task.payload, BlobRef)
            out.append(Dropped(task.payload))
        return out

    # --- views --------------------------------------------------------------------------------------------------------

    def status(self, now: int) -> Status:
        """Counts, and the age of the oldest ready task at `now` (ms). Those behind another of their topic count as ready."""
        firsts = [others[0][1] for others in self.topics.values() if others] if self.behind else []
        if (ready := self.ready.oldest()) is not None:
            firsts.append(ready)
        oldest = min(firsts, key=lambda task: task.order, default=None)
        return Status(
            ready=self.ready.count + self.behind,
            delayed=len(self.delayed),
            leased=len(self.leased),
            dead=len(self.dead),
            completed=self.completed,
            inserted=self.inserted,
            oldest_ms=-1 if oldest is None else max(now - oldest.inserted, 0),
        )

    def first(self, state: TaskState, count: int) -> list[StoredTask]:
        """The first tasks of a state: ready in the order of leasing, delayed and leased by their ends, dead by their deaths."""
        match state:
            case TaskState.READY:
                return list(islice(chain(self.ready, self.all_behind()), count))
            case TaskState.DELAYED:
                return [entry[2] for entry in nsmallest(count, self.delayed)]
            case TaskState.LEASED:
                return nsmallest(count, self.leased.values(), key=lambda task: (task.due, task.delivery))
            case TaskState.DEAD:
                return list(islice(self.dead.values(), count))

    def inline_bytes(self) -> Iterator[int]:
        """The payload of every task that has it in its record. O(n)."""
        delayed = (entry[2] for entry in self.delayed)
        tasks = chain(self.ready, delayed, self.leased.values(), self.dead.values(), self.all_behind())
        return (len(task.payload) for task in tasks if type(task.payload) is bytes)

    def check(self) -> None:
        """The invariants (RDSQ I1, I3), and that every index agrees with what it indexes. O(n log n), for tests."""
        ready, delayed = list(self.ready), [entry[2] for entry in self.delayed]
        behind, open_tasks = self.all_behind(), [*ready, *delayed, *self.leased.values()]
        tasks = [*open_tasks, *self.dead.values(), *behind]
        keys = {(task.producer, task.sequence) for task in tasks}
        assert len(keys) == len(tasks), "a task is in two places"
        assert len({task.order for task in tasks}) == len(tasks), "two tasks have one place in the order"
        assert self.inserted == len(tasks) + self.completed + self.removed, "a task is neither here nor done"
        assert len(ready) == self.ready.count, "ready tasks are miscounted"
        wanted = sorted(ready, key=lambda task: (-task.priority, task.order))
        assert ready == wanted, "ready tasks are out of order"
        idle = (*ready, *self.dead.values(), *behind)
        assert all(task.delivery == task.due == task.instance == 0 for task in idle), "leased and not"
        assert all(task.delivery == 0 and task.due == due for due, _, task in self.delayed), "a delay is not the task's"
        assert not delayed or min(task.due for task in delayed) > self.clock, "a delay is over"
        assert all(task.delivery == delivery and task.attempts > 0 for delivery, task in self.leased.items()), (
            "not its delivery"
        )
        assert all(delivery >> POP_SHIFT <= self.position for delivery in self.leased), "a delivery of a Pop to come"
        ends = set(self._ends)
        assert all((task.due, delivery) in ends for delivery, task in self.leased.items()), "a lease without an end"
        times = [time for time, _ in self.keys.values()]
        assert times == sorted(times), "dedup keys are out of order"
        firsts = [task.topic for task in open_tasks if task.ordered]
        assert sorted(firsts) == sorted(self.topics), "of a topic two may be taken, or none"
        assert len(behind) == self.behind, "tasks behind others are miscounted"
        assert self.fed_bytes == sum(map(_fed_bytes, tasks)), "bytes are miscounted"
        elsewhere = {(task.producer, task.sequence): task for task in tasks if type(task.payload) is BlobRef}
        assert elsewhere == self.blobs, "blobs are miscounted"


def _fed_bytes(task: StoredTask) -> int:
    """Of a group's message."""
    return len(task.payload) if task.topic and type(task.payload) is bytes else 0


def _nothing(record: Record) -> Effects:
    """It concerns Pops that wait, or says what time it is."""
    return ()
