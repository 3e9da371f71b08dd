"""Memory that the processes of one folder share: a small mapped file of words, sleeping on one of them (the kernel's futex),
the header through which they see how far the log is and wake each other, and their common clock.

All of it is a cache, nothing in it outlives a boot: lost, stale or foreign, it is made anew from the segments by the next
process that opens the folder alone. Every word is 8 bytes and aligned, so that a reader without a lock sees an old or a new
value, never a mixture. The first five say whose cache it is. Who may write which word: log.py, publication.py.

A sleeper that is killed leaves nothing behind. Where a machine's futex is not known, sleeping is looking again every few
milliseconds and waking does nothing. Why a futex: docs/decisions/0054.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import platform
import sys
import time
from collections.abc import Callable
from enum import IntEnum
from functools import partial
from pathlib import Path

MAGIC = 0x0001_474F_4C51_4F52  # "ROQLOG", version 1
WORD = 8
IDENTITY_WORDS = 5  # magic, boot, device, inode, cookie
HEADER_BYTES = 4096
LISTEN_SECONDS = 1.0  # a waiter looks again at least this often, whatever happened to its wake-up
NANOS = 1_000_000
_BOOTTIME = partial(time.clock_gettime_ns, time.CLOCK_BOOTTIME)
POLL_SECONDS = 0.005  # where a machine's futex is not known
EVERYBODY = 0x7FFFFFFF
_CALL = {"x86_64": 202, "aarch64": 98, "riscv64": 98, "loongarch64": 98}
_WAIT, _WAKE = 0, 1


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_int64), ("nanoseconds", ctypes.c_int64))


def _futex() -> tuple[ctypes._FuncPointer, int] | None:
    number = _CALL.get(platform.machine())
    if number is None or sys.platform != "linux":
        return None
    call = ctypes.CDLL(None, use_errno=True).syscall
    call.argtypes = [
        ctypes.c_long,
        ctypes.c_void_p,
        ctypes.c_int,
        ctypes.c_uint32,
        ctypes.c_void_p,
        ctypes.c_void_p,
        ctypes.c_int,
    ]
    call.restype = ctypes.c_long
    return call, number


_FUTEX = _futex()
FUTEX_AVAILABLE = _FUTEX is not None


def futex_wake(address: int, count: int) -> None:
    """Let at most `count` of those run who sleep on the 32-bit word at `address`."""
    if _FUTEX is not None:
        call, number = _FUTEX
        call(number, address, _WAKE, count, None, None, 0)


def futex_wait(address: int, value: int, seconds: float) -> None:
    """Sleep until woken or `seconds` are over; not at all if the 32-bit word at `address` is not `value`. May end early."""
    if _FUTEX is None:
        time.sleep(min(seconds, POLL_SECONDS))
        return
    call, number = _FUTEX
    limit = _Timespec(int(seconds), int(seconds % 1 * 1e9))
    if call(number, address, _WAIT, value, ctypes.byref(limit), None, 0) < 0:
        code = ctypes.get_errno()
        if code not in {errno.EAGAIN, errno.EINTR, errno.ETIMEDOUT}:
            raise OSError(code, os.strerror(code))


def boot_number() -> int:
    """A number of this boot of the machine, never 0."""
    text = Path("/proc/sys/kernel/random/boot_id").read_text().strip().replace("-", "")
    return int(text, 16) % (2**63) or 1


class Mapped:
    """The mapped file. words: its memory word by word; bytes: the same memory. Unmapped when nobody refers to it any more."""

    def __init__(self, path: Path, mode: int, size: int) -> None:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, mode)
        try:
            os.posix_fallocate(descriptor, 0, size)  # a hole could end the process when the disk is full
            self._map = mmap.mmap(descriptor, size)
            status = os.fstat(descriptor)
        finally:
            os.close(descriptor)
        self.bytes = memoryview(self._map)
        self.words = self.bytes.cast("Q")
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self._identity = (MAGIC, boot_number(), status.st_dev, status.st_ino)

    def is_current(self, cookie: int) -> bool:
        """Whether the words were written in this boot, in this very file, for this log."""
        return tuple(self.words[:IDENTITY_WORDS]) == (*self._identity, cookie)

    def adopt(self, cookie: int) -> None:
        """Say that the words are of this boot, file and log."""
        for word, value in enumerate((*self._identity, cookie)):
            self.words[word] = value

    def address(self, word: int) -> int:
        """Where the low half of a word is, for a futex."""
        return self._address + WORD * word + (4 if sys.byteorder == "big" else 0)


class Word(IntEnum):
    """The 8-byte fields."""

    MAGIC = 0
    BOOT = 1  # these five say whose cache this is
    DEVICE = 2
    INODE = 3
    COOKIE = 4
    WRITTEN = 8  # position behind the last complete entry
    INTENT = 9  # position up to which the holder of the append lock is writing; = WRITTEN when nobody is
    ACTIVE = 10  # base of the segment that is written
    FIRST = 11  # base of the first segment that is still there
    FAILED = 12  # errno of a failed sync or write: the log is read-only until it was opened anew; 0: fine
    ROLL = 13  # base of the segment that is being started; 0: none
    DURABLE = 16  # position up to which everything is on stable storage
    ROUND = 17  # number of the group sync that a writer may still join
    CLOCK_OFFSET = 18  # ms to add to CLOCK_BOOTTIME
    CLOCK_BOOT = 19  # number of the boot for which the offset was chosen: version 0.1 knows neither, and leaves both
    TIGHT = 20  # 1: a put was refused because the disk is full, or an acknowledgement took what is kept; 0: not since
    BELL = 24  # counts appends; the futex word
    LISTEN = 25  # CLOCK_MONOTONIC milliseconds until which somebody may be waiting for the bell


class MappedHeader(Mapped):
    """The mapped words. A thread may still sleep on the bell of a log that was closed."""

    def __init__(self, path: Path, mode: int) -> None:
        super().__init__(path, mode, HEADER_BYTES)
        self._bell = self.address(Word.BELL)

    def rebuild(self, cookie: int, *, first: int, active: int, end: int) -> None:
        """Start the words anew: everything up to `end` is written and durable."""
        words = self.words
        words[Word.MAGIC] = 0
        words[Word.FIRST], words[Word.ACTIVE] = first, active
        words[Word.WRITTEN] = words[Word.INTENT] = words[Word.DURABLE] = end
        words[Word.FAILED] = words[Word.LISTEN] = words[Word.ROLL] = words[Word.TIGHT] = 0
        self.adopt(cookie)

    def ring(self) -> None:
        """Wake everybody who waits. Only while holding the append lock."""
        words = self.words
        words[Word.BELL] = (words[Word.BELL] + 1) & 0xFFFFFFFF

    def wake(self) -> None:
        """After `ring`, and after letting go of the lock: let those who sleep run."""
        if FUTEX_AVAILABLE and self.words[Word.LISTEN] > time.monotonic() * 1000:
            futex_wake(self._bell, EVERYBODY)

    def listen(self, seconds: float) -> int:
        """Say that somebody will wait; returns the bell's count to give to `wait`."""
        words = self.words
        until = int((time.monotonic() + min(seconds, LISTEN_SECONDS) + 0.5) * 1000)
        words[Word.LISTEN] = max(until, words[Word.LISTEN])
        return words[Word.BELL]

    def wait(self, bell: int, seconds: float) -> None:
        """Sleep until the bell was rung after `listen` gave `bell`, or `seconds` (at most LISTEN_SECONDS) are over."""
        futex_wait(self._bell, bell, min(seconds, LISTEN_SECONDS))


