"""Puts that may be repeated: tasks with given numbers, each inserted once, however often whoever puts them is killed.

    {folder}/{work}/{number}          the files of one put, prepared durably: named as they will be in the queue
    {folder}/{work}/{number}.done     all of them are in the queue

A prepared file is inserted by renaming it, so one that is not there any more was inserted, even if its task is done since.
Two who repeat the same put at the same time take each file once between them. Not covered: who decides what is put.
"""

from __future__ import annotations

import hashlib
import math
import os
import secrets
import shutil
import time
from collections.abc import Sequence
from contextlib import suppress
from urllib.parse import quote

from roq.runtime.files import DISK, storage_errors
from roq.wire.task import NewTask
from roq.workqueue.contract import check_put
from roq.workqueue.file_queue import names
from roq.workqueue.file_queue.counters import INSERTED, Calls, CounterFiles
from roq.workqueue.file_queue.dedup import Dedup
from roq.workqueue.file_queue.directory import TaskDirectory
from roq.workqueue.file_queue.folder import Folder, create, rename
from roq.workqueue.file_queue.names import DATA, JSON, Name, Why

MARK_BYTES = 6


class FilePublication:
    """Of one work queue's folder, which exists. work: a folder in it. job: whose numbers they are. decided: Unix milliseconds,
    always the same for the same numbers. trust_functions: see names.check_functions."""

    def __init__(self, folder: str, work: str, job: str, decided: int, *, trust_functions: bool = False) -> None:
        self._trust_functions = trust_functions
        with storage_errors(folder):
            place = Folder(folder, {})
            self._work = f"{place.path}/{work}"
            os.makedirs(self._work, exist_ok=True)
            mutex, limit = place.mutexes.tasks, place.settings.max_attempts
            self._directories = {
                JSON: TaskDirectory(place.path, place.temporary, JSON, mutex, limit),
                DATA: TaskDirectory(place.data, place.temporary, DATA, mutex, limit),
            }
        self._place, self._job, self._decided = place, job, decided
        self._counters = CounterFiles(place.path, place.mutexes.counters)
        self._calls = Calls(place.path, self._directories, self._counters)
        self._dedup = Dedup(place.dedup, place.temporary, place.mutexes.keys, time.time, self._exists)

    def put(self, first: int, tasks: Sequence[NewTask]) -> None:
        """Tasks first, first + 1, …: durable and in the queue on return, those put before not again."""
        check_put(tasks, self._place.settings)
        if not self._trust_functions:
            names.check_functions(task.payload for task in tasks)
        done, prepared = f"{self._work}/{first}.done", f"{self._work}/{first}"
        with storage_errors(self._place.path):
            if not os.path.exists(done):
                self._place.seal()
                if not os.path.isdir(prepared):
                    self._prepare(prepared, first, tasks)
                self._insert(prepared, first, tasks)
                with suppress(FileExistsError):
                    DISK.create_files([(done, b"")])
                DISK.sync_folder(self._work)
            shutil.rmtree(prepared, ignore_errors=True)

    def end(self) -> None:
        """Forget what was put: nobody will repeat it."""
        shutil.rmtree(self._work, ignore_errors=True)

    def close(self) -> None:
        """Let go."""
        self._calls.close()

    def _names(self, first: int, tasks: Sequence[NewTask]) -> list[str]:
        """The tasks' ids."""
        made: list[str] = []
        for number, task in enumerate(tasks, first):
            mark = hashlib.sha256(f"{self._job} {number}".encode()).digest()[:MARK_BYTES]
            made.append(names.numbered(self._decided, number & 0xFFFF_FFFF, task.priority, mark))
        return made

    def _prepare(self, prepared: str, first: int, tasks: Sequence[NewTask]) -> None:
        temporary = f"{prepared}.{secrets.token_hex(4)}"
        os.mkdir(temporary)
        now, files = time.time(), list[tuple[str, bytes]]()
        for task, id in zip(tasks, self._names(first, tasks), strict=True):
            suffix = names.suffix(task.payload)
            why, due = (Why.WAITING, math.ceil(now + task.delay_seconds)) if task.delay_seconds else (Why.LEASED, 0)
            data = names.encode(task.payload, suffix, id, self._place.path)
            files.append((f"{temporary}/{Name(why, due, id, suffix)}", data))
        DISK.create_files(files)
        DISK.sync_folder(temporary)
        try:
            os.rename(temporary, prepared)
        except OSError:  # another prepared the same
            shutil.rmtree(temporary)
        DISK.sync_folder(self._work)

    def _insert(self, prepared: str, first: int, tasks: Sequence[NewTask]) -> None:
        ids = map(names.unsealed, self._names(first, tasks))  # 0.1 may have prepared them
        keys = {id: task.dedup_key for id, task in zip(ids, tasks, strict=True) if task.dedup_key}
        if not keys:
            return self._move(prepared)
        with self._dedup.locked():
            fresh: dict[str, str] = {}
            for text in sorted(os.listdir(prepared)):
                name = names.parse(text)
                if name is None or names.unsealed(name.id) not in keys:
                    continue
                key = keys[names.unsealed(name.id)]
                known = fresh.get(key) or self._dedup.find(key)
                if known is not None and known != name.id:
                    os.unlink(f"{prepared}/{text}")
                else:
                    fresh[key] = name.id
            self._dedup.begin(list(fresh.items()), time.time() + self._place.settings.dedup_seconds)
            self._move(prepared)
            self._dedup.end(list(fresh.values()))
        return None

    def _move(self, prepared: str) -> None:
        listed = ((text, names.parse(text)) for text in sorted(os.listdir(prepared)))
        found = [(f"{prepared}/{text}", name) for text, name in listed if name is not None]
        call = self._calls.begin()
        if call is not None:
            call.write("put", [quote(path.removeprefix(f"{self._place.path}/")) for path, _ in found])
        try:
            count = sum(self._move_one(path, name) for path, name in found)
            for directory in self._directories.values():
                DISK.sync_folder(directory.movement)
                DISK.sync_folder(directory.queue)
            self._counters.add(INSERTED, count, call)
        except BaseException:
            if call is not None:
                call.abandon()
            raise
        self._calls.end(call)
        self._counters.sync()

    def _move_one(self, path: str, name: Name) -> bool:
        """False: another has moved it."""
        directory = self._directories[name.suffix]
        with suppress(FileExistsError):
            create(f"{directory.movement}/{name.id}", f"{name}\n".encode())
        return rename(path, f"{directory.queue}/{name}")

    def _exists(self, id: str) -> bool:
        return any(
            os.path.exists(f"{self._place.dead}/{id}{directory.suffix}") or directory.find(id)
            for directory in self._directories.values()
        )
