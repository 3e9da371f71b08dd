"""log: a work queue in a folder of one machine; any number of its processes put and lease at the same time.

Each open LogQueue is an RDSQ instance: it appends records to the folder's log and learns what they did by folding the log up
to them, or has both done by another process that is at it anyway (log_clerk.py). A process that only puts folds nothing. There
is no server and no thread that keeps time: who leases or looks first ends what is over (expired leases, delays, instances that
died), and a lease() that waits wakes up for it.

What is put or settled is on stable storage when the call returns. A lease is not: if the machine goes down before the next
sync, the lease is gone together with the worker that had it, and its attempt is not counted.
"""

from __future__ import annotations

import logging
import os
import random
import time
import weakref
from collections.abc import Callable, Sequence, Set
from pathlib import Path
from threading import RLock
from typing import TypeVar

import msgspec

from roq.errors import Closed, InvalidConfiguration, RoqError, StorageFailed, StorageFull, TemporaryError, WorkQueueConflict
from roq.ids import new_id
from roq.log.local import LocalLog
from roq.wire.task import EXTEND, LeasedTask, NewTask, Settlement, Status, TaskState, TaskView
from roq.wire.work_queue import TaskSettings
from roq.workqueue import codec
from roq.workqueue.contract import Asked, RoundTrip, asked_for, conflict, of_new
from roq.workqueue.fold import Effects, TasksChanged, TasksDelivered
from roq.workqueue.log_clerk import CLOSED, Clerk, CommandAnswer
from roq.workqueue.log_replica import REPLAY_BYTES, Replica
from roq.workqueue.records import (
    Cancel,
    Configure,
    Payload,
    Pop,
    Purge,
    Push,
    Record,
    ReleaseAll,
    RemoveDead,
    Requeue,
    RequeueDead,
    encode,
)

KEEP_BYTES = 4 * 1024 * 1024  # room that puts leave to settlements on a full disk
JITTER_SECONDS = 0.02  # so that not all who wait end the same lease
SETTINGS = "settings.json"
Result = TypeVar("Result")
logger = logging.getLogger(__name__)


