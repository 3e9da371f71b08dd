"""A work queue over a log on a server that is there already (roq/log/contract.py): any number of processes on any number of
hosts put and lease; no process of RoQ serves it.

Each open SharedQueue is an RDSQ instance: it appends records and learns what they did by folding the log up to them
(shared_replica.py). A request is one entry: what ends what is over, settlements, and last a Pop, whose nonce tells it from all
others; one that asks for no task where none is asked for. The entry is appended again when the server did not say whether it
took it: what its records do happens once, and its answer is what its first coming did. Commands (`purge` …) would do more the
second time, so they are appended once.

A Pop that waits stands in the log (state.py), for WAIT_SLICE_SECONDS at most: nobody tells of an instance that died, so a task
that is handed to its Pop meanwhile is free again when its lease ends.
"""

from __future__ import annotations

import contextlib
import logging
import random
import time
from collections.abc import Callable, Iterator, Sequence
from threading import Event, RLock
from typing import TypeVar

from roq.errors import (
    AppendUnknown,
    LogUnavailable,
    PayloadTooLarge,
    RoqError,
    StorageFull,
    TemporaryError,
    WorkQueueConflict,
)
from roq.ids import new_id
from roq.log.contract import SharedLog
from roq.runtime.backoff import delays
from roq.wire.task import NewTask, Settlement, Status, TaskState, TaskView
from roq.wire.work_queue import TaskSettings
from roq.workqueue import codec
from roq.workqueue.contract import Asked, RoundTrip, asked_for, check_lease, check_peek, conflict, of_new
from roq.workqueue.fold import Effects, Fold, Handed, TasksChanged
from roq.workqueue.folded_log import answer_of
from roq.workqueue.records import (
    Cancel,
    Configure,
    Pop,
    Purge,
    Push,
    Record,
    ReleaseAll,
    RemoveDead,
    Requeue,
    RequeueDead,
    TaskKey,
    encode,
)
from roq.workqueue.shared_replica import REPLAY_BYTES, SharedReplica

PATIENCE_SECONDS = 30.0  # a server that is away for longer makes calls fail: longer than its restart takes
WAIT_SLICE_SECONDS = 10.0  # longest wait of one Pop
JITTER_SECONDS = 0.05  # so that not all who wait end the same lease
PUSH_BYTES = 400  # of a Push around its payload, dedup key included
SETTLED_AT_ONCE = 10_000  # in one entry
ERRORS_AT_ONCE = 200  # settlements with an error's text
IDS_AT_ONCE = 10_000  # dead letters named in one entry
LARGE_BYTES = 1024 * 1024  # an entry of puts is not made longer than this by a further task
CHORE_SECONDS = 5.0  # in which a snapshot that is being written may end by itself as the queue is closed
Result = TypeVar("Result")
logger = logging.getLogger(__name__)


