"""Kill a process at each of its changes to the file system in turn, and tell what would survive a loss of power.

`crash_points(act)` runs `act` in forked children: the n-th is killed by SIGKILL right before its n-th change (creating,
writing, renaming, removing, syncing), writes once before and once halfway, until a child comes through. `trace(act)` records
the changes of one run; `unsynced` says which of them a power loss could undo. Not covered: what other programs do meanwhile.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple
from unittest import mock

POINTS_MAX = 500


class Change(NamedTuple):
    """One call. path: of the file; target: of a rename."""

    call: str
    path: str
    target: str = ""


def _paths(fd: int) -> str:
    return os.readlink(f"/proc/self/fd/{fd}")


def _described(call: str, arguments: tuple[Any, ...]) -> Change | None:
    """What a call changes, None if nothing."""
    match call, arguments:
        case "open", (path, flags, *_) if flags & os.O_CREAT:
            return Change("create" if not os.path.exists(path) else "open", str(path))
        case (("write" | "pwrite"), (int(fd), *_)):
            return Change("write", _paths(fd))
        case (("fsync" | "fdatasync" | "ftruncate"), (int(fd), *_)):
            return Change(call, _paths(fd))
        case (("rename" | "replace" | "link"), (source, target)):
            return Change("link" if call == "link" else "rename", str(source), str(target))
        case "unlink", (path,):
            return Change("unlink", str(path))
    return None


CALLS = ("open", "write", "pwrite", "fsync", "fdatasync", "ftruncate", "rename", "replace", "link", "unlink")


@contextmanager
def watched(see: Callable[[Change, tuple[Any, ...]], None]) -> Iterator[None]:
    """Call `see` before every change made through `os`."""
    originals = {call: getattr(os, call) for call in CALLS}

    def wrapper(call: str) -> Callable[..., Any]:
        def wrapped(*arguments: Any, **named: Any) -> Any:
            change = _described(call, arguments)
            if change is not None:
                see(change, arguments)
            return originals[call](*arguments, **named)

        return wrapped

    with ExitStack() as stack:
        for call in CALLS:
            stack.enter_context(mock.patch.object(os, call, wrapper(call)))
        yield


def trace(act: Callable[[], object]) -> list[Change]:
    """The changes `act` makes."""
    changes: list[Change] = []
    with watched(lambda change, _: changes.append(change)):
        act()
    return changes


def crash_points(prepare: Callable[[], Callable[[], object]]) -> Iterator[tuple[str, bool]]:
    """For each point: `prepare`, then what it returned is run and killed there. Yields (the point, whether it came through)."""
    for point in range(POINTS_MAX):
        for half in (False, True):
            act = prepare()
            name, finished = _killed_at(act, point, half=half)
            if name:
                yield name, finished
            if finished:
                return
    raise AssertionError(f"more than {POINTS_MAX} changes")


def _killed_at(act: Callable[[], object], point: int, *, half: bool) -> tuple[str, bool]:
    """half: in the middle of a write; other calls are not killed then, and the name is empty."""
    reading, writing = os.pipe()
    process = os.fork()
    if process == 0:
        try:
            _die_at(act, point, writing, half=half)
            os._exit(0)
        finally:
            os._exit(3)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        name = pipe.read()
    _, status = os.waitpid(process, 0)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return name, False
    assert os.waitstatus_to_exitcode(status) in (0, 4), "the act failed by itself"
    return ("came through", True) if os.waitstatus_to_exitcode(status) == 0 else ("", False)


def _die_at(act: Callable[[], object], point: int, pipe: int, *, half: bool) -> None:
    count = 0
    write, pwrite = os.write, os.pwrite

    def see(change: Change, arguments: tuple[Any, ...]) -> None:
        nonlocal count
        if count == point:
            if half and change.call != "write":
                os._exit(4)
            if half:
                file, data, *offset = arguments
                part = data[: len(data) // 2]
                pwrite(file, part, *offset) if offset else write(file, part)
            write(pipe, f"{'half of ' if half else ''}{change.call} {change.path} {change.target}".encode())
            os.kill(os.getpid(), signal.SIGKILL)
        count += 1

    with watched(see):
        act()


def unsynced(changes: list[Change]) -> list[Change]:
    """What a power loss right after these changes could undo: bytes not synced since, entries of folders not synced since."""
    left: list[Change] = []
    for change in changes:
        match change:
            case Change("fsync" | "fdatasync", path):
                left = [one for one in left if not _covers(path, one)]
            case Change("rename", path, target):  # bytes go with the file
                left = [one._replace(path=target) if one == Change("write", path) else one for one in left]
                left.append(change)
            case Change("write" | "create" | "unlink" | "link", _):
                left.append(change)
    return left


def _covers(path: str, change: Change) -> bool:
    match change:
        case Change("write", written):
            return path == written
        case Change("rename" | "link", _, target):
            return path == os.path.dirname(target)
        case Change("create" | "unlink", changed):
            return path == os.path.dirname(changed)
    return False
