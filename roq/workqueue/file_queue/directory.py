"""One pair of folders, queue/ and movement/: every change of one task, each safe to be killed in at any step.

    insert   tmp/ files durable, then movement/ files, then renamed into queue/: visible only when whole
    move     under the movement file's lock: append the new name, rename. Lease, extension and release are moves.
    ack      unlink the very name the lease gave: a later lease has another name, so an old token finds nothing

A task is what its file in queue/ says; a movement file without one is litter, a name in it that never was is harmless.
The lock is `lockf` as python-task-queue takes it, and a mutex for the threads of this process, to which `lockf` is blind. A
process that dies lets go of both. A lease is not synced: who loses power has no lease left to keep.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NamedTuple

from roq.errors import StorageFailed
from roq.runtime.files import DISK
from roq.workqueue.file_queue import names
from roq.workqueue.file_queue.folder import Unreadable, create, read_open, remove_quietly, rename, try_lock, write_open
from roq.workqueue.file_queue.names import Name, Why

logger = logging.getLogger(__name__)
INSERT_GRACE_SECONDS = 5.0  # python-task-queue makes the task file first and the movement file right after
LOCK_SECONDS = 2.0  # to wait for a movement file's lock; its holders keep it for microseconds
_LOCK_RETRY_SECONDS = 0.002


class NewFile(NamedTuple):
    """A task to insert."""

    name: Name
    content: bytes


class LeasedName(NamedTuple):
    """The new name, and the leases so far, this one included."""

    name: Name
    attempts: int


class AttemptsSpent(NamedTuple):
    """The task was leased as often as it may be."""

    attempts: int


class Busy(Exception):
    """Another process has the movement file's lock."""


