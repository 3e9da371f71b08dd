"""log: a work queue in a folder of one machine; any number of its processes put and lease at the same time.

Each open LogQueue is an RDSQ instance: it appends records to the folder's log and learns what they did by folding the log up
to them. A process that only puts folds nothing. There is no server and no thread that keeps time: who leases or looks first
ends what is over (expired leases, delays, instances that died), and a lease() that waits wakes up for it.

What is put or settled is on stable storage when the call returns. A lease is not: if the machine goes down before the next
sync, the lease is gone together with the worker that had it, and its attempt is not counted.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Sequence
from pathlib import Path
from threading import RLock

import msgspec

from roq.errors import Closed, InvalidConfiguration, RoqError, StorageFailed, TemporaryError, WorkQueueConflict
from roq.ids import new_id
from roq.log.local import LocalLog
from roq.workqueue import desk
from roq.workqueue.contract import Leased, NewTask, Settings, Settlement, Status, TaskState, TaskView
from roq.workqueue.effects import Counted, Delivered, Refused
from roq.workqueue.log_lives import Lives
from roq.workqueue.log_replica import REPLAY_BYTES, Effects, Replica
from roq.workqueue.records import (
    Cancel,
    Configure,
    InstanceDead,
    Payload,
    Pop,
    Purge,
    Record,
    ReleaseAll,
    RemoveDead,
    Requeue,
    RequeueDead,
    Tick,
    encode,
)

KEEP_BYTES = 4 * 1024 * 1024  # room that puts leave to settlements on a full disk
LIVES_SECONDS = 0.5  # between two looks for instances that died
INSTANCES_FEW = 16  # with this many, each looks half as often
EXPIRED_AT_ONCE = 1000
JITTER_SECONDS = 0.02  # so that not all who wait end the same lease
SETTINGS = "settings.json"
_CLOSED = "the work queue was closed"
logger = logging.getLogger(__name__)


class LogQueue:
    """A Backend in `folder`. settings None: as they are, or the defaults. Raises InvalidAddress, WorkQueueConflict,
    UnknownFormat, StorageFull, StorageFailed (damaged). log, replay_bytes (of log between two snapshots): for tests."""

    def __init__(
        self, folder: Path, settings: Settings | None = None, *, log: LocalLog | None = None, replay_bytes: int = REPLAY_BYTES
    ) -> None:
        self._log = log or LocalLog(folder)
        self._lock = RLock()
        self._desk = desk.Desk(new_id())
        self._lives = Lives(self._log.folder / "instances")
        self._lives_at = 0.0
        self._replica = Replica(self._log, self._desk.id, self._lock, replay_bytes)
        self._loaded = self._closed = False
        try:
            self.settings = self._agree(settings)
        except BaseException:
            self._log.close()
            raise

    def _agree(self, wanted: Settings | None) -> Settings:
        """The settings the queue has, after giving them to a new one."""
        path = self._log.folder / SETTINGS
        if not path.exists():
            with self._lock:
                replica = self._open_replica()
                if not replica.state.version:
                    self._write_durably([Configure(replica.now(), wanted or Settings(), 0)])
                self._log.write_file(SETTINGS, msgspec.json.encode(replica.state.settings))
        try:
            found = msgspec.json.decode(path.read_bytes(), type=Settings)
        except (msgspec.DecodeError, OSError) as error:
            raise StorageFailed(f"{path} can't be read ({error}); remove it, it is made anew from the log") from error
        if wanted is not None and wanted != found:
            raise WorkQueueConflict(f"the work queue {self._log.folder} exists with {found}, not {wanted}")
        return found

    # --- tasks --------------------------------------------------------------------------------------------------------

    def put(self, tasks: Sequence[NewTask]) -> list[str]:
        """Store tasks, all or none; their ids."""
        self._check_open()
        pushes = self._desk.put(tasks, self.settings, self._replica.now())
        if not pushes:
            return []
        if any(task.dedup_key for task in tasks):
            with self._lock:
                effects = self._write_durably(pushes, keep_bytes=KEEP_BYTES)
            return [desk.put_id(push, effect) for push, effect in zip(pushes, effects, strict=True)]
        self._log.sync(self._log.append([encode(pushes)], keep_bytes=KEEP_BYTES))
        return [desk.put_id(push, ()) for push in pushes]

    def lease(
        self, seconds: float, count: int, wait_seconds: float, settle: Sequence[Settlement] = ()
    ) -> tuple[list[str | None], list[Leased]]:
        """First `settle`, then up to `count` tasks, in one entry of the log."""
        deadline = time.monotonic() + min(wait_seconds, desk.WAIT_SECONDS_MAX)
        with self._lock:
            replica = self._open_replica()
            now = replica.now()
            pop = self._desk.lease(seconds, count, wait_seconds, now)
            records: list[Record] = [desk.settlement(one, now) for one in settle]
            self._begin_life()
            due = replica.state.next_due()
            if not replica.state.ready.count or (due is not None and due <= now):
                replica.catch_up()  # what seems over here may have been settled by others since
            records += self._over(now)
            if not (records or wait_seconds > 0 or replica.state.ready.count):
                return [], []
            replica.asked.add(pop.nonce)
            try:
                effects = replica.write([*records, pop])
            except BaseException:
                self._take(pop.nonce)
                raise
            answers = [desk.settled(one, effect) for one, effect in zip(settle, effects, strict=False)]
            position = replica.position
            delivered = self._take(pop.nonce) if pop.nonce in replica.answers else None
            if any(type(effect) is Refused for effect in effects[-1]):
                raise TemporaryError("this process was taken for dead: open the work queue anew")
        if settle:
            self._log.sync(position)
        if delivered is None:
            delivered = self._wait(pop, deadline)
        return answers, [desk.leased(one, self._desk.id, _payload(one.task.payload)) for one in delivered.handed]

    def settle(self, settlements: Sequence[Settlement]) -> list[str | None]:
        """Per settlement: the token from now on, "" when the lease is over, None when it was lost before."""
        if not settlements:
            return []
        with self._lock:
            replica = self._open_replica()
            now = replica.now()
            effects = replica.write([desk.settlement(one, now) for one in settlements])
            position = replica.position
        self._log.sync(position)
        return [desk.settled(one, effect) for one, effect in zip(settlements, effects, strict=True)]

    def peek(self, state: TaskState, count: int) -> list[TaskView]:
        """The first tasks of a state."""
        if count < 0:
            raise InvalidConfiguration(f"count is at least 0, got {count}")
        with self._lock:
            replica = self._current_replica()
            return [desk.view(task, state, _payload(task.payload)) for task in replica.state.first(state, count)]

    def status(self) -> Status:
        """Counts, as of now."""
        with self._lock:
            replica = self._current_replica()
            return replica.state.status(replica.now())

    # --- commands -----------------------------------------------------------------------------------------------------

    def release_all(self) -> int:
        """Make every leased and delayed task ready; how many."""
        return self._count(ReleaseAll(self._replica.now()))

    def purge(self) -> int:
        """Remove every task that is not dead; how many."""
        return self._count(Purge(self._replica.now()))

    def requeue_dead(self, ids: Sequence[str] | None) -> int:
        """Make dead letters ready again; how many."""
        return self._count(RequeueDead(self._replica.now(), desk.chosen(ids)))

    def remove_dead(self, ids: Sequence[str] | None) -> int:
        """Forget dead letters; how many."""
        return self._count(RemoveDead(self._replica.now(), desk.chosen(ids)))

    def _count(self, command: Record) -> int:
        with self._lock:
            self._current_replica()
            effects = self._write_durably([command])
        return sum(effect.tasks for effect in effects[0] if type(effect) is Counted)

    def close(self) -> None:
        """Let go. Leases that wait end with Closed; what is leased stays leased until it expires."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._end_waits(sorted(self._replica.asked))
            self._lives.end()
            chore = self._replica.chore
        if chore is not None:
            chore.join()
        self._log.close()

    def _end_waits(self, nonces: list[int]) -> None:
        """These Pops get nothing any more; what they were given meanwhile goes back."""
        replica, me = self._replica, self._desk.id
        if not nonces:
            return
        now = replica.now()
        try:
            replica.write([Cancel(now, me, nonce) for nonce in nonces])
            answers = [replica.answers[nonce] for nonce in nonces if nonce in replica.answers]
            given = [one.delivery for answer in answers for one in answer.handed]
            if given:
                replica.write([Requeue(now, delivery, me) for delivery in given])
        except RoqError as error:
            logger.warning("%s: a lease() that ended early may still be given a task: %s", self._log.folder, error)

    # --- time and waiting -----------------------------------------------------------------------------------------------

    def _over(self, now: int) -> list[Record]:
        """Records that end what is over at `now`, as far as this copy knows. Lock held."""
        state = self._replica.state
        records: list[Record] = []
        due = state.next_due()
        if due is not None and due <= now:
            records += state.expired(now, EXPIRED_AT_ONCE)
            records.append(Tick(now))
        if time.monotonic() >= self._lives_at and (dead := self._find_dead()):
            self._replica.write([InstanceDead(now, instance, "the process died") for instance in dead])
            for instance in dead:
                self._lives.forget(instance)
            records.append(Tick(now))
        return records

    def _begin_life(self) -> None:
        try:
            self._lives.begin(self._desk.id)
        except OSError as error:  # a full disk: should this process die now, its leases end by time only
            logger.warning("%s: can't tell others that this process lives: %s", self._log.folder, error)

    def _find_dead(self) -> list[int]:
        alive, dead = self._lives.look()
        # The more instances look, the less often each has to.
        self._lives_at = time.monotonic() + LIVES_SECONDS * (1 + alive / INSTANCES_FEW) * random.uniform(0.8, 1.2)
        return dead

    def _wait(self, pop: Pop, deadline: float) -> Delivered:
        """Sleep until this Pop is answered, or its time is over."""
        replica, nonce = self._replica, pop.nonce
        try:
            while True:
                with self._lock:
                    if self._closed:
                        raise Closed(_CLOSED)
                    replica.catch_up()
                    if nonce in replica.answers:
                        return replica.answers[nonce]
                    left = deadline - time.monotonic()
                    now = replica.now()
                    if left <= 0:
                        replica.write([self._desk.cancel(pop, now)])
                        return replica.answers[nonce]
                    if over := self._over(now):
                        replica.write(over)
                        continue
                    due, position = replica.state.next_due(), replica.position
                    until_due = left if due is None else (due - now) / 1000
                    until_look = max(self._lives_at - time.monotonic(), 0) + 0.001
                self._log.wait(position, min(left, until_look, until_due + random.uniform(0.001, JITTER_SECONDS)))
        except BaseException:  # nobody waits any more: leave nothing in line
            with self._lock:
                if not self._closed:
                    self._end_waits([nonce])
            raise
        finally:
            self._take(nonce)

    def _take(self, nonce: int) -> Delivered:
        """The answer to a Pop that nobody waits for any more."""
        with self._lock:
            self._replica.asked.discard(nonce)
            return self._replica.answers.pop(nonce, Delivered(self._desk.id, nonce, ()))

    # --- the log, with the lock held --------------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._closed:
            raise Closed(_CLOSED)

    def _open_replica(self) -> Replica:
        """The copy of the state, read from the folder at first use."""
        self._check_open()
        if not self._loaded:
            self._replica.load()
            self._replica.catch_up()
            self._loaded = True
        return self._replica

    def _current_replica(self) -> Replica:
        """The same, as of now, with everything ended that is over."""
        replica = self._open_replica()
        replica.catch_up()
        while over := self._over(replica.now()):
            replica.write(over)
        return replica

    def _write_durably(self, records: Sequence[Record], keep_bytes: int = 0) -> list[Effects]:
        effects = self._open_replica().write(records, keep_bytes)
        self._log.sync(self._replica.position)
        return effects


def _payload(payload: Payload) -> bytes:
    assert isinstance(payload, bytes)  # nothing is kept elsewhere here
    return payload
