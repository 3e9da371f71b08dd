"""Stopping processes so that nothing of them runs any more.

SIGSTOP takes effect later: one thread is told, and that one, when it runs, stops the others. On a busy machine a server may
still answer meanwhile.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

FROZEN_SECONDS = 5.0
POLL_SECONDS = 0.001
STANDS_STILL = "TtZXx"  # states of a thread in /proc: stopped, traced, ended


def freeze(*pids: int, seconds: float = FROZEN_SECONDS) -> None:
    """SIGSTOP; returns when no thread of these processes runs. They go on by SIGCONT. Raises ProcessLookupError if one isn't
    there, TimeoutError after `seconds`: then they go on."""
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    until = time.monotonic() + seconds
    for pid in pids:
        while not (_stands_still(pid) and _stands_still(pid)):  # a thread may have been started between the looks at two others
            if time.monotonic() > until:
                for one in pids:
                    os.kill(one, signal.SIGCONT)
                raise TimeoutError(f"process {pid} is not stopped {seconds:g} s after SIGSTOP")
            time.sleep(POLL_SECONDS)


def _stands_still(pid: int) -> bool:
    """So does what has ended."""
    try:
        threads = list(Path(f"/proc/{pid}/task").iterdir())
    except OSError:
        return True
    return all(_state(thread) in STANDS_STILL for thread in threads)


def _state(thread: Path) -> str:
    try:
        return (thread / "stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "X"
