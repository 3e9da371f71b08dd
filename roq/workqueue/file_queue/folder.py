"""The folder of a work queue: what lies where, its settings, and what crashes left behind.

queue/, movement/, insertions, completions      exactly as python-task-queue 2.14 keeps them (`fq://`), nothing else in them
data/queue/, data/movement/                     the same for payloads that program could not run
dead/{id}.json, dead/{id}.data                  dead letters; why they died is in meta/
meta/                                           who leases what, errors (notes.py)
dedup/                                          keys put lately (dedup.py)
counting/                                       calls under way that will be counted (counters.py)
tmp/                                            files being written
roq.json                                        the version and the settings
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import threading
import time
from collections.abc import Sequence
from contextlib import suppress

import msgspec

from roq.errors import Closed, UnknownFormat, WorkQueueConflict
from roq.runtime.files import DISK
from roq.wire.work_queue import TaskSettings
from roq.workqueue.contract import Asked, conflict, of_new

VERSION = 3  # 1: 0.1, whose tasks have no checksum and which would take ours for a part of the payload; 2 never was
OPENED = (1, VERSION)
LITTER_SECONDS = 3600.0  # what a live process would not leave unfinished for so long, whatever the clocks


class Mutexes:
    """One set per folder and process, however often it is opened: `lockf` does not keep threads apart."""

    def __init__(self) -> None:
        self.tasks, self.counters, self.keys = threading.Lock(), threading.Lock(), threading.Lock()


_mutexes: dict[tuple[int, int], Mutexes] = {}  # by device and inode
_mutexes_lock = threading.Lock()


class _Kept(msgspec.Struct, frozen=True):
    version: int
    settings: TaskSettings


class Folder:
    """Makes what is missing. Raises OSError, UnknownFormat, or WorkQueueConflict if it was made with other settings."""

    def __init__(self, path: str, asked: Asked) -> None:
        self.path = os.path.abspath(os.path.expanduser(path))
        self.data, self.dead, self.meta = f"{self.path}/data", f"{self.path}/dead", f"{self.path}/meta"
        self.dedup, self.temporary = f"{self.path}/dedup", f"{self.path}/tmp"
        for part in (self.data, self.dead, self.meta, self.dedup, self.temporary):
            os.makedirs(part, exist_ok=True)
        self.settings = self._agree(asked)
        found = os.stat(self.path)
        with _mutexes_lock:
            self.mutexes = _mutexes.setdefault((found.st_dev, found.st_ino), Mutexes())

    def _agree(self, asked: Asked) -> TaskSettings:
        """The kept settings; whoever comes first keeps his."""
        path = f"{self.path}/roq.json"
        if not os.path.exists(path):
            temporary = f"{self.temporary}/settings-{secrets.token_hex(8)}"
            try:
                DISK.create_files([(temporary, msgspec.json.encode(_Kept(VERSION, of_new(asked))))])
                with suppress(FileExistsError):
                    os.link(temporary, path)
            finally:
                remove_quietly([temporary])
            DISK.sync_folder(self.path)
        try:
            kept = msgspec.json.decode(read(path), type=_Kept)
        except msgspec.DecodeError as error:
            raise UnknownFormat(f"{path} is not what this version writes: {error}") from error
        if kept.version not in OPENED:
            raise UnknownFormat(f"{path} is of version {kept.version}, this program knows {' and '.join(map(str, OPENED))}")
        if differing := conflict(asked, kept.settings):
            raise WorkQueueConflict(f"the work queue {self.path} exists with {differing}")
        self._version = kept.version
        return kept.settings

    def seal(self) -> None:
        """Tasks with checksums are put from now on: programs that don't know them can't open the folder any more."""
        if self._version != VERSION:
            data = msgspec.json.encode(_Kept(VERSION, self.settings))
            DISK.write_file(f"{self.path}/roq.json", data, f"{self.temporary}/settings-{secrets.token_hex(8)}")
            self._version = VERSION

    def sweep(self) -> None:
        """Remove what killed processes left in tmp/ long ago."""
        _sweep(self.temporary)

    def sweep_movement(self, queue: str, movement: str) -> None:
        """Remove movement files of an empty queue: their tasks are gone. Those of a put under way are younger."""
        with os.scandir(queue) as entries:
            empty = next(entries, None) is None
        if empty:
            _sweep(movement)


def _sweep(folder: str) -> None:
    oldest = time.time() - LITTER_SECONDS
    with os.scandir(folder) as entries:
        for entry in entries:
            with suppress(OSError):
                if entry.stat(follow_symlinks=False).st_mtime < oldest:
                    os.unlink(entry.path)


# --- files: nothing here relies on two hosts' appends being kept apart, appends happen under a lock -------------------

READ_BYTES = 65_536
_BUSY = (errno.EACCES, errno.EAGAIN)
_UNREADABLE = (errno.EIO, errno.EBADMSG, errno.EUCLEAN, errno.ENODATA, errno.EILSEQ)  # what file systems say of bad sectors


class Unreadable(OSError):
    """The medium does not give back what was written to this file; other files may be well."""


def read(path: str) -> bytes:
    """The whole file. Raises Unreadable."""
    fd = os.open(path, os.O_RDONLY)
    try:
        return read_open(fd, path)
    finally:
        os.close(fd)


def modified_ms(path: str) -> int:
    """Milliseconds since 1970."""
    return os.stat(path).st_mtime_ns // 1_000_000


def read_open(fd: int, path: str) -> bytes:
    """From the file's position to its end. Raises Unreadable."""
    try:
        data = os.read(fd, READ_BYTES)
        if len(data) < READ_BYTES:
            return data
        parts = [data]
        while part := os.read(fd, READ_BYTES):
            parts.append(part)
    except OSError as error:
        if error.errno in _UNREADABLE:
            raise Unreadable(error.errno, error.strerror, path) from error
        raise
    return b"".join(parts)


def write_open(fd: int, data: bytes) -> None:
    """All of it."""
    written = os.write(fd, data)
    while written < len(data):
        written += os.write(fd, data[written:])


def create(path: str, data: bytes) -> None:
    """A new file; not durable yet."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        write_open(fd, data)
    finally:
        os.close(fd)


def remove_quietly(paths: Sequence[str]) -> None:
    """After an error: what can't be removed is litter and swept later."""
    for path in paths:
        with suppress(OSError):
            os.unlink(path)


def rename(source: str, target: str) -> bool:
    """False if the source is gone. Names are never used twice here, so a target that exists means the rename did happen: a
    network file system may have sent it again and answer to the second one."""
    try:
        os.rename(source, target)
    except FileNotFoundError:
        return os.path.exists(target) and not os.path.exists(source)
    return True


def try_lock(fd: int) -> bool:
    """The whole file's exclusive lock (`lockf`, held by the process: another thread needs a mutex of its own)."""
    try:
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _BUSY:
            return False
        raise
    return True


def check_open(*, closed: bool) -> None:
    """Raises Closed."""
    if closed:
        raise Closed("the work queue was closed")
