"""Files the way a queue needs them: written whole and durably, or not at all; errors that say what to do.

Not covered: what the files mean. Nothing here relies on two hosts' appends being kept apart: appends happen under a lock.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Sequence
from contextlib import suppress

from roq.errors import Closed

READ_BYTES = 65_536
_BUSY = (errno.EACCES, errno.EAGAIN)
_UNREADABLE = (errno.EIO, errno.EBADMSG, errno.EUCLEAN, errno.ENODATA, errno.EILSEQ)  # what file systems say of bad sectors


class Unreadable(OSError):
    """The medium does not give back what was written to this file; other files may be well."""


def read(path: str) -> bytes:
    """The whole file. Raises Unreadable."""
    fd = os.open(path, os.O_RDONLY)
    try:
        return read_open(fd, path)
    finally:
        os.close(fd)


def modified_ms(path: str) -> int:
    """Milliseconds since 1970."""
    return os.stat(path).st_mtime_ns // 1_000_000


def read_open(fd: int, path: str) -> bytes:
    """From the file's position to its end. Raises Unreadable."""
    try:
        data = os.read(fd, READ_BYTES)
        if len(data) < READ_BYTES:
            return data
        parts = [data]
        while part := os.read(fd, READ_BYTES):
            parts.append(part)
    except OSError as error:
        if error.errno in _UNREADABLE:
            raise Unreadable(error.errno, error.strerror, path) from error
        raise
    return b"".join(parts)


def write_open(fd: int, data: bytes) -> None:
    """All of it."""
    written = os.write(fd, data)
    while written < len(data):
        written += os.write(fd, data[written:])


def create(path: str, data: bytes) -> None:
    """A new file; not durable yet."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        write_open(fd, data)
    finally:
        os.close(fd)


def remove_quietly(paths: Sequence[str]) -> None:
    """After an error: what can't be removed is litter and swept later."""
    for path in paths:
        with suppress(OSError):
            os.unlink(path)


def rename(source: str, target: str) -> bool:
    """False if the source is gone. Names are never used twice here, so a target that exists means the rename did happen: a
    network file system may have sent it again and answer to the second one."""
    try:
        os.rename(source, target)
    except FileNotFoundError:
        return os.path.exists(target) and not os.path.exists(source)
    return True


def try_lock(fd: int) -> bool:
    """The whole file's exclusive lock (`lockf`, held by the process: another thread needs a mutex of its own)."""
    try:
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _BUSY:
            return False
        raise
    return True


def check_open(*, closed: bool) -> None:
    """Raises Closed."""
    if closed:
        raise Closed("the work queue was closed")
