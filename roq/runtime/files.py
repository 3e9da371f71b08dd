"""Files that are durable when a call returns, the one place for it; and what their failures mean.

`Disk` is the seam: logs, stores and shuffles are given one, who writes a small file now and then takes `DISK`. Tests give one
that fails, fills up or forgets what was not synced; a simulation replaces `os` in this module. Bytes are synced by fdatasync,
names by an fsync of their folder. Not covered: what is in the files, locks, and reading.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from roq.errors import RoqError, StorageDenied, StorageFailed, StorageFull

StrPath = str | os.PathLike[str]
FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
REFUSED = frozenset({errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST, errno.ENAMETOOLONG})
MODE = 0o666  # less the umask: who shares the folder is decided by its rights
TEMPORARY = ".new"  # suffix of a file that is not complete yet
CHUNK_BYTES = 1024 * 1024  # of zeros
SYNC_COUNT = 256  # files open at once while they are written and synced


class Disk:
    """Plain files, by descriptor or path. Every method may raise OSError."""

    # --- one file ---------------------------------------------------------------------------------------------------------

    def open(self, path: StrPath, flags: int = 0, mode: int = MODE) -> int:
        """A descriptor to read and write the file. flags: O_CREAT and the like."""
        return os.open(path, os.O_RDWR | os.O_CLOEXEC | flags, mode)

    def close(self, file: int) -> None:
        """Close."""
        os.close(file)

    def size(self, file: int) -> int:
        """Length in bytes."""
        return os.fstat(file).st_size

    def read(self, file: int, size: int, offset: int) -> bytes:
        """At most `size` bytes."""
        return os.pread(file, size, offset)

    def write(self, file: int, data: bytes | memoryview, offset: int) -> int:
        """Write some of `data`; how many bytes. Not durable yet."""
        return os.pwrite(file, data, offset)

    def write_all(self, file: int, data: bytes | memoryview, offset: int) -> None:
        """Write every byte of `data`. Not durable yet."""
        written = self.write(file, data, offset)
        while written < len(data):
            written += self.write(file, memoryview(data)[written:], offset + written)

    def truncate(self, file: int, size: int) -> None:
        """Make the file this long; what it loses is free again."""
        os.ftruncate(file, size)

    def sync(self, file: int) -> None:
        """Return when what was written is on stable storage."""
        os.fdatasync(file)

    def allocate(self, file: int, size: int) -> None:
        """Make room for `size` bytes, zeros, so that writing there can't find the disk full and needs no journal."""
        os.posix_fallocate(file, 0, size)

    def reserve(self, folder: StrPath, file: int, size: int) -> None:
        """Allocate in a file of this folder; on a full disk the error says how many bytes are needed and how many are free."""
        free = self.free(folder)
        try:
            self.allocate(file, size)
        except OSError as error:
            if error.errno not in FULL:
                raise
            needed = size - os.fstat(file).st_size
            raise OSError(error.errno, f"{os.strerror(error.errno)}: {needed} bytes are needed, {free} are free") from None

    def forget_cached(self, file: int) -> None:
        """Let the next reads come from the medium as far as the kernel agrees."""
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)

    # --- names ------------------------------------------------------------------------------------------------------------

    def free(self, folder: StrPath) -> int:
        """Bytes that may still be allocated on the folder's disk."""
        status = os.statvfs(folder)
        return status.f_bavail * status.f_frsize

    def names(self, folder: StrPath) -> list[str]:
        """Names in a folder, sorted."""
        return sorted(os.listdir(folder))

    def sync_folder(self, folder: StrPath) -> None:
        """Make the folder's names durable: what was created, renamed and removed in it."""
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def rename(self, old: StrPath, new: StrPath) -> None:
        """Put `new` in place, durably."""
        os.replace(old, new)
        self.sync_folder(os.path.dirname(new))

    def remove(self, path: StrPath) -> bool:
        """Forget a file, not durably; whether it was there."""
        try:
            os.unlink(path)
        except FileNotFoundError:
            return False
        return True

    # --- whole files ------------------------------------------------------------------------------------------------------

    def write_synced(self, path: StrPath, data: bytes | memoryview, mode: int = MODE) -> None:
        """A file whose content is on stable storage; its name is not yet."""
        file = self.open(path, os.O_CREAT | os.O_TRUNC, mode)
        try:
            self.write_all(file, data, 0)
            self.sync(file)
        finally:
            self.close(file)

    def write_file(self, path: StrPath, data: bytes | memoryview, temporary: StrPath = "", mode: int = MODE) -> None:
        """Put a whole file in place by way of a temporary one: after a crash it has all of `data` or is what it was before."""
        temporary = temporary or f"{os.fspath(path)}.{os.getpid()}.tmp"
        try:
            self.write_synced(temporary, data, mode)
            self.rename(temporary, path)
        except OSError:
            self.remove(temporary)
            raise

    def write_over(self, room: StrPath, path: StrPath, data: bytes) -> None:
        """The same, written over the file `room`, which may be there already, so that no further room is needed."""
        file = self.open(room, os.O_CREAT)
        try:
            self.write_all(file, data, 0)
            self.truncate(file, len(data))
            self.sync(file)
        finally:
            self.close(file)
        self.rename(room, path)

    def write_zeros(self, path: Path, size: int) -> None:
        """A file of zeros, durable; it is there complete or not at all. They are written, not only reserved: overwriting them
        later needs no change of the file's metadata."""
        temporary = path.with_name(path.name + TEMPORARY)
        file = self.open(temporary, os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            self.allocate(file, size)
            zeros = bytes(CHUNK_BYTES)
            for offset in range(0, size, CHUNK_BYTES):
                self.write_all(file, zeros[: size - offset], offset)
            self.sync(file)
        except OSError:
            self.remove(temporary)
            raise
        finally:
            self.close(file)
        self.rename(temporary, path)

    def create_files(self, files: Sequence[tuple[str, bytes | memoryview]]) -> None:
        """New files whose content is on stable storage; their names are not yet. On an error some may exist."""
        for start in range(0, len(files), SYNC_COUNT):
            opened: list[int] = []
            try:
                for path, data in files[start : start + SYNC_COUNT]:
                    opened.append(self.open(path, os.O_CREAT | os.O_EXCL))
                    self.write_all(opened[-1], data, 0)
                if len(opened) > 1:
                    for file in opened:  # begins to write back all, so that the first sync's commit covers the others
                        self.forget_cached(file)
                for file in opened:
                    self.sync(file)
            finally:
                for file in opened:
                    self.close(file)


DISK = Disk()


def storage_error(error: OSError, what: object, refused: type[RoqError] = StorageFailed) -> RoqError:
    """What an OSError means to the caller. refused: for one whose folder it is, if he may not use it or it is none."""
    text = f"{what}: {error.strerror or error}"
    if error.errno in FULL:
        return StorageFull(f"{text}; nothing that was acknowledged is lost")
    return refused(text) if error.errno in REFUSED else StorageFailed(text)


@contextlib.contextmanager
def storage_errors(what: object, refused: type[RoqError] = StorageDenied) -> Iterator[None]:
    """Raises StorageFull, StorageFailed or `refused` for an OSError inside."""
    try:
        yield
    except OSError as error:
        raise storage_error(error, what, refused) from error
