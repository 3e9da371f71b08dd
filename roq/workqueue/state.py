"""A work queue's state as a log leads to it: the tasks (fold.py), and the Pops that wait for one; dump and load. Pure.

In a log that several processes write, a Pop that finds nothing and may wait is in the log before its task is. So all who read
it must agree who gets that task, and the waiters are part of what a dump keeps. A task that comes, or comes back, is handed to
the first of them at once; a wait ends with its time, by Cancel, or with its instance. A master and `memory:` have none of them
here: a Pop of theirs is written when there is a task for it.

A dump is a version byte and a msgpack array. Equal states have equal dumps, however they were reached: by all records, or by a
dump and the records after it. That of a group has a version of its own, and so has one with transactions or with messages that
have an end: programs that know none refuse it.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from typing import NamedTuple, Self

import msgspec

from roq.errors import UnknownFormat
from roq.wire.decoding import UNDECODABLE
from roq.wire.work_queue import TaskSettings
from roq.workqueue.fold import Effect, Effects, Fold, TasksDelivered
from roq.workqueue.outbox import DestinationImage
from roq.workqueue.ready import StoredTask
from roq.workqueue.records import BlobRef, Cancel, InstanceDead, Pop, Record, Senders, TaskKey, Tick
from roq.workqueue.waiters import Waiters

VERSION, GROUP_VERSION, OUTBOX_VERSION = 1, 2, 3
WAITERS_MAX = 10_000  # one more is answered at once, with nothing


class Waiter(NamedTuple):
    """A Pop that waits. position: its LSN. until: ms."""

    position: int
    lease_ms: int
    until: int


class StateImage(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """A state as it is written; every list in the one order it can have."""

    position: int
    clock: int
    settings: TaskSettings
    version: int
    inserted: int
    completed: int
    removed: int
    ready: list[StoredTask]
    delayed: list[StoredTask]
    leased: list[StoredTask]
    dead: list[StoredTask]
    waiters: list[tuple[int, int, Waiter]]
    producers: Senders
    instances: Senders
    keys: list[tuple[str, int, TaskKey]]


class GroupImage(StateImage, array_like=True, forbid_unknown_fields=True):
    """The state of a group."""

    behind: list[StoredTask]
    fed: dict[str, int] | None


class OutboxImage(GroupImage, array_like=True, forbid_unknown_fields=True):
    """The state of a work queue or group with transactions, with messages that have an end, or with gaps."""

    lapsed: int
    transactions: Senders
    outbox: list[DestinationImage]
    missed: int = 0


_encoder = msgspec.msgpack.Encoder()
_decoders: dict[int, msgspec.msgpack.Decoder[StateImage]] = {
    VERSION: msgspec.msgpack.Decoder(StateImage),
    GROUP_VERSION: msgspec.msgpack.Decoder(GroupImage),
    OUTBOX_VERSION: msgspec.msgpack.Decoder(OutboxImage),
}


class State:
    """A work queue after `fold.position` records."""

    def __init__(self, fold: Fold | None = None) -> None:
        self.fold = fold or Fold()
        self.waiters: Waiters[Waiter] = Waiters(WAITERS_MAX)  # none while a task is ready; positions ascend

    def apply(self, record: Record) -> Effects:
        """Take the next record of the log."""
        if self.waiters:
            return self._apply_with_waiters(record)
        effects = self.fold.apply(record)
        return self._unserved(record) if not effects and type(record) is Pop else effects

    def _apply_with_waiters(self, record: Record) -> Effects:
        self.fold.advance(record.now)
        out = self._serve()  # delayed tasks whose time has come go to those who waited before this record
        out += self._ended(record)
        effects = self.fold.apply(record)
        if type(record) is Pop:
            if not effects:
                effects = self._unserved(record)
            elif (record.instance, record.nonce) in self.waiters and type(effects[0]) is TasksDelivered:
                effects = ()  # written twice: its answer is still to come
        out += effects
        return out + self._serve()

    def _unserved(self, record: Pop) -> Effects:
        """There was no task for it."""
        key = record.instance, record.nonce
        if record.wait_ms <= 0 or self.waiters.full:
            return (TasksDelivered(*key, ()),)
        self.waiters.add(key, Waiter(self.fold.position, record.lease_ms, self.fold.clock + record.wait_ms))
        return ()

    def _ended(self, record: Record) -> list[TasksDelivered]:
        """The waits that this record ends, in their order."""
        waiters, kind = self.waiters, type(record)
        if kind is Tick:
            gone = [key for key, _ in sorted(waiters.over(self.fold.clock), key=lambda one: one[1].position)]
        elif isinstance(record, Cancel):
            key = record.instance, record.nonce
            gone = [] if waiters.remove(key) is None else [key]
        elif isinstance(record, InstanceDead):
            gone = [key for key in waiters if key[0] == record.instance]
            for key in gone:
                waiters.remove(key)
        else:
            return []
        return [TasksDelivered(*key, ()) for key in gone]

    def _serve(self) -> list[Effect]:
        """Hand ready tasks to those who wait, one each; a Pop may have more at once only if it need not wait."""
        fold, waiters = self.fold, self.waiters
        out: list[Effect] = []
        while waiters and fold.ready.count:
            (instance, nonce), waiter = waiters.take()
            if waiter.until < fold.clock:
                out.append(TasksDelivered(instance, nonce, ()))
            else:
                out.append(fold.hand(instance, nonce, waiter.position, waiter.lease_ms, 1))
        return out

    # --- dump and load ------------------------------------------------------------------------------------------------

    def dump(self) -> bytes:
        """The whole state."""
        fold = self.fold
        common = StateImage(
            position=fold.position,
            clock=fold.clock,
            settings=fold.settings,
            version=fold.version,
            inserted=fold.inserted,
            completed=fold.completed,
            removed=fold.removed,
            ready=list(fold.ready),
            delayed=[entry[2] for entry in sorted(fold.delayed)],
            leased=[fold.leased[delivery] for delivery in sorted(fold.leased)],
            dead=list(fold.dead.values()),
            waiters=[(*key, waiter) for key, waiter in self.waiters.items()],
            producers=fold.producers.ordered(),
            instances=fold.instances.ordered(),
            keys=[(key, *value) for key, value in fold.keys.items()],
        )
        newest = fold.outbox or fold.transactions.known or fold.has_ends() or fold.missed
        if fold.fed is None and not (fold.topics or fold.fed_bytes or newest):
            return bytes((VERSION,)) + _encoder.encode(common)
        fed = None if fold.fed is None else dict(sorted(fold.fed.items()))
        group = {**msgspec.structs.asdict(common), "behind": fold.topics.all_behind(), "fed": fed}
        if not newest:
            return bytes((GROUP_VERSION,)) + _encoder.encode(GroupImage(**group))
        transactions, outbox = fold.transactions.ordered(), fold.outbox.images()
        image = OutboxImage(**group, lapsed=fold.lapsed, transactions=transactions, outbox=outbox, missed=fold.missed)
        return bytes((OUTBOX_VERSION,)) + _encoder.encode(image)

    @classmethod
    def load(cls, data: bytes) -> Self:
        """What `dump` wrote. UnknownFormat: another version did, or it is damaged."""
        if not data or data[0] not in _decoders:
            raise UnknownFormat(
                f"a snapshot of format {data[0] if data else 'nothing'}; this program reads {VERSION} to {OUTBOX_VERSION}"
            )
        try:
            image = _decoders[data[0]].decode(memoryview(data)[1:])
        except UNDECODABLE as error:
            raise UnknownFormat(f"a snapshot can't be read: {error}") from error
        state = cls()
        fold = state.fold
        fold.position, fold.clock = image.position, image.clock
        fold.settings, fold.version = image.settings, image.version
        fold.inserted, fold.completed, fold.removed = image.inserted, image.completed, image.removed
        for task in image.ready:
            fold.ready.push(task)  # they come in order
        fold.delayed = [(task.due, task.order, task) for task in image.delayed]
        fold.leased = {task.delivery: task for task in image.leased}
        fold.dead = {(task.producer, task.sequence): task for task in image.dead}
        for instance, nonce, waiter in image.waiters:
            state.waiters.add((instance, nonce), waiter)
        fold.producers, fold.instances = image.producers, image.instances
        fold.keys = OrderedDict((key, (time, task)) for key, time, task in image.keys)
        for tasks in (image.ready, image.delayed, image.leased, image.dead):
            fold.blobs |= {(task.producer, task.sequence): task for task in tasks if type(task.payload) is BlobRef}
        fold.ends.load(fold.leased)
        if isinstance(image, GroupImage):
            fold.fed = image.fed
            fold.stand_behind(image.behind)
        if isinstance(image, OutboxImage):
            fold.lapsed, fold.missed, fold.transactions = image.lapsed, image.missed, image.transactions
            fold.outbox.load(image.outbox)
        return state

    def digest(self) -> str:
        """Equal for equal states, different for different ones; 32 characters."""
        return hashlib.blake2b(self.dump(), digest_size=16).hexdigest()

    def check(self) -> None:
        """The invariants, also of the tasks (RDSQ I4). O(n log n), for tests."""
        self.fold.check()
        assert not (self.fold.ready.count and self.waiters), "a task is ready and a Pop waits"
        positions = [waiter.position for waiter in self.waiters.values()]
        assert positions == sorted(positions), "Pops wait in another order than they came in"
