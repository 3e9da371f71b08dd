"""The two counters beside the queue, as python-task-queue keeps them: `insertions` in digits, `completions` one byte per task.

Both are informative: a counter that can't be written is logged and never fails a verb. That program reads `insertions` before
it takes the lock and appends to `completions` without one, so it may lose counts beside others; counts made here are not lost
among themselves, on any number of hosts.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable

from roq.workqueue.file_queue.storage import read_open, try_lock, write_open

logger = logging.getLogger(__name__)
LOCK_SECONDS = 2.0
_RETRY_SECONDS = 0.001


class Counters:
    """Of one folder. mutex: of this process for both files."""

    def __init__(self, folder: str, mutex: threading.Lock) -> None:
        self._insertions, self._completions = f"{folder}/insertions", f"{folder}/completions"
        self._mutex = mutex

    @property
    def inserted(self) -> int:
        """Tasks ever put."""
        try:
            with self._mutex, open(self._insertions, "rb") as file:
                return int(file.read() or 0)
        except (FileNotFoundError, ValueError):
            return 0

    @property
    def completed(self) -> int:
        """Tasks ever acked."""
        try:
            return os.stat(self._completions).st_size
        except FileNotFoundError:
            return 0

    def add_inserted(self, count: int) -> None:
        """`count` tasks more."""

        def rewrite(fd: int) -> None:
            digits = read_open(fd, self._insertions)
            total = b"%d" % (int(digits if digits.isdigit() else 0) + count)
            os.lseek(fd, 0, os.SEEK_SET)
            write_open(fd, total)
            os.ftruncate(fd, len(total))

        self._locked(self._insertions, os.O_RDWR, rewrite)

    def add_completed(self, count: int) -> None:
        """`count` tasks more."""
        self._locked(self._completions, os.O_WRONLY | os.O_APPEND, lambda fd: write_open(fd, bytes(count)))

    def _locked(self, path: str, flags: int, act: Callable[[int], None]) -> None:
        deadline = time.monotonic() + LOCK_SECONDS
        try:
            with self._mutex:
                fd = os.open(path, flags | os.O_CREAT, 0o666)
                try:
                    while not try_lock(fd):
                        if time.monotonic() > deadline:
                            logger.warning("%s stays locked: tasks were not counted", path)
                            return
                        time.sleep(_RETRY_SECONDS)
                    act(fd)
                finally:
                    os.close(fd)
        except OSError as error:
            logger.warning("%s can't be written, tasks were not counted: %s", path, error)
