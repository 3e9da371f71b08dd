"""The locks between the processes that share a log: one small file each, locked with flock(2).

The kernel lets go of a lock when its holder dies, at whatever instruction, and wakes whoever waits for it. A lock belongs to
the open file, so two logs of one process exclude each other too; threads of one log need a mutex besides. A forked child
would keep its parent's locks alive: it closes them at once, and its copy of the log is closed.

Order, where two are held: open · clerk · append · disk.

A signal handler that raises (Ctrl-C, an alarm) must leave no lock behind, or everybody waits for this process to die. Python
runs it where a function begins, where a loop goes round, and after a call, before the result is stored. So a lock is taken
inside the `try` whose `finally` lets go of it, and that calls flock first: letting go of what one has not does nothing. A
context manager written in Python can't promise that.
"""

from __future__ import annotations

import os
import weakref
from fcntl import LOCK_EX, LOCK_NB, LOCK_SH, LOCK_UN, flock
from pathlib import Path

from roq.runtime.files import MODE

ROUNDS = 4  # lock files that the rounds of group sync take in turn


class Locks:
    """The open lock files of one log: descriptors.

    append: who writes entries, or changes which segment is written. disk: who syncs. rounds: held by the writer that will sync
    for its round. presence: shared by everybody who has the log open. upkeep: who writes a snapshot. clerk: who serves the
    requests on the board. places: whose is which place on it, by its bytes.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        self._folder = folder
        self._open: list[int] = []
        self.is_open = True
        try:
            self.append, self.disk, self.presence, self.upkeep, self.clerk, self.places = map(
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
        ours, there = os.fstat(self.clerk), os.stat(self._folder / "clerk")
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
