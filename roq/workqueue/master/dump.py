"""A dump of a work queue's state that does not hold up the master: a fork of this process makes a large one.

The fork has the state of that moment, whatever is applied here meanwhile, and costs the time to copy page tables: 12 ms for a
million tasks, whose dump takes 200 ms. It touches nothing but that state and a file in memory, and ends. Not covered: when a
dump is made, and of which position (term.py).
"""

from __future__ import annotations

import asyncio
import gc
import mmap
import os
import signal
import warnings

from roq.errors import StorageFailed
from roq.runtime.observe import logger
from roq.workqueue.fold import Fold
from roq.workqueue.state import State

DIRECT_MAX = 200  # tasks, keys and messages of transactions whose dump takes no longer than a fork, however large they are
log = logger(__name__)


class Dump:
    """Of the state now."""

    def __init__(self, fold: Fold, direct_max: int = DIRECT_MAX) -> None:
        self._data = b""
        self._child = self._file = 0  # pid while it is neither reaped nor discarded; descriptor
        self._ended = asyncio.Event()
        tasks = fold.inserted - fold.completed - fold.removed - fold.lapsed
        if tasks + len(fold.keys) + fold.outbox.count > direct_max:
            try:
                self._fork(fold)
            except OSError as error:  # no memory for another process
                log.warning("snapshot is made without a fork and blocks the queue", extra={"fields": {"reason": str(error)}})
        if not self._child:
            self._data = State(fold).dump()

    def _fork(self, fold: Fold) -> None:
        file = os.memfd_create("roq-dump", os.MFD_CLOEXEC)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # of threads: the child needs none of their locks
                child = os.fork()
        except OSError:
            os.close(file)
            raise
        if child:
            self._child, self._file = child, file
            return
        code = 1
        try:
            gc.disable()
            os.closerange(3, file)  # ports and connections are not to outlive their process
            os.closerange(file + 1, os.sysconf("SC_OPEN_MAX"))
            rest = memoryview(State(fold).dump())
            while rest:
                rest = rest[os.write(file, rest) :]
            code = 0
        finally:
            os._exit(code)

    async def data(self) -> bytes | memoryview:
        """Once it is made; to be asked once. Raises StorageFailed if it could not be made, or was discarded."""
        if self._data:
            data, self._data = self._data, b""
            return data
        end = os.pidfd_open(self._child)
        loop = asyncio.get_running_loop()
        loop.add_reader(end, self._ended.set)
        try:
            await self._ended.wait()
        finally:
            loop.remove_reader(end)
            os.close(end)
        return self._result()

    def _result(self) -> memoryview:
        """Of the child, which has ended."""
        child, self._child = self._child, 0
        if not child:
            raise StorageFailed("the dump was discarded")
        _, status = os.waitpid(child, 0)
        try:
            if status:
                raise StorageFailed(f"the process that made a dump ended with {os.waitstatus_to_exitcode(status)}")
            return memoryview(mmap.mmap(self._file, 0, access=mmap.ACCESS_READ))
        finally:
            os.close(self._file)

    def discard(self) -> None:
        """Nobody needs it."""
        child, self._child = self._child, 0
        if child:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            os.close(self._file)
            self._ended.set()
