"""Which processes belong to a local cluster, found without trusting any parent: every daemon gets a mark in its environment,
and what it forks inherits the mark, even when its parent is gone.

Also a program, the keeper of a cluster: it waits for the death of whoever started the cluster, then ends what is left of it. It
has its starter's pid, not a pipe: what else the starter forked does not hold it up, and the end of one thread is no death.

    python -I -S leftovers.py <token> <pid of the starter>

Linux only (/proc, pidfd). The standard library only: a keeper shall be small and start at once.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import time
from pathlib import Path
from typing import NamedTuple

MARK = "LOCAL_ROQ_CLUSTER"  # not ROQ_…: those configure the daemons
ORIGIN = "LOCAL_ROQ_ORIGIN"
KILL_SECONDS = 5.0
POLL_SECONDS = 0.05  # between two looks at processes that are not our children
PID_MAX = 1 << 22  # of Linux
END_SECONDS = 20.0  # for all of a cluster; what survives SIGKILL for so long hangs in the kernel


class Origin(NamedTuple):
    """Where a cluster comes from. pid, started: of the starter, start time in clock ticks since boot; command: what people call
    that program."""

    directory: str
    pid: int
    started: int
    command: str


class Leftover(NamedTuple):
    """One live process of the cluster. owner: the daemon that it, or whoever forked it, is."""

    pid: int
    owner: str
    command: str


def mark(token: str, daemon: str, origin: Origin | None = None) -> dict[str, str]:
    """The environment variables that mark a daemon and all it forks."""
    return {MARK: f"{token}/{daemon}", **({ORIGIN: json.dumps(origin)} if origin else {})}


def origins() -> dict[tuple[str, int], Origin]:
    """What says to belong to a cluster, of this user (of all users, for root), outside of containers: by token and user id.

    Anybody can put such marks on processes of their own: what is done about them is done to processes of that user only.
    """
    found = {}
    here = _namespaces("self")
    for pid in _pids():
        user = user_of(pid)
        marks = dict(_variables(pid, (MARK, ORIGIN)))
        origin = _origin(marks.get(ORIGIN, ""))
        if user is not None and origin is not None and MARK in marks and _namespaces(pid) == here:
            found[marks[MARK].partition("/")[0], user] = origin
    return found


def _origin(text: str) -> Origin | None:
    """None for what `mark` did not write."""
    try:
        read = Origin(*json.loads(text))
    except (ValueError, TypeError, RecursionError):
        return None
    kinds = [type(value) for value in read]
    return read if kinds == [str, int, int, str] and 0 < read.pid <= PID_MAX else None


def user_of(pid: int) -> int | None:
    """As whom a process acts; None if there is no such process."""
    try:
        return os.stat(f"/proc/{pid}").st_uid
    except OSError:
        return None


def _namespaces(pid: int | str) -> tuple[str, str]:
    """What names processes and files: a container's are others, and its paths and pids mean nothing here."""
    try:
        return os.readlink(f"/proc/{pid}/ns/pid"), os.readlink(f"/proc/{pid}/ns/mnt")
    except OSError:
        return "", ""


def end(token: str, user: int | None = None) -> list[Leftover]:
    """Kill everything that `find` finds, also what is started meanwhile; those that were killed."""
    ended: dict[int, Leftover] = {}
    until = time.monotonic() + END_SECONDS
    while (left := find(token, user)) and time.monotonic() < until:
        ended |= {process.pid: process for process in left if kill(process, token)}
    return list(ended.values())


def find(token: str, user: int | None = None) -> list[Leftover]:
    """All live processes of a user (None: the caller's) with this cluster's mark, except the caller. Zombies don't count."""
    user = os.geteuid() if user is None else user
    owners = ((pid, _owner(pid, token)) for pid in _pids() if pid != os.getpid() and user_of(pid) == user)
    return [Leftover(pid, owner, _command(pid)) for pid, owner in owners if owner]


def alive(pid: int) -> bool:
    """Whether there is a process with this id, zombies included."""
    return Path(f"/proc/{pid}").exists()


def kill(leftover: Leftover, token: str) -> bool:
    """SIGKILL; True when the process is gone. A pid that was given to another process meanwhile is left alone."""
    return _signal(leftover, token, signal.SIGKILL, KILL_SECONDS)


def terminate(leftover: Leftover, token: str) -> None:
    """SIGTERM, as `kill`, without waiting."""
    _signal(leftover, token, signal.SIGTERM, 0.0)


def stop_owner(token: str, owner: str, seconds: float) -> list[Leftover]:
    """End all processes of this daemon: it is asked first, and has so long to end what it forked. What survives."""
    found = [process for process in find(token) if process.owner == owner]
    if not found:
        return []
    terminate(min(found, key=lambda process: _started(process.pid)), token)
    until = time.monotonic() + seconds
    while time.monotonic() < until and any(process.owner == owner for process in find(token)):
        time.sleep(POLL_SECONDS)
    return [process for process in find(token) if process.owner == owner and not kill(process, token)]


def _started(pid: int) -> tuple[int, int]:
    """What was started first is least."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]), pid
    except (OSError, IndexError, ValueError):
        return 0, pid


def _signal(leftover: Leftover, token: str, number: signal.Signals, seconds: float) -> bool:
    try:
        descriptor = os.pidfd_open(leftover.pid)
    except ProcessLookupError:
        return True
    try:
        if _owner(leftover.pid, token) != leftover.owner:
            return True
        signal.pidfd_send_signal(descriptor, number)
        poller = select.poll()
        poller.register(descriptor, select.POLLIN)
        return bool(poller.poll(seconds * 1000))
    except ProcessLookupError:
        return True
    finally:
        os.close(descriptor)


def _pids() -> list[int]:
    return [int(entry) for entry in os.listdir("/proc") if entry.isdigit()]


def _owner(pid: int, token: str) -> str:
    marked, _, owner = dict(_variables(pid, (MARK,))).get(MARK, "").partition("/")
    return owner if marked == token else ""


def _variables(pid: int, names: tuple[str, ...]) -> list[tuple[str, str]]:
    """Those of these environment variables that a process has. None for a zombie."""
    try:
        environment = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:  # gone, or another user's
        return []
    pairs = (variable.decode(errors="replace").partition("=") for variable in environment.split(b"\0"))
    return [(name, value) for name, _, value in pairs if name in names]


def _command(pid: int) -> str:
    try:
        name = Path(f"/proc/{pid}/comm").read_text().strip()
        arguments = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return "?"
    return f"{name} ({arguments})" if arguments else name


def main() -> None:
    """The keeper: returns once the starter is dead and nothing of its cluster is left."""
    token, starter = sys.argv[1], int(sys.argv[2])
    try:
        descriptor = os.pidfd_open(starter)
    except ProcessLookupError:
        pass
    else:
        if os.getppid() == starter:  # asked after the pidfd was opened: this pid, this life
            select.select([descriptor], [], [])
    ended = end(token)
    if ended:
        owners = ", ".join(sorted({process.owner for process in ended}))
        sys.stderr.write(
            f"{time.strftime('%F %T')} the starter, pid {starter}, died: ended {len(ended)} processes of {owners}\n"
        )


if __name__ == "__main__":
    main()
