"""Opening the folder of a local log: create it, refuse what is not one, and find the end of the log after a crash.

Recovery runs in the first process that opens the folder in this boot of the machine, or alone after a failed sync. It keeps
every complete entry in a row from the start of the last segment, cuts what follows (a torn tail: bytes written and never
synced, so never acknowledged) and makes the rest durable. Damage below a durable mark, of the shared header, of a later entry
or of a snapshot, is no torn tail, nor is a file shorter than it was allocated: the log is not opened and nothing is changed.
The one thing that can't be told apart is damage to what the very last sync before a power failure wrote, when the header's page
did not get to the disk either.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
from collections.abc import Callable
from fcntl import LOCK_EX, LOCK_UN, flock
from pathlib import Path
from typing import NamedTuple

from roq.errors import InvalidAddress, StorageFailed, StorageFull, UnknownFormat
from roq.log.local.layout import HEAD, cut_short, damaged, scan
from roq.log.local.locks import Locks, share, try_alone
from roq.log.local.segments import KEPT, RESERVE, SMALLEST_DISK, SPARE, SegmentFiles, fitting, snapshot_positions
from roq.log.local.shared import MAGIC, Clock, MappedHeader, Word
from roq.runtime.files import MODE, Disk

VERSION = 1
FORMAT = "FORMAT"
LOCKS = "locks"
HEADER = "header"
_FORMAT = re.compile(rb"roq-log (\d+)\n(?:cookie=([0-9a-f]{16})\nsegment_bytes=(\d+)\n)?")
_OURS = re.compile(rf"{LOCKS}|{HEADER}|{SPARE}|{KEPT}|{RESERVE}|.*\.tmp|[0-9a-f]{{16}}\.segment")

_logger = logging.getLogger(__name__)


class OpenedLog(NamedTuple):
    """What an open log stands on."""

    cookie: int
    locks: Locks
    segments: SegmentFiles
    header: MappedHeader
    clock: Clock


def open_folder(folder: Path, disk: Disk, segment_bytes: int | None, wall: Callable[[], int]) -> OpenedLog:
    """Open or create the log in `folder`. wall: ns since 1970. Raises OSError, InvalidAddress, UnknownFormat, StorageFailed."""
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / FORMAT).exists():
        _refuse_foreign(folder)
    locks = Locks(folder / LOCKS)
    try:
        flock(locks.append, LOCK_EX)
        alone = try_alone(locks.presence)
        cookie, size = _identity(folder, disk, segment_bytes)
        segments = SegmentFiles(folder, cookie, disk, size)
        header = MappedHeader(folder / HEADER, MODE)
        if alone:
            segments.remove_leftovers()
        if not header.is_current(cookie) or (alone and header.words[Word.FAILED]):
            if not alone:
                raise StorageFailed(f"{folder / HEADER} was replaced while other processes have the log open; close them all")
            flock(locks.disk, LOCK_EX)
            _recover(folder, disk, cookie, segments, header)
            flock(locks.disk, LOCK_UN)
        clock = Clock(header, wall)
        share(locks.presence)
        flock(locks.append, LOCK_UN)
    except BaseException:
        locks.close()  # and so lets go of all of them
        raise
    return OpenedLog(cookie, locks, segments, header, clock)


def _refuse_foreign(folder: Path) -> None:
    foreign = sorted(name for name in os.listdir(folder) if not _OURS.fullmatch(name))
    if foreign and not (folder / FORMAT).exists():
        raise InvalidAddress(f"{folder} is not empty and not a log (it has {foreign[0]!r}): name an empty folder or a new one")


def _size(folder: Path, disk: Disk) -> int:
    """Bytes of a segment of a new log."""
    free = disk.free(folder)
    if free < SMALLEST_DISK:
        raise StorageFull(f"{folder}: {free} bytes are free on its disk; a new log needs {SMALLEST_DISK}")
    return fitting(free)


def _identity(folder: Path, disk: Disk, segment_bytes: int | None) -> tuple[int, int]:
    """(cookie, bytes of a segment) of the log; creates the log when there is none. Under the append lock."""
    try:
        content = (folder / FORMAT).read_bytes()
    except FileNotFoundError:
        cookie = secrets.randbits(63) | 1
        segment_bytes = segment_bytes or _size(folder, disk)
        segments = SegmentFiles(folder, cookie, disk, segment_bytes)
        for base in segments.bases():
            if base or any(segments.path(base).read_bytes()[HEAD:]):
                raise StorageFailed(f"{folder} has segments of a log but no file {FORMAT}") from None
            disk.remove(segments.path(base))
        segments.create(0, 0)
        segments.make_spare()
        disk.write_file(folder / FORMAT, f"roq-log {VERSION}\ncookie={cookie:016x}\nsegment_bytes={segment_bytes}\n".encode())
        return cookie, segment_bytes
    match = _FORMAT.match(content)
    if match is None:
        raise StorageFailed(f"{folder / FORMAT} is damaged or not that of a log")
    if int(match[1]) != VERSION or match[2] is None:
        raise UnknownFormat(f"{folder} has format {int(match[1])}; this program reads format {VERSION}")
    return int(match[2], 16), int(match[3])


def _recover(folder: Path, disk: Disk, cookie: int, segments: SegmentFiles, header: MappedHeader) -> None:
    """Find the end of the log, cut a torn tail, start the shared header anew. Nobody else has the log open."""
    bases, covered = segments.bases(), snapshot_positions(folder)
    proved = covered[-1] if covered else 0
    if header.words[Word.MAGIC] == MAGIC and header.words[Word.COOKIE] == cookie:
        proved = max(proved, header.words[Word.DURABLE])
    needed = covered[-1] if covered else 0
    if not bases or bases[0] > needed:
        raise segments.missing(needed)
    first = max(base for base in bases if base <= needed)
    segments.remove_below(first)  # some that were removed before may be back after a crash
    segment = segments.open(bases[-1])
    disk.forget_cached(segment.descriptor)
    size = os.fstat(segment.descriptor).st_size
    found = scan(disk.read(segment.descriptor, size, 0), segment.base, segment.base)
    allocated = max(segments.segment_bytes, found.needed)
    if size < allocated:
        raise cut_short(str(segment.path), size, allocated)
    if found.end < max(proved, found.proved):
        raise damaged(str(segment.path), found.end, segment.base)
    cut = found.dirty - segment.offset(found.end)
    if cut > 0:
        _logger.warning("%s: cut a torn tail of %d bytes behind position %d", segment.path, cut, found.end)
        disk.write_all(segment.descriptor, bytes(cut), segment.offset(found.end))
    disk.sync(segment.descriptor)
    header.rebuild(cookie, first=first, active=segment.base, end=found.end)
