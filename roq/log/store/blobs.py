"""Blobs: immutable payload files, one each, checked when they come and when they go.

    blobs/<2 hex>/<quoted name>     "RoQB" · version u32 · length u64 · crc u32 · header crc u32 · the bytes
    blobs/bad/<quoted name>         found damaged: kept for people, no longer listed

Blocking code: the process runs it in threads. A blob is written beside its place, synced, then renamed.
"""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from struct import Struct
from typing import BinaryIO
from urllib.parse import quote, unquote
from zlib import crc32

from roq.errors import CallError, StorageFailed, StorageFull, TaskNotFound, TemporaryError
from roq.runtime.files import DISK, FULL, TEMPORARY
from roq.wire.store import BLOB_PART_BYTES, BlobView

MAGIC = b"RoQB"
VERSION = 1
NAME_BYTES_MAX = 250  # as a quoted file name, with the temporary suffix
UPLOADS_MAX = 256  # under way at a time
UPLOAD_SECONDS_MAX = 120.0  # without a further part
REFUSED_SECONDS = 600.0  # a deleted name is not taken again for so long: longer than any copy takes
_header = Struct("<4sIQI")
_crc = Struct("<I")
HEADER_BYTES = _header.size + _crc.size


@dataclass(eq=False)
class _Upload:
    """users: threads that work on its file; the last one closes it when it is over."""

    path: Path
    file: int
    total: int
    crc: int
    received: int = 0
    running: int = 0
    users: int = 0
    over: bool = False
    touched: float = field(default_factory=time.monotonic)


