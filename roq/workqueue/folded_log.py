"""A copy of a work queue's state that is folded from a log: what all copies do, whatever the log is.

Positions of the log and of the state differ: the state counts records. Whoever calls holds the queue's lock; the thread that
writes snapshots takes it itself. A copy that fell behind the log's trim loads the snapshot; what its Pops were given is found
there. A forked child's copy is closed: its locks and connections are its parent's.

A signal handler that raises can break off a change of the state at any record. `consistent` is False while there is one; who
finds it False throws the copy away and folds anew, and nobody makes a snapshot of it.

Not covered: how far to fold, what to append, when to take a snapshot (log_replica.py for a folder's log, shared_replica.py for
one on a server).
"""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable, Sequence
from threading import RLock, Thread
from typing import Any, Generic, Protocol, TypeVar

import msgspec

from roq.errors import Closed, LogTrimmed, StorageFailed, UnknownFormat
from roq.wire.task import LeasedTask
from roq.workqueue.fold import APPLIED, Effects, Handed, RecordRefused, Settled, TasksDelivered
from roq.workqueue.records import Pop, Record, Requeue
from roq.workqueue.state import State

EXPIRED_AT_ONCE = 1000
CLOSED = "the work queue was closed"
OUTCOME_UNKNOWN = "whether this call took effect is unknown; look before you repeat it"
EntryT = TypeVar("EntryT")


class SnapshotStore(Protocol):
    """What every log keeps beside its entries."""

    def snapshot(self, position: int, data: bytes) -> None:
        """Keep `data` as what the entries up to `position` add up to, and forget them."""

    def load_snapshot(self) -> tuple[int, bytes] | None:
        """The newest snapshot as (position, data), None if there is none."""


class CommandAnswer(msgspec.Struct, array_like=True):
    """settled: of each settlement, whether it did anything. handed: to the Pop; None while it stands in line."""

    settled: list[bool]
    handed: tuple[Handed, ...] | None
    refused: bool = False


NOTHING = CommandAnswer([], ())


def answer_of(records: Sequence[Record], effects: Sequence[Effects]) -> CommandAnswer:
    """What a request's records, settlements and, last, a Pop, did to it."""
    pop = records[-1]
    assert type(pop) is Pop
    settled = [any(type(effect) is Settled and effect.applied for effect in one) for one in effects[:-1]]
    for effect in effects[-1]:
        if type(effect) is TasksDelivered and effect.nonce == pop.nonce and effect.instance == pop.instance:
            return CommandAnswer(settled, effect.handed)
        if type(effect) is RecordRefused:
            return CommandAnswer(settled, (), refused=True)
    return CommandAnswer(settled, None)


