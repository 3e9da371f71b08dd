"""What lies in a shuffle's folder: attempts while they are written, and ranges while they are read.

Not covered: the shuffles themselves (folder.py), the layout of a file (attempt_file.py).
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from fcntl import LOCK_EX, LOCK_NB, flock
from pathlib import Path
from urllib.parse import quote

from roq.errors import AttemptConflict, DataLost, InvalidName, RoqError, ShuffleNotFound, ShuffleSealed
from roq.log.local.disk import MODE, Disk, failure
from roq.shuffle.attempt_file import AttemptWriter, BlockPlace, Owner, read_block, same_file
from roq.shuffle.contract import Opened
from roq.wire.shuffle import Block, Receipt, RunSample, RunSlice

RUN, PART = ".run", ".part"
FILE_NAME_MAX = 240  # bytes of an encoded name
UNLOCKED_SECONDS = 60.0  # nobody takes so long between making a file and locking it


def encoded(name: str, suffix: str) -> str:
    """Any name as that of a file. Raises InvalidName (too long)."""
    found = quote(name, safe=" ") + suffix
    if len(found) > FILE_NAME_MAX:
        raise InvalidName(f"{name!r} makes too long a file name: {len(found)} bytes, at most {FILE_NAME_MAX}")
    return found


def file_name(partition: int, attempt: str, suffix: str) -> str:
    """Of an attempt. Raises InvalidName (too long)."""
    return encoded(f"{partition}-{attempt}", suffix)


@contextlib.contextmanager
def failing(path: Path) -> Iterator[None]:
    """Failures of the disk as RoQ's errors: StorageFull, StorageFailed, InvalidAddress."""
    try:
        yield
    except OSError as error:
        raise failure(error, str(path)) from error


class FolderAttempt:
    """A contract.AttemptSink: one attempt, in a file of its own."""

    def __init__(self, disk: Disk, home: Path, owner: Owner) -> None:
        """Raises AttemptConflict, ShuffleNotFound, StorageFull, StorageFailed."""
        self._disk, self._home, self._owner = disk, home, owner
        self._part = home / "attempts" / file_name(owner.partition, owner.attempt, PART)
        self._run = home / "attempts" / file_name(owner.partition, owner.attempt, RUN)
        _sweep_dead(home)
        with failing(self._part):
            try:
                file = os.open(self._part, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, MODE)
            except FileExistsError as error:
                raise self._conflict() from error
            except FileNotFoundError as error:
                raise ShuffleNotFound(f"the shuffle in {home} was removed") from error
            try:
                flock(file, LOCK_EX)
                self._file = AttemptWriter(disk, file, owner)
            except BaseException:  # no room for its head: the id can be used when there is some
                if same_file(self._part, file):
                    disk.remove(self._part)
                os.close(file)
                raise
            if self._run.exists():
                self.abandon()
                raise self._conflict()

    def begin(self, run: int) -> None:
        """See the contract."""

    def send(self, blocks: Sequence[Block]) -> None:
        """See the contract."""
        with failing(self._part):
            self._file.send(blocks)

    def end(self, sample: RunSample) -> None:
        """See the contract."""
        with failing(self._part):
            self._file.end(sample)

    def finish(self, receipt: Receipt) -> None:
        """See the contract."""
        with failing(self._part):
            self._file.finish()
            self._name()
            if (self._home / "table").exists():  # committed without us, just now
                self._remove(self._run)
                raise self._gone()
            self._file.close()

    def _name(self) -> None:
        """Durably. Another's file may have our names by now: in a shuffle that was made anew under the old name."""
        if not self._file.is_at(self._part):
            raise self._gone()
        try:
            self._disk.rename(self._part, self._run)
        except FileNotFoundError as error:
            raise self._gone() from error
        except OSError:
            if self._file.is_at(self._run):  # it has its name, but for how long? Another try names it anew
                os.replace(self._run, self._part)
            raise

    def abandon(self) -> None:
        """See the contract."""
        with contextlib.suppress(OSError):
            self._remove(self._part)
            self._remove(self._run)
        self._file.close()

    def _remove(self, path: Path) -> None:
        """If it is ours."""
        if self._file.is_at(path):
            self._disk.remove(path)

    def _gone(self) -> RoqError:
        """Others' commit has swept it, or the shuffle is gone."""
        if (self._home / "table").exists():
            return ShuffleSealed(f"the shuffle was sealed while attempt {self._owner.attempt!r} was written")
        return ShuffleNotFound(f"the shuffle that attempt {self._owner.attempt!r} was begun in was removed")

    def _conflict(self) -> RoqError:
        owner = self._owner
        return AttemptConflict(f"attempt {owner.attempt!r} of partition {owner.partition} was begun before: take another id")


class FolderRange:
    """A contract.RangeSource over files."""

    def __init__(self, disk: Disk, opened: Opened, places: Sequence[tuple[RunSlice, Path, Sequence[BlockPlace]]]) -> None:
        self.opened = opened
        self.slices: Sequence[RunSlice] = [piece for piece, _, _ in places]
        self._disk = disk
        self._places = {piece: (path, blocks) for piece, path, blocks in places}

    def blocks(self, slice: RunSlice) -> Iterator[Block]:
        """See the contract. The CRC is checked where blocks are decoded."""
        path, places = self._places[slice]
        for place in places:
            yield self._block(path, place)  # and keep no name for it: many of these wait at the same time

    def close(self) -> None:
        """See the contract."""

    def _block(self, path: Path, place: BlockPlace) -> Block:
        with failing(path):
            try:
                return read_block(self._disk, path, place)
            except FileNotFoundError as error:
                raise DataLost(f"{path} is gone: was the shuffle removed?") from error


def _sweep_dead(home: Path) -> None:
    """Take away what writers that died have left: their locks are free."""
    with contextlib.suppress(OSError):
        for path in (home / "attempts").glob(f"*{PART}"):
            if time.time() - path.stat().st_mtime > UNLOCKED_SECONDS and _is_free(path):
                path.unlink(missing_ok=True)


def _is_free(path: Path) -> bool:
    file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        flock(file, LOCK_EX | LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(file)
    return True
