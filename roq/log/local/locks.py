"""The locks between the processes that share a log: one small file each, locked with flock(2).

The kernel lets go of a lock when its holder dies, at whatever instruction, and wakes whoever waits for it. A lock belongs to
the open file, so two logs of one process exclude each other too; threads of one log need a mutex besides. A forked child
would keep its parent's locks alive: it closes them at once, and its copy of the log is closed.

Order, where two are held: open · combiner · append · disk.

A signal handler that raises (Ctrl-C, an alarm) must leave no lock behind, or everybody waits for this process to die. Python
runs it where a function begins, where a loop goes round, and after a call, before the result is stored. So a lock is taken
inside the `try` whose `finally` lets go of it, and that calls flock first: letting go of what one has not does nothing. A
context manager written in Python can't promise that.
"""

from __future__ import annotations

import contextlib
import os
import re
import weakref
from fcntl import LOCK_EX, LOCK_NB, LOCK_SH, LOCK_UN, flock
from pathlib import Path

from roq.runtime.files import MODE

_INSTANCE = re.compile(r"[0-9a-f]{16}")
ROUNDS = 4  # lock files that the rounds of group sync take in turn


class Locks:
    """The open lock files of one log: descriptors.

    append: who writes entries, or changes which segment is written. disk: who syncs. rounds: held by the writer that will sync
    for its round. presence: shared by everybody who has the log open. upkeep: who writes a snapshot. combiner: who serves
    the requests on the publication list (its file is called clerk). places: whose is which place on it, by its bytes.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        self._folder = folder
        self._open: list[int] = []
        self.is_open = True
        try:
            self.append, self.disk, self.presence, self.upkeep, self.combiner, self.places = map(
                self._file, self._paths(folder, "append disk presence upkeep clerk places")
            )
            self.rounds = tuple(self._file(folder / f"round-{number}") for number in range(ROUNDS))
        except OSError:
            self.close()
            raise
        _everywhere.add(self)

    @staticmethod
    def _paths(folder: Path, names: str) -> list[Path]:
        return [folder / name for name in names.split()]

    def _file(self, path: Path) -> int:
        self._open.append(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, MODE))
        return self._open[-1]

    def are_in_place(self) -> bool:
        """Whether the folder still has these files: it may have been moved away, and another one be there. Raises OSError."""
        ours, there = os.fstat(self.combiner), os.stat(self._folder / "clerk")
        return (ours.st_dev, ours.st_ino) == (there.st_dev, there.st_ino)

    def close(self) -> None:
        """Let go of everything."""
        self.is_open = False
        while self._open:
            os.close(self._open.pop())


class LifeLock:
    """A file that is locked alone as long as its owner lives."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, MODE)
        flock(self._descriptor, LOCK_EX)
        _everywhere.add(self)

    @property
    def is_held(self) -> bool:
        """Whether it is ours: not in a forked child."""
        return self._descriptor >= 0

    def close(self) -> None:
        """Let go."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


class Lives:
    """Which instances of a shared folder are alive: one locked file per instance, so that a death is seen without asking a pid.

    The file is locked before it gets its name, and removed by an instance that closes in good order (its leases then stay until
    they expire). So a file whose lock is free belonged to an instance that died.
    """

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
            names = [name for name in os.listdir(self._folder) if _INSTANCE.fullmatch(name)]
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


def try_alone(descriptor: int) -> bool:
    """Take the lock alone if nobody has it."""
    try:
        flock(descriptor, LOCK_EX | LOCK_NB)
    except BlockingIOError:
        return False
    return True


def share(descriptor: int) -> None:
    """Hold the lock together with others; waits while somebody holds it alone."""
    flock(descriptor, LOCK_SH)


def release(descriptor: int) -> None:
    """Let go."""
    flock(descriptor, LOCK_UN)


_everywhere: weakref.WeakSet[Locks | LifeLock] = weakref.WeakSet()


def _forked() -> None:
    for locks in list(_everywhere):
        locks.close()


os.register_at_fork(after_in_child=_forked)