class Clock:
    """The time of a log: one clock for all processes that share the folder, which no step of the wall clock reaches.

    Milliseconds of CLOCK_BOOTTIME, which all processes of a machine share and which counts while it sleeps, plus an offset in
    the shared header. Who opens the folder first in a boot chooses the offset by its wall clock; from then on it only grows,
    when the log turns out to hold a later time: of the boot before, when the wall clock has gone back since, or of a program of
    version 0.1, which writes its own wall clock. Invariant: within a boot, no process is ahead of another, and none goes back.

    After a reboot only the wall clock knows how long the machine was off. Is it wrong then, leases and delays from before end
    early, or later by what it is behind; durations begun since are right.

    wall, boottime: nanoseconds. boot: of the machine. Make one, and call `reach`, under the append lock only.
    """

    def __init__(
        self,
        header: MappedHeader,
        wall: Callable[[], int] = time.time_ns,
        boottime: Callable[[], int] = _BOOTTIME,
        boot: int | None = None,
    ) -> None:
        self._words, self._boottime = header.words, boottime
        boot = boot or boot_number()
        if self._words[Word.CLOCK_BOOT] != boot:  # first the offset: without its boot it counts for nothing
            self._words[Word.CLOCK_OFFSET] = max((wall() - boottime()) // NANOS, 0)
            self._words[Word.CLOCK_BOOT] = boot

    def now(self) -> int:
        """ms since 1970, about."""
        return self._boottime() // NANOS + self._words[Word.CLOCK_OFFSET]

    def reach(self, milliseconds: int) -> None:
        """The log holds this time: no process is before it from now on."""
        offset = milliseconds - self._boottime() // NANOS
        self._words[Word.CLOCK_OFFSET] = max(self._words[Word.CLOCK_OFFSET], offset)
