"""The few things the journal does to files, so that a test can put a disk in its place that forgets what was not synced."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Protocol

CREATE_CHUNK_BYTES = 1024 * 1024
TEMPORARY = ".new"  # suffix of a file that is not whole yet


class JournalDisk(Protocol):
    """Files by descriptor. Every call may raise OSError."""

    def create(self, path: Path, size: int) -> None:
        """A file of zeros, durable; it is there whole or not at all."""

    def open(self, path: Path) -> int:
        """Open an existing file."""

    def size(self, file: int) -> int:
        """Length in bytes."""

    def read(self, file: int, offset: int, count: int) -> bytes:
        """Up to `count` bytes."""

    def write(self, file: int, offset: int, data: bytes) -> None:
        """Write all of `data`; not durable yet."""

    def sync(self, file: int) -> None:
        """Everything written is durable when this returns."""

    def close(self, file: int) -> None:
        """Close."""

    def remove(self, path: Path) -> None:
        """Delete the file."""

    def names(self, directory: Path) -> list[str]:
        """Names in a directory, sorted."""


def sync_directory(path: Path) -> None:
    """Make what was created, renamed or removed in `path` durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class OsDisk:
    """The operating system's files."""

    def create(self, path: Path, size: int) -> None:
        """Zeros are written, not only reserved: overwriting them later needs no change of the file's metadata."""
        temporary = path.with_name(path.name + TEMPORARY)
        file = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            os.posix_fallocate(file, 0, size)
            zeros = bytes(CREATE_CHUNK_BYTES)
            for offset in range(0, size, CREATE_CHUNK_BYTES):
                self.write(file, offset, zeros[: size - offset])
            os.fsync(file)
        except OSError:
            temporary.unlink()
            raise
        finally:
            os.close(file)
        temporary.rename(path)
        sync_directory(path.parent)

    def open(self, path: Path) -> int:
        """Open an existing file."""
        return os.open(path, os.O_RDWR | os.O_CLOEXEC)

    def size(self, file: int) -> int:
        """Length in bytes."""
        return os.fstat(file).st_size

    def read(self, file: int, offset: int, count: int) -> bytes:
        """Up to `count` bytes."""
        return os.pread(file, count, offset)

    def write(self, file: int, offset: int, data: bytes) -> None:
        """Write all of `data`; not durable yet."""
        written = os.pwrite(file, data, offset)
        while written < len(data):
            written += os.pwrite(file, memoryview(data)[written:], offset + written)

    def sync(self, file: int) -> None:
        """Everything written is durable when this returns."""
        os.fdatasync(file)

    def close(self, file: int) -> None:
        """Close."""
        os.close(file)

    def remove(self, path: Path) -> None:
        """Delete the file."""
        path.unlink()

    def names(self, directory: Path) -> list[str]:
        """Names in a directory, sorted."""
        return sorted(os.listdir(directory))
