"""Sleeping on a word of shared memory, and waking those who do: the kernel's futex.

A sleeper that is killed leaves nothing behind. Where a machine's futex is not known (`AVAILABLE`), sleeping is looking again
every few milliseconds and waking does nothing.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import sys
import time

POLL_SECONDS = 0.005
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
AVAILABLE = _FUTEX is not None


def wake(address: int, count: int) -> None:
    """Let at most `count` of those run who sleep on the 32-bit word at `address`."""
    if _FUTEX is not None:
        call, number = _FUTEX
        call(number, address, _WAKE, count, None, None, 0)


def wait(address: int, value: int, seconds: float) -> None:
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
