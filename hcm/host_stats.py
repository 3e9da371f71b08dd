"""How loaded this host is: processor and memory, as fractions 0..1."""

from __future__ import annotations

from pathlib import Path

import psutil

NOTICEABLE = 0.05  # a change of load by less is not worth a ZooKeeper write


class HostStats:
    """Asked about once a second; the processor fraction is the average since the call before."""

    def __init__(self) -> None:
        psutil.cpu_percent(None)  # the first call only starts the interval

    def sample(self) -> tuple[float, float]:
        """(processor fraction, memory fraction)."""
        return psutil.cpu_percent(None) / 100, psutil.virtual_memory().percent / 100


def memory_bytes() -> int:
    """Memory this host has."""
    return int(psutil.virtual_memory().total)


def disk_free_bytes(directory: Path) -> int:
    """Room on the file system of `directory`, -1 if it does not tell."""
    try:
        return int(psutil.disk_usage(str(directory)).free)
    except OSError:
        return -1


def noticeably_different(left: tuple[float, float], right: tuple[float, float]) -> bool:
    """Is either fraction off by NOTICEABLE?"""
    return any(abs(a - b) >= NOTICEABLE for a, b in zip(left, right, strict=True))
