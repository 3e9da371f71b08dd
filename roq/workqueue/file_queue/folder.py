"""The folder of a work queue: what lies where, its settings, and what crashes left behind.

queue/, movement/, insertions, completions      exactly as python-task-queue 2.14 keeps them (`fq://`), nothing else in them
data/queue/, data/movement/                     the same for payloads that program could not run
dead/{id}.json, dead/{id}.data                  dead letters; why they died is in meta/
meta/                                           who leases what, errors (notes.py)
dedup/                                          keys put lately (dedup.py)
counting/                                       calls under way that will be counted (counting.py)
tmp/                                            files being written
roq.json                                        the version and the settings
"""

from __future__ import annotations

import os
import secrets
import threading
import time
from contextlib import suppress

import msgspec

from roq.errors import UnknownFormat, WorkQueueConflict
from roq.runtime.files import DISK
from roq.wire.work_queue import TaskSettings
from roq.workqueue.contract import Asked, conflict, of_new
from roq.workqueue.file_queue.storage import read, remove_quietly

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
