"""One life of a process: a pid may be given to another process, a pid with its start time never is (within a boot)."""

from __future__ import annotations

from pathlib import Path

PARENT_FIELD, START_TIME_FIELD = 4, 22  # of /proc/<pid>/stat, counted from 1 as proc(5) does


def start_time(pid: int) -> int | None:
    """Clock ticks since boot at which process `pid` started; None if there is no such process or only its zombie."""
    return _field(pid, START_TIME_FIELD)


def parent(pid: int) -> int | None:
    """Which process has forked this one, or adopted it since; None if there is no such process or only its zombie."""
    return _field(pid, PARENT_FIELD)


def _field(pid: int, number: int) -> int | None:
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    fields = stat[stat.rindex(b")") + 2 :].split()  # the name before may hold anything; field 3 (state) comes next
    if fields[0] in (b"Z", b"X"):
        return None
    return int(fields[number - 3])
