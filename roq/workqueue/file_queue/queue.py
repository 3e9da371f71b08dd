"""file: a work queue in a folder that any number of programs and hosts share, python-task-queue 2.14 among them.

One task's journey: `put` writes it in tmp/, syncs it and renames it into queue/ (directory.py); `lease` takes the next
candidate (candidates.py) and renames its file, the new name being the lease's token (names.py); `settle` with an ack unlinks
that very name. Payloads that program can run lie where it finds them, all others beside (names.py, folder.py).

Times are whole seconds on disk: leases and delays end up to a second late, never early. All hosts' clocks should agree; if
not, leases end early or late by the difference, and an old token is still refused. Not synced: leases (after a power loss there
is no holder) and the number of attempts; late: the counters.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence

from roq.errors import CallError
from roq.runtime.files import DISK, FULL, storage_errors
from roq.wire.task import ACK, REJECT, RELEASE, LeasedTask, NewTask, Settlement, Status, TaskState, TaskView
from roq.wire.work_queue import TaskSettings
from roq.workqueue.contract import Asked, RoundTrip, asked_for, check_lease, check_peek, check_put
from roq.workqueue.file_queue import names
from roq.workqueue.file_queue.aftermath import Aftermath, is_local
from roq.workqueue.file_queue.candidates import Candidates
from roq.workqueue.file_queue.counters import COMPLETED, INSERTED, Calls, CountedCall, CounterFiles
from roq.workqueue.file_queue.dedup import Dedup
from roq.workqueue.file_queue.directory import AttemptsSpent, Busy, NewFile, TaskDirectory
from roq.workqueue.file_queue.folder import Folder, Unreadable, check_open, modified_ms, read
from roq.workqueue.file_queue.names import DATA, JSON, Name, Why
from roq.workqueue.file_queue.notes import DeadLetters, Note, Notes
from roq.workqueue.file_queue.snapshot import FolderSnapshot, Listing, damaged

logger = logging.getLogger(__name__)
LISTINGS = 2  # per lease that does not wait: what stays locked by others must not make it list for ever
POLL_SECONDS = (0.002, 0.05)  # first and longest pause of a lease that waits; other hosts can't wake it
TORN_SECONDS = 60.0  # a file that is no task after so long never will be
TORN_RETRY_SECONDS = 5


class FileQueue:
    """A Backend. Opening makes what is missing in the folder; a forked child opens its own.

    settings: those that are asked for; None takes what the folder was made with.
    ack_sync_seconds: above 0, an Ack returns when the task is gone for every process, and is synced so much later at most: a
    power loss may bring back tasks acked just before. trust_functions: see names.check_functions. clock: Unix seconds.
    Raises WorkQueueConflict, UnknownFormat, StorageDenied, StorageFull or StorageFailed."""

    def __init__(
        self,
        folder: str | os.PathLike[str],
        settings: TaskSettings | Asked | None = None,
        ack_sync_seconds: float = 0.0,
        trust_functions: bool = False,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._trust_functions = trust_functions
        path = os.fspath(folder)
        with storage_errors(path):
            place = Folder(path, asked_for(settings))
            self._place, self.path, self.settings = place, place.path, place.settings
            mutexes = place.mutexes
            limit = place.settings.max_attempts
            self._directories = {
                JSON: TaskDirectory(place.path, place.temporary, JSON, mutexes.tasks, limit),
                DATA: TaskDirectory(place.data, place.temporary, DATA, mutexes.tasks, limit),
            }
            self._counters = CounterFiles(place.path, mutexes.counters)
            self._calls = Calls(place.path, self._directories, self._counters)
            self._calls.recover()  # before what tells of killed calls is swept
            place.sweep()
            for directory in self._directories.values():
                place.sweep_movement(directory.queue, directory.movement)
        self._clock = clock
        self._ids = names.IdMaker()
        self._candidates = Candidates([directory.queue for directory in self._directories.values()], clock)
        self._notes = Notes(place.meta, place.temporary)
        self._dead = DeadLetters(place.dead, self._directories, self._notes)
        self._dedup = Dedup(place.dedup, place.temporary, mutexes.keys, clock, self._exists)
        self._snapshot = FolderSnapshot(self._directories, self._dead, self._notes, clock)
        self._aftermath = Aftermath(self._counters, ack_sync_seconds)
        weakref.finalize(self, self._calls.close)  # also when the program ends without `close`
        weakref.finalize(self, self._aftermath.forsaken).atexit = False
        self._hold = self._aftermath.hold if is_local(self.path) else None
        self._late_sync = ack_sync_seconds > 0
        self._news = threading.Condition()  # something became leasable here, or this queue was closed
        self._closed = False

    # --- put ----------------------------------------------------------------------------------------------------------

    def put(self, tasks: Sequence[NewTask]) -> list[str]:
        """Store tasks durably, all or none; their ids. Raises InvalidConfiguration for a function that is not trusted."""
        check_open(closed=self._closed)
        check_put(tasks, self.settings)
        if not self._trust_functions:
            names.check_functions(task.payload for task in tasks)
        ids = self._ids.make(int(self._clock() * 1000), [task.priority for task in tasks])
        with storage_errors(self.path):
            if any(task.dedup_key for task in tasks):
                return self._put_with_keys(tasks, ids)
            self._insert(tasks, ids)
        return ids

    def _put_with_keys(self, tasks: Sequence[NewTask], ids: list[str]) -> list[str]:
        with self._dedup.locked():
            fresh: dict[str, str] = {}  # key -> id
            chosen: list[int] = []
            for place, task in enumerate(tasks):
                known = (fresh.get(task.dedup_key) or self._dedup.find(task.dedup_key)) if task.dedup_key else None
                if known is not None:
                    ids[place] = known
                    continue
                chosen.append(place)
                if task.dedup_key:
                    fresh[task.dedup_key] = ids[place]
            if fresh:
                self._dedup.begin(list(fresh.items()), self._clock() + self.settings.dedup_seconds)
            self._insert([tasks[place] for place in chosen], [ids[place] for place in chosen])
            if fresh:
                self._dedup.end(list(fresh.values()))
        return ids

    def _insert(self, tasks: Sequence[NewTask], ids: Sequence[str]) -> None:
        if not tasks:
            return
        try:
            self._insert_once(tasks, ids)
        except OSError as error:
            if error.errno not in FULL:
                raise
            self._aftermath.flush()  # what was acked may lie on the disk still
            self._insert_once(tasks, ids)

    def _insert_once(self, tasks: Sequence[NewTask], ids: Sequence[str]) -> None:
        self._place.seal()
        now = self._clock()
        files: dict[str, list[NewFile]] = {JSON: [], DATA: []}
        for task, id in zip(tasks, ids, strict=True):
            suffix = names.suffix(task.payload)
            why, due = (Why.WAITING, math.ceil(now + task.delay_seconds)) if task.delay_seconds else (Why.LEASED, 0)
            data = names.encode(task.payload, suffix, id, self.path)
            files[suffix].append(NewFile(Name(why, due, id, suffix), data))
        call = self._calls.begin()
        try:
            self._insert_files(files, call)
            if self._counters.add(INSERTED, len(tasks), call):
                self._aftermath.sync_counters_soon()
        finally:
            self._calls.end(call)
        self._tell(str(file.name) for part in files.values() for file in part if file.name.due == 0)

    def _insert_files(self, files: Mapping[str, Sequence[NewFile]], call: CountedCall | None) -> None:
        def begun(paths: Sequence[str]) -> None:
            if call is not None:
                call.write("put", [path.removeprefix(f"{self.path}/") for path in paths])

        if files[JSON]:
            self._directories[JSON].insert(files[JSON], begun)
        if files[DATA]:
            try:
                self._directories[DATA].insert(files[DATA], begun)
            except OSError:
                self._directories[JSON].withdraw(files[JSON])
                raise

    # --- lease --------------------------------------------------------------------------------------------------------

    def lease(self, seconds: float, count: int, wait_seconds: float, settle: Sequence[Settlement] = ()) -> RoundTrip:
        """First `settle`, then up to `count` tasks."""
        check_open(closed=self._closed)
        check_lease(seconds, count, wait_seconds)
        settled = self.settle(settle) if settle else []
        deadline = time.monotonic() + wait_seconds
        pause = POLL_SECONDS[0]
        while True:
            began = time.monotonic()
            with storage_errors(self.path):
                leases = self._lease(seconds, count)
            left = deadline - time.monotonic()
            if leases or left <= 0:
                return RoundTrip(settled, leases, began)
            with self._news:
                if not self._closed:
                    self._news.wait(min(left, pause, self._candidates.wait_seconds() + POLL_SECONDS[0]))
            check_open(closed=self._closed)
            pause = min(2 * pause, POLL_SECONDS[1])

    def _lease(self, seconds: float, count: int) -> list[LeasedTask[bytes]]:
        found: list[LeasedTask[bytes]] = []
        listings_max = self._candidates.listings + LISTINGS
        while len(found) < count and (text := self._candidates.take(listings_max)) is not None:
            name = names.parse(text)
            if name is None:
                continue
            leased = self._lease_one(name, seconds)
            self._candidates.tell(lost=leased is None)
            if leased is not None:
                found.append(leased)
        if found:
            self._notes.hold([(leased.id, leased.token, leased.attempt) for leased in found])
        return found

    def _lease_one(self, name: Name, seconds: float) -> LeasedTask[bytes] | None:
        directory = self._directories[name.suffix]
        try:
            moved = directory.lease(name, math.ceil(self._clock() + seconds))
        except Busy:
            return None
        except Unreadable as error:
            self._bury_damaged(name, damaged(str(error.filename), error), 0)
            return None
        if moved is None:
            return None
        if isinstance(moved, AttemptsSpent):
            self._bury(name, "", moved.attempts)
            return None
        try:
            data = read(f"{directory.queue}/{moved.name}")
            inserted = names.inserted_ms(name.id) or modified_ms(f"{directory.queue}/{moved.name}")
        except FileNotFoundError:
            return None  # purged
        except Unreadable as error:
            self._bury_damaged(moved.name, damaged(str(error.filename), error), moved.attempts)
            return None
        payload = names.decode(data, name.suffix, name.id)
        if payload is None:
            self._set_aside(moved.name, moved.attempts)
            return None
        priority = names.priority(name.id)
        return LeasedTask(name.id, str(moved.name), payload, moved.attempts, priority, inserted, 1000 * moved.name.due)

    def _set_aside(self, name: Name, attempts: int) -> None:
        """A file that is no task. Ours are complete when they come into the queue; another's may be under way, later it is a
        dead letter."""
        directory = self._directories[name.suffix]
        if names.is_sealed(name.id):
            self._bury_damaged(name, damaged(f"{directory.queue}/{name}"), attempts)
            return
        now = self._clock()
        if now - os.stat(f"{directory.queue}/{name}").st_mtime < TORN_SECONDS:
            directory.move(name, Why.WAITING, int(now) + TORN_RETRY_SECONDS, 1)
        else:
            self._bury(name, "the file is no task: cut short by a crash, or of another program", attempts)

    # --- settle -------------------------------------------------------------------------------------------------------

    def settle(self, settlements: Sequence[Settlement]) -> list[str | None]:
        """Per settlement: the token from now on, "" when the lease is over, None when it was lost before. Durable."""
        check_open(closed=self._closed)
        pairs = [(_name(one.token), one) for one in settlements]
        acks = [name for name, one in pairs if one.kind == ACK]
        call = self._calls.begin() if acks and not self._late_sync else None
        try:
            answers = self._settle_all(pairs, acks, call)
        except BaseException:  # a signal's handler may raise, too
            if call is not None:
                call.abandon()
            raise
        self._calls.end(call)
        return answers

    def _settle_all(self, pairs: list[tuple[Name, Settlement]], acks: list[Name], call: CountedCall | None) -> list[str | None]:
        answers: list[str | None] = []
        if call is not None:
            call.write("ack", acks)
        with storage_errors(self.path):
            for name, one in pairs:
                answers.append(self._settle(name, one) if name.is_lease else None)
            done = [(name, one) for (name, one), answer in zip(pairs, answers, strict=True) if answer is not None]
            acked = [name for name, one in done if one.kind == ACK]
            folders = {self._directories[name.suffix].queue for name, _ in done}
            late = self._late_sync and len(acked) == len(done)
            if not late:
                for folder in folders:
                    DISK.sync_folder(folder)
            self._notes.forget([name.id for name in acked if self._notes.drop(name.id)])
        if late:
            self._aftermath.add(len(acked), folders)
        elif acked:
            if self._counters.add(COMPLETED, len(acked), call):
                self._aftermath.sync_counters_soon()
            self._aftermath.add()
        return answers

    def _settle(self, name: Name, one: Settlement) -> str | None:
        directory = self._directories[name.suffix]
        if one.kind == ACK:
            return "" if directory.ack(name, self._hold) else None
        now, seconds = self._clock(), one.milliseconds / 1000
        if one.kind == RELEASE:
            return self._release(directory, name, now, seconds, one.error)
        if one.kind == REJECT:
            return "" if self._bury(name, one.error, names.attempts(directory.history(name.id))) else None
        moved = directory.move(name, Why.EXTENDED, math.ceil(now + seconds), 1)
        if moved is None:
            return None
        self._notes.hold([(name.id, str(moved.name), moved.attempts)])
        return str(moved.name)

    def _release(self, directory: TaskDirectory, name: Name, now: float, delay: float, error: str) -> str | None:
        if error:
            attempts = names.attempts(directory.history(name.id))
            if 0 < self.settings.max_attempts <= attempts:
                return "" if self._bury(name, error, attempts) else None
            if not os.path.exists(f"{directory.queue}/{name}"):
                return None
            self._notes.write(name.id, Note(error, attempts))
        due, step = (math.ceil(now + delay), 1) if delay else (int(now), -1)
        moved = directory.move(name, Why.WAITING, due, step)
        if moved is None:
            return None
        self._notes.drop(name.id)
        if not delay:
            self._tell([str(moved.name)])
        return ""

    def _bury_damaged(self, name: Name, damage: str, attempts: int) -> None:
        """A task whose payload nobody gets any more. Put aside at once, so that it holds up no other."""
        where = self._dead.path(name.id, name.suffix)
        if self._bury(name, f"{damage}; what is left of it is in {where}", attempts):
            DISK.sync_folder(self._directories[name.suffix].queue)
            logger.error("task %s is %s; it is a dead letter now, its file is %s", name.id, damage, where)

    def _bury(self, name: Name, error: str, attempts: int) -> bool:
        self._notes.drop(name.id)
        return self._dead.bury(name, Note(error or self._notes.read(name.id).error, attempts))

    # --- all tasks ----------------------------------------------------------------------------------------------------

    def release_all(self) -> int:
        """Make every leased and delayed task ready; how many."""
        check_open(closed=self._closed)
        count = 0
        with storage_errors(self.path):
            now = int(self._clock())
            for directory in self._directories.values():
                for text in names.split_due(os.listdir(directory.queue), now)[1]:
                    name = names.parse(text)
                    try:
                        count += name is not None and directory.move(name, Why.WAITING, now, -1) is not None
                    except Unreadable as error:
                        assert name is not None
                        self._bury_damaged(name, damaged(str(error.filename), error), 0)
                DISK.sync_folder(directory.queue)
        self._candidates.clear()
        self._tell(())
        return count

    def peek(self, state: TaskState, count: int) -> list[TaskView]:
        """The first tasks of a state."""
        check_open(closed=self._closed)
        check_peek(count)
        with storage_errors(self.path):
            return self._snapshot.peek(self._look(), state, count)

    def status(self) -> Status:
        """Counts, as of now. Exact but for tasks python-task-queue put with a delay: beyond 1,000 they count as leased."""
        check_open(closed=self._closed)
        with storage_errors(self.path):
            self._aftermath.flush()
            self._counters.settle()
            self._calls.recover()
            return self._snapshot.status(self._look(), self._counters.inserted, self._counters.completed)

    def purge(self) -> int:
        """Remove every task that is not dead; how many."""
        check_open(closed=self._closed)
        with storage_errors(self.path):
            count = sum(directory.remove_all() for directory in self._directories.values())
            self._notes.forget(id for id in self._notes.ids() if not self._dead.exists(id))
            with self._dedup.locked():
                self._dedup.clear()
        self._candidates.clear()
        return count

    def requeue_dead(self, ids: Sequence[str] | None) -> int:
        """Make dead letters ready again with attempts at 0; how many. Raises CallError for what is no id."""
        check_open(closed=self._closed)
        with storage_errors(self.path):
            back = self._dead.requeue(ids)
        self._tell(str(Name(Why.LEASED, 0, id, suffix)) for id, suffix in back)
        return len(back)

    def remove_dead(self, ids: Sequence[str] | None) -> int:
        """Forget dead letters; how many. Raises CallError for what is no id."""
        check_open(closed=self._closed)
        with storage_errors(self.path):
            return self._dead.remove(ids)

    def close(self) -> None:
        """Let go; a lease() that waits ends with Closed. Leases stay."""
        with self._news:
            self._closed = True
            self._news.notify_all()
        self._aftermath.close()
        self._calls.close()
        self._notes.close()

    def _look(self) -> Listing:
        """A listing in which the tasks whose last attempt is over are dead, though nobody tried to lease them yet."""
        look = self._snapshot.look()
        if self.settings.max_attempts:
            dead = {str(name) for name, attempts in self._snapshot.spent(look, self.settings.max_attempts)
                    if self._bury(name, "", attempts)}  # fmt: skip
            if dead:
                look = look._replace(ready=[text for text in look.ready if text not in dead])
        return look

    def _exists(self, id: str) -> bool:
        return self._dead.exists(id) or any(directory.find(id) is not None for directory in self._directories.values())

    def _tell(self, ready: Iterable[str]) -> None:
        """These became leasable by this process."""
        self._candidates.add(ready)
        with self._news:
            self._news.notify_all()


def _name(token: str) -> Name:
    """Raises CallError."""
    name = names.parse(token)
    if name is None:
        raise CallError(f"{token!r} is not the token of a lease of this kind of work queue")
    return name
