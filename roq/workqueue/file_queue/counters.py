"""The two counters beside the queue, as python-task-queue keeps them: `insertions` in digits, `completions` one byte per task.

Both are informative: a counter that can't be written never fails a verb; what it lacks is kept and added the next time. That
program reads `insertions` before it takes the lock and appends to `completions` without one, so it may lose counts beside
others; counts made here are not lost among themselves, on any number of hosts.

They are synced a second after a change, by a thread, and when the queue is closed, so no verb waits for it: a loss of power
takes back what was counted after that, never the whole.

Calls that will be counted are written down before they take effect, so that a killed one is counted by whoever comes next.

    counting/{host}--{process}--{nonce}     one call under way; locked by its process, empty between calls
        put {path} {path} …                 written when these files are durable; each is inserted when it is there no more;
                                            percent-encoded where it has to be: a publication's name may hold blanks
        ack {name} …                        written before the tasks are removed
        counted {before} {count}            written with the counter's lock, right before the counter is

Nothing here is synced: what a kill interrupts is counted exactly, what a loss of power interrupts is not. A call whose line
can't be written goes on, and is counted unless it is killed.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Literal, Protocol
from urllib.parse import unquote

from roq.runtime.files import DISK
from roq.workqueue.file_queue import names
from roq.workqueue.file_queue.directory import TaskDirectory
from roq.workqueue.file_queue.folder import LITTER_SECONDS, Unreadable, read_open, try_lock, write_open

logger = logging.getLogger(__name__)
LOCK_SECONDS = 2.0
_RETRY_SECONDS = 0.001
CALLS_KEPT = 8  # files kept for later calls; as many as threads of one queue call at once

Counter = Literal["insertions", "completions"]  # the names of their files
INSERTED: Counter = "insertions"
COMPLETED: Counter = "completions"


class Announced(Protocol):
    """Where it is written down that a counter is about to be changed."""

    def write(self, verb: str, words: tuple[int, int]) -> None:
        """One line."""


class CounterFiles:
    """Of one folder. mutex: of this process for both files."""

    def __init__(self, folder: str, mutex: threading.Lock) -> None:
        self._folder = folder
        self._mutex = mutex
        self._owed: dict[Counter, int] = {INSERTED: 0, COMPLETED: 0}  # not written yet, the disk refused
        self._unsynced: set[Counter] = set()
        self._created = False  # since the last sync

    @property
    def inserted(self) -> int:
        """Tasks ever put."""
        try:
            with self._mutex, open(self._path(INSERTED), "rb") as file:
                return int(file.read() or 0)
        except (FileNotFoundError, ValueError):
            return 0

    @property
    def completed(self) -> int:
        """Tasks ever acked."""
        try:
            return os.stat(self._path(COMPLETED)).st_size
        except FileNotFoundError:
            return 0

    def add(self, counter: Counter, count: int, announced: Announced | None = None) -> bool:
        """`count` tasks more, and those owed. True: `sync` is to be called, nobody was told so since the last time."""
        with self._mutex:
            self._owed[counter] += count
            owed = self._owed[counter]
            if not owed:
                return False
            clean = not self._unsynced
            if self._change(counter, lambda before: before + owed, announced):
                self._owed[counter] -= owed
            return clean and bool(self._unsynced)

    def add_once(self, counter: Counter, began_at: int, count: int) -> bool:
        """`count` tasks more unless they are in it: the counter stood at `began_at` when they were about to be counted. False:
        it can't be written."""

        def total(before: int) -> int:
            if before > began_at:
                return max(before, began_at + count)
            if before in (began_at, 0) or counter == COMPLETED:  # 0: set to it since
                return before + count
            return began_at + count  # digits cut short

        with self._mutex:
            return self._change(counter, total, None)

    def settle(self) -> None:
        """Write what is owed."""
        for counter in (INSERTED, COMPLETED):
            self.add(counter, 0)

    def sync(self) -> None:
        """Make what was counted durable."""
        with self._mutex:
            unsynced, self._unsynced = self._unsynced, set()
            created, self._created = self._created, False
        try:
            for counter in unsynced:
                fd = os.open(self._path(counter), os.O_RDWR)
                try:
                    DISK.sync(fd)
                finally:
                    os.close(fd)
            if created:
                DISK.sync_folder(self._folder)
        except OSError as error:
            logger.warning("the counters of %s can't be synced, a loss of power would take them back: %s", self._folder, error)

    def _path(self, counter: Counter) -> str:
        return f"{self._folder}/{counter}"

    def _change(self, counter: Counter, total: Callable[[int], int], announced: Announced | None) -> bool:
        """Set it to `total` of what it is. False: the disk refuses."""
        path = self._path(counter)
        deadline = time.monotonic() + LOCK_SECONDS
        try:
            fd = os.open(path, os.O_CREAT | (os.O_RDWR if counter == INSERTED else os.O_WRONLY | os.O_APPEND), 0o666)
            try:
                while not try_lock(fd):
                    if time.monotonic() > deadline:
                        logger.warning("%s stays locked: what is to be counted is counted later", path)
                        return False
                    time.sleep(_RETRY_SECONDS)
                before = _value(counter, fd, path)
                after = total(before)
                if announced is not None:
                    announced.write("counted", (before, after - before))
                _write(counter, fd, before, after)
                self._created |= before == 0
                self._unsynced.add(counter)
                return True
            finally:
                os.close(fd)
        except OSError as error:
            logger.warning("%s can't be written: what is to be counted is counted later: %s", path, error)
            return False


def _value(counter: Counter, fd: int, path: str) -> int:
    if counter == COMPLETED:
        return os.fstat(fd).st_size
    digits = read_open(fd, path)
    return int(digits if digits.isdigit() else 0)