class LogQueue:
    """A Backend in `folder`. settings: those that are asked for; others are as they are, or the defaults.

    log, replay_bytes (of log between two snapshots): for tests. Raises InvalidAddress, WorkQueueConflict, UnknownFormat,
    StorageFull, StorageFailed (damaged).
    """

    def __init__(
        self,
        folder: Path,
        settings: TaskSettings | Asked | None = None,
        *,
        log: LocalLog | None = None,
        replay_bytes: int = REPLAY_BYTES,
    ) -> None:
        self._log = log or LocalLog(folder)
        self._lock = RLock()
        self._codec = codec.RequestCodec(new_id())
        self._replica = Replica(self._log, self._codec.id, self._lock, replay_bytes)
        self._clerk = Clerk(self._log, self._codec.id, self._lock, self._replica)
        self._closed = self._ended = False  # whether `close` has begun; has ended the waits
        _everywhere.add(self)
        try:
            self.settings = self._agree(asked_for(settings))
        except BaseException:
            self._log.close()
            raise

    def forked(self) -> None:
        """We are a forked child: its locks are its parent's, and mutexes of its parent's threads never come free."""
        self._closed = self._clerk.closed = True

    def _agree(self, wanted: Asked) -> TaskSettings:
        """The settings the queue has, after giving them to a new one."""
        path = self._log.folder / SETTINGS
        if not path.exists():
            with self._lock:
                replica = self._clerk.replica()
                if not replica.state.fold.version:
                    self._write_durably([Configure(replica.now(), of_new(wanted), 0)])
                self._log.write_file(SETTINGS, msgspec.json.encode(replica.state.fold.settings))
        try:
            found = msgspec.json.decode(path.read_bytes(), type=TaskSettings)
        except (msgspec.DecodeError, OSError) as error:
            raise StorageFailed(f"{path} can't be read ({error}); remove it, it is made anew from the log") from error
        if differing := conflict(wanted, found):
            raise WorkQueueConflict(f"the work queue {self._log.folder} exists with {differing}")
        return found

    # --- tasks --------------------------------------------------------------------------------------------------------

    def put(self, tasks: Sequence[NewTask]) -> list[str]:
        """Store tasks, all or none; their ids."""
        self._check_open()
        pushes = self._codec.put(tasks, self.settings, self._replica.now())
        if not pushes:
            return []
        if any(task.dedup_key for task in tasks):
            effects = self._with_room(lambda: self._write_durably(pushes, keep_bytes=KEEP_BYTES), pushes)
            return [codec.put_id(push, effect) for push, effect in zip(pushes, effects, strict=True)]
        self._append(pushes)
        return [codec.put_id(push, ()) for push in pushes]

    def put_numbered(self, producer: int, first: int, tasks: Sequence[NewTask]) -> None:
        """Store tasks under the caller's numbers, first, first + 1, … of this producer; what it has put before, not again."""
        self._check_open()
        if pushes := codec.numbered(producer, first, tasks, self.settings, self._replica.now()):
            self._append(pushes)

    def _append(self, pushes: Sequence[Push]) -> None:
        entry = [encode(pushes)]
        try:  # not `_with_room`: every put passes here
            position = self._log.append(entry, keep_bytes=KEEP_BYTES)
        except StorageFull:
            self._look_for_room(pushes)
            position = self._log.append(entry, keep_bytes=KEEP_BYTES)
        self._log.sync(position)

    def lease(self, seconds: float, count: int, wait_seconds: float, settle: Sequence[Settlement] = ()) -> RoundTrip:
        """First `settle`, then up to `count` tasks, in one entry of the log."""
        deadline = time.monotonic() + min(wait_seconds, codec.WAIT_SECONDS_MAX)
        now = self._replica.now()
        records: list[Record] = [codec.settlement(one, now) for one in settle]
        pop = self._codec.lease(seconds, count, wait_seconds, now)
        self._replica.asked.add(pop.nonce)
        answer: CommandAnswer | None = None
        try:
            answer = self._with_room(lambda: self._clerk.ask([*records, pop]))
            handed = self._wait(pop, deadline).handed if answer.handed is None else answer.handed
            tasks = [codec.leased(one, self._codec.id, _payload(one.task.payload)) for one in handed]
            tokens = _tokens(settle, answer)
            self._take(pop.nonce, tasks)
        except BaseException as error:  # nobody waits any more: leave nothing in line, and with a signal no task either
            self._end_wait(pop.nonce, in_line=answer is not None or not isinstance(error, RoqError))
            raise
        if answer.refused:
            raise TemporaryError("this process was taken for dead: open the work queue anew")
        return RoundTrip(tokens, tasks)

    def settle(self, settlements: Sequence[Settlement]) -> list[str | None]:
        """Per settlement: the token from now on, "" when the lease is over, None when it was lost before."""
        if not settlements:
            return []
        now = self._replica.now()
        records = [codec.settlement(one, now) for one in settlements]
        nothing = msgspec.structs.replace(self._codec.lease(1, 1, 0, now), count=0)  # says whose request it is
        answer = self._with_room(lambda: self._clerk.ask([*records, nothing]))
        return _tokens(settlements, answer)

    def peek(self, state: TaskState, count: int) -> list[TaskView]:
        """The first tasks of a state."""
        if count < 0:
            raise InvalidConfiguration(f"count is at least 0, got {count}")
        self._check_open()
        return self._with_room(lambda: self._peek(state, count))

    def _peek(self, state: TaskState, count: int) -> list[TaskView]:
        with self._lock:
            replica = self._current_replica()
            return [
                codec.view(TaskView, task, state, _payload(task.payload)) for task in replica.state.fold.first(state, count)
            ]

    def status(self) -> Status:
        """Counts, as of now."""
        self._check_open()
        return self._with_room(self._status)

    def _status(self) -> Status:
        with self._lock:
            replica = self._current_replica()
            return replica.state.fold.status(replica.now())

    # --- commands -----------------------------------------------------------------------------------------------------

    def release_all(self) -> int:
        """Make every leased and delayed task ready; how many."""
        return self._count(ReleaseAll(self._replica.now()))

    def purge(self) -> int:
        """Remove every task that is not dead; how many."""
        return self._count(Purge(self._replica.now()))

    def requeue_dead(self, ids: Sequence[str] | None) -> int:
        """Make dead letters ready again; how many."""
        return self._count(RequeueDead(self._replica.now(), codec.chosen(ids)))

    def remove_dead(self, ids: Sequence[str] | None) -> int:
        """Forget dead letters; how many."""
        return self._count(RemoveDead(self._replica.now(), codec.chosen(ids)))

    def _count(self, command: Record) -> int:
        self._check_open()
        effects = self._with_room(lambda: self._command(command))
        return sum(effect.tasks for effect in effects[0] if type(effect) is TasksChanged)

    def _command(self, command: Record) -> list[Effects]:
        with self._lock:
            self._current_replica()
            return self._write_durably([command])

    def close(self) -> None:
        """Let go. Leases that wait end with Closed; what is leased stays leased until it expires."""
        if self._closed:  # it may be a forked child's
            return
        with self._lock:
            if self._closed:
                return
            self._closed = True
        try:
            self._clerk.close()
            with self._lock:
                self._end_waits(set(self._replica.asked))
                self._ended = True
                self._clerk.end_life()
                chore = self._replica.chore
            if chore is not None and chore.is_alive():
                chore.join()
        finally:
            self._log.close()

    def _end_waits(self, nonces: Set[int]) -> None:
        """These Pops get nothing any more; what they were given meanwhile goes back."""
        replica, me = self._replica, self._codec.id
        if not nonces:
            return
        now = replica.now()
        try:
            replica.write([Cancel(now, me, nonce) for nonce in sorted(nonces)])
            leased = replica.state.fold.leased.values()
            given = [task.delivery for task in leased if task.instance == me and task.nonce in nonces]
            if given:
                replica.write([Requeue(now, delivery, me) for delivery in given])
        except RoqError as error:
            logger.warning("%s: a lease() that ended early may still be given a task: %s", self._log.folder, error)

    # --- time and waiting -----------------------------------------------------------------------------------------------

    def _wait(self, pop: Pop, deadline: float) -> TasksDelivered:
        """Sleep until this Pop is answered, or its time is over."""
        replica, nonce = self._replica, pop.nonce
        while True:
            with self._lock:
                self._clerk.replica().catch_up()
                if nonce in replica.answers:
                    return replica.answers[nonce]
                left = deadline - time.monotonic()
                now = replica.now()
                if left <= 0:
                    replica.write([self._codec.cancel(pop, now)])
                    return replica.answers[nonce]
                if over := self._clerk.over(now):
                    replica.write(over)
                    continue
                due, position = replica.state.fold.next_due(), replica.position
                until_due = left if due is None else (due - now) / 1000
                until_look = max(self._clerk.lives_at - time.monotonic(), 0) + 0.001
            self._log.wait(position, min(left, until_look, until_due + random.uniform(0.001, JITTER_SECONDS)))

    def _end_wait(self, nonce: int, *, in_line: bool) -> None:
        """A lease() failed. in_line: its Pop may stand in line, or have been answered."""
        if self._closed:  # close() ends it: what it is given until then goes back
            return
        with self._lock:
            if self._closed:
                return
            if in_line:
                self._end_waits({nonce})
            self._take(nonce, ())

    def _take(self, nonce: int, tasks: Sequence[LeasedTask[bytes]]) -> None:
        """The answer to a Pop has been brought to who asked: these. Closed: they were given back just before."""
        with self._lock:
            if self._ended and tasks:
                raise Closed(CLOSED)
            self._replica.asked.discard(nonce)
            self._replica.answers.pop(nonce, None)

    # --- the log, with the lock held --------------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._closed:
            raise Closed(CLOSED)

    def _current_replica(self) -> Replica:
        """The same, as of now, with everything ended that is over."""
        replica = self._clerk.replica()
        replica.catch_up()
        while over := self._clerk.over(replica.now()):
            replica.write(over)
        return replica

    def _write_durably(self, records: Sequence[Record], keep_bytes: int = 0) -> list[Effects]:
        with self._lock:
            effects = self._clerk.replica().write(records, keep_bytes)
            self._log.sync(self._replica.position)
            return effects

    # --- a full disk, without the lock ------------------------------------------------------------------------------------

    def _with_room(self, write: Callable[[], Result], puts: Sequence[Push] = ()) -> Result:
        """What `write` returns, which writes these. It wrote nothing because the disk is full: once more, after looking for
        room."""
        try:
            return write()
        except StorageFull:
            self._look_for_room(puts)
            return write()

    def _look_for_room(self, puts: Sequence[Push]) -> None:
        with self._lock:
            self._clerk.replica()
        self._replica.relieve(len(encode(puts)))


_everywhere: weakref.WeakSet[LogQueue] = weakref.WeakSet()


def _forked() -> None:
    for queue in list(_everywhere):
        queue.forked()


os.register_at_fork(after_in_child=_forked)


def _tokens(settlements: Sequence[Settlement], answer: CommandAnswer) -> list[str | None]:
    """The answers to settlements."""
    return [
        (one.token if one.kind == EXTEND else "") if done else None
        for one, done in zip(settlements, answer.settled, strict=True)
    ]


def _payload(payload: Payload) -> bytes:
    assert isinstance(payload, bytes)  # nothing is kept elsewhere here
    return payload
