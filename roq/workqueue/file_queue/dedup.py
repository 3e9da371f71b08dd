"""The window in which a `dedup_key` put again is the same task: dedup/keys, a list that is only appended to under a lock.

    list {nonce}                            first line: another list has another one
    {expires} {sha256 of the key} {id}      written before the task is inserted
    done {id}                               written after

A key without `done` is of a put that was killed or failed in between: whoever finds it looks whether the task exists. A line
cut short by a crash is passed over. The list is written anew when most of it is over. Who has read a part reads on from there
only if it is still the same list: an inode's number may come back after two rewrites, so the first line must be the same, too.
Lists of 0.1 begin with a key, which is as good until they are written anew.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from roq.errors import StorageFailed
from roq.runtime.files import DISK
from roq.workqueue.file_queue.folder import read_open, try_lock, write_open

LOCK_SECONDS = 10.0  # to wait for other processes' puts with keys
_RETRY_SECONDS = 0.002
REWRITE_BYTES = 1 << 20  # of a list that is worth writing anew
DIGEST_BYTES = 16
FIRST_LINE_BYTES = 128  # of the longest first line, which is a key


class Key(NamedTuple):
    """A key's task."""

    id: str
    expires: float  # Unix seconds


class _List(NamedTuple):
    """What tells two lists apart."""

    inode: int
    first_line: bytes


NO_LIST = _List(0, b"")


def digest(key: str) -> str:
    """What stands in the list for a key."""
    return hashlib.sha256(key.encode()).hexdigest()[: 2 * DIGEST_BYTES]


class Dedup:
    """Of one folder. mutex: of this process. clock: Unix seconds. exists: whether a task is in the queue or dead."""

    def __init__(
        self, folder: str, temporary: str, mutex: threading.Lock, clock: Callable[[], float], exists: Callable[[str], bool]
    ) -> None:
        self._path, self._lock_path, self._temporary = f"{folder}/keys", f"{folder}/lock", temporary
        self._clock, self._exists = clock, exists
        self._mutex = mutex
        self._keys: dict[str, Key] = {}
        self._done: set[str] = set()  # ids
        self._list, self._position = NO_LIST, 0  # how far the list was read

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Nobody else puts tasks with keys meanwhile, and what they put is known. Raises StorageFailed when that takes long."""
        deadline = time.monotonic() + LOCK_SECONDS
        with self._mutex:
            fd = os.open(self._lock_path, os.O_RDWR | os.O_CREAT, 0o666)
            try:
                while not try_lock(fd):
                    if time.monotonic() > deadline:
                        raise StorageFailed(f"{self._lock_path} stays locked by another process")
                    time.sleep(_RETRY_SECONDS)
                self._read()
                yield
            finally:
                os.close(fd)

    def find(self, key: str) -> str | None:
        """The id of the task put with this key within the window. Inside `locked`."""
        known = self._keys.get(digest(key))
        if known is None or known.expires <= self._clock():
            return None
        return known.id if known.id in self._done or self._exists(known.id) else None

    def begin(self, keys: Sequence[tuple[str, str]], expires: float) -> None:
        """These (key, id) will be inserted now. Durable. Inside `locked`."""
        found = {digest(key): Key(id, expires) for key, id in keys}
        self._write("".join(f"{expires:.3f} {text} {key.id}\n" for text, key in found.items()))
        self._keys.update(found)

    def end(self, ids: Sequence[str]) -> None:
        """They were inserted. Inside `locked`."""
        self._write("".join(f"done {id}\n" for id in ids))
        self._done.update(ids)

    def clear(self) -> None:
        """Forget every key. Inside `locked`."""
        DISK.remove(self._path)
        self._forget(NO_LIST)

    def _forget(self, found: _List) -> None:
        self._keys, self._done, self._list, self._position = {}, set(), found, 0

    def _write(self, lines: str) -> None:
        fd = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        try:
            head = "" if os.fstat(fd).st_size else _head()
            write_open(fd, f"{head}{lines}".encode())
            DISK.sync(fd)
        finally:
            os.close(fd)

    def _read(self) -> None:
        """What others wrote since; from the beginning if the list was written anew."""
        try:
            fd = os.open(self._path, os.O_RDONLY)
        except FileNotFoundError:
            self._forget(NO_LIST)
            return
        try:
            stat, found = os.fstat(fd), _identity(fd)
            if found != self._list or stat.st_size < self._position:
                self._forget(found)
            os.lseek(fd, self._position, os.SEEK_SET)
            data = read_open(fd, self._path)
        finally:
            os.close(fd)
        if data and not data.endswith(b"\n"):  # cut short by a crash: end the line, so that the next one is whole
            self._write("\n")
            data += b"\n"
        self._position += len(data)
        for line in data.decode("ascii", "replace").splitlines():
            self._take_in(line.split(" "))
        if self._position > REWRITE_BYTES:
            self._rewrite()

    def _take_in(self, words: list[str]) -> None:
        match words:
            case ["done", id]:
                self._done.add(id)
            case [expires, text, id] if expires.replace(".", "").isdigit() and len(text) == 2 * DIGEST_BYTES:
                self._keys[text] = Key(id, float(expires))

    def _rewrite(self) -> None:
        """Leave out what is over, if that is at least half."""
        now = self._clock()
        valid = {text: key for text, key in self._keys.items() if key.expires > now}
        if 2 * len(valid) > len(self._keys):
            return
        self._keys, self._done = valid, {key.id for key in valid.values() if key.id in self._done}
        lines = [_head(), *(f"{key.expires:.3f} {text} {key.id}\n" for text, key in valid.items())]
        lines += [f"done {id}\n" for id in sorted(self._done)]
        data = "".join(lines).encode()
        DISK.write_file(self._path, data, f"{self._temporary}/keys-{secrets.token_hex(4)}")
        self._list = _List(os.stat(self._path).st_ino, lines[0].encode())
        self._position = len(data)


def _head() -> str:
    """The first line of a new list."""
    return f"list {secrets.token_hex(8)}\n"


def _identity(fd: int) -> _List:
    """Of an open list; the line's end belongs to it, so that one cut short is not its beginning."""
    first, end, _ = os.pread(fd, FIRST_LINE_BYTES, 0).partition(b"\n")
    return _List(os.fstat(fd).st_ino, first + end)