class TaskDirectory:
    """The tasks of one suffix. mutex: one per folder and process. attempts_max: of the queue, 0 for no limit."""

    def __init__(self, folder: str, temporary: str, suffix: str, mutex: threading.Lock, attempts_max: int) -> None:
        self.queue, self.movement = f"{folder}/queue", f"{folder}/movement"
        self.suffix = suffix
        self._temporary = temporary
        self._mutex = mutex
        self._attempts_max = attempts_max
        for path in (self.queue, self.movement):
            os.makedirs(path, exist_ok=True)

    def insert(self, files: Sequence[NewFile], begun: Callable[[list[str]], None]) -> None:
        """All of them durably, or none and an OSError (but those a worker has already leased). begun: called with the files
        that are gone when their tasks are in the queue."""
        temporary = [f"{self._temporary}/{file.name.id}" for file in files]
        movements = [f"{self.movement}/{file.name.id}" for file in files]
        targets = [f"{self.queue}/{file.name}" for file in files]
        try:
            DISK.create_files([(path, file.content) for path, file in zip(temporary, files, strict=True)])
            begun(temporary)
            for path, file in zip(movements, files, strict=True):
                create(path, f"{file.name}\n".encode())
            for path, target in zip(temporary, targets, strict=True):
                os.rename(path, target)
            DISK.sync_folder(self.movement)
            DISK.sync_folder(self.queue)
        except OSError:
            remove_quietly([*targets, *temporary, *movements])
            raise

    def withdraw(self, files: Sequence[NewFile]) -> None:
        """Undo an insertion, as far as nobody leased the tasks."""
        remove_quietly([f"{self.queue}/{file.name}" for file in files])
        remove_quietly([f"{self.movement}/{file.name.id}" for file in files])

    def lease(self, name: Name, due: int) -> LeasedName | AttemptsSpent | None:
        """Lease the task until `due` or a little later. None: another has it. Raises Busy."""
        return self._move(name, Why.LEASED, due, 1)

    def move(self, name: Name, why: Why, due: int, step: int) -> LeasedName | None:
        """Extend a lease or end it. step: seconds to go from `due` to a name the task never had. None: the lease was lost.
        Raises StorageFailed if the movement file stays locked."""
        deadline = time.monotonic() + LOCK_SECONDS
        while True:
            try:
                moved = self._move(name, why, due, step)
            except Busy as error:
                if time.monotonic() > deadline:
                    raise StorageFailed(f"{self.movement}/{name.id} stays locked by another process") from error
                time.sleep(_LOCK_RETRY_SECONDS)
                continue
            return moved if isinstance(moved, LeasedName) else None

    def _move(self, name: Name, why: Why, due: int, step: int) -> LeasedName | AttemptsSpent | None:
        with self._mutex:
            fd = self._open_movement(name)
            if fd is None:
                return None
            try:
                if not try_lock(fd):
                    raise Busy
                before = read_open(fd, f"{self.movement}/{name.id}")
                attempts = names.attempts(names.parse_history(before)) if before.count(b"\n") > 1 else 0
                leases = why is Why.LEASED
                if leases and 0 < self._attempts_max <= attempts and name.is_lease:
                    return AttemptsSpent(attempts)
                new = names.unused(Name(why, due, name.id, name.suffix), before, step)
                self._append(fd, before, new)
                if rename(f"{self.queue}/{name}", f"{self.queue}/{new}"):
                    return LeasedName(new, attempts + leases)
                os.ftruncate(fd, len(before))  # what was not to be leaves no trace
                return None
            finally:
                os.close(fd)

    @staticmethod
    def _append(fd: int, before: bytes, name: Name) -> None:
        """One more line; on a full disk none."""
        torn = before and not before.endswith(b"\n")
        try:
            write_open(fd, (b"\n" if torn else b"") + f"{name}\n".encode())
        except OSError:
            with suppress(OSError):
                os.ftruncate(fd, len(before))
            raise

    def _open_movement(self, name: Name) -> int | None:
        """Never creates the file for a task that is gone. One that has none, after a crash or power loss, gets it."""
        path = f"{self.movement}/{name.id}"
        try:
            return os.open(path, os.O_RDWR | os.O_APPEND)
        except FileNotFoundError:
            pass
        try:
            age = time.time() - os.stat(f"{self.queue}/{name}").st_mtime
        except FileNotFoundError:
            return None
        if 0 <= age < INSERT_GRACE_SECONDS:
            return None  # being inserted by python-task-queue
        fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
        if os.fstat(fd).st_size == 0:
            write_open(fd, f"{name}\n".encode())
        return fd

    def ack(self, name: Name, hold: Callable[[str], None] | None) -> bool:
        """Remove the task; not synced yet. hold: called for each file right before. False: the lease was lost."""
        task, movement = f"{self.queue}/{name}", f"{self.movement}/{name.id}"
        if hold is not None:
            hold(task)
            hold(movement)
        if not DISK.remove(task):
            return self._acked_before(name)
        DISK.remove(movement)
        return True

    def _acked_before(self, name: Name) -> bool:
        """A network file system may send an unlink again and answer to the second one. If the task is gone while this lease
        is still the last thing that happened to it, nobody else removed it."""
        history = self.history(name.id)
        if not history or history[-1] != name or os.path.exists(f"{self.queue}/{name}"):
            return False
        DISK.remove(f"{self.movement}/{name.id}")
        return True

    def history(self, id: str) -> list[Name]:
        """Every name the task had; empty if it is gone, or its file can't be read. Takes the mutex: closing the file would drop
        another thread's lock."""
        with self._mutex:
            try:
                fd = os.open(f"{self.movement}/{id}", os.O_RDONLY)
            except FileNotFoundError:
                return []
            try:
                return names.parse_history(read_open(fd, f"{self.movement}/{id}"))
            except Unreadable as error:
                logger.warning("the past of task %s is not known: %s", id, error)
                return []
            finally:
                os.close(fd)

    def find(self, id: str) -> Name | None:
        """The task's current name, None if it is gone."""
        for name in reversed(self.history(id)):
            if os.path.exists(f"{self.queue}/{name}"):
                return name
        return None

    def take_out(self, name: Name, target: str) -> bool:
        """Move the task's file out of the queue. False: the lease was lost."""
        if not rename(f"{self.queue}/{name}", target):
            return False
        DISK.remove(f"{self.movement}/{name.id}")
        return True

    def put_back(self, source: str, id: str) -> bool:
        """Bring a task's file back as if it were new. False: it is gone."""
        name = Name(Why.LEASED, 0, id, self.suffix)
        with self._mutex:
            fd = os.open(f"{self.movement}/{id}", os.O_RDWR | os.O_CREAT, 0o666)
            try:
                if not try_lock(fd):
                    return False
                if not os.path.exists(source):
                    if os.fstat(fd).st_size == 0:
                        DISK.remove(f"{self.movement}/{id}")
                    return False
                os.ftruncate(fd, 0)
                write_open(fd, f"{name}\n".encode())
                return rename(source, f"{self.queue}/{name}")
            finally:
                os.close(fd)

    def remove_all(self) -> int:
        """Remove every task; how many. What is no task's file stays."""
        count = 0
        for text in os.listdir(self.queue):
            if names.parse(text) is not None:
                count += DISK.remove(f"{self.queue}/{text}")
        for text in os.listdir(self.movement):
            if names.ID.fullmatch(text):
                DISK.remove(f"{self.movement}/{text}")
        DISK.sync_folder(self.queue)
        return count
