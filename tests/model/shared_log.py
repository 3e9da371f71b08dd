"""Instances that share a work queue's log, every interleaving: breadth-first search over the real fold (roq.workqueue.state).

Each instance replays the log at its own pace and has a consumer (a Pop that may wait, the work, a Complete) and a monitor that
may believe at any time that a lease it sees has run out. Producers push. In the budget: leases that run out early, crashes (an
instance restarts from a snapshot, under a new name), records that get into the log twice (an append of unknown outcome, tried
again), waits that are given up, extensions, and deaths told of the living. What holders that are gone have leased *must* be
requeued, consumers *must* pop and settle, and replays *must* go on; all else may. An end is a state where nothing must happen
any more: everything pushed has to be done there.

The promises I1 to I8, L1 and L2 of the protocol are checked against what really happened (`_promises`, `end`), not by asking
the fold; with `config.checked` the fold's own `check` runs as well. Every state is reached through a dump and a load of the one
before, and must equal what all records from the start lead to (I5). Instances differ in nothing but their names, as do
producers of equally many messages: those that have done nothing yet begin in their order. Not covered: time, priorities,
batches.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from roq.wire.work_queue import TaskSettings
from roq.workqueue.records import (
    POP_SHIFT,
    Cancel,
    Complete,
    Configure,
    ExtendLease,
    InstanceDead,
    Pop,
    Push,
    Record,
    Requeue,
    TaskKey,
)
from roq.workqueue.state import State
from tests.model.folded import Content, Folded, Replay
from tests.model.moves import Breach

IDLE, POPPING, WAITING, WORKING, ACKING = "idle", "popping", "waiting", "working", "acking"
LEASE_MS, WAIT_MS = 1000, 1000
NAMES = "ABC"
Step = tuple[bool, str, "World"]
Asker = tuple[int, int]  # instance, nonce


class Config(NamedTuple):
    """A search. messages: per producer. lag: entries that may be in the log before the slowest instance has replayed the first
    of them. The numbers after it are budgets of what may go wrong."""

    instances: int = 2
    messages: tuple[int, ...] = (1, 1)
    lag: int = 3
    requeues: int = 0
    crashes: int = 0
    repeats: int = 0
    cancels: int = 0
    extensions: int = 0
    slanders: int = 0  # the living are declared dead
    told: bool = True  # the dead are declared dead
    max_attempts: int = 0
    returns: bool = False  # a replay may see a Pop before its append has returned
    owner_by_nonce: bool = True
    fold: type[State] = State
    checked: bool = True


class Entry(NamedTuple):
    """A record in the log, and what its author meant: the task, who had it, until when."""

    record: Record
    task: TaskKey | None = None
    holder: Asker = (0, 0)
    due: int = 0


class Instance(NamedTuple):
    """at: entries of the tail it has replayed; view: the state it is in. nonce, delivery, task, due: of its consumer's Pop."""

    life: int
    at: int
    view: int
    status: str = IDLE
    nonce: int = 0
    delivery: int = 0
    task: TaskKey = (0, 0)
    due: int = 0
    alive: bool = True


class Budget(NamedTuple):
    requeues: int
    crashes: int
    repeats: int
    cancels: int
    extensions: int
    slanders: int


class World(NamedTuple):
    """base: the state before the tail, tip: after it. lives: names given so far. gone: Pops cancelled, (life, 0) for lives told
    dead. given: deliveries by Pop."""

    base: int
    tail: tuple[Entry, ...]
    tip: int
    instances: tuple[Instance, ...]
    pushed: tuple[int, ...]
    done: frozenset[TaskKey]
    gone: frozenset[Asker]
    given: frozenset[tuple[int, int, int]]
    lives: int
    budget: Budget


