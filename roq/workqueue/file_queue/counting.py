"""Calls that will be counted, written down before they take effect, so that a killed one is counted by whoever comes next.

    counting/{host}--{process}--{nonce}     one call under way; locked by its process, empty between calls
        put {path} {path} …                 written when these files are durable; each is inserted when it is there no more;
                                            percent-encoded where it has to be: a publication's name may hold blanks
        ack {name} …                        written before the tasks are removed
        counted {before} {count}            written with the counter's lock, right before the counter is

Nothing here is synced: what a kill interrupts is counted exactly, what a loss of power interrupts is not. A call whose line
can't be written goes on, and is counted unless it is killed. Not covered: the counters themselves (counters.py).
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from urllib.parse import unquote

from roq.runtime.files import DISK
from roq.workqueue.file_queue import names
from roq.workqueue.file_queue.counters import COMPLETED, INSERTED, CounterFiles
from roq.workqueue.file_queue.folder import LITTER_SECONDS
from roq.workqueue.file_queue.lane import Lane
from roq.workqueue.file_queue.storage import Unreadable, read_open, try_lock, write_open

logger = logging.getLogger(__name__)
CALLS_KEPT = 8  # files kept for later calls; as many as threads of one queue call at once
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
    """Those of one open queue. lanes: by suffix."""

    def __init__(self, root: str, lanes: Mapping[str, Lane], counters: CounterFiles) -> None:
        self._root, self._folder = root, f"{root}/counting"
        self._lanes, self._counters = lanes, counters
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
        if name is None or os.path.exists(f"{self._lanes[name.suffix].queue}/{text}"):
            return False
        history = self._lanes[name.suffix].history(name.id)
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
