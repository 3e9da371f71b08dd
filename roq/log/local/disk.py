"""The file operations a local log stands on, in one replaceable place, and what their failures mean.

Tests put a layer here that forgets what was not synced. Not here: locks and the shared header, which no crash of the machine
survives anyway.
"""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path

from roq.errors import InvalidAddress, RoqError, StorageFailed, StorageFull

FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
REFUSED = frozenset({errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST, errno.ENAMETOOLONG})
MODE = 0o666  # less the umask: who shares the folder is decided by its rights


class Disk:
    """Plain files. Every method raises OSError."""

    def write(self, descriptor: int, data: bytes | memoryview, offset: int) -> int:
        """Write some of `data`; how many bytes."""
        return os.pwrite(descriptor, data, offset)

    def read(self, descriptor: int, size: int, offset: int) -> bytes:
        """At most `size` bytes."""
        return os.pread(descriptor, size, offset)

    def sync(self, descriptor: int) -> None:
        """Return when what was written is on stable storage."""
        os.fdatasync(descriptor)

    def open(self, path: Path) -> int:
        """A descriptor to read and write the file."""
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, MODE)

    def allocate(self, descriptor: int, size: int) -> None:
        """Make room for `size` bytes, zeros, so that writing there can't find the disk full and needs no journal."""
        os.posix_fallocate(descriptor, 0, size)

    def free(self, folder: Path) -> int:
        """Bytes that may still be allocated on the folder's disk."""
        status = os.statvfs(folder)
        return status.f_bavail * status.f_frsize

    def reserve(self, folder: Path, descriptor: int, size: int) -> None:
        """Allocate in a file of this folder; on a full disk the error says how many bytes are needed and how many are free."""
        free = self.free(folder)
        try:
            self.allocate(descriptor, size)
        except OSError as error:
            if error.errno not in FULL:
                raise
            needed = size - os.fstat(descriptor).st_size
            raise OSError(error.errno, f"{os.strerror(error.errno)}: {needed} bytes are needed, {free} are free") from None

    def truncate(self, descriptor: int, size: int) -> None:
        """Make the file this long; what it loses is free again."""
        os.ftruncate(descriptor, size)

    def rename(self, old: Path, new: Path) -> None:
        """Put `new` in place, durably."""
        os.replace(old, new)
        self.sync_folder(new.parent)

    def remove(self, path: Path) -> None:
        """Forget a file; gone already is fine."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)

    def sync_folder(self, folder: Path) -> None:
        """Make the folder's list of names durable."""
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def forget_cached(self, descriptor: int) -> None:
        """Let the next reads come from the medium as far as the kernel agrees."""
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)

    def write_all(self, descriptor: int, data: bytes, offset: int) -> None:
        """Write every byte of `data`."""
        view = memoryview(data)
        while view:
            written = self.write(descriptor, view, offset)
            view, offset = view[written:], offset + written

    def write_file(self, path: Path, data: bytes) -> None:
        """Put a whole file in place: it is there with all its bytes, durably, or not at all."""
        temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
        try:
            self.replace(temporary, path, data)
        except OSError:
            self.remove(temporary)
            raise

    def replace(self, room: Path, path: Path, data: bytes) -> None:
        """The same, written over the file `room`, which may be there already and becomes this one."""
        descriptor = self.open(room)
        try:
            self.write_all(descriptor, data, 0)
            self.truncate(descriptor, len(data))
            self.sync(descriptor)
        finally:
            os.close(descriptor)
        self.rename(room, path)


def failure(error: OSError, what: str) -> RoqError:
    """The error to raise for a failed file operation."""
    text = f"{what}: {error.strerror or error}"
    if error.errno in FULL:
        return StorageFull(f"{text}; nothing that was acknowledged is lost")
    if error.errno in REFUSED:
        return InvalidAddress(text)
    return StorageFailed(text)
