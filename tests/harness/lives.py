"""Processes that somebody else started: finding them, and waiting for their end."""

from __future__ import annotations

import contextlib
import os
import select
import time
from collections.abc import Iterable
from pathlib import Path

from roq.runtime.liveness import start_time


def outlive(pids: Iterable[int], seconds: float) -> set[int]:
    """Wait until these processes have ended, zombies count as such; those that still run after `seconds`."""
    until = time.monotonic() + seconds
    left = set()
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            descriptor = os.pidfd_open(pid)
            try:
                if not select.select([descriptor], [], [], max(0.0, until - time.monotonic()))[0] and start_time(pid):
                    left.add(pid)
            finally:
                os.close(descriptor)
    return left


def running(argument: str) -> list[int]:
    """Live processes with this command-line argument."""
    found = []
    for entry in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):  # it has ended
            if argument.encode() in Path(f"/proc/{entry}/cmdline").read_bytes().split(b"\0"):
                found.append(int(entry))
    return found


def kept_waiting(pid: int) -> float:
    """Seconds that a process, which may have ended but not been waited for, has waited for a processor so far: what it does
    itself it does so much faster on an idle machine. Its first thread only."""
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9