class BlobFolder:
    """The blobs of one store directory. Any thread."""

    def __init__(self, directory: Path, free_bytes_min: int) -> None:
        self._directory, self._free_bytes_min = directory, free_bytes_min
        self._lock = threading.Lock()
        self._blobs: dict[str, tuple[int, float]] = {}  # name -> size, when stored
        self.bytes = 0  # of all of them
        self._uploads: dict[str, _Upload] = {}
        self._deleted: dict[str, float] = {}
        self._bad: set[str] = set()
        for folder in ("bad", *(f"{number:02x}" for number in range(256))):
            (directory / folder).mkdir(parents=True, exist_ok=True)
        DISK.sync_folder(directory)
        self._load()

    def _load(self) -> None:
        for number in range(256):
            folder = self._directory / f"{number:02x}"
            entries = list(os.scandir(folder))
            if entries:  # what a killed process renamed counts as durable from now on
                DISK.sync_folder(folder)
            for entry in entries:
                if entry.name.endswith(TEMPORARY):
                    os.unlink(entry.path)
                else:
                    found = entry.stat()
                    self._list(unquote(entry.name), max(found.st_size - HEADER_BYTES, 0), found.st_mtime)
        self._bad = {unquote(name) for name in os.listdir(self._directory / "bad")}

    @property
    def count(self) -> int:
        """How many there are."""
        return len(self._blobs)

    def _list(self, blob: str, size: int, when: float) -> None:
        self._unlist(blob)
        self._blobs[blob] = (size, when)
        self.bytes += size

    def _unlist(self, blob: str) -> None:
        self.bytes -= self._blobs.pop(blob, (0, 0.0))[0]

    def _path(self, blob: str) -> Path:
        name = quote(blob, safe="~")
        if not 0 < len(name) <= NAME_BYTES_MAX or name in (".", "..") or name.endswith(TEMPORARY):
            raise CallError(f"{blob!r} can't name a blob")
        return self._directory / f"{crc32(blob.encode()) & 0xFF:02x}" / name

    def put(self, blob: str, offset: int, total: int, crc: int, data: bytes) -> None:
        """One part, in order; the last one makes it durable. Raises StorageFull, StorageFailed, CallError, TemporaryError."""
        path = self._path(blob)
        if total < 0 or offset < 0 or offset + len(data) > total or (not data and total):
            raise CallError(f"a part of {len(data)} bytes at {offset} of {total}")
        known: _Upload | None = None
        try:
            if (known := self._upload(blob, path, offset, total, crc)) is None:
                return  # it is here already
            DISK.write_all(known.file, data, HEADER_BYTES + offset)
            known.running, known.received = crc32(data, known.running), offset + len(data)
            if known.received == total:
                self._finish(blob, path, known)
        except OSError as error:
            self._drop(blob)
            if error.errno in FULL:
                raise StorageFull(f"no space for blob {blob}") from error
            raise StorageFailed(f"blob {blob}: {error}") from error
        finally:
            if known is not None:
                self._leave(known)

    def _leave(self, upload: _Upload) -> None:
        with self._lock:
            upload.users -= 1
            if upload.over and not upload.users:
                DISK.close(upload.file)

    def _upload(self, blob: str, path: Path, offset: int, total: int, crc: int) -> _Upload | None:
        with self._lock:
            if time.monotonic() - self._deleted.get(blob, -REFUSED_SECONDS) < REFUSED_SECONDS:
                raise TaskNotFound(f"blob {blob} was deleted: upload it under another name")
            if blob in self._blobs and self._fits(path, total, crc):
                return None
            self._expire()
            known = self._uploads.get(blob)
            if known is not None and (offset == 0 or (known.total, known.crc) != (total, crc)):
                self._drop_locked(blob)
                known = None
            if known is None and offset == 0:
                known = self._uploads[blob] = self._begin(path, total, crc)
            if known is None or known.received != offset:
                raise TemporaryError(f"blob {blob} has no upload at byte {offset}: upload it again from its first byte")
            known.touched = time.monotonic()
            known.users += 1
            return known

    def _begin(self, path: Path, total: int, crc: int) -> _Upload:
        if len(self._uploads) >= UPLOADS_MAX:
            raise TemporaryError("too many uploads: try again")
        if DISK.free(self._directory) < total + self._free_bytes_min:
            raise StorageFull("no space for blobs")
        temporary = path.with_name(f"{secrets.token_hex(8)}{TEMPORARY}")
        file = DISK.open(temporary, os.O_CREAT | os.O_EXCL, 0o600)
        head = _header.pack(MAGIC, VERSION, total, crc)
        DISK.write_all(file, head + _crc.pack(crc32(head)), 0)
        return _Upload(temporary, file, total, crc)

    def _finish(self, blob: str, path: Path, upload: _Upload) -> None:
        if upload.running != upload.crc:
            self._drop(blob)
            raise TemporaryError(f"blob {blob} was damaged on its way")
        DISK.sync(upload.file)
        with self._lock:
            if self._uploads.get(blob) is not upload:
                raise TemporaryError(f"blob {blob}: deleted or uploaded anew meanwhile")
            DISK.rename(upload.path, path)
            del self._uploads[blob]
            upload.over = True
            self._list(blob, upload.total, time.time())
            self._bad.discard(blob)

    def _fits(self, path: Path, total: int, crc: int) -> bool:
        try:
            with opened(path) as file:
                return _decode(file.read(HEADER_BYTES)) == (total, crc)
        except OSError:
            return False

    def expire(self) -> int:
        """Drop uploads that nobody went on with for UPLOAD_SECONDS_MAX; how many."""
        with self._lock:
            return self._expire()

    def _expire(self) -> int:
        now = time.monotonic()
        over = [name for name, one in self._uploads.items() if now - one.touched > UPLOAD_SECONDS_MAX]
        for blob in over:
            self._drop_locked(blob)
        for blob in [name for name, when in self._deleted.items() if now - when > REFUSED_SECONDS]:
            del self._deleted[blob]
        return len(over)

    def _drop(self, blob: str) -> None:
        with self._lock:
            self._drop_locked(blob)

    def _drop_locked(self, blob: str) -> None:
        upload = self._uploads.pop(blob, None)
        if upload is not None:
            upload.over = True
            if not upload.users:
                DISK.close(upload.file)
            upload.path.unlink(missing_ok=True)

    def get(self, blob: str, offset: int, count: int) -> tuple[int, int, bytes]:
        """(length, crc, part). Raises TaskNotFound, StorageFailed (damaged), CallError. The reader checks all of it."""
        if offset < 0 or count < 0:
            raise CallError(f"{count} bytes of a payload from {offset} on")
        try:
            with opened(self._path(blob)) as file:
                head = _decode(file.read(HEADER_BYTES))
                file.seek(HEADER_BYTES + offset)
                data = file.read(min(count, BLOB_PART_BYTES))
        except FileNotFoundError:
            self._vanished(blob)
            raise TaskNotFound(f"no blob {blob} here") from None
        except OSError as error:
            raise StorageFailed(f"blob {blob}: {error}") from error
        if head is None or len(data) < min(count, BLOB_PART_BYTES, max(head[0] - offset, 0)):
            self.put_aside(blob)
            raise StorageFailed(f"blob {blob} is damaged")
        return (*head, data)

    def check(self, blob: str) -> bool:
        """Read all of it; a damaged one is put aside."""
        try:
            with opened(self._path(blob)) as file:
                head, running, size = _decode(file.read(HEADER_BYTES)), 0, 0
                while data := file.read(BLOB_PART_BYTES):
                    running, size = crc32(data, running), size + len(data)
        except FileNotFoundError:
            return not self._vanished(blob)
        except OSError:
            head = None
        if head == (size, running):
            return True
        self.put_aside(blob)
        return False

    def _vanished(self, blob: str) -> bool:
        """Its file was removed by somebody else: it is no longer listed."""
        with self._lock:
            gone = blob in self._blobs and not self._path(blob).exists()
            if gone:
                self._unlist(blob)
            return gone

    def put_aside(self, blob: str) -> None:
        """It is damaged: no longer listed, so that it is copied here again."""
        path = self._path(blob)
        with self._lock:
            self._unlist(blob)
            self._bad.add(blob)
        if path.exists():
            path.rename(self._directory / "bad" / path.name)
            for folder in (self._directory / "bad", path.parent):
                DISK.sync_folder(folder)

    def delete(self, blob: str) -> None:
        """Forget it; refuse it for a while."""
        path = self._path(blob)
        with self._lock:
            self._deleted[blob] = time.monotonic()
            self._drop_locked(blob)
            self._unlist(blob)
            self._bad.discard(blob)
        path.unlink(missing_ok=True)
        (self._directory / "bad" / path.name).unlink(missing_ok=True)
        DISK.sync_folder(path.parent)

    def size(self, blob: str) -> int:
        """Bytes of a blob, 0 if it is not here."""
        return self._blobs.get(blob, (0, 0.0))[0]

    def lacking(self, asked: Sequence[tuple[str, int]]) -> list[int]:
        """Which of these (name, bytes) are not here, or have another length. Any thread, without waiting."""
        blobs = self._blobs
        return [place for place, (name, size) in enumerate(asked) if blobs.get(name, (-1, 0.0))[0] != size]

    def names(self, prefix: str = "", after: str = "") -> list[str]:
        """All blobs, sorted."""
        with self._lock:
            return sorted(name for name in self._blobs if name.startswith(prefix) and name > after)

    def views(self, prefix: str, after: str, count: int) -> tuple[list[BlobView], list[str]]:
        """Inventory, and what was found damaged."""
        now = time.time()
        found = [(name, self._blobs.get(name)) for name in self.names(prefix, after)[:count]]
        bad = sorted(name for name in self._bad if name.startswith(prefix))[:count]
        return [BlobView(name, one[0], now - one[1]) for name, one in found if one is not None], bad


def opened(path: Path) -> BinaryIO:
    """To read it."""
    return path.open("rb")


def _decode(head: bytes) -> tuple[int, int] | None:
    if len(head) < HEADER_BYTES or _crc.unpack_from(head, _header.size)[0] != crc32(head[: _header.size]):
        return None
    magic, version, total, crc = _header.unpack_from(head)
    return (int(total), int(crc)) if (magic, version) == (MAGIC, VERSION) else None
