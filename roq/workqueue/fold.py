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
those above; the others stand behind it until it is gone or dead. One that has an end (`expires`) is gone then, unless it is
leased or dead: it is no more when it would come back from there.

The shell appends Tick and Requeue when `next_due` has come; this file only says what is due. What a record means: records.py;
a task, and the order of the ready ones: ready.py. Not here: lease requests that wait for a task (waiters.py), and Pops that a
log says wait (state.py, with dump and load). Limits here cut by the records alone: DEDUP_KEYS_MAX, SENDERS_MAX.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from heapq import heappop, heappush, nsmallest
from itertools import chain, islice
from typing import Any, NamedTuple

from roq.wire.task import Status, TaskState
from roq.wire.work_queue import TaskSettings
from roq.workqueue.outbox import TransactionOutbox
from roq.workqueue.ready import Expiries, LeaseEnds, ReadyTasks, StoredTask, be_gone
from roq.workqueue.records import (
    POP_SHIFT,
    BlobRef,
    Cancel,
    CommitTransaction,
    Complete,
    CompleteMany,
    Configure,
    DeadLetter,
    ExtendLease,
    FeedMessage,
    FeedMessages,
    FeedPosition,
    HoldersReplaced,
    InstanceDead,
    OutboxForwarded,
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
from roq.workqueue.topics import Topics

NEVER = 1 << 62  # ms
DEDUP_KEYS_MAX = 1_000_000  # remembered at once; above it the oldest are forgotten early


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


class ManySettled(NamedTuple):
    """The same of each delivery of a CompleteMany."""

    applied: tuple[bool, ...]


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


Effect = TasksDelivered | Settled | ManySettled | Known | RecordRefused | TasksChanged | Dropped
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
        # Every task that was inserted is completed, removed, lapsed, or in exactly one of the next four. No two have one order.
        self.inserted = self.completed = self.removed = 0
        self.lapsed = 0  # messages of a group whose time was over
        self.ready = ReadyTasks()  # by priority, then order; none has a due time, a delivery or a holder
        self.delayed: list[tuple[int, int, StoredTask]] = []  # a heap by due, order; every due is the task's and after `clock`
        self.leased: dict[int, StoredTask] = {}  # by delivery, which is the task's and of a Pop at or before `position`
        self.dead: dict[TaskKey, StoredTask] = {}  # in the order of their deaths; as the ready ones none is leased
        self.producers, self.instances = Senders(), Senders()  # numbers used by Pushes, by Pops
        self.keys: OrderedDict[str, tuple[int, TaskKey]] = OrderedDict()  # dedup key -> time, task; times ascend
        self.blobs: dict[TaskKey, StoredTask] = {}  # exactly the tasks whose payload is elsewhere
        self.topics = Topics()  # of the ordered tasks that are ready, delayed or leased; all others are behind those
        self.fed_bytes = 0  # payload bytes of all messages of a group that are not done
        self.fed: dict[str, int] | None = None  # entries of tapes up to which everything came, by Exchange; None: no group
        self.missed = 0  # gaps in what was fed
        self.transactions = Senders()  # numbers used by CommitTransactions: others than those of who puts or publishes
        self.outbox = TransactionOutbox()  # what transactions publish
        self.expiring = Expiries()  # of the ready tasks; each ends after `clock`, as those behind others do
        self._next = 0  # ms; before that time itself changes nothing
        self.ends = LeaseEnds()
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
            FeedMessages: self._feed_many,
            CompleteMany: self._complete_many,
            FeedPosition: self._feed_position,
            CommitTransaction: self._commit,
            OutboxForwarded: self._forwarded,
        }

    def apply(self, record: Record) -> Effects:
        """Take the next record of the log."""
        self.position += 1
        if record.now > self.clock:  # noqa: PLR1730 - max() takes longer, and this runs for every record
            self.clock = record.now
        if self.clock >= self._next:
            self._pass_time()
        return self._handlers[type(record)](record)

    def advance(self, now: int) -> None:
        """Time has come to `now`, as the next record will say."""
        self.clock = max(self.clock, now)
        self._pass_time()

    # --- what is due --------------------------------------------------------------------------------------------------

    def next_due(self) -> int | None:
        """ms when the next delay, lease or message's time ends. None: nothing will happen by itself."""
        end, due = self.ends.next(self.leased), self._next_by_time()
        return due if end is None else end if due is None else min(end, due)

    def _next_by_time(self) -> int | None:
        """ms when a record has to do more than what it says."""
        firsts = (self.delayed[0][0] if self.delayed else None, self.expiring.next(), self.topics.expiring.next())
        return min((one for one in firsts if one is not None), default=None)

    def expired(self, now: int, count: int) -> list[Requeue]:
        """The records for a log: deliveries whose lease is over at `now`, at most `count`, the longest over first."""
        found = self.ends.over(now, count, self.leased)
        return [Requeue(now, delivery, self.leased[delivery].instance, due) for delivery, due in found.items()]

    # --- tasks come ---------------------------------------------------------------------------------------------------

    def _push(self, record: Push) -> Effects:
        key = (record.producer, record.sequence)
        use = self.producers.use(record.producer, record.sequence, self.clock)
        if use is not Use.NEW:
            return (RecordRefused() if use is Use.FORGOTTEN else Known(self.known_key(record.dedup_key) or key),)
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

    def _feed_many(self, record: FeedMessages) -> Effects:
        """Each has a place of its own, as if it had a record of its own."""
        publisher, topic, ordered, expires = record.publisher, record.topic, record.ordered, record.expires
        sender, clock, known = self.producers.of(publisher, self.clock), self.clock, list[Effect]()
        position = self.position
        self.position += max(len(record.messages) - 1, 0)
        for order, (sequence, payload) in enumerate(record.messages, position):
            if not sender.ascend(sequence):
                known.append(Known((publisher, sequence)))
                continue
            self.inserted += 1
            self.fed_bytes += len(payload)
            task = StoredTask(order, publisher, sequence, payload, record.priority, record.published)
            task.topic, task.ordered, task.expires = topic, ordered, expires
            if 0 < expires <= clock:
                self._lapse(task)
            elif not ordered or self._is_first(task):
                self.ready.push(task)
                if expires:
                    self._expires(task)
        return known

    def _feed(self, record: FeedMessage) -> Effects:
        message, wishes = (record.sequence, record.payload), (record.priority, record.expires)
        alike = record.now, record.publisher, record.topic, record.published, record.ordered
        return self._feed_many(FeedMessages(*alike, (message,), *wishes))

    def _feed_position(self, record: FeedPosition) -> Effects:
        self.fed = record.done
        self.missed += record.missed
        return ()

    def _is_first(self, task: StoredTask) -> bool:
        """A group's message comes, or comes back from the dead: whether it may be taken. If not, it stands behind another."""
        if not task.ordered:
            return True
        first = self.topics.enter(task)
        if task.expires and not first:
            self._next = min(self._next, task.expires)
        return first

    def _go_on_behind(self, task: StoredTask) -> None:
        """A task is done, dead or no more: if it is of an ordered group, the next of its topic is ready."""
        if task.ordered and (following := self.topics.go_on(task.topic)) is not None:
            self._be_ready(following)

    def stand_behind(self, behind: list[StoredTask]) -> None:
        """Of a group that was loaded: what follows from its other tasks, and these behind them."""
        tasks = [*self.ready, *(entry[2] for entry in self.delayed), *self.leased.values(), *behind]
        for task in tasks:
            self._is_first(task)
        for task in self.ready:
            self._expires(task)
        self.fed_bytes = sum(map(_fed_bytes, chain(tasks, self.dead.values())))

    def _over(self) -> int:
        """Deduplication keys that were first used then, or earlier, stand for nothing any more."""
        return self.clock - round(self.settings.dedup_seconds * 1000)

    def known_key(self, dedup_key: str) -> TaskKey | None:
        """The task this key stands for, if it does. Nothing is noted."""
        known = self.keys.get(dedup_key) if dedup_key else None
        return known[1] if known is not None and known[0] > self._over() else None

    def known_keys(self) -> int:
        """How many deduplication keys may still stand for something."""
        return len(self.keys) if self.keys and next(reversed(self.keys.values()))[0] > self._over() else 0

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
        due = self.clock + delay_ms
        task.due = min(due, task.expires) if task.expires else due
        self._next = min(self._next, task.due)
        heappush(self.delayed, (task.due, task.order, task))

    # --- time passes --------------------------------------------------------------------------------------------------

    def _pass_time(self) -> None:
        """Delays and messages' times that are over. First those that nothing would follow."""
        delayed, clock = self.delayed, self.clock
        for task in self.topics.over(clock):
            self._lapse(task)
            be_gone(task)
        while delayed and delayed[0][0] <= clock:
            task = heappop(delayed)[2]
            task.due = 0
            self._come_back(task)
        for task in self.expiring.over(clock):
            self._lapse(task)
            self.ready.drop(task)
            self._go_on_behind(task)
        self.topics.clear_away()
        due = self._next_by_time()
        self._next = NEVER if due is None else due

    def _expires(self, task: StoredTask) -> None:
        """It is ready from now on, and may have an end."""
        if task.expires:
            self.expiring.add(task)
            self._next = min(self._next, task.expires)

    def _lapse(self, task: StoredTask) -> None:
        """Its time is over, and it is nowhere any more."""
        self.lapsed += 1
        self.fed_bytes -= _fed_bytes(task)

    def _is_over(self, task: StoredTask) -> bool:
        return 0 < task.expires <= self.clock

    def _come_back(self, task: StoredTask) -> None:
        """It was leased or delayed."""
        if not self._is_over(task):
            self._be_ready(task)
            return
        self._lapse(task)
        self._go_on_behind(task)

    def _be_ready(self, task: StoredTask) -> None:
        """One of any age."""
        self.ready.put_back(task)
        self._expires(task)

    # --- tasks go to Pops ---------------------------------------------------------------------------------------------

    def _pop(self, record: Pop) -> Effects:
        """Nothing at all where no task is ready: whether the Pop waits is not for the fold to say."""
        use = self.instances.use(record.instance, record.nonce, self.clock)
        if use is not Use.NEW:
            return (RecordRefused() if use is Use.FORGOTTEN else self.held_by(record.instance, record.nonce),)
        if self.ready.count and record.count > 0:
            count = 1 if record.count == 1 else min(record.count, self.ready.count, 1 << POP_SHIFT)
            return (self.hand(record.instance, record.nonce, self.position, record.lease_ms, count),)
        return ()

    def held_by(self, instance: int, nonce: int) -> TasksDelivered:
        """What a Pop was given and still has."""
        mine = [task for task in self.leased.values() if task.instance == instance and task.nonce == nonce]
        mine.sort(key=lambda task: task.delivery)
        return TasksDelivered(instance, nonce, tuple(Handed(task.delivery, task.attempts, task.due, task) for task in mine))

    def hand(self, instance: int, nonce: int, position: int, lease_ms: int, count: int) -> TasksDelivered:
        """Lease so many ready tasks, which there are, to the Pop at `position`."""
        handed: list[Handed] = []
        due, delivery = self.clock + lease_ms, position << POP_SHIFT
        take, leased = self.ready.take, self.leased
        for _ in range(count):
            task = take()
            task.attempts += 1
            task.due, task.delivery, task.instance, task.nonce = due, delivery, instance, nonce
            if task.expires:
                self.expiring.remove(task)
            leased[delivery] = task
            handed.append(_new(Handed, (delivery, task.attempts, due, task)))
            delivery += 1
        self.ends.add(due, delivery - count, count, leased)
        return _new(TasksDelivered, (instance, nonce, tuple(handed)))

    # --- deliveries end -----------------------------------------------------------------------------------------------

    def _current(self, delivery: int, instance: int) -> StoredTask | None:
        """The task of this delivery, if that is the one it is in."""
        task = self.leased.get(delivery)
        return task if task is not None and task.instance == instance else None

    def _complete(self, record: Complete) -> Effects:
        task = self._current(record.delivery, record.instance)
        if task is None:
            return LOST
        self._done(task)
        return APPLIED if type(task.payload) is bytes else (*APPLIED, *self._drop((task,)))

    def _complete_many(self, record: CompleteMany) -> Effects:
        leased, instance, dropped = self.leased, record.instance, list[StoredTask]()
        applied: list[bool] = []
        for first, count in record.runs:
            for delivery in range(first, first + count):
                task = leased.get(delivery)
                is_current = task is not None and task.instance == instance
                applied.append(is_current)
                if task is not None and is_current:
                    self._done(task)
                    if type(task.payload) is BlobRef:
                        dropped.append(task)
        return (ManySettled(tuple(applied)), *self._drop(dropped))

    def _done(self, task: StoredTask) -> None:
        """It was leased, and is complete."""
        del self.leased[task.delivery]
        self.completed += 1
        if task.topic:
            self.fed_bytes -= _fed_bytes(task)
            self._go_on_behind(task)

    def lost(self, deliveries: Sequence[tuple[int, int]]) -> list[int]:
        """Places of the deliveries that are over."""
        return [place for place, (delivery, instance) in enumerate(deliveries) if self._current(delivery, instance) is None]

    def _commit(self, record: CommitTransaction) -> Effects:
        use = self.transactions.seen(record.producer, record.sequence)
        if use is Use.FORGOTTEN:
            return (RecordRefused(),)
        if use is Use.KNOWN:
            return (Known((record.producer, record.sequence)),)
        deliveries = dict.fromkeys(record.deliveries)
        if self.lost(tuple(deliveries)):
            return LOST
        self.transactions.use(record.producer, record.sequence, self.clock)
        dropped: list[Effect] = []
        for delivery, instance in deliveries:
            dropped += self._complete(Complete(record.now, delivery, instance))[1:]
        self.outbox.add(record.outgoing)
        return (*APPLIED, *dropped) if dropped else APPLIED

    def _forwarded(self, record: OutboxForwarded) -> Effects:
        return APPLIED if self.outbox.forwarded(record) else LOST

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
        self.ends.add(task.due, task.delivery, 1, self.leased)
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
        if self._is_over(task):
            self._come_back(task)
        elif may_die and 0 < self.settings.max_attempts <= task.attempts:
            self._bury(task)
        elif delay_ms > 0:
            self._delay(task, delay_ms)
        else:
            self._be_ready(task)

    def _bury(self, task: StoredTask) -> None:
        self.dead[task.producer, task.sequence] = task
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
        tasks = [*self.ready, *(entry[2] for entry in sorted(self.delayed)), *self.leased.values(), *self.topics.all_behind()]
        dropped = self._drop(task for task in tasks if type(task.payload) is BlobRef)
        self.ready.clear()
        self.delayed.clear()
        self.leased.clear()
        self.ends.clear()
        self.keys.clear()
        self.topics.clear()
        self.expiring.clear()
        self.fed_bytes = sum(map(_fed_bytes, self.dead.values()))
        self.removed += len(tasks)
        return (TasksChanged(len(tasks)), *dropped)

    def _release_all(self, record: ReleaseAll) -> Effects:
        tasks = [*(entry[2] for entry in self.delayed), *self.leased.values()]
        self.delayed.clear()
        self.leased.clear()
        self.ends.clear()
        for task in tasks:
            task.due = task.delivery = task.instance = task.nonce = 0
        self.ready.fill([task for task in tasks if not task.expires])
        for task in tasks:
            if task.expires:
                self._come_back(task)
        return (TasksChanged(len(tasks)),)

    def _chosen(self, tasks: tuple[TaskKey, ...] | None) -> list[StoredTask]:
        """Take these out of the dead letters."""
        keys = list(self.dead) if tasks is None else tasks
        return [task for key in keys if (task := self.dead.pop(key, None)) is not None]

    def _requeue_dead(self, record: RequeueDead) -> Effects:
        tasks = self._chosen(record.tasks)
        for task in tasks:
            task.attempts = 0
            if self._is_over(task):
                self._lapse(task)
        tasks.sort(key=lambda task: task.order)
        ready = [task for task in tasks if not self._is_over(task) and self._is_first(task)]
        self.ready.fill(ready)
        for task in ready:
            self._expires(task)
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

    def has_ends(self) -> bool:
        """Whether a message has an end, or had one that came."""
        kept = chain((entry[2] for entry in self.delayed), self.leased.values(), self.dead.values())
        waiting = self.expiring.waiting or self.topics.expiring.waiting
        return bool(self.lapsed or waiting) or any(task.expires for task in kept)

    # --- views --------------------------------------------------------------------------------------------------------

    def status(self, now: int) -> Status:
        """Counts, and the age of the oldest ready task at `now` (ms). Those behind another of their topic count as ready."""
        firsts = [task for task in (self.ready.oldest(), self.topics.oldest()) if task is not None]
        oldest = min(firsts, key=lambda task: task.order, default=None)
        return Status(
            ready=self.ready.count + self.topics.behind,
            delayed=len(self.delayed),
            leased=len(self.leased),
            dead=len(self.dead),
            completed=self.completed,
            inserted=self.inserted,
            oldest_ms=-1 if oldest is None else max(now - oldest.inserted, 0),
            expired=self.lapsed,
            outgoing=self.outbox.count,
            missed=self.missed,
        )

    def first(self, state: TaskState, count: int) -> list[StoredTask]:
        """The first tasks of a state: ready in the order of leasing, delayed and leased by their ends, dead by their deaths."""
        match state:
            case TaskState.READY:
                return list(islice(chain(self.ready, self.topics.all_behind()), count))
            case TaskState.DELAYED:
                return [entry[2] for entry in nsmallest(count, self.delayed)]
            case TaskState.LEASED:
                return nsmallest(count, self.leased.values(), key=lambda task: (task.due, task.delivery))
            case TaskState.DEAD:
                return list(islice(self.dead.values(), count))

    def inline_bytes(self) -> Iterator[int]:
        """The payload of every task that has it in its record. O(n)."""
        delayed = (entry[2] for entry in self.delayed)
        tasks = chain(self.ready, delayed, self.leased.values(), self.dead.values(), self.topics.all_behind())
        return (len(task.payload) for task in tasks if type(task.payload) is bytes)

    def check(self) -> None:
        """The invariants (RDSQ I1, I3), and that every index agrees with what it indexes. O(n log n), for tests."""
        ready, delayed = list(self.ready), [entry[2] for entry in self.delayed]
        behind, open_tasks = self.topics.all_behind(), [*ready, *delayed, *self.leased.values()]
        tasks = [*open_tasks, *self.dead.values(), *behind]
        keys = {(task.producer, task.sequence) for task in tasks}
        assert len(keys) == len(tasks), "a task is in two places"
        assert len({task.order for task in tasks}) == len(tasks), "two tasks have one place in the order"
        assert self.inserted == len(tasks) + self.completed + self.removed + self.lapsed, "a task is neither here nor done"
        for one, waiting in ((self.expiring, ready), (self.topics.expiring, behind)):
            assert one.waiting == {task.order: task for task in waiting if task.expires}, "ends of messages are miscounted"
        assert not any(self._is_over(task) for task in (*ready, *delayed, *behind)), "a message waits whose time is over"
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
        assert all(self.ends.covers(delivery, task.due) for delivery, task in self.leased.items()), "a lease without an end"
        times = [time for time, _ in self.keys.values()]
        assert times == sorted(times), "dedup keys are out of order"
        firsts = [task.topic for task in open_tasks if task.ordered]
        assert sorted(firsts) == sorted(self.topics.names()), "of a topic two may be taken, or none"
        assert len(behind) == self.topics.behind, "tasks behind others are miscounted"
        assert self.fed_bytes == sum(map(_fed_bytes, tasks)), "bytes are miscounted"
        self.outbox.check()
        elsewhere = {(task.producer, task.sequence): task for task in tasks if type(task.payload) is BlobRef}
        assert elsewhere == self.blobs, "blobs are miscounted"


def _fed_bytes(task: StoredTask) -> int:
    """Of a group's message."""
    return len(task.payload) if task.topic and type(task.payload) is bytes else 0


def _nothing(record: Record) -> Effects:
    """It concerns Pops that wait, or says what time it is."""
    return ()
