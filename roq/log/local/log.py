"""`LocalLog`: one ordered, durable list of entries in a folder, that any number of processes of one machine append to.

An append is one write under the append lock; it is visible to every process at once and durable after `sync`. Syncs are made
in rounds: the first writer of a round leads it, the others sleep on its lock file and wake when it has let go; meanwhile the
next round gathers. So one fdatasync covers everybody who had written when it began, and a follower wakes once.

What is read may not be durable yet. That is safe on one machine: only a crash of the machine loses it, and that ends every
process that has read it. Whoever tells somebody outside must `sync` first.

A process may be killed at any instruction: the kernel frees its locks, INTENT != WRITTEN in the header tells the next appender
to wipe what it left, ROLL to finish its change of segment. A failed write or sync ends writing for everybody (StorageFailed)
until the log is opened anew by a process alone, which looks at what the medium really has. Not covered: folders shared by
several machines; a process that is stopped (SIGSTOP) while it holds a lock holds up the writers until it goes on.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from fcntl import LOCK_EX, LOCK_NB, LOCK_SH, LOCK_UN, flock
from pathlib import Path
from zlib import crc32

from roq.errors import CallError, Closed, InvalidAddress, LogTrimmed, StorageFailed, StorageFull
from roq.log.local.layout import ENTRY_BYTES_MAX, ENTRY_HEAD, damaged, entry_length, pack, padded, unpack
from roq.log.local.locks import ROUNDS, release, try_alone
from roq.log.local.opening import open_folder
from roq.log.local.publication import PublicationList, open_list
from roq.log.local.segments import KEPT, DiskRoom, SegmentFile, load_snapshot, newest_snapshot, save_snapshot
from roq.log.local.shared import Word
from roq.runtime.files import FULL, MODE, Disk, storage_error

READ_BYTES = 4 * 1024 * 1024
UPKEEP_PAUSE_SECONDS = 0.01
PUBLICATIONS = "board"  # another layout gets another name: versions that share a folder don't read each other's lists

_logger = logging.getLogger(__name__)


class LocalLog:
    """An open log. Any thread. Positions are ints that grow with every entry; 0 is before the first.

    segment_bytes: of a new log, None: as fits its disk; an existing one keeps its own. disk, wall (ns since 1970): for tests.
    Raises InvalidAddress (no rights, not a log), UnknownFormat, StorageFailed (damaged), StorageFull.
    """

    def __init__(
        self,
        folder: Path,
        *,
        segment_bytes: int | None = None,
        disk: Disk | None = None,
        wall: Callable[[], int] = time.time_ns,
    ) -> None:
        self.folder = folder.absolute()
        self._disk = disk or Disk()
        with self._failures(f"can't open the log {self.folder}"):
            opened = open_folder(self.folder, self._disk, segment_bytes, wall)
        self._cookie, self._locks, self._segments, self._header, self._clock = opened
        self._words = self._header.words
        self._room = DiskRoom(self.folder, self._disk, self._segments)
        self._upkeeping = threading.Lock()
        self._appending = threading.Lock()
        self._syncing = threading.Lock()

    @property
    def end(self) -> int:
        """Position of the last entry."""
        return self._words[Word.WRITTEN]

    @property
    def durable(self) -> int:
        """Position up to which everything is on stable storage."""
        return self._words[Word.DURABLE]

    @property
    def first(self) -> int:
        """Position from which on entries can still be read."""
        return self._words[Word.FIRST]

    @staticmethod
    def start_of(position: int, entries: Sequence[bytes]) -> int:
        """Position before these entries, the last of which ends at `position`."""
        return position - sum([padded(len(entry)) for entry in entries])

    def now(self, known: int = 0) -> int:
        """ms since 1970 of the log's clock, the same for all processes and never before `known`, a time that is in the log."""
        now = self._clock.now()
        if now >= known:
            return now
        with self._appending:
            if self._locks.is_open:
                try:
                    flock(self._locks.append, LOCK_EX)
                    self._clock.reach(known)
                finally:
                    flock(self._locks.append, LOCK_UN)
        return max(self._clock.now(), known)

    # --- writing ----------------------------------------------------------------------------------------------------------

    def append(self, entries: Sequence[bytes], *, keep_bytes: int = 0) -> int:
        """Write entries, in a row; the position of the last one. Not durable yet: see `sync`.

        keep_bytes: leave this much of the segment (at most half), and what DiskRoom keeps, to those who append with 0. Raises
        StorageFull (nothing was written), StorageFailed (what was written is unknown).
        """
        total = sum([padded(len(entry)) for entry in entries])
        if total > ENTRY_BYTES_MAX:
            raise CallError(f"entries of {total} bytes; a log takes {ENTRY_BYTES_MAX} at once")
        checksums = [crc32(entry) for entry in entries]
        words = self._words
        with self._appending:
            self._check_open()
            lock = self._locks.append
            try:
                flock(lock, LOCK_EX)  # inside: see locks.py
                segment = self._writable(total, keep_bytes)
                start = words[Word.WRITTEN]
                end = start + total
                data = pack(entries, checksums, start, words[Word.DURABLE])
                words[Word.INTENT] = end
                self._write(segment, data, start)
                words[Word.WRITTEN] = end
                self._header.ring()
            finally:
                flock(lock, LOCK_UN)
        self._header.wake()
        return end

    def sync(self, position: int) -> None:
        """Return when everything up to `position` is on stable storage. Raises StorageFailed: it may never be."""
        words = self._words
        if words[Word.DURABLE] >= position:
            return
        with self._syncing:
            self._check_open()
            if words[Word.DURABLE] >= position:
                return
            round_ = words[Word.ROUND]
            lock = self._locks.rounds[round_ % ROUNDS]
            try:
                flock(lock, LOCK_EX | LOCK_NB)
                self._lead(position)
            except BlockingIOError:  # this round has a leader
                flock(lock, LOCK_SH)
                flock(lock, LOCK_UN)
                if words[Word.DURABLE] < position:  # the leader died, or its round had closed before
                    self._lead(position)
            finally:
                flock(lock, LOCK_UN)

    def _lead(self, position: int) -> None:
        words = self._words
        lock = self._locks.disk
        try:
            flock(lock, LOCK_EX)
            if words[Word.DURABLE] >= position:
                return
            self._check_failed()
            words[Word.ROUND] += 1  # whoever writes from now on joins the next round
            self._sync_disk(words[Word.WRITTEN])
        finally:
            flock(lock, LOCK_UN)

    def _sync_disk(self, target: int) -> None:
        """Sync the active segment, in which `target` lies. Under the disk lock."""
        try:
            self._disk.sync(self._segments.open(self._words[Word.ACTIVE]).descriptor)
        except OSError as error:
            raise self._fail(error, "sync") from error
        self._words[Word.DURABLE] = target

    def _write(self, segment: SegmentFile, data: bytes, position: int) -> None:
        offset = segment.offset(position)
        try:
            written = self._disk.write(segment.descriptor, data, offset)
            if written < len(data):
                self._disk.write_all(segment.descriptor, data[written:], offset + written)
        except OSError as error:
            if error.errno in FULL:  # the next appender wipes what got there
                free = self._disk.free(self.folder)
                raise storage_error(
                    error, f"{self.folder}: append of {len(data)} bytes, {free} are free", InvalidAddress
                ) from error
            raise self._fail(error, "append") from error

    def _writable(self, total: int, keep_bytes: int) -> SegmentFile:
        """The segment to write `total` bytes to. Under the append lock."""
        words = self._words
        self._check_failed()
        if words[Word.INTENT] != words[Word.WRITTEN] or words[Word.ROLL]:
            self._repair()
        segment = self._segments.open(words[Word.ACTIVE])
        room = segment.end_max - words[Word.WRITTEN]
        if keep_bytes:
            short = room - total < min(keep_bytes, self._segments.segment_bytes // 2)
            if room < total or words[Word.TIGHT] or (short and not self._segments.has_spare()):
                self._leave_room(total)
        if room < total:
            empty = words[Word.WRITTEN] == segment.base
            return self._widen(segment, total) if empty else self._roll(total, take_kept=not keep_bytes)
        return segment

    def _leave_room(self, total: int) -> None:
        """Keep what DiskRoom says, and a spare, or refuse the put. Under the append lock."""
        end = self._words[Word.WRITTEN] + total
        try:
            with self._failures(f"{self.folder}: no room for more tasks until others are done"):
                if not self._room.is_kept(end) and not self._room.is_ample(end):
                    with self.upkeep() as mine:
                        if not mine:
                            raise OSError(errno.ENOSPC, "a snapshot is being written")
                        self._room.keep(end)
                self._segments.make_spare()
            self._words[Word.TIGHT] = 0
        except StorageFull:
            self._words[Word.TIGHT] = 1
            raise

    def _repair(self) -> None:
        """Finish or wipe what an appender that died left. Under the append lock."""
        words = self._words
        base = words[Word.ROLL]
        if base and words[Word.ACTIVE] != base and self._segments.path(base).exists():
            try:
                flock(self._locks.disk, LOCK_EX)
                words[Word.ACTIVE] = base
            finally:
                flock(self._locks.disk, LOCK_UN)
        words[Word.ROLL] = 0
        left = words[Word.INTENT] - words[Word.WRITTEN]
        segment = self._segments.open(words[Word.ACTIVE])
        left = min(left, segment.end_max - words[Word.WRITTEN])
        if left > 0:
            self._write(segment, bytes(left), words[Word.WRITTEN])
        words[Word.INTENT] = words[Word.WRITTEN]

    def _roll(self, room: int, *, take_kept: bool) -> SegmentFile:
        """Start the next segment. Under the append lock."""
        base = self._words[Word.WRITTEN]
        try:
            flock(self._locks.disk, LOCK_EX)
            self._check_failed()
            self._sync_disk(base)  # first: where there is a next segment, the one before is taken to be complete
            self._words[Word.ROLL] = base
            with self._failures(f"{self.folder}: can't start a segment"):
                segment = self._segments.create(base, room, take_kept=take_kept)
            self._words[Word.ACTIVE] = base
        finally:
            flock(self._locks.disk, LOCK_UN)
        self._words[Word.ROLL] = 0
        if take_kept and not self._segments.has_spare(KEPT) and not self._room.is_ample(base):
            self._words[Word.TIGHT] = 1
        threading.Thread(target=self._prepare, name="roq-log-spare", daemon=True).start()
        return segment

    def _widen(self, segment: SegmentFile, room: int) -> SegmentFile:
        """Make an empty segment large enough. Others may go on seeing it small: then they start the next one early."""
        with self._failures(f"{self.folder}: can't widen a segment"):
            self._disk.reserve(self.folder, segment.descriptor, segment.offset(segment.base + room))
            self._disk.sync(segment.descriptor)  # its size, before anything is written: a shorter file counts as cut off
        segment.end_max = segment.base + room
        return segment

    def _prepare(self) -> None:
        """Thread: allocate the segment after the one just begun."""
        try:
            self._segments.make_spare()
        except OSError as error:
            _logger.warning("%s: can't allocate the next segment: %s", self.folder, error)

    def _fail(self, error: OSError, what: str) -> StorageFailed:
        """Nobody writes any more: after a failed sync the kernel may have dropped what it could not write."""
        self._words[Word.FAILED] = error.errno or 1
        _logger.error("%s: %s failed: %s; the log takes no more entries", self.folder, what, error)
        return StorageFailed(f"{self.folder}: {what} failed: {error.strerror}; the log takes no more until it is opened anew")

    def _check_failed(self) -> None:
        if code := self._words[Word.FAILED]:
            raise StorageFailed(
                f"{self.folder}: stable storage failed before ({os.strerror(code)}); close it everywhere, open it anew"
            )

    # --- reading ----------------------------------------------------------------------------------------------------------

    def read(self, after: int, bytes_max: int = READ_BYTES) -> list[tuple[int, bytes]]:
        """Entries behind `after`, (position, entry), about `bytes_max` at most and at least one if there is one.

        Raises LogTrimmed: load the snapshot and go on behind it.
        """
        words = self._words
        written = words[Word.WRITTEN]  # before ACTIVE: a segment is active before anything is written to it
        if after >= written:
            return []
        try:
            segment, end = self._segments.holding(after, words[Word.ACTIVE])
        except FileNotFoundError:
            self._check_trimmed(after)
            raise self._segments.missing(after) from None
        self._check_trimmed(after)
        limit = min(written, end or written)
        size = min(limit - after, max(bytes_max, ENTRY_HEAD))
        name = str(segment.path)
        with self._failures(f"{name}: read"):
            data = self._disk.read(segment.descriptor, size, segment.offset(after))
            entries = unpack(data, after, name, segment.base)
            if not entries and len(data) >= ENTRY_HEAD:
                size = min(limit - after, entry_length(data))
                data = self._disk.read(segment.descriptor, size, segment.offset(after))
                entries = unpack(data, after, name, segment.base)
        if not entries:
            raise damaged(name, after, segment.base)
        return entries

    def wait(self, after: int, seconds: float) -> bool:
        """Sleep until there is an entry behind `after`; whether there is. May return False early: look at the clock."""
        if self._words[Word.WRITTEN] > after:
            return True
        bell = self._header.listen(seconds)
        if self._words[Word.WRITTEN] <= after and self._locks.is_open and seconds > 0:
            self._header.wait(bell, seconds)
        return self._words[Word.WRITTEN] > after

    def _check_trimmed(self, after: int) -> None:
        if after < self._words[Word.FIRST]:
            raise LogTrimmed(f"{self.folder}: entries behind position {after} are in the snapshot")

    # --- snapshots --------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def upkeep(self, wait_seconds: float = 0.0) -> Iterator[bool]:
        """Whether this thread may write a snapshot now; at most one of all does at a time. Waits for the other."""
        deadline, mine = time.monotonic() + wait_seconds, False
        try:
            while not (mine := self._try_upkeep()) and self._locks.is_open and time.monotonic() < deadline:
                time.sleep(UPKEEP_PAUSE_SECONDS)
            yield mine
        finally:
            if mine:
                if self._locks.is_open:
                    release(self._locks.upkeep)
                self._upkeeping.release()

    def _try_upkeep(self) -> bool:
        if not self._upkeeping.acquire(blocking=False):
            return False
        if self._locks.is_open and try_alone(self._locks.upkeep):
            return True
        self._upkeeping.release()
        return False

    def snapshot(self, position: int, data: bytes) -> None:
        """Keep `data` as what the entries up to `position` add up to, and forget the segments below. Only within `upkeep`."""
        self.sync(position)
        with self._failures(f"{self.folder}: snapshot"):
            save_snapshot(self.folder, self._disk, self._cookie, position, data)
            bases = [base for base in self._segments.bases() if base <= min(position, self._words[Word.ACTIVE])]
            self._words[Word.FIRST] = max(bases[-1], self._words[Word.FIRST])
            self._segments.remove_below(self._words[Word.FIRST])

    @property
    def is_tight(self) -> bool:
        """Whether the disk is so full that a snapshot should bring room back as soon as it can."""
        return self._words[Word.TIGHT] != 0

    def reclaimable(self) -> int:
        """Bytes that a snapshot of everything would free, itself not counted."""
        words, end = self._words, self.end
        turns = self._turns()
        with self._failures(f"{self.folder}: room"):
            segments = self._segments.allocated(end if turns else words[Word.ACTIVE])
        return segments + self.newest_snapshot()[1]

    def is_worth(self, size: int, put: int) -> bool:
        """Whether a snapshot of this size, now, would leave room for a put of so many bytes, or has to be: acknowledgements may
        find none soon."""
        with self._failures(f"{self.folder}: room"):
            return self._room.is_worth(size, self.reclaimable(), put)

    def _turns(self) -> bool:
        """Whether the active segment stands in the way: it is the only one, and another can be begun."""
        words = self._words
        long = words[Word.WRITTEN] - words[Word.ACTIVE] > self._segments.segment_bytes // 4
        spare = self._segments.has_spare() or self._segments.has_spare(KEPT)
        return long and spare and words[Word.FIRST] == words[Word.ACTIVE]

    def make_way(self) -> None:
        """Begin another segment if the active one is all there is, so that a snapshot can free it. Only within `upkeep`."""
        with self._appending:
            self._check_open()
            lock = self._locks.append
            try:
                flock(lock, LOCK_EX)
                self._check_failed()
                if self._words[Word.INTENT] != self._words[Word.WRITTEN] or self._words[Word.ROLL]:
                    self._repair()
                if self._turns():
                    self._roll(0, take_kept=True)
            finally:
                flock(lock, LOCK_UN)

    def find_room(self, put: int) -> bool:
        """Whether a put of so many bytes finds room now. Only within `upkeep`."""
        end = self.end + put
        with self._appending:
            self._check_open()
            lock = self._locks.append
            try:
                flock(lock, LOCK_EX)
                if not self._room.is_ample(end):
                    self._room.keep(end)
                self._segments.make_spare()
                self._words[Word.TIGHT] = 0
            except OSError as error:
                if error.errno in FULL:
                    return False
                raise storage_error(error, f"{self.folder}: room", InvalidAddress) from error
            finally:
                flock(lock, LOCK_UN)
        return True

    def newest_snapshot(self) -> tuple[int, int]:
        """Position and bytes of the newest snapshot; zeros if there is none."""
        with self._failures(f"{self.folder}: snapshot"):
            return newest_snapshot(self.folder)

    def load_snapshot(self) -> tuple[int, bytes] | None:
        """The newest snapshot as (position, data), None if there is none."""
        with self._failures(f"{self.folder}: snapshot"):
            return load_snapshot(self.folder, self._cookie)

    def write_file(self, name: str, data: bytes) -> None:
        """Put a small file beside the log, durably and at once with all its bytes."""
        with self._failures(f"{self.folder / name}"):
            self._disk.write_file(self.folder / name, data)

    def open_list(self) -> PublicationList | None:
        """A place on the list where the processes of this folder ask each other; None: there is none to be had."""
        self._check_open()
        with self._failures(f"{self.folder / PUBLICATIONS}"):
            return open_list(self.folder / PUBLICATIONS, self._cookie, MODE, self._locks)

    # --- the end ----------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Let go. Nothing is synced. Threads that wait return, threads that append or sync finish first."""
        with self._appending, self._syncing:
            if self._locks.is_open:
                try:
                    flock(self._locks.append, LOCK_EX)
                    self._header.ring()
                finally:
                    self._locks.close()
        self._header.wake()

    def _check_open(self) -> None:
        if not self._locks.is_open:
            raise Closed(f"the log {self.folder} was closed")

    @contextlib.contextmanager
    def _failures(self, what: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise storage_error(error, what, InvalidAddress) from error
