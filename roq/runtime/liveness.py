"""Who lives: silence and its limits, one life of a process, heartbeats and the host's lease, what a child tells its HCM.

A peer counts as gone when it has been silent for longer than a limit (FailureDetector). Three things are no silence: an exit
(its pidfd tells), a connection's end (TCP tells), and a deadline that somebody was promised (a lease, a ZooKeeper session).

Heartbeats and host statistics are in one small shared file per host, so that an idle heartbeat costs no system call. Layout
(little endian, 8-byte fields): 0 magic · 1 host CPU fraction f64 · 2 host memory fraction f64 · 3 Exchanges u64 ·
4 Exchanges at most u64 · 5 HCM's own heartbeat u64 · 6 end of the lease u64 · 7 spare · 8… one slot per child process: its last
heartbeat. Heartbeats are CLOCK_MONOTONIC nanoseconds: one machine, one clock, and wall-clock jumps don't matter.
"""

from __future__ import annotations

import asyncio
import mmap
import os
import socket
import struct
import time
from collections.abc import Callable, Hashable, Iterable
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

from roq.errors import ProcessFailed
from roq.wire.process import ChildSpec

K = TypeVar("K", bound=Hashable)
MAGIC = 0x526F51_0001
HEAD = 8
LEASE = 6
SLOTS = 4096  # child processes of one host at a time
BEAT_SECONDS = 1.0
LEASE_MARGIN_SECONDS = 4.0  # an HCM that is back within its session has time to register
LATE_BEATS = 3  # a process this many beats late is hung
PARENT_FIELD, START_TIME_FIELD = 4, 22  # of /proc/<pid>/stat, counted from 1 as proc(5) does


class FailureDetector(Generic[K]):
    """When peers were heard last. Whoever has been silent for longer than a limit counts as gone; the limits, one or
    more, stand with their user, each with its reason. Pure; now: seconds of a steady clock."""

    def __init__(self, peers: Iterable[K] = (), now: float = 0.0) -> None:
        self.last: dict[K, float] = dict.fromkeys(peers, now)

    def heard(self, peer: K, now: float) -> None:
        """It lives."""
        self.last[peer] = now

    def silence(self, peer: K, now: float) -> float:
        """For how many seconds it has not been heard. It must have been, once."""
        return now - self.last[peer]

    def forget_silent(self, seconds: float, now: float) -> None:
        """Those who have been silent for longer are not known any more."""
        self.last = {peer: last for peer, last in self.last.items() if now - last <= seconds}


# --- one life of a process ----------------------------------------------------------------------------------------------


def start_time(pid: int) -> int | None:
    """Clock ticks since boot at which process `pid` started: a pid may be given to another process, a pid with its start time
    never is (within a boot). None if there is no such process or only its zombie."""
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


# --- the host's board ----------------------------------------------------------------------------------------------------


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


# --- what every child of an HCM does besides its own work ---------------------------------------------------------------


def announce_ready(spec: ChildSpec) -> None:
    """Tell the HCM that this process serves. An HCM that is away finds out from the heartbeat instead."""
    send_datagram(f"ready {os.getpid()} {spec.process.name}".encode(), spec.ready_socket)


def send_datagram(data: bytes, path: str) -> None:
    """To a Unix socket, if somebody reads there."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as out:
        out.setblocking(False)
        try:
            out.sendto(data, path)
        except OSError:
            return  # no HCM listens just now; its successor adopts us by pid and heartbeat


async def beat(board: HeartbeatBoard, slot: int) -> None:
    """Beat for ever; a hung loop stops beating, and that is the point."""
    while True:
        board.beat(slot)
        await asyncio.sleep(BEAT_SECONDS)


class HostLease:
    """The host's lease as one process sees it. It counts once it was seen to run: an HCM that has just come back starts what is
    wanted before it can renew it."""

    def __init__(self, board: HeartbeatBoard) -> None:
        self._board = board
        self._given = False

    def check(self) -> None:
        """Raises ProcessFailed when it is over: what lives on unseen must not carry what goes on elsewhere."""
        if not self._board.lease_is_over(time.monotonic()):
            self._given = True
        elif self._given:
            raise ProcessFailed("the HCM has not renewed this host's lease: the process ends, it may be replaced elsewhere")


async def beat_on_lease(board: HeartbeatBoard, spec: ChildSpec, stop: asyncio.Event, on_beat: Callable[[], None]) -> None:
    """A process of a queue that is ready: say so, beat and call `on_beat` once a beat, until `stop`. Raises ProcessFailed when
    the host's lease is over."""
    lease = HostLease(board)
    board.beat(spec.slot)
    announce_ready(spec)
    while not stop.is_set():
        lease.check()
        board.beat(spec.slot)
        try:
            async with asyncio.timeout(BEAT_SECONDS):
                await stop.wait()
        except TimeoutError:
            on_beat()


def open_board(spec: ChildSpec) -> HeartbeatBoard:
    """The host's heartbeat board."""
    return HeartbeatBoard(Path(spec.board))
