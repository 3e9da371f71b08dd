"""Which instances of a shared folder are alive: one locked file per instance, so that a death is seen without asking a pid.

The file is locked before it gets its name, and removed by an instance that closes in good order (its leases then stay until
they expire). So a file whose lock is free belonged to an instance that died.
"""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

from roq.log.local.locks import LifeLock, try_alone

_NAME = re.compile(r"[0-9a-f]{16}")


class Lives:
    """The files of all instances, and the lock on our own."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._mine: LifeLock | None = None
        self._path = folder

    def begin(self, instance: int) -> None:
        """We live. OSError: the folder takes no file."""
        if self._mine is not None:
            return
        self._folder.mkdir(exist_ok=True)
        self._path = self._folder / f"{instance:016x}"
        unnamed = self._path.with_suffix(".new")
        mine = LifeLock(unnamed)
        os.rename(unnamed, self._path)
        self._mine = mine  # last: does a signal break this off, it is done again

    def end(self) -> None:
        """We close in good order."""
        if self._mine is not None and self._mine.is_held:  # else we are a forked child: our parent lives on
            with contextlib.suppress(OSError):
                os.unlink(self._path)
            self._mine.close()
            self._mine = None

    def look(self) -> tuple[int, list[int]]:
        """How many instances there are, and those of them that died and were not forgotten yet."""
        try:
            names = [name for name in os.listdir(self._folder) if _NAME.fullmatch(name)]
        except FileNotFoundError:
            return 0, []
        return len(names), [int(name, 16) for name in names if name != self._path.name and self._is_free(name)]

    def _is_free(self, name: str) -> bool:
        try:
            descriptor = os.open(self._folder / name, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        try:
            return try_alone(descriptor) and os.fstat(descriptor).st_nlink > 0  # else it was removed since we opened it
        finally:
            os.close(descriptor)

    def forget(self, instance: int) -> None:
        """Its death is in the log."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._folder / f"{instance:016x}")