def _write(counter: Counter, fd: int, before: int, after: int) -> None:
    """Appended, not set, where python-task-queue appends without a lock."""
    if counter == COMPLETED:
        write_open(fd, bytes(after - before))
        return
    digits = b"%d" % after
    os.lseek(fd, 0, os.SEEK_SET)
    write_open(fd, digits)
    os.ftruncate(fd, len(digits))


# --- calls under way --------------------------------------------------------------------------------------------------

_mine: set[str] = set()  # of this process: `lockf` would not keep it from taking them for a dead one's
os.register_at_fork(after_in_child=_mine.clear)  # a child counts for its parent as anybody does


class CountedCall:
    """One call under way, in a file of its own."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._written = False
        _mine.add(path)
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o666)
        except OSError:
            _mine.discard(path)
            raise
        try_lock(self._fd)  # nobody else does: it is empty and new

    def write(self, verb: str, words: Iterable[object]) -> None:
        """One line more. On a full or failing disk none: the call goes on."""
        self._written = True
        try:
            write_open(self._fd, f"{verb} {' '.join(map(str, words))}\n".encode())
        except OSError as error:
            logger.debug("%s can't be written: a call that is killed now is not counted: %s", self.path, error)

    def clear(self) -> None:
        """It is counted, or took no effect."""
        if self._written:
            with suppress(OSError):
                os.ftruncate(self._fd, 0)
        self._written = False

    def abandon(self) -> None:
        """Nobody knows how far it came: as if its process had been killed."""
        os.close(self._fd)
        _mine.discard(self.path)

    def close(self) -> None:
        """Remove the file."""
        with suppress(OSError):
            DISK.remove(self.path)
        self.abandon()


class Calls:
    """Those of one open queue. directories: by suffix."""

    def __init__(self, root: str, directories: Mapping[str, TaskDirectory], counters: CounterFiles) -> None:
        self._root, self._folder = root, f"{root}/counting"
        self._directories, self._counters = directories, counters
        self._lock = threading.Lock()
        self._free: list[CountedCall] = []
        self._process = os.getpid()

    def begin(self) -> CountedCall | None:
        """None if the folder takes no more files."""
        with self._lock:
            if self._process != os.getpid():  # forked: those are the parent's
                self._free, self._process = [], os.getpid()
            if self._free:
                return self._free.pop()
        try:
            os.makedirs(self._folder, exist_ok=True)
            return CountedCall(f"{self._folder}/{socket.gethostname()}--{os.getpid()}--{secrets.token_hex(8)}")
        except OSError as error:
            logger.debug("%s takes no file: a call that is killed now is not counted: %s", self._folder, error)
            return None

    def end(self, call: CountedCall | None) -> None:
        """It was counted, or took no effect."""
        if call is None:
            return
        call.clear()
        with self._lock:
            if len(self._free) < CALLS_KEPT and self._process == os.getpid():
                self._free.append(call)
                return
        call.close()

    def close(self) -> None:
        """Remove the files of calls that are over."""
        with self._lock:
            free, self._free = self._free, []
        if self._process == os.getpid():
            for call in free:
                call.close()

    # --- those of killed processes --------------------------------------------------------------------------------------

    def recover(self) -> None:
        """Count what killed processes did and did not count. Raises OSError."""
        try:
            listed = os.listdir(self._folder)
        except FileNotFoundError:
            return
        for text in listed:
            path = f"{self._folder}/{text}"
            if path in _mine:
                continue
            try:
                fd = os.open(path, os.O_RDWR | os.O_APPEND)
            except (FileNotFoundError, PermissionError):
                continue
            try:
                if try_lock(fd) and os.path.exists(path) and self._recover(fd, path):
                    DISK.remove(path)
            finally:
                os.close(fd)

    def _recover(self, fd: int, path: str) -> bool:
        """Count what a dead process did. True: the file is of no use any more."""
        data = _read(fd, path)
        if not data:
            return time.time() - os.fstat(fd).st_mtime > LITTER_SECONDS  # a younger one may be about to be locked
        complete = data[: data.rfind(b"\n") + 1].decode("utf-8", "replace")  # a line cut short had no effect yet
        lines = [line.split(" ") for line in complete.splitlines()]
        acks = [word for verb, *words in lines if verb == "ack" for word in words]
        puts = [unquote(word) for verb, *words in lines if verb == "put" for word in words]
        counter = COMPLETED if acks else INSERTED
        for verb, *words in lines:
            if verb == "counted" and len(words) == 2 and all(word.isdigit() for word in words):
                return self._counters.add_once(counter, int(words[0]), int(words[1]))
        done = sum(map(self._acked, acks)) + sum(map(self._inserted, puts))
        if done:
            logger.info("%s: %d tasks of a killed process are counted now", path, done)
            self._counters.add(counter, done, _Announcement(fd))
        return True

    def _inserted(self, path: str) -> bool:
        return not os.path.exists(f"{self._root}/{path}")

    def _acked(self, text: str) -> bool:
        """The file is gone and nothing else happened to the task than the lease that was acked."""
        name = names.parse(text)
        if name is None or os.path.exists(f"{self._directories[name.suffix].queue}/{text}"):
            return False
        history = self._directories[name.suffix].history(name.id)
        return not history or history[-1] == name


class _Announcement:
    """In the file of a dead process, by who counts for it."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def write(self, verb: str, words: Iterable[object]) -> None:
        """One line more."""
        with suppress(OSError):
            write_open(self._fd, f"{verb} {' '.join(map(str, words))}\n".encode())


def _read(fd: int, path: str) -> bytes:
    try:
        return read_open(fd, path)
    except Unreadable as error:
        logger.warning("what a killed process had not counted is not known: %s", error)
        return b"?\n"
