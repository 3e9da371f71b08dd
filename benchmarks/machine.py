"""The machine while it measures: waiting for quiet, memory and CPU of given processes, its disks."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from pathlib import Path

import psutil

from roq.tools.bench.cpu import MachineMeter

FLUSH_FIELD = 18  # of a line of /proc/diskstats: major, minor, name, then 15 counters before it
MEMORY_FILESYSTEMS = ("tmpfs", "ramfs")
QUIET_CORES = 0.25  # busy cores below which a run may start
QUIET_SECONDS = 40.0  # then it starts anyway, and the noise is in its `foreign_cores`
LOOK_SECONDS = 0.7


async def quiet(cores: float = QUIET_CORES, patience_seconds: float = QUIET_SECONDS) -> float:
    """Wait until the machine is nearly idle, at most so long; the busy cores of the last look."""
    end = time.monotonic() + patience_seconds
    while True:
        meter = MachineMeter()
        await asyncio.sleep(LOOK_SECONDS)
        busy = meter.foreign_cores(0.0)
        if busy < cores or time.monotonic() > end:
            return busy


def proportional_bytes(pids: Iterable[int]) -> int:
    """Proportional set size (shared pages divided by those who share them) of the processes together."""
    total = 0
    for pid in pids:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                total += int(line.split()[1]) * 1024
    return total


def with_descendants(pids: Iterable[int]) -> set[int]:
    """The processes and everything they started."""
    found = set(pids)
    for pid in list(found):
        try:
            found |= {child.pid for child in psutil.Process(pid).children(recursive=True)}
        except psutil.Error:
            continue
    return found


def disk_flushes() -> int:
    """Flush requests of all real disks since the machine started (Linux, Documentation/admin-guide/iostats)."""
    total = 0
    for line in Path("/proc/diskstats").read_text().splitlines():
        fields = line.split()
        if len(fields) > FLUSH_FIELD and Path("/sys/block", fields[2], "device").exists():
            total += int(fields[FLUSH_FIELD])
    return total


def disk_of(folder: Path) -> str:
    """The disk that a folder is on, with its file system. Raises RuntimeError if that is memory."""
    mounts = [line.split()[:3] for line in Path("/proc/mounts").read_text().splitlines()]
    there = [mount for mount in mounts if folder.resolve().is_relative_to(mount[1])]
    device, _, kind = max(reversed(there), key=lambda mount: len(mount[1]))
    if kind in MEMORY_FILESYSTEMS:
        raise RuntimeError(f"{folder} is in memory ({kind}): what is stored there costs nothing. Set TMPDIR to a disk's folder")
    return f"{device} ({kind})"
