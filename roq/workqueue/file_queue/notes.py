"""What is known beside the task files, in meta/: who leases what, and why a task failed or died.

    meta/worker--{host}--{process}--{nonce}     one line per lease this process got: the task file's name at that time
    meta/{id}                                   JSON: the last error; for a dead letter also its attempts

Only `peek` reads them; nothing is lost with them but explanations. Dead letters are task files taken out of the queue, each
with such a note. The note is durable before the task leaves the queue; a kill in between leaves a note too early, which is
harmless.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress

import msgspec

from roq.errors import CallError
from roq.runtime.files import DISK
from roq.workqueue.file_queue.directory import TaskDirectory
from roq.workqueue.file_queue.folder import Unreadable, read, write_open
from roq.workqueue.file_queue.names import ID, Name

logger = logging.getLogger(__name__)
_WORKER = "worker--"
WORKER_FILE_BYTES = 1 << 20  # then it is begun anew with the leases still held
WORKER_FILE_SECONDS = 7 * 86_400.0  # a file not written for so long is removed


class Note(msgspec.Struct, frozen=True):
    """Why a task failed, and how often it had been leased."""

    error: str = ""
    attempts: int = 0


class Notes:
    """Of one folder, seen by one open queue."""

    def __init__(self, folder: str, temporary: str) -> None:
        self._folder, self._temporary = folder, temporary
        nonce = secrets.token_hex(4)
        self._path = f"{folder}/{_WORKER}{socket.gethostname()}--{os.getpid()}--{nonce}"
        self._fd: int | None = None
        self._held: dict[str, tuple[str, int]] = {}  # id -> name and attempt
        self._size = 0
        self._lock = threading.Lock()

    # --- errors -------------------------------------------------------------------------------------------------------

    def write(self, id: str, note: Note) -> None:
        """Durable on return."""
        temporary = f"{self._temporary}/{id}-{secrets.token_hex(4)}"
        DISK.write_file(f"{self._folder}/{id}", msgspec.json.encode(note), temporary)

    def read(self, id: str) -> Note:
        """An empty one if there is none."""
        try:
            return msgspec.json.decode(read(f"{self._folder}/{id}"), type=Note)
        except (FileNotFoundError, Unreadable, msgspec.DecodeError):
            return Note()

    def forget(self, ids: Iterable[str]) -> None:
        """The tasks are gone."""
        for id in ids:
            DISK.remove(f"{self._folder}/{id}")

    def ids(self) -> list[str]:
        """Of every task with a note."""
        return [text for text in os.listdir(self._folder) if ID.fullmatch(text)]

    # --- who leases ---------------------------------------------------------------------------------------------------

    def hold(self, leases: Sequence[tuple[str, str, int]]) -> None:
        """This process got these leases: (id, name, attempt)."""
        with self._lock:
            try:
                if self._fd is None or self._size > WORKER_FILE_BYTES:
                    self._begin()
                assert self._fd is not None
                self._held.update((id, (name, attempt)) for id, name, attempt in leases)
                self._write(name for _, name, _ in leases)
            except OSError as error:
                logger.warning("%s can't be written: nobody will see what this process leases: %s", self._path, error)

    def drop(self, id: str) -> bool:
        """A lease of this process is over. Whether the task may have a note: at its first attempt it has none."""
        return self._held.pop(id, ("", 0))[1] != 1

    def holders(self) -> dict[str, str]:
        """Task file's name -> "host process" of who leased it."""
        found: dict[str, str] = {}
        for text in os.listdir(self._folder):
            if not text.startswith(_WORKER):
                continue
            path = f"{self._folder}/{text}"
            with suppress(FileNotFoundError, Unreadable):
                if time.time() - os.stat(path).st_mtime > WORKER_FILE_SECONDS:
                    DISK.remove(path)
                    continue
                host, process = text.removeprefix(_WORKER).rsplit("--", 2)[:2]
                found.update(dict.fromkeys(read(path).decode("ascii", "replace").split(), f"{host} {process}"))
        return found

    def close(self) -> None:
        """Remove the list of leases."""
        with self._lock:
            if self._fd is not None:
                os.close(self._fd)
                self._fd = None
                with suppress(OSError):
                    DISK.remove(self._path)

    def _begin(self) -> None:
        if self._fd is None:
            self._fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        os.ftruncate(self._fd, 0)
        self._size = 0
        now = time.time()
        self._held = {id: held for id, held in self._held.items() if int(held[0].partition("--")[0]) > now}
        self._write([name for name, _ in self._held.values()])

    def _write(self, lines: Iterable[str]) -> None:
        data = "".join(f"{line}\n" for line in lines).encode()
        if data and self._fd is not None:
            write_open(self._fd, data)
            self._size += len(data)


class DeadLetters:
    """Of one folder. directories: by suffix."""

    def __init__(self, folder: str, directories: Mapping[str, TaskDirectory], notes: Notes) -> None:
        self._folder, self._directories, self._notes = folder, directories, notes

    def bury(self, name: Name, note: Note) -> bool:
        """Durable, but for the queue's folder. False: the lease was lost."""
        if not os.path.exists(f"{self._directories[name.suffix].queue}/{name}"):
            return False
        self._notes.write(name.id, note)
        buried = self._directories[name.suffix].take_out(name, f"{self._folder}/{name.id}{name.suffix}")
        DISK.sync_folder(self._folder)
        return buried

    def all(self) -> list[tuple[str, str]]:
        """(id, suffix) of all of them."""
        split = (os.path.splitext(text) for text in os.listdir(self._folder))
        return [(id, suffix) for id, suffix in split if suffix in self._directories and ID.fullmatch(id)]

    def exists(self, id: str) -> bool:
        """Whether the task is dead."""
        return any(os.path.exists(f"{self._folder}/{id}{suffix}") for suffix in self._directories)

    def path(self, id: str, suffix: str) -> str:
        """Its file."""
        return f"{self._folder}/{id}{suffix}"

    def requeue(self, ids: Sequence[str] | None) -> list[tuple[str, str]]:
        """Put these back as new, None: all; (id, suffix) of those that were dead. Durable."""
        back = [
            (id, suffix) for id, suffix in self._chosen(ids) if self._directories[suffix].put_back(self.path(id, suffix), id)
        ]
        for suffix in {suffix for _, suffix in back}:
            DISK.sync_folder(self._directories[suffix].queue)
        DISK.sync_folder(self._folder)
        self._notes.forget(id for id, _ in back)
        return back

    def remove(self, ids: Sequence[str] | None) -> int:
        """Forget these, None: all; how many there were. Durable."""
        gone = [id for id, suffix in self._chosen(ids) if DISK.remove(self.path(id, suffix))]
        DISK.sync_folder(self._folder)
        self._notes.forget(gone)
        return len(gone)

    def _chosen(self, ids: Sequence[str] | None) -> Iterator[tuple[str, str]]:
        if ids is None:
            yield from self.all()
            return
        wrong = next((id for id in ids if not ID.fullmatch(id)), None)
        if wrong is not None:
            raise CallError(f"{wrong!r} is not the id of a task of this kind of work queue")
        for id in ids:
            yield from ((id, suffix) for suffix in self._directories if os.path.exists(self.path(id, suffix)))
