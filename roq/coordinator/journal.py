"""The coordinator's journal: a local log of transactions with snapshots, and a lock so that one process at a time has it.

    folder/lock       held by the process that serves
    folder/journal/   a log (roq/log/local): one entry per transaction, a snapshot is an image of the tree

A folder that holds anything else, and no tree yet, is somebody else's: it is refused before anything is written there. Torn
ends are cut and damage is told by the log. Not covered: what a transaction means (tree.py), when to write (server.py).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from fcntl import LOCK_EX, LOCK_NB, flock
from pathlib import Path

from roq.coordinator.changes import decode_image, decode_transaction
from roq.coordinator.tree import Tree
from roq.errors import CallError, InvalidAddress, StorageFailed, UnknownFormat
from roq.log.local import LocalLog
from roq.runtime.files import MODE, Disk, storage_error
from roq.runtime.observe import logger

log = logger(__name__)

SEGMENT_BYTES = 4 * 1024 * 1024  # two are allocated at the first start: small, so that it is quick
SNAPSHOT_BYTES_MIN = 1024 * 1024  # of entries, between two snapshots; or as many as the last snapshot had
READ_BYTES = 1024 * 1024
LOCK, LOG = "lock", "journal"
NOBODYS = frozenset({LOCK, "lost+found"})  # what an empty folder may hold


class TreeJournal:
    """An open journal. One thread at a time appends; another one may write a snapshot beside it.
    force_sync: what `write` has written outlives a power cut, not kill -9 alone.

    Raises CallError: another process serves this folder, or it is not a coordinator's; StorageFailed (damaged: file and byte),
    StorageFull, UnknownFormat, InvalidAddress (no rights).
    """

    def __init__(self, folder: Path, *, force_sync: bool = True, disk: Disk | None = None) -> None:
        self.folder, self._force_sync = folder, force_sync
        _refuse_foreign(folder)
        self._lock = _lock(folder)
        try:
            self._log = LocalLog(folder / LOG, segment_bytes=SEGMENT_BYTES, disk=disk)
        except BaseException:
            os.close(self._lock)
            raise
        self._snapshot_position, self._snapshot_bytes = self._log.newest_snapshot()
        self._tried = 0  # position of the last one that was begun; there may have been no room for it

    def replay(self) -> Tree:
        """The tree as it was. What it is made of is durable when this returns."""
        snapshot = self._log.load_snapshot()
        position = snapshot[0] if snapshot else 0
        tree = Tree(decode_image(snapshot[1]) if snapshot else None)
        entries = 0
        while found := self._log.read(position, READ_BYTES):
            for at, entry in found:
                try:
                    tree.apply(decode_transaction(entry))
                except (StorageFailed, UnknownFormat) as error:
                    raise type(error)(f"{self.folder}: entry that ends at position {at}: {error}") from None
            position = found[-1][0]
            entries += len(found)
        self._log.sync(position)
        fields = {"folder": str(self.folder), "transactions": entries, "nodes": len(tree), "sessions": len(tree.sessions)}
        log.info("journal was read", extra={"fields": fields})
        return tree

    def write(self, entries: Sequence[bytes]) -> int:
        """Make these durable, in a row; the position behind them. Raises StorageFailed, StorageFull: write no more then."""
        position = self._log.append(entries)
        if self._force_sync:
            self._log.sync(position)
        return position

    def wants_snapshot(self) -> bool:
        """Whether reading it again would take much longer than reading a snapshot, and the last try is not just over."""
        last = max(self._snapshot_position, self._tried)
        return self._log.end - last > max(SNAPSHOT_BYTES_MIN, self._snapshot_bytes)

    def snapshot(self, position: int, image: bytes) -> None:
        """Keep the image of the tree behind `position`, and forget what went before. Raises StorageFailed, StorageFull."""
        with self._log.upkeep() as mine:
            if mine:
                self._tried = position
                self._log.snapshot(position, image)
                self._snapshot_position, self._snapshot_bytes = position, len(image)

    def close(self) -> None:
        """Let go of the folder."""
        self._log.close()
        os.close(self._lock)


def _refuse_foreign(folder: Path) -> None:
    try:
        found = {entry.name for entry in folder.iterdir()}
    except FileNotFoundError:
        return
    except OSError as error:
        raise storage_error(error, f"can't open {folder}", InvalidAddress) from error
    ours = found == {LOG} if LOCK not in found else LOG in found  # the lock may be missing in a copy
    foreign = sorted(found - NOBODYS)
    if foreign and not ours:
        raise CallError(
            f"{folder} is no coordinator's: it has {foreign[0]!r} and no journal of one. Name an empty folder or a new one"
        )


def _lock(folder: Path) -> int:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, MODE)
    except OSError as error:
        raise storage_error(error, f"can't open {folder}", InvalidAddress) from error
    try:
        flock(descriptor, LOCK_EX | LOCK_NB)
    except OSError:
        holder = os.pread(descriptor, 32, 0).decode(errors="replace").strip() or "unknown"
        os.close(descriptor)
        raise CallError(
            f"another coordinator (process {holder}) serves the folder {folder}: stop it or name another folder"
        ) from None
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, str(os.getpid()).encode(), 0)
    return descriptor
