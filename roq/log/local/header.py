"""The small mapped file through which the processes of one folder see how far the log is, and wake each other.

It is a cache: lost, stale or foreign, it is rebuilt from the segments by the next process that opens the folder alone.
Every field is one aligned 8-byte word, so that a reader without a lock sees an old or a new value, never a mixture. Who may
write which word: `log.py`. Waiting uses the kernel's futex on the bell word: a waiter that was killed leaves nothing behind.
Where a machine's futex is not known, waiting falls back to looking every few milliseconds.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import platform
import sys
import time
from enum import IntEnum
from pathlib import Path

SIZE = 4096
MAGIC = 0x0001_474F_4C51_4F52  # "ROQLOG", version 1
LISTEN_SECONDS = 1.0  # a waiter looks again at least this often, whatever happened to its wake-up
POLL_SECONDS = 0.005

_FUTEX_CALL = {"x86_64": 202, "aarch64": 98, "riscv64": 98, "loongarch64": 98}
_FUTEX_WAIT, _FUTEX_WAKE = 0, 1
_EVERYBODY = 0x7FFFFFFF


class Word(IntEnum):
    """The 8-byte fields."""

    MAGIC = 0
    BOOT = 1  # these five say whose cache this is
    DEVICE = 2
    INODE = 3
    COOKIE = 4
    WRITTEN = 8  # position behind the last whole entry
    INTENT = 9  # position up to which the holder of the append lock is writing; = WRITTEN when nobody is
    ACTIVE = 10  # base of the segment that is written
    FIRST = 11  # base of the first segment that is still there
    FAILED = 12  # errno of a failed sync or write: the log is read-only until it was opened anew; 0: fine
    ROLL = 13  # base of the segment that is being started; 0: none
    DURABLE = 16  # position up to which everything is on stable storage
    ROUND = 17  # number of the group sync that a writer may still join
    BELL = 24  # counts appends; the futex word
    LISTEN = 25  # CLOCK_MONOTONIC milliseconds until which somebody may be waiting for the bell


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_int64), ("nanoseconds", ctypes.c_int64))


def _futex() -> tuple[ctypes._FuncPointer, int] | None:
    number = _FUTEX_CALL.get(platform.machine())
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


def boot_number() -> int:
    """A number of this boot of the machine, never 0."""
    text = Path("/proc/sys/kernel/random/boot_id").read_text().strip().replace("-", "")
    return int(text, 16) % (2**63) or 1


class Header:
    """The mapped words. `words[Word.X]` reads and writes one. Unmapped when nobody refers to it any more: a thread may still
    sleep on the bell of a log that was closed."""

    def __init__(self, path: Path, mode: int) -> None:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, mode)
        try:
            os.posix_fallocate(descriptor, 0, SIZE)  # a hole could end the process when the disk is full
            self._map = mmap.mmap(descriptor, SIZE)
            status = os.fstat(descriptor)
        finally:
            os.close(descriptor)
        self.words = memoryview(self._map).cast("Q")
        self._identity = (MAGIC, boot_number(), status.st_dev, status.st_ino)
        self._bell = ctypes.c_uint32.from_buffer(self._map, 8 * Word.BELL)
        self._bell_address = ctypes.addressof(self._bell)

    def is_current(self, cookie: int) -> bool:
        """Whether the words were written in this boot, in this very file, for this log."""
        return tuple(self.words[Word.MAGIC : Word.COOKIE + 1]) == (*self._identity, cookie)

    def rebuild(self, cookie: int, *, first: int, active: int, end: int) -> None:
        """Start the words anew: everything up to `end` is written and durable."""
        words = self.words
        words[Word.MAGIC] = 0
        words[Word.FIRST], words[Word.ACTIVE] = first, active
        words[Word.WRITTEN] = words[Word.INTENT] = words[Word.DURABLE] = end
        words[Word.FAILED] = words[Word.LISTEN] = words[Word.ROLL] = 0
        for word, value in zip(range(Word.MAGIC, Word.COOKIE + 1), (*self._identity, cookie), strict=True):
            words[word] = value

    def ring(self) -> None:
        """Wake everybody who waits. Only while holding the append lock."""
        words = self.words
        words[Word.BELL] = (words[Word.BELL] + 1) & 0xFFFFFFFF

    def wake(self) -> None:
        """After `ring`, and after letting go of the lock: let those who sleep run."""
        if _FUTEX is not None and self.words[Word.LISTEN] > time.monotonic() * 1000:
            call, number = _FUTEX
            call(number, self._bell_address, _FUTEX_WAKE, _EVERYBODY, None, None, 0)

    def listen(self, seconds: float) -> int:
        """Say that somebody will wait; returns the bell's count to give to `wait`."""
        words = self.words
        until = int((time.monotonic() + min(seconds, LISTEN_SECONDS) + 0.5) * 1000)
        words[Word.LISTEN] = max(until, words[Word.LISTEN])
        return words[Word.BELL]

    def wait(self, bell: int, seconds: float) -> None:
        """Sleep until the bell was rung after `listen` gave `bell`, or `seconds` (at most LISTEN_SECONDS) are over."""
        seconds = min(seconds, LISTEN_SECONDS)
        if _FUTEX is None:
            time.sleep(min(seconds, POLL_SECONDS))
            return
        call, number = _FUTEX
        limit = _Timespec(int(seconds), int(seconds % 1 * 1e9))
        if call(number, self._bell_address, _FUTEX_WAIT, bell, ctypes.byref(limit), None, 0) < 0:
            code = ctypes.get_errno()
            if code not in {errno.EAGAIN, errno.EINTR, errno.ETIMEDOUT}:
                raise OSError(code, os.strerror(code))
