"""A work queue's state with what its shells ask of it: counts, views, dump and load, check. Pure; the fold itself: fold.py.

A dump is a version byte and a msgpack array. Equal states have equal dumps, however they were reached: by all records, or by a
dump and the records after it.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from heapq import heapify, nsmallest
from itertools import chain, islice

import msgspec

from roq.errors import UnknownFormat
from roq.wire.decoding import UNDECODABLE
from roq.wire.work_queue import TaskSettings
from roq.workqueue.contract import Status, TaskState
from roq.workqueue.fold import Fold, Waiter
from roq.workqueue.ready import StoredTask
from roq.workqueue.records import POP_SHIFT, BlobRef, TaskKey
from roq.workqueue.senders import Senders

VERSION = 1


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


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(StateImage)
_HEAD = bytes((VERSION,))


class State(Fold):
    """A work queue after `position` records."""

    # --- views --------------------------------------------------------------------------------------------------------

    def status(self, now: int) -> Status:
        """Counts, and the age of the oldest ready task at `now` (ms)."""
        oldest = self.ready.oldest()
        return Status(
            ready=self.ready.count,
            delayed=len(self.delayed),
            leased=len(self.leased),
            dead=len(self.dead),
            completed=self.completed,
            inserted=self.inserted,
            oldest_seconds=None if oldest is None else max(now - oldest.inserted, 0) / 1000,
        )

    def first(self, state: TaskState, count: int) -> list[StoredTask]:
        """The first tasks of a state: ready in the order of leasing, delayed and leased by their ends, dead by their deaths."""
        match state:
            case TaskState.READY:
                return list(islice(self.ready, count))
            case TaskState.DELAYED:
                return [entry[2] for entry in nsmallest(count, self.delayed)]
            case TaskState.LEASED:
                return nsmallest(count, self.leased.values(), key=lambda task: (task.due, task.delivery))
            case TaskState.DEAD:
                return list(islice(self.dead.values(), count))

    def blob_tasks(self) -> dict[TaskKey, StoredTask]:
        """Every task whose payload is elsewhere, by its id. Not a copy."""
        return self.blobs

    def payload_bytes(self) -> int:
        """Of all tasks that are here: a dump is a little larger. O(n)."""
        delayed = (entry[2] for entry in self.delayed)
        tasks = chain(self.ready, delayed, self.leased.values(), self.dead.values())
        return sum(len(task.payload) for task in tasks if type(task.payload) is bytes)

    # --- dump and load ------------------------------------------------------------------------------------------------

    def dump(self) -> bytes:
        """The whole state."""
        image = StateImage(
            position=self.position,
            clock=self.clock,
            settings=self.settings,
            version=self.version,
            inserted=self.inserted,
            completed=self.completed,
            removed=self.removed,
            ready=list(self.ready),
            delayed=[entry[2] for entry in sorted(self.delayed)],
            leased=[self.leased[delivery] for delivery in sorted(self.leased)],
            dead=list(self.dead.values()),
            waiters=[(*key, waiter) for key, waiter in self.waiters.items()],
            producers=self.producers.ordered(),
            instances=self.instances.ordered(),
            keys=[(key, *value) for key, value in self.keys.items()],
        )
        return _HEAD + _encoder.encode(image)

    @classmethod
    def load(cls, data: bytes) -> State:
        """What `dump` wrote. UnknownFormat: another version did, or it is damaged."""
        if not data or data[0] != VERSION:
            raise UnknownFormat(f"a snapshot of format {data[0] if data else 'nothing'}; this program reads format {VERSION}")
        try:
            image = _decoder.decode(memoryview(data)[1:])
        except UNDECODABLE as error:
            raise UnknownFormat(f"a snapshot can't be read: {error}") from error
        state = cls()
        state.position, state.clock = image.position, image.clock
        state.settings, state.version = image.settings, image.version
        state.inserted, state.completed, state.removed = image.inserted, image.completed, image.removed
        for task in image.ready:
            state.ready.push(task)  # they come in order
        state.delayed = [(task.due, task.order, task) for task in image.delayed]
        state.leased = {task.delivery: task for task in image.leased}
        state.dead = {(task.producer, task.sequence): task for task in image.dead}
        state.waiters = OrderedDict(((instance, nonce), waiter) for instance, nonce, waiter in image.waiters)
        state.producers, state.instances = image.producers, image.instances
        state.keys = OrderedDict((key, (time, task)) for key, time, task in image.keys)
        for tasks in (image.ready, image.delayed, image.leased, image.dead):
            state.blobs |= {(task.producer, task.sequence): task for task in tasks if type(task.payload) is BlobRef}
        state._ends = [(task.due, task.delivery) for task in image.leased]
        heapify(state._ends)
        return state

    def digest(self) -> str:
        """Equal for equal states, different for different ones; 32 characters."""
        return hashlib.blake2b(self.dump(), digest_size=16).hexdigest()

    # --- check --------------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """The invariants (RDSQ I1, I3, I4) and that every index agrees with what it indexes. O(n log n), for tests."""
        ready, delayed = list(self.ready), [entry[2] for entry in self.delayed]
        tasks = [*ready, *delayed, *self.leased.values(), *self.dead.values()]
        keys = {(task.producer, task.sequence) for task in tasks}
        assert len(keys) == len(tasks), "a task is in two places"
        assert len({task.order for task in tasks}) == len(tasks), "two tasks have one place in the order"
        assert self.inserted == len(tasks) + self.completed + self.removed, "a task is neither here nor done"
        assert not (self.ready.count and self.waiters), "a task is ready and a Pop waits"
        assert len(ready) == self.ready.count, "ready tasks are miscounted"
        wanted = sorted(ready, key=lambda task: (-task.priority, task.order))
        assert ready == wanted, "ready tasks are out of order"
        assert all(task.delivery == task.due == task.instance == 0 for task in (*ready, *self.dead.values())), "leased and not"
        assert all(task.delivery == 0 and task.due == due for due, _, task in self.delayed), "a delay is not the task's"
        assert not delayed or min(task.due for task in delayed) > self.clock, "a delay is over"
        assert all(task.delivery == delivery and task.attempts > 0 for delivery, task in self.leased.items()), (
            "not its delivery"
        )
        assert all(delivery >> POP_SHIFT <= self.position for delivery in self.leased), "a delivery of a Pop to come"
        ends = set(self._ends)
        assert all((task.due, delivery) in ends for delivery, task in self.leased.items()), "a lease without an end"
        elsewhere = {(task.producer, task.sequence): task for task in tasks if type(task.payload) is BlobRef}
        assert elsewhere == self.blobs, "blobs are miscounted"
        assert [waiter.position for waiter in self.waiters.values()] == sorted(w.position for w in self.waiters.values())
