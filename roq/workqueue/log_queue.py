"""log: a work queue in a folder of one machine; any number of its processes put and lease at the same time.

Each open LogQueue is an RDSQ instance: it appends records to the folder's log and learns what they did by folding the log up to
them (log_replica.py). A process that only puts folds nothing. There is no server and no thread that keeps time: who leases or
looks first ends what is over (expired leases, delays, instances that died), and a lease() that waits wakes up for it.

What is put or settled is on stable storage when the call returns. A lease is not: if the machine goes down before the next
sync, the lease is gone together with the worker that had it, and its attempt is not counted.

Folding costs as much as everybody else wrote, so processes that are busy at the same time leave it to one of them, the combiner
of the moment (flat combining: roq/log/local/publication.py). A request is what one call wants written: settlements and, last, a
Pop, which tells it from all others. The combiner appends all requests, each as an entry of its own, folds them, syncs once, and
hands out the answers; the others fold nothing. The log can't tell who wrote an entry. Does a combiner die in a round, its
requests are in the log or not: their owners fold the log and look, and write them if they are not there. Who finds no place on
the list does its own work, and so does a second thread of one process.

A signal handler that raises may break off any of this. No lock is left then (roq/log/local/locks.py), the copy is folded anew,
and a published request is withdrawn, at the latest by the next one.
"""

from __future__ import annotations

import contextlib
import logging
import random
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import RLock
from typing import TypeVar

import msgspec

from roq.errors import (
    RoqError,
    StorageFailed,
    StorageFull,
    TemporaryError,
    UnknownFormat,
    WorkQueueConflict,
)
from roq.ids import new_id
from roq.log.local import LocalLog
from roq.log.local.publication import REQUEST_MAX, PublicationList, PublishedRequest
from roq.wire.task import EXTEND, NewTask, Settlement, Status, TaskState, TaskView
from roq.wire.work_queue import TaskSettings
from roq.workqueue import codec
from roq.workqueue.contract import Asked, RoundTrip, asked_for, check_peek, conflict, of_new
from roq.workqueue.fold import Effects, TasksChanged, TasksDelivered
from roq.workqueue.folded_log import CommandAnswer
from roq.workqueue.log_replica import REPLAY_BYTES, Replica, Request, decode_answer, encode_answer
from roq.workqueue.records import (
    Configure,
    Pop,
    Purge,
    Push,
    Record,
    ReleaseAll,
    RemoveDead,
    RequeueDead,
    decode,
    encode,
)

