"""Heartbeats and host statistics in one small shared file per host, so that an idle heartbeat costs no system call.

Layout (little endian, 8-byte fields): 0 magic · 1 host CPU fraction f64 · 2 host memory fraction f64 · 3 Exchanges u64 ·
4 Exchanges at most u64 · 5 HCM's own heartbeat u64 · 6 end of the lease u64 · 7 spare · 8… one slot per child process: its last
heartbeat.
Heartbeats are CLOCK_MONOTONIC nanoseconds: one machine, one clock, and wall-clock jumps don't matter.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from pathlib import Path
from typing import NamedTuple

MAGIC = 0x526F51_0001
HEAD = 8
LEASE = 6
SLOTS = 4096  # child processes of one host at a time
BEAT_SECONDS = 1.0
LEASE_MARGIN_SECONDS = 4.0  # an HCM that is back within its session has time to register
LATE_BEATS = 3  # a process this many beats late is hung


def lease_seconds(session_seconds: float) -> float:
    """How long a host's processes go on without their HCM: longer than the host takes to count as lost."""
    return session_seconds + LEASE_MARGIN_SECONDS


def lease_left_seconds(session_seconds: float) -> float:
    """How much of it may be left when the host is found lost: its HCM renewed it at most a ping (a third of the session) after
    ZooKeeper had heard of it last, and a process looks once a beat."""
    return LEASE_MARGIN_SECONDS + session_seconds / 3 + 2 * BEAT_SECONDS


class HostLoad(NamedTuple):
    """Fractions 0..1 and Exchange counts of one host."""

    cpu_fraction: float
    memory_fraction: float
    exchanges: int
    exchanges_max: int


class HeartbeatBoard:
    """The mapped file. The HCM creates it; children and a restarted HCM open it."""

    def __init__(self, path: Path) -> None:
        size = 8 * (HEAD + SLOTS)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            os.ftruncate(descriptor, size)
            self._map = mmap.mmap(descriptor, size)
        finally:
            os.close(descriptor)
        struct.pack_into("<Q", self._map, 0, MAGIC)

    def beat(self, slot: int) -> None:
        """The process that owns `slot` is alive now."""
        struct.pack_into("<Q", self._map, 8 * (HEAD + slot), time.monotonic_ns())

    def clear(self, slot: int) -> None:
        """Forget the slot's last heartbeat; a new process gets its full time to start."""
        struct.pack_into("<Q", self._map, 8 * (HEAD + slot), 0)

    def last(self, slot: int) -> int:
        """Monotonic nanoseconds of the slot's last heartbeat, 0 if none yet."""
        return int(struct.unpack_from("<Q", self._map, 8 * (HEAD + slot))[0])

    def set_host_load(self, load: HostLoad) -> None:
        """Written by the HCM about once a second."""
        struct.pack_into("<ddQQQ", self._map, 8, *load, time.monotonic_ns())

    def host_load(self) -> HostLoad:
        """What the HCM wrote last."""
        return HostLoad(*struct.unpack_from("<ddQQ", self._map, 8))

    def renew_lease(self, until: float) -> None:
        """What belongs to a queue may go on here until then (monotonic seconds). Written by the HCM about once a second."""
        struct.pack_into("<Q", self._map, 8 * LEASE, int(until * 1e9))

    def lease(self) -> float:
        """Monotonic seconds of the lease's end, 0 if none was ever given: then nothing ends for it."""
        return float(struct.unpack_from("<Q", self._map, 8 * LEASE)[0]) / 1e9

    def lease_is_over(self, now: float) -> bool:
        """Whether this host may have been replaced without anybody here knowing. now: monotonic seconds."""
        return 0 < self.lease() < now

    def close(self) -> None:
        """Unmap; the file stays."""
        self._map.close()