class SharedQueue:
    """A Backend over the log that `open_log` opens. settings: those asked for; others are as they are, or the defaults.

    patience_seconds: for which a call tries again while the server is away. replay_bytes (of log between two snapshots): for
    tests. Raises WorkQueueConflict, UnknownFormat, TemporaryError.
    """

    def __init__(
        self,
        open_log: Callable[[], SharedLog],
        settings: TaskSettings | Asked | None = None,
        *,
        patience_seconds: float = PATIENCE_SECONDS,
        replay_bytes: int = REPLAY_BYTES,
    ) -> None:
        self._patience_seconds = patience_seconds
        self._closing = Event()
        self._lock = RLock()
        self._codec = codec.RequestCodec(new_id())
        self._log = self._patiently(open_log)
        self._replica = SharedReplica(self._log, self._codec.id, self._lock, replay_bytes)
        try:
            self.settings = self._agree(asked_for(settings))
        except BaseException:
            self._closing.set()
            self._log.close()
            raise

    def _agree(self, wanted: Asked) -> TaskSettings:
        """The settings the queue has, after giving them to a new one."""
        if not self._patiently(self._caught_up).version:
            self._write([Configure(0, of_new(wanted), 0)], self._codec.nothing(0))
        found = self._replica.state.fold.settings
        if differing := conflict(wanted, found):
            raise WorkQueueConflict(f"the work queue {self._log.name} exists with {differing}")
        return found

    # --- tasks --------------------------------------------------------------------------------------------------------

    def put(self, tasks: Sequence[NewTask]) -> list[str]:
        """Store tasks, all or none as long as one entry of the log takes them; their ids."""
        self._replica.check_open()
        self._check_sizes(tasks)
        pushes = self._codec.put(tasks, self.settings, 0)
        ids: list[str] = []
        for part in self._parts(pushes):
            if any(push.dedup_key for push in part):
                effects = self._write(part, self._codec.nothing(0), make_room=False)[:-1]
                ids += [codec.put_id(push, effect) for push, effect in zip(part, effects, strict=True)]
            else:
                self._append(part)
                ids += [codec.put_id(push, ()) for push in part]
        return ids

    def put_numbered(self, producer: int, first: int, tasks: Sequence[NewTask]) -> None:
        """Store tasks under the caller's numbers, first, first + 1, … of this producer; what it has put before, not again."""
        self._replica.check_open()
        self._check_sizes(tasks)
        for part in self._parts(codec.numbered(producer, first, tasks, self.settings, 0)):
            self._append(part)

    def _check_sizes(self, tasks: Sequence[NewTask]) -> None:
        limit = self._log.entry_bytes_max - PUSH_BYTES
        for task in tasks:
            if len(task.payload) > limit:
                raise PayloadTooLarge(
                    f"{self._log.name} takes payloads of {limit} bytes at most, got {len(task.payload)}: let its server "
                    "take larger messages, or put a reference"
                )

    def _parts(self, pushes: Sequence[Push]) -> Iterator[list[Push]]:
        """The pushes in order, as they fit into entries."""
        limit = min(self._log.entry_bytes_max, LARGE_BYTES)
        part: list[Push] = []
        size = 0
        for push in pushes:
            length = PUSH_BYTES + len(push.payload) if isinstance(push.payload, bytes) else PUSH_BYTES
            if part and size + length > limit:
                yield part
                part, size = [], 0
            part.append(push)
            size += length
        if part:
            yield part

    def _append(self, pushes: Sequence[Push]) -> None:
        entry = encode(pushes)
        self._patiently(lambda: self._log.append(entry))

    def lease(self, seconds: float, count: int, wait_seconds: float, settle: Sequence[Settlement] = ()) -> RoundTrip:
        """First `settle`, then up to `count` tasks, in one entry of the log."""
        self._replica.check_open()
        check_lease(seconds, count, wait_seconds)
        deadline = time.monotonic() + min(wait_seconds, codec.WAIT_SECONDS_MAX)
        first = max(len(settle) - _at_once(settle), 0)
        done, settled, left = self.settle(settle[:first]), list[str | None](), list(settle[first:])
        while True:
            wait = min(max(deadline - time.monotonic(), 0.0), WAIT_SLICE_SECONDS)
            trip = self._lease_once(seconds, count, wait, left)
            if left:
                settled, left = trip.settled, []
            if trip.tasks or time.monotonic() >= deadline:
                return trip._replace(settled=done + settled)

    def _lease_once(self, seconds: float, count: int, wait_seconds: float, settle: Sequence[Settlement]) -> RoundTrip:
        asked = time.monotonic()
        until = asked + wait_seconds
        records = [codec.settlement(one, 0) for one in settle]
        pop = self._codec.lease(seconds, count, wait_seconds, 0)
        over, ready = self._patiently(self._find_over)
        if not (over or ready or records or pop.wait_ms):  # what finds nothing need not be written
            return RoundTrip([], [])
        self._replica.asked.add(pop.nonce)
        try:
            effects = self._write([*over, *records], pop)[len(over) :]
            answer = answer_of([*records, pop], effects)
            if answer.refused:
                raise TemporaryError("this process was taken for dead: open the work queue anew")
            handed = self._wait(pop, until) if answer.handed is None else answer.handed
            tasks = codec.leased(handed, self._codec.id, codec.inline)
            settled = [codec.settled(one, effect) for one, effect in zip(settle, effects, strict=False)]
            trip = RoundTrip(settled, tasks, self._began(handed, pop, asked))
            self._replica.take(pop.nonce, tasks)  # last: nothing may come between it and the return
        except BaseException:  # nobody waits any more: leave nothing in line, and no task either
            self._end_wait(pop.nonce)
            raise
        return trip

    def _find_over(self) -> tuple[list[Record], int]:
        """What ends what is over; how many tasks are ready. Caught up if there seems to be any of the one or none of the
        other."""
        with self._lock:
            replica = self._replica
            due, ready = replica.state.fold.next_due(), replica.state.fold.ready.count
            if not ready or not replica.consistent or (due is not None and due <= replica.now()):
                replica.catch_up()
            return replica.over(), replica.state.fold.ready.count

    def _began(self, handed: Sequence[Handed], pop: Pop, asked: float) -> float:
        """When these leases began, not later than they did, and not before they were asked for."""
        if not handed:
            return 0.0
        age = self._log.latest() - (handed[0].due - pop.lease_ms)
        return max(asked, time.monotonic() - max(age, 0) / 1000)

    def settle(self, settlements: Sequence[Settlement]) -> list[str | None]:
        """Per settlement: the token from now on, "" when the lease is over, None when it was lost before."""
        self._replica.check_open()
        records = [codec.settlement(one, 0) for one in settlements]
        answers: list[str | None] = []
        at_once = _at_once(settlements)
        for first in range(0, len(records), at_once):
            part = slice(first, first + at_once)
            effects = self._write(records[part], self._codec.nothing(0))[:-1]
            answers += [codec.settled(one, effect) for one, effect in zip(settlements[part], effects, strict=True)]
        return answers

    def peek(self, state: TaskState, count: int) -> list[TaskView]:
        """The first tasks of a state."""
        check_peek(count)
        return self._look(lambda fold: codec.views(fold, state, count))

    def status(self) -> Status:
        """Counts, as of now."""
        return self._look(lambda fold: fold.status(self._replica.now()))

    def _look(self, see: Callable[[Fold], Result]) -> Result:
        """What there is to see once everything is ended that is over."""
        self._replica.check_open()
        before = None
        while True:
            over = self._patiently(self._over_now)
            if not over or over == before:  # the log's clock has not come to it yet
                break
            self._write(over, self._codec.nothing(0))
            before = over
        with self._lock:
            return see(self._replica.state.fold)

    # --- commands -----------------------------------------------------------------------------------------------------

    def release_all(self) -> int:
        """Make every leased and delayed task ready; how many."""
        return self._command(ReleaseAll(0))

    def purge(self) -> int:
        """Remove every task that is not dead; how many."""
        return self._command(Purge(0))

    def requeue_dead(self, ids: Sequence[str] | None) -> int:
        """Make dead letters ready again; how many."""
        return sum(self._command(RequeueDead(0, keys)) for keys in _chosen(ids))

    def remove_dead(self, ids: Sequence[str] | None) -> int:
        """Forget dead letters; how many."""
        return sum(self._command(RemoveDead(0, keys)) for keys in _chosen(ids))

    def _command(self, command: Record) -> int:
        self._replica.check_open()
        pop = self._codec.nothing(0)
        over = self._patiently(self._over_now)
        entry = encode([*over, command, pop])
        with self._wanted(pop):
            try:
                position = self._patiently(lambda: self._add(entry), (LogUnavailable,))
            except AppendUnknown as error:  # not again: it might be done twice
                position = self._patiently(self._log.end)
                self._patiently(lambda: self._fold_to(position))
                if self._replica.wanted[pop.nonce] is None:
                    what = type(command).__name__
                    raise AppendUnknown(
                        f"whether {what} takes effect is unknown; look before you repeat it: {error}"
                    ) from error
            effects = self._patiently(lambda: self._effects(pop, position))
        return sum(effect.tasks for effect in effects[len(over)] if type(effect) is TasksChanged)

    def close(self) -> None:
        """Let go. Leases that wait end with Closed; what is leased stays leased until it expires."""
        if self._replica.closed:  # it may be a forked child's
            return
        self._closing.set()  # first: nobody tries again with the lock held
        with self._lock:
            if self._replica.closed:
                return
            self._replica.closed = True
        try:
            with self._lock:
                self._give_back(set(self._replica.asked))
                self._replica.ended = True
                chore = self._replica.chore
            if chore is not None:
                chore.join(CHORE_SECONDS)
        finally:
            self._log.close()  # ends what the chore still asks of a server that hangs

    # --- waiting ------------------------------------------------------------------------------------------------------

    def _wait(self, pop: Pop, until: float) -> tuple[Handed, ...]:
        """Sleep until this Pop is answered, or its time is over."""
        before: list[Record] = []
        while True:
            over = self._patiently(self._over_now)
            with self._lock:
                self._replica.check_open()
                replica = self._replica
                if pop.nonce in replica.answers:
                    return replica.answers[pop.nonce].handed
                due, position = replica.state.fold.next_due(), replica.position
                until_due = WAIT_SLICE_SECONDS if due is None else max(due - replica.now(), 0) / 1000
            left = until - time.monotonic()
            if left <= 0:
                self._write([self._codec.cancel(pop, 0)], self._codec.nothing(0))
            elif over and over != before:
                self._write(over, self._codec.nothing(0))
                before = over
            else:
                self._log.wait(position, min(left, until_due + random.uniform(0.001, JITTER_SECONDS)))
                before = []

    def _end_wait(self, nonce: int) -> None:
        """A lease() failed; its Pop may stand in line, or have been answered."""
        if self._replica.closed:  # close() ends it: what it is given until then goes back
            return
        with self._lock:
            if not self._replica.closed:
                self._give_back({nonce})
                self._replica.take(nonce, ())

    def _give_back(self, nonces: set[int]) -> None:
        """These Pops get nothing any more; what they were given meanwhile goes back. Tried once. With the lock held.

        One may still be on its way to the log: then a Pop of its nonce that asks for nothing comes first, and it repeats that.
        """
        if not nonces:
            return
        me = self._codec.id
        ends = [record for nonce in sorted(nonces) for record in (Pop(0, me, nonce, 0, codec.LEAST_MS), Cancel(0, me, nonce))]
        try:
            self._write(ends, self._codec.nothing(0), 0.0)
            if given := self._replica.given(nonces):
                self._write([Requeue(0, delivery, me) for delivery in given], self._codec.nothing(0), 0.0)
        except RoqError as error:
            logger.warning("%s: a lease() that ended early may still be given a task: %s", self._log.name, error)

    # --- the log ------------------------------------------------------------------------------------------------------

    def _write(
        self, records: Sequence[Record], pop: Pop, patience_seconds: float | None = None, *, make_room: bool = True
    ) -> list[Effects]:
        """Append records that may be written twice, and this Pop; what each of them did."""
        entry, append = encode([*records, pop]), self._add if make_room else self._log.append
        with self._wanted(pop):
            position = self._patiently(lambda: append(entry), patience_seconds=patience_seconds)
            return self._patiently(lambda: self._effects(pop, position), patience_seconds=patience_seconds)

    def _add(self, entry: bytes) -> int:
        """Append; a full log becomes empty by a snapshot. For all but puts: those a full one refuses."""
        try:
            return self._log.append(entry)
        except StorageFull:
            if self._closing.is_set() or not self._replica.make_room():
                raise
            return self._log.append(entry)

    @contextlib.contextmanager
    def _wanted(self, pop: Pop) -> Iterator[None]:
        """Whoever folds keeps what the request does that ends with this Pop."""
        wanted = self._replica.wanted
        wanted[pop.nonce] = None
        try:
            yield
        finally:
            wanted.pop(pop.nonce, None)

    def _effects(self, pop: Pop, position: int) -> list[Effects]:
        with self._lock:
            return self._replica.effects(pop.nonce, position)

    def _fold_to(self, position: int) -> None:
        with self._lock:
            self._replica.fold_to(position)

    def _caught_up(self) -> Fold:
        with self._lock:
            self._replica.catch_up()
            return self._replica.state.fold

    def _over_now(self) -> list[Record]:
        """Caught up: what ends what is over."""
        with self._lock:
            self._replica.catch_up()
            return self._replica.over()

    def _patiently(
        self,
        call: Callable[[], Result],
        again: tuple[type[TemporaryError], ...] = (LogUnavailable, AppendUnknown),
        patience_seconds: float | None = None,
    ) -> Result:
        """What `call` returns; it is tried again after these errors."""
        patience = self._patience_seconds if patience_seconds is None else patience_seconds
        deadline, pauses = time.monotonic() + patience, delays(0.02, 1.0)
        while True:
            try:
                return call()
            except again as error:
                pause = next(pauses)
                if self._closing.is_set() or time.monotonic() + pause > deadline:
                    raise
                logger.debug("tried again: %s", error)
                self._closing.wait(pause)


def _at_once(settlements: Sequence[Settlement]) -> int:
    """So many of these fit into an entry of any log."""
    return ERRORS_AT_ONCE if any(one.error for one in settlements) else SETTLED_AT_ONCE


def _chosen(ids: Sequence[str] | None) -> list[tuple[TaskKey, ...] | None]:
    """Dead letters as records name them, as they fit into entries."""
    keys = codec.chosen(ids)
    return [None] if keys is None else [keys[first : first + IDS_AT_ONCE] for first in range(0, len(keys), IDS_AT_ONCE)]
