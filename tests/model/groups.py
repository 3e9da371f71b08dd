"""A model of a group: its feed, its log, masters that take over and members, with the fold itself inside.

A reader delivers the messages of a tape in order; the master writes Feeds and now and then the position; members lease, ack,
give back and reject. A record counts when it is durable: a crash takes away those that are not, the next master folds the rest
and reads on at the position. A message may lie in the middle of an entry, and positions name whole entries only.

What is checked: no message is in the group twice or handed out when it is done; of a topic the messages go one after the other;
none is handed out when its time is over; in the end all have been done, were rejected or are over. Time passes once. Not
covered: which messages a reader delivers (tapes.py), leases that end, batches.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from roq.workqueue.fold import Fold, TasksDelivered
from roq.workqueue.ready import StoredTask
from roq.workqueue.records import (
    Complete,
    DeadLetter,
    FeedMessage,
    FeedPosition,
    Pop,
    Record,
    Requeue,
    RequeueDead,
    decode,
    encode,
)
from roq.workqueue.state import State
from tests.model.folded import forget
from tests.model.moves import Breach

Sent = tuple[int, int, str]  # publisher, number, topic
MEMBER, TAPE = 9, "x"
END = 5  # ms, of those that have one


class GroupConfig(NamedTuple):
    """entries: of the tape. pending: records that are not durable, at most. crashes, releases, rejects, redrives: how often.
    early: the position is kept before its messages are. ending: messages that have an end, which comes."""

    entries: tuple[tuple[Sent, ...], ...]
    ordered: bool = True
    pending: int = 1
    crashes: int = 0
    releases: int = 0
    rejects: int = 0
    redrives: int = 0
    fold: type[Fold] = Fold
    early: bool = False
    ending: frozenset[Sent] = frozenset()


class GroupView(NamedTuple):
    """A fold as a value. image: its dump. done: acked by then. fed: entries before its position. ready: whether it has
    something to lease. leased: with their deliveries. dead: by rejection. lapsed: how many are over."""

    image: bytes
    done: frozenset[Sent]
    fed: int = 0
    ready: bool = False
    leased: tuple[tuple[int, Sent], ...] = ()
    dead: frozenset[Sent] = frozenset()
    lapsed: int = 0


class GroupWorld(NamedTuple):
    """base: what is durable. pending: entries that are not. read: messages the reader has delivered. nonce: of the last Pop.
    now: ms."""

    base: GroupView
    pending: tuple[bytes, ...]
    read: int
    nonce: int
    crashes: int
    releases: int
    rejects: int
    redrives: int
    now: int = 0


class GroupModel:
    """See search.Explorable."""

    def __init__(self, config: GroupConfig) -> None:
        self.config = config
        self.stream = [sent for entry in config.entries for sent in entry]
        ends = [0]
        for entry in config.entries:
            ends.append(ends[-1] + len(entry))
        self.ends = ends  # messages before the end of so many entries
        self._views: dict[tuple[GroupView, tuple[bytes, ...]], GroupView] = {}  # most worlds differ in something else

    def start(self) -> GroupWorld:
        """An empty group."""
        c = self.config
        return GroupWorld(_seen(Fold(), frozenset()), (), 0, 0, c.crashes, c.releases, c.rejects, c.redrives)

    def steps(self, world: GroupWorld) -> Iterator[tuple[bool, str, GroupWorld]]:
        """See Explorable."""
        now = self._now(world)
        if world.pending:
            durable = world._replace(base=self._with(world.base, world.pending[:1]), pending=world.pending[1:])
            yield True, "a record is durable", durable
        if world.crashes:
            read = self.ends[world.base.fed]
            yield False, "crash", world._replace(pending=(), read=read, crashes=world.crashes - 1)
        if len(world.pending) >= self.config.pending:
            return
        if world.read < len(self.stream):
            publisher, number, topic = self.stream[world.read]
            end = END if self.stream[world.read] in self.config.ending else 0
            record = FeedMessage(world.now, publisher, number, b"", topic, 0, self.config.ordered, 0, end)
            yield True, f"feed {publisher}.{number}", self._written(world, record)._replace(read=world.read + 1)
        read = world.read + 1 if self.config.early else world.read
        entry = max(n for n, end in enumerate(self.ends) if end <= read)
        if entry > now.fed:
            yield True, f"position {entry}", self._written(world, FeedPosition(world.now, {TAPE: entry}))
        if now.ready:
            pop = Pop(world.now, MEMBER, world.nonce + 1, 1, 1000)
            yield True, "lease", self._written(world, pop)._replace(nonce=world.nonce + 1)
        if self.config.ending and not world.now:
            yield False, "time passes", world._replace(now=END)
        if now.dead and world.redrives:
            yield False, "redrive", self._written(world, RequeueDead(world.now, None))._replace(redrives=world.redrives - 1)
        yield from self._settlements(world)

    def _settlements(self, world: GroupWorld) -> Iterator[tuple[bool, str, GroupWorld]]:
        """Members know of leases that are durable."""
        for delivery, (publisher, number, _) in world.base.leased:
            if any(getattr(record, "delivery", 0) == delivery for entry in world.pending for record in decode(entry)):
                continue
            name = f"{publisher}.{number}"
            yield True, f"ack {name}", self._written(world, Complete(world.now, delivery, MEMBER))
            if world.releases:
                released = self._written(world, Requeue(world.now, delivery, MEMBER))
                yield False, f"release {name}", released._replace(releases=world.releases - 1)
            if world.rejects:
                rejected = self._written(world, DeadLetter(world.now, delivery, MEMBER, "bad"))
                yield False, f"reject {name}", rejected._replace(rejects=world.rejects - 1)

    def end(self, world: GroupWorld) -> None:
        """Everything was handed out, and is done or dead."""
        now = self._now(world)
        left = set(self.stream) - now.done - now.dead
        if now.lapsed != len(left & self.config.ending):
            raise Breach(f"G5: {now.lapsed} messages are counted as over, of {sorted(left)}")
        left -= self.config.ending
        if left:
            raise Breach(f"G3: {sorted(left)} never came")

    # --- the log ------------------------------------------------------------------------------------------------------

    def _written(self, world: GroupWorld, record: Record) -> GroupWorld:
        after = world._replace(pending=(*world.pending, encode([record])))
        self._now(after)
        return after

    def _load(self, data: bytes) -> Fold:
        """With the rules of this search."""
        fold = State.load(data).fold
        if type(fold) is not self.config.fold:
            fold.__class__ = self.config.fold
            fold._handlers = {kind: getattr(fold, call.__name__, call) for kind, call in fold._handlers.items()}
        return fold

    def _now(self, world: GroupWorld) -> GroupView:
        """The master's state in memory: what is not durable has never been through a dump."""
        return self._with(world.base, world.pending)

    def _with(self, base: GroupView, entries: tuple[bytes, ...]) -> GroupView:
        after = self._views.get((base, entries))
        if after is None:
            fold, done = self._load(base.image), base.done
            for entry in entries:
                done = self._take(fold, done, *decode(entry))
            after = self._views[base, entries] = _seen(fold, done)
            forget(fold)
        return after

    def _take(self, fold: Fold, done: frozenset[Sent], record: Record) -> frozenset[Sent]:
        """Acked with this record."""
        ended = fold.leased.get(record.delivery) if isinstance(record, Complete) else None
        for effect in fold.apply(record):
            if isinstance(effect, TasksDelivered):
                for handed in effect.handed:
                    self._check_handed(fold, done, handed.task)
        if self.config.fold is Fold:
            fold.check()
        there = [_sent(task) for task in _open(fold)]
        if len(there) != len(set(there)) or done & set(there):
            raise Breach("G1: a message is there twice")
        return done | {_sent(ended)} if ended is not None else done

    def _check_handed(self, fold: Fold, done: frozenset[Sent], task: StoredTask) -> None:
        if _sent(task) in done:
            raise Breach(f"G1: {_sent(task)} is handed out again")
        if _sent(task) in self.config.ending and fold.clock >= END:
            raise Breach(f"G4: {_sent(task)} is handed out when its time is over")
        others = [other for other in _open(fold) if other.topic == task.topic and other is not task]
        behind = fold.topics.all_behind() if self.config.redrives else ()  # back from the dead one waits whatever its age
        if self.config.ordered and any(other.order < task.order and other not in behind for other in others):
            raise Breach(f"G2: {_sent(task)} is handed out before an older one of its topic is done")


def _sent(task: StoredTask) -> Sent:
    return task.producer, task.sequence, task.topic


def _open(fold: Fold) -> list[StoredTask]:
    """Neither done nor dead."""
    return [*fold.ready, *(entry[2] for entry in fold.delayed), *fold.leased.values(), *fold.topics.all_behind()]


def _seen(fold: Fold, done: frozenset[Sent]) -> GroupView:
    leased = tuple((delivery, _sent(task)) for delivery, task in fold.leased.items())
    dead = frozenset(_sent(task) for task in fold.dead.values())
    fed = fold.fed[TAPE] if fold.fed else 0
    return GroupView(State(fold).dump(), done, fed, bool(fold.ready.count), leased, dead, fold.lapsed)