KEEP_BYTES = 4 * 1024 * 1024  # room that puts leave to settlements on a full disk
JITTER_SECONDS = 0.02  # so that not all who wait end the same lease
SETTINGS = "settings.json"
LIST_SECONDS = 10.0  # until who finds no place on the publication list tries again
CLOSE_PAUSE_SECONDS = 0.001  # between two looks at whether a call that is under way has ended
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
        self._list: PublicationList | None = None
        self._list_at = 0.0  # monotonic; when to try for a place again
        self._publisher: dict[int, tuple[int]] = {}  # at 0: the call that uses our place on the list, as its thread's number
        try:
            self.settings = self._agree(asked_for(settings))
        except BaseException:
            self._log.close()
            raise

    def _agree(self, wanted: Asked) -> TaskSettings:
        """The settings the queue has, after giving them to a new one."""
        path = self._log.folder / SETTINGS
        if not path.exists():
            with self._lock:
                replica = self._ready_replica()
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
        self._replica.check_open()
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
        self._replica.check_open()
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
            answer = self._with_room(lambda: self._ask([*records, pop]))
            handed = self._wait(pop, deadline).handed if answer.handed is None else answer.handed
            tasks = codec.leased(handed, self._codec.id, codec.inline)
            trip = RoundTrip(_tokens(settle, answer), tasks)
            self._replica.take(pop.nonce, tasks)  # last: nothing may come between it and the return
        except BaseException as error:  # nobody waits any more: leave nothing in line, and with a signal no task either
            self._end_wait(pop.nonce, in_line=answer is not None or not isinstance(error, RoqError))
            raise
        if answer.refused:
            raise TemporaryError("this process was taken for dead: open the work queue anew")
        return trip

    def settle(self, settlements: Sequence[Settlement]) -> list[str | None]:
        """Per settlement: the token from now on, "" when the lease is over, None when it was lost before."""
        if not settlements:
            return []
        now = self._replica.now()
        records = [codec.settlement(one, now) for one in settlements]
        answer = self._with_room(lambda: self._ask([*records, self._codec.nothing(now)]))
        return _tokens(settlements, answer)

    def peek(self, state: TaskState, count: int) -> list[TaskView]:
        """The first tasks of a state."""
        check_peek(count)
        return self._look(lambda replica: codec.views(replica.state.fold, state, count))

    def status(self) -> Status:
        """Counts, as of now."""
        return self._look(lambda replica: replica.state.fold.status(replica.now()))

    def _look(self, see: Callable[[Replica], Result]) -> Result:
        self._replica.check_open()

        def current() -> Result:
            with self._lock:
                return see(self._current_replica())

        return self._with_room(current)

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
        [effects] = self._look(lambda _: self._write_durably([command]))
        return sum(effect.tasks for effect in effects if type(effect) is TasksChanged)

    def close(self) -> None:
        """Let go. Leases that wait end with Closed; what is leased stays leased until it expires."""
        if self._replica.closed:  # it may be a forked child's
            return
        with self._lock:
            if self._replica.closed:
                return
            self._replica.closed = True
        try:
            self._leave_list()
            with self._lock:
                self._replica.give_back(set(self._replica.asked))
                self._replica.ended = True
                self._replica.end_life()
                chore = self._replica.chore
            if chore is not None and chore.is_alive():
                chore.join()
        finally:
            self._log.close()

    # --- time and waiting -----------------------------------------------------------------------------------------------

    def _wait(self, pop: Pop, deadline: float) -> TasksDelivered:
        """Sleep until this Pop is answered, or its time is over."""
        nonce = pop.nonce
        while True:
            with self._lock:
                replica = self._ready_replica()
                replica.catch_up()
                if nonce in replica.answers:
                    return replica.answers[nonce]
                left = deadline - time.monotonic()
                now = replica.now()
                if left <= 0:
                    replica.write([self._codec.cancel(pop, now)])
                    return replica.answers[nonce]
                if over := replica.over(now):
                    replica.write(over)
                    continue
                due, position = replica.state.fold.next_due(), replica.position
                until_due = left if due is None else (due - now) / 1000
                until_look = max(replica.lives_at - time.monotonic(), 0) + 0.001
            self._log.wait(position, min(left, until_look, until_due + random.uniform(0.001, JITTER_SECONDS)))

    def _end_wait(self, nonce: int, *, in_line: bool) -> None:
        """A lease() failed. in_line: its Pop may stand in line, or have been answered."""
        if self._replica.closed:  # close() ends it: what it is given until then goes back
            return
        with self._lock:
            if self._replica.closed:
                return
            if in_line:
                self._replica.give_back({nonce})
            self._replica.take(nonce, ())

    # --- flat combining -------------------------------------------------------------------------------------------------

    def _ask(self, records: Sequence[Record]) -> CommandAnswer:
        """Have settlements and a Pop written; settlements are durable then. One call at a time uses our place on the list; a
        signal handler that asks within another call does not."""
        self._replica.check_open()
        self._replica.begin_life()
        asked, call = (encode(records), records), (threading.get_ident(),)
        try:
            if self._publisher.setdefault(0, call) is call and (publications := self._publications()) is not None:
                return self._combine(publications, asked)
        finally:
            try:  # nothing is called here, so no signal may come between
                if self._publisher[0] is call:
                    del self._publisher[0]
            except KeyError:  # not begun, or another's, which is over
                pass
        return self._write_alone(asked)

    def _publications(self) -> PublicationList | None:
        """Our place on the list; None: there is none, it is asked for again now and then."""
        if self._list is None and time.monotonic() >= self._list_at:
            self._list_at = time.monotonic() + LIST_SECONDS
            try:
                self._list = self._log.open_list()
            except (RoqError, OSError) as error:  # a full disk
                logger.warning("%s: this process can't work together with others: %s", self._log.folder, error)
        return self._list

    def _combine(self, publications: PublicationList, asked: Request) -> CommandAnswer:
        if self._replica.sought:  # left by a call that broke off
            publications.withdraw()
            self._replica.sought = 0
        if publications.is_ours():
            publications.gather()
        elif publications.pause(self._replica.patience()) > 0:
            return self._leave(publications, asked)
        return publications.combine(lambda: self._serve(publications, asked)) or self._leave(publications, asked)

    def _leave(self, publications: PublicationList, asked: Request) -> CommandAnswer:
        """Leave our request to the combiner."""
        if len(asked[0]) > REQUEST_MAX:
            return self._write_alone(asked)
        pop = asked[1][-1]
        assert type(pop) is Pop
        try:
            self._replica.sought = pop.nonce
            publications.publish(asked[0])
            found = publications.await_answer(self._replica.patience, lambda: self._serve(publications, asked))
            if isinstance(found, bytes):
                found = decode_answer(found) or self._look_up(asked)
            self._replica.sought = 0
            return found
        except BaseException:  # a signal: nobody waits any more
            with contextlib.suppress(RoqError, OSError):
                publications.withdraw()
                self._replica.sought = 0
            raise

    def _look_up(self, asked: Request) -> CommandAnswer:
        """The answer to a request that a combiner may have written; if none did, write it."""
        with self._lock:
            replica = self._ready_replica()
            answer, position = replica.find(asked[1]), replica.position
        if answer is None:
            return self._write_alone(asked)
        self._log.sync(position)
        return answer

    def _write_alone(self, asked: Request) -> CommandAnswer:
        with self._lock:
            [answer] = self._ready_replica().write_requests([asked])
            position = self._replica.position
        if answer.settled:
            self._log.sync(position)
        return answer

    def _serve(self, publications: PublicationList, asked: Request) -> CommandAnswer:
        """Our own request and all that is on the list."""
        publications.drop()  # before it is written: from now on nobody else may do it
        self._replica.sought = 0
        requests = publications.take()
        return self._serve_all(publications, asked, requests) if requests else self._write_alone(asked)

    def _serve_all(self, publications: PublicationList, asked: Request, taken: Sequence[PublishedRequest]) -> CommandAnswer:
        requests, entries = list[PublishedRequest](), [asked]
        for request in taken:  # one that can't be read is of a newer version: its owner is told to see for itself
            with contextlib.suppress(UnknownFormat):
                records = decode(request.text)
                if records and type(records[-1]) is Pop:
                    entries.append((request.text, records))
                    requests.append(request)
        with self._lock:
            answers = self._ready_replica().write_requests(entries)
            position = self._replica.position
        late = list[tuple[PublishedRequest, CommandAnswer]]()
        for request, answer in zip(requests, answers[1:], strict=True):
            if answer.settled:
                late.append((request, answer))
            else:
                publications.reply(request, encode_answer(answer))
        if late or answers[0].settled:
            self._log.sync(position)
        for request, answer in late:
            publications.reply(request, encode_answer(answer))
        return answers[0]

    def _leave_list(self) -> None:
        """Publish no more requests; returns when the one under way is answered."""
        mine = (threading.get_ident(),)
        while self._publisher.setdefault(0, mine) != mine:
            time.sleep(CLOSE_PAUSE_SECONDS)
        publications, self._list = self._list, None
        if publications is None:
            return
        if self._replica.sought:
            publications.withdraw()
        if publications.has_company():
            try:
                if publications.begin():
                    self._replica.hand_over()
            finally:
                publications.end()

    # --- the log, with the lock held --------------------------------------------------------------------------------------

    def _ready_replica(self) -> Replica:
        """The copy of the state."""
        self._replica.check_open()
        return self._replica.ready()

    def _current_replica(self) -> Replica:
        """The same, as of now, with everything ended that is over."""
        replica = self._ready_replica()
        replica.catch_up()
        while over := replica.over(replica.now()):
            replica.write(over)
        return replica

    def _write_durably(self, records: Sequence[Record], keep_bytes: int = 0) -> list[Effects]:
        with self._lock:
            effects = self._ready_replica().write(records, keep_bytes)
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
            self._ready_replica()
        self._replica.relieve(len(encode(puts)))


def _tokens(settlements: Sequence[Settlement], answer: CommandAnswer) -> list[str | None]:
    """The answers to settlements."""
    return [
        (one.token if one.kind == EXTEND else "") if done else None
        for one, done in zip(settlements, answer.settled, strict=True)
    ]