class SharedLog:
    """The steps that are possible in a world, and what is to be true at an end."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self._folded = Folded(config.fold, checked=config.checked)

    def start(self) -> World:
        """Everyone is there and nothing was pushed."""
        settings = [Configure(0, TaskSettings(max_attempts=self.config.max_attempts), 0)] if self.config.max_attempts else []
        first = self._folded.start(tuple(settings))
        return World(
            base=first,
            tail=(),
            tip=first,
            instances=tuple(Instance(n + 1, 0, first) for n in range(self.config.instances)),
            pushed=(0,) * len(self.config.messages),
            done=frozenset(),
            gone=frozenset(),
            given=frozenset(),
            lives=self.config.instances,
            budget=Budget(*(getattr(self.config, name) for name in Budget._fields)),
        )

    # --- steps --------------------------------------------------------------------------------------------------------

    def steps(self, world: World) -> Iterator[Step]:
        """Everything that may happen next."""
        full = len(world.tail) >= self.config.lag
        for p, count in enumerate(world.pushed):
            if count < self.config.messages[p] and not full and (count or self._may_push_first(world, p)):
                pushed = (*world.pushed[:p], count + 1, *world.pushed[p + 1 :])
                push = Entry(Push(0, p + 1, count + 1, b""))
                yield False, f"push {p + 1}-{count + 1}", self._append(world._replace(pushed=pushed), push)
        for i, one in enumerate(world.instances):
            if one.alive:
                if one.at < len(world.tail):
                    yield True, f"{NAMES[i]} replays {_show(world.tail[one.at].record)}", self._replay(world, i)
                if one.status == POPPING:
                    yield True, f"{NAMES[i]}'s append returns", _put(world, i, one._replace(status=WAITING))
                if not full:
                    yield from self._consumer(world, i, one)
                    yield from self._monitor(world, i, one)
                if world.budget.crashes:
                    yield False, f"{NAMES[i]} crashes", self._crash(world, i)
            else:
                born = Instance(world.lives + 1, 0, world.base)
                restarted = _put(world._replace(lives=world.lives + 1), i, born)
                yield True, f"{NAMES[i]} restarts as instance {born.life}", restarted
        if world.budget.repeats and not full:
            yield from self._repeat(world)

    def _may_push_first(self, world: World, p: int) -> bool:
        """All that are as it is have begun."""
        alike = (before for before, count in enumerate(self.config.messages[:p]) if count == self.config.messages[p])
        return all(world.pushed[before] for before in alike)

    def _may_pop_first(self, world: World, i: int) -> bool:
        """All that were as it is have begun, as far as it can be seen."""
        return world.lives > self.config.instances or all(one.nonce or not one.alive for one in world.instances[:i])

    def _consumer(self, world: World, i: int, one: Instance) -> Iterator[Step]:
        name, pop = NAMES[i], (one.life, one.nonce)
        match one.status:
            case "idle" if one.nonce or self._may_pop_first(world, i):
                asking = one._replace(status=POPPING if self.config.returns else WAITING, nonce=one.nonce + 1)
                record = Pop(0, one.life, one.nonce + 1, 1, LEASE_MS, WAIT_MS)
                yield True, f"{name} appends {_show(record)}", self._append(_put(world, i, asking), Entry(record))
            case "waiting" if world.budget.cancels and pop not in world.gone:
                fewer = world._replace(budget=world.budget._replace(cancels=world.budget.cancels - 1))
                yield False, f"{name} appends Cancel", self._append(fewer, Entry(Cancel(0, *pop)))
            case "working":
                meant = (one.task, pop, one.due)
                done = Entry(Complete(0, one.delivery, one.life), *meant)
                acking = _put(world, i, one._replace(status=ACKING))
                yield True, f"{name} appends {_show(done.record)}", self._append(acking, done)
                if world.budget.extensions:
                    fewer = world._replace(budget=world.budget._replace(extensions=world.budget.extensions - 1))
                    longer = Entry(ExtendLease(0, one.delivery, one.life, LEASE_MS * 2), *meant)
                    yield False, f"{name} appends {_show(longer.record)}", self._append(fewer, longer)

    def _monitor(self, world: World, i: int, one: Instance) -> Iterator[Step]:
        budget, name = world.budget, NAMES[i]
        for task in self._folded.contents[one.view].leased:
            holder = (task.instance, task.nonce)
            record = Requeue(0, task.delivery, task.instance, task.due)
            if any(entry.record == record for entry in world.tail[one.at :]):
                continue
            must = not any(
                other.alive and (other.life, other.nonce) == holder and other.status != IDLE for other in world.instances
            )
            if must or budget.requeues:
                fewer = world if must else world._replace(budget=budget._replace(requeues=budget.requeues - 1))
                entry = Entry(record, (task.producer, task.sequence), holder, task.due)
                yield must, f"{name} appends {_show(record)}", self._append(fewer, entry)
        living = {other.life for other in world.instances if other.alive}
        for life in range(1, world.lives + 1):
            told = self.config.told and life not in living
            if (life, 0) in world.gone or not (told or (budget.slanders and life in living)):
                continue
            fewer = world if told else world._replace(budget=budget._replace(slanders=budget.slanders - 1))
            yield False, f"{name} appends InstanceDead({life})", self._append(fewer, Entry(InstanceDead(0, life)))

    def _crash(self, world: World, i: int) -> World:
        one = world.instances[i]
        crashed = _put(world, i, Instance(one.life, 0, world.base, alive=False))
        return crashed._replace(budget=world.budget._replace(crashes=world.budget.crashes - 1))

    def _repeat(self, world: World) -> Iterator[Step]:
        fewer = world._replace(budget=world.budget._replace(repeats=world.budget.repeats - 1))
        records: list[Record] = [Push(0, p + 1, count, b"") for p, count in enumerate(world.pushed) if count]
        pops = [(one.life, one.nonce) for one in world.instances if one.alive and one.nonce and one.status != IDLE]
        records += [Pop(0, *pop, 1, LEASE_MS, WAIT_MS) for pop in pops]
        for record in records:
            yield False, f"{_show(record)} gets into the log again", self._append(fewer, Entry(record))

    # --- the log ------------------------------------------------------------------------------------------------------

    def _append(self, world: World, entry: Entry) -> World:
        record, replay = entry.record, self._folded.apply(world.tip, entry.record)
        done, gone, given = world.done, world.gone, world.given
        if isinstance(record, Complete) and replay.applied and entry.task is not None:
            if entry.task in done:
                raise Breach(f"I2: task {entry.task} is done twice")
            done |= {entry.task}
        self._promises(world, entry, replay)
        asking = {(one.life, one.nonce) for one in world.instances if one.alive}
        for instance, nonce, handed in replay.delivered:
            given |= {(instance, nonce, one.delivery) for one in handed}
        given = frozenset(one for one in given if one[:2] in asking)  # no other Pop gets into the log again
        if isinstance(record, Cancel):
            gone |= {(record.instance, record.nonce)}
        elif isinstance(record, InstanceDead):
            gone |= {(record.instance, 0)}
        after = world._replace(tail=(*world.tail, entry), tip=replay.after, done=done, gone=gone, given=given)
        self._conserved(after)
        return after

    def _promises(self, world: World, entry: Entry, replay: Replay) -> None:
        """What is true of a record at its place in the log."""
        before, after = self._folded.contents[world.tip], self._folded.contents[replay.after]
        if entry.task is not None:
            now = next((t for t in before.leased if (t.producer, t.sequence) == entry.task), None)
            stale = now is None or (now.instance, now.nonce) != entry.holder
            stale = stale or (isinstance(entry.record, Requeue) and now is not None and now.due != entry.due)
            if stale and replay.changed:
                raise Breach(f"I6: {_show(entry.record)} is about an older delivery, and changes the state")
        if after.ready and after.waiting:
            raise Breach("I4: a task is ready while a Pop waits")
        served = set(before.waiting) - set(after.waiting)
        if (
            served
            and after.waiting
            and max(served) > min(after.waiting)
            and not isinstance(entry.record, Cancel | InstanceDead)
        ):
            raise Breach("I7: a Pop is served before an older one")
        for instance, nonce, handed in replay.delivered:
            for one in handed:
                if (instance, nonce) in world.gone or (instance, 0) in world.gone:
                    raise Breach(f"a task is handed to Pop {instance}-{nonce}, of which the log says that nobody waits for it")
                if any((instance, nonce) == (a, b) and one.delivery != c for a, b, c in world.given):
                    raise Breach(f"I3: Pop {instance}-{nonce} is given a second task")
                if any(order < one.task.order for order in after.ready):
                    raise Breach("I7: a task is handed out before an older one")
                if 0 < self.config.max_attempts < one.attempt:
                    raise Breach(f"a task is leased {one.attempt} times, which is more than it may")

    def _conserved(self, world: World) -> None:
        tasks = self._folded.contents[world.tip].tasks
        there = [(task.producer, task.sequence) for task in tasks]
        pushed = {(p + 1, n) for p, count in enumerate(world.pushed) for n in range(1, count + 1)}
        if len(set(there)) < len(there):
            raise Breach("I1: a task is there twice")
        if again := world.done.intersection(there):
            raise Breach(f"I1: {again} came back after it was done")
        if lost := pushed - world.done - set(there):
            raise Breach(f"I1: {lost} is lost")
        holders = {life for life, nonce in world.gone if not nonce}
        if any(task.instance in holders for task in self._folded.contents[world.tip].leased):
            raise Breach("a task is leased by an instance that the log says is dead")

    def _replay(self, world: World, i: int) -> World:
        one = world.instances[i]
        entry = world.tail[one.at]
        replay = self._folded.apply(one.view, entry.record)
        view = self._folded.contents[replay.after]
        one = one._replace(at=one.at + 1, view=replay.after)
        for instance, nonce, handed in replay.delivered:
            if (instance, nonce) == (one.life, one.nonce):
                one = self._told(one, handed[0] if handed else None, view)
        if replay.refused and isinstance(entry.record, Pop) and entry.record.instance == one.life:
            world = world._replace(lives=world.lives + 1)
            one = Instance(world.lives, one.at, one.view)  # it was declared dead: a new name
        if isinstance(entry.record, Complete) and one.status == ACKING and entry.holder == (one.life, one.nonce):
            one = one._replace(status=IDLE, delivery=0, task=(0, 0), due=0)
        return _trim(_put(world, i, one))

    def _told(self, one: Instance, handed: object, view: Content) -> Instance:
        listening = one.status == WAITING or (one.status == POPPING and self.config.owner_by_nonce)
        if not listening:
            return one  # a second answer, or one that nobody knows whose it is
        if handed is None:
            return one._replace(status=IDLE)
        task = next((t for t in view.leased if (t.instance, t.nonce) == (one.life, one.nonce)), None)
        if task is None:
            raise Breach("I8: a consumer is given what is not leased to it")
        key = (task.producer, task.sequence)
        return one._replace(status=WORKING, delivery=task.delivery, task=key, due=task.due)

    # --- the end ------------------------------------------------------------------------------------------------------

    def end(self, world: World) -> None:
        """Nothing must happen any more: is everything done?"""
        content = self._folded.contents[world.tip]
        for task in content.tasks:
            key = (task.producer, task.sequence)
            if key not in content.dead:
                where = "leased to one that does not know it" if task.delivery else "ready, and nobody gets it"
                raise Breach(f"L1: task {key} is never done: {where}")
        assert all(one.status == WAITING for one in world.instances)


def _put(world: World, i: int, one: Instance) -> World:
    return world._replace(instances=(*world.instances[:i], one, *world.instances[i + 1 :]))


def _trim(world: World) -> World:
    """Everything that all the living have replayed goes into the base."""
    living = [one for one in world.instances if one.alive]
    cut = min((one.at for one in living), default=0)
    if not cut:
        return world
    base = next(one.view for one in living if one.at == cut)
    instances = tuple(one._replace(at=one.at - cut) if one.alive else one._replace(view=base) for one in world.instances)
    return world._replace(base=base, tail=world.tail[cut:], instances=instances)


def _show(record: Record) -> str:
    match record:
        case Push(producer=producer, sequence=sequence):
            return f"Push {producer}-{sequence}"
        case Pop(instance=instance, nonce=nonce):
            return f"Pop {instance}-{nonce}"
        case Complete(delivery=delivery) | Requeue(delivery=delivery) | ExtendLease(delivery=delivery):
            return f"{type(record).__name__}({delivery >> POP_SHIFT}.{delivery & ((1 << POP_SHIFT) - 1)})"
        case _:
            return type(record).__name__