class FoldedLog(Generic[EntryT]):
    """State and position. instance: ours, whose deliveries are kept in `answers` by nonce, for the nonces in `asked`. lock: the
    queue's.

    A subclass says what follows (`_read`), what is in an entry (`_decoded`), which requests of ours are entries whose effects
    are waited for (`_seeks`, `_found`), and when a snapshot is due (`_plan`).
    """

    def __init__(self, snapshots: SnapshotStore, instance: int, lock: RLock) -> None:
        self._snapshots, self._instance, self._lock = snapshots, instance, lock
        self.closed = self.ended = False  # whether the queue's `close` has begun; has given back what its calls wait for
        self.chore: Thread | None = None  # writes a snapshot
        self._chore_after = 0.0  # monotonic
        self.state = State()
        self.position = 0
        self.asked: set[int] = set()
        self.answers: dict[int, TasksDelivered] = {}
        self.consistent = True
        _everywhere.add(self)

    def check_open(self) -> None:
        """Raises Closed."""
        if self.closed:
            raise Closed(CLOSED)

    def take(self, nonce: int, tasks: Sequence[LeasedTask[bytes]]) -> None:
        """The answer to a Pop has been brought to who asked: these. Raises Closed: they were given back just before."""
        with self._lock:
            if self.ended and tasks:
                raise Closed(CLOSED)
            self.asked.discard(nonce)
            self.answers.pop(nonce, None)

    # --- what a subclass says -------------------------------------------------------------------------------------------

    def _read(self) -> Sequence[tuple[int, EntryT]]:
        """Entries behind `position`. Raises LogTrimmed."""
        raise NotImplementedError

    def _decoded(self, entry: EntryT) -> list[Record]:
        """The records of an entry, which is applied next. Raises UnknownFormat."""
        raise NotImplementedError

    def _seeks(self, nonce: int) -> bool:
        """Whether somebody waits for the effects of the request that ends with our Pop of this nonce."""
        raise NotImplementedError

    def _found(self, nonce: int, effects: list[Effects]) -> None:
        """That request is in the log, and did this."""
        raise NotImplementedError

    def _plan(self, position: int, size: int) -> None:
        """A snapshot of this position and size is the newest."""
        raise NotImplementedError

    # --- folding ------------------------------------------------------------------------------------------------------

    def _fold(self, start: int, end: int) -> list[list[Effects]]:
        """Fold some entries; the effects of those between two positions."""
        found: list[list[Effects]] = []
        try:
            entries = self._read()
        except LogTrimmed:
            self._skip()
            return found
        apply, instance = self.state.apply, self._instance
        self.consistent = False
        for position, entry in entries:
            try:
                records = self._decoded(entry)
            except UnknownFormat:
                self.consistent = True  # up to here
                raise
            last = records[-1] if records else None
            if start < position <= end:
                found.append([self._apply(record) for record in records])
            elif type(last) is Pop and last.instance == instance and self._seeks(last.nonce):
                self._found(last.nonce, [self._apply(record) for record in records])
            else:
                for record in records:
                    effects = apply(record)
                    if effects and effects is not APPLIED:
                        for effect in effects:
                            if type(effect) is TasksDelivered and effect.instance == instance:
                                self._answer(effect)
            self.position = position
        self.consistent = True
        return found

    def _apply(self, record: Record) -> Effects:
        effects = self.state.apply(record)
        for effect in effects:
            if type(effect) is TasksDelivered and effect.instance == self._instance:
                self._answer(effect)
        return effects

    def _answer(self, delivered: TasksDelivered) -> None:
        if delivered.nonce in self.asked:
            self.answers[delivered.nonce] = delivered

    def given(self, nonces: set[int]) -> list[int]:
        """Deliveries that these Pops of ours have."""
        leased = self.state.fold.leased.values()
        return [task.delivery for task in leased if task.instance == self._instance and task.nonce in nonces]

    def _expired(self, now: int) -> list[Requeue] | None:
        """The ends of leases that are over at `now`; None: nothing is, no delay either."""
        due = self.state.fold.next_due()
        if due is None or due > now:
            return None
        self.consistent = False  # it takes leases out of line and puts them back
        expired = self.state.fold.expired(now, EXPIRED_AT_ONCE)
        self.consistent = True
        return expired

    # --- snapshots ----------------------------------------------------------------------------------------------------

    def load(self) -> None:
        """Start from the newest snapshot, if it spares anything."""
        found = self._snapshots.load_snapshot()
        if found is None or found[0] <= self.position:
            self._plan(self.position, 0)
            return
        position, data = found
        state = State.load(data)
        self.consistent = False
        self.position, self.state = position, state
        self._plan(position, len(data))
        me = state.fold.instances.known.get(self._instance)
        for nonce in self.asked - self.answers.keys():
            if me is not None and me.knows(nonce) and (self._instance, nonce) not in state.waiters:
                self.answers[nonce] = state.fold.held_by(self._instance, nonce)
        self.consistent = True

    def _skip(self) -> None:
        """What follows is no longer in the log."""
        before = self.position
        self.load()
        if self.position <= before:
            raise StorageFailed(
                f"the log lost what follows position {before}, and no snapshot has it: restore the log, or begin a new queue"
            )

    def _begin_chore(self, chore: Callable[[], None], pause_seconds: float) -> None:
        """Have a thread do this, unless one is at it, or began as long as a pause ago."""
        if time.monotonic() >= self._chore_after and (self.chore is None or not self.chore.is_alive()):
            self._chore_after = time.monotonic() + pause_seconds
            self.chore = Thread(target=chore, name="roq-queue-snapshot", daemon=True)
            self.chore.start()

    def _keep(self, position: int, data: bytes) -> None:
        """Write a snapshot. Without the lock."""
        self._snapshots.snapshot(position, data)
        with self._lock:
            self._plan(position, len(data))


_everywhere: weakref.WeakSet[FoldedLog[Any]] = weakref.WeakSet()


def _forked() -> None:
    for folded in list(_everywhere):
        folded.closed = True


os.register_at_fork(after_in_child=_forked)
