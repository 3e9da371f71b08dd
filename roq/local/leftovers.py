"""Which processes belong to a local cluster, found without trusting any parent: every daemon gets a mark in its environment,
and what it forks inherits the mark, even when its parent is gone.

Linux only (/proc, pidfd).
"""

from __future__ import annotations

import os
import select
import signal
from pathlib import Path
from typing import NamedTuple

MARK = "LOCAL_ROQ_CLUSTER"  # not ROQ_…: those configure the daemons
KILL_SECONDS = 5.0


class Leftover(NamedTuple):
    """One live process of the cluster. owner: the daemon that it, or whoever forked it, is."""

    pid: int
    owner: str
    command: str


def mark(token: str, daemon: str) -> dict[str, str]:
    """The environment variable that marks a daemon and all it forks."""
    return {MARK: f"{token}/{daemon}"}


def find(token: str) -> list[Leftover]:
    """All live processes with this cluster's mark, except the caller. Zombies don't count."""
    owners = ((pid, _owner(pid, token)) for pid in _pids() if pid != os.getpid())
    return [Leftover(pid, owner, _command(pid)) for pid, owner in owners if owner]


def find_running(argument: str) -> list[int]:
    """Live processes with this command-line argument (a file path that nobody else would use)."""
    return [pid for pid in _pids() if argument.encode() in _arguments(pid)]


def cluster_at(port: int) -> Path | None:
    """The directory of the local cluster, of this user, whose ZooKeeper has this port; None if there is none."""
    for pid in _pids():
        for argument in _arguments(pid):
            if argument.endswith(b"/zoo.cfg"):
                configuration = Path(os.fsdecode(argument))
                try:
                    lines = configuration.read_text().splitlines()
                except OSError:
                    continue
                if f"clientPort={port}" in lines:
                    return configuration.parent.parent
    return None


def alive(pid: int) -> bool:
    """Whether there is a process with this id, zombies included."""
    return Path(f"/proc/{pid}").exists()


def kill(leftover: Leftover, token: str) -> bool:
    """SIGKILL; True when the process is gone. A pid that was given to another process meanwhile is left alone."""
    try:
        descriptor = os.pidfd_open(leftover.pid)
    except ProcessLookupError:
        return True
    try:
        if _owner(leftover.pid, token) != leftover.owner:
            return True
        signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        poller = select.poll()
        poller.register(descriptor, select.POLLIN)
        return bool(poller.poll(KILL_SECONDS * 1000))
    except ProcessLookupError:
        return True
    finally:
        os.close(descriptor)


def _pids() -> list[int]:
    return [int(entry) for entry in os.listdir("/proc") if entry.isdigit()]


def _owner(pid: int, token: str) -> str:
    wanted = f"{MARK}={token}/".encode()
    try:
        environment = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:  # gone, or another user's
        return ""
    for variable in environment.split(b"\0"):
        if variable.startswith(wanted):
            return variable[len(wanted) :].decode(errors="replace")
    return ""


def _arguments(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return []


def _command(pid: int) -> str:
    try:
        name = Path(f"/proc/{pid}/comm").read_text().strip()
        arguments = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return "?"
    return f"{name} ({arguments})" if arguments else name
