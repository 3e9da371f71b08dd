"""Shuffles in a folder: a contract.Service without any server, for any number of processes of one machine.

    NAME.shuffle/shuffle          what it was created with; the folder appears with it, at once
    NAME.shuffle/lock             held (flock) while it is sealed, split anew or removed
    NAME.shuffle/attempts/P-A.part    an attempt that is being written, locked by its writer
    NAME.shuffle/attempts/P-A.run     a stored attempt (attempt_file.py)
    NAME.shuffle/table            the sealed shuffle (folder_table.py); there is no state between filling and sealed
    TOKEN.new, TOKEN.removed      being made, being removed

Every step is one rename of something that is on stable storage already, so a process may be killed anywhere: what it left is
used, or taken away by whoever comes next. Names are percent-encoded. Not covered: machines that share a folder over a network.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from fcntl import LOCK_EX, LOCK_NB, LOCK_UN, flock
from pathlib import Path
from urllib.parse import quote, unquote

import msgspec

from roq.errors import (
    AttemptConflict,
    AttemptNotFound,
    CallError,
    Closed,
    DataLost,
    InvalidAddress,
    InvalidName,
    RoqError,
    ShuffleConflict,
    ShuffleNotFound,
    ShuffleNotSealed,
    ShuffleSealed,
)
from roq.ids import check_name, new_token
from roq.runtime.files import MODE, Disk, storage_errors
from roq.shuffle.attempt_file import AttemptFile, AttemptWriter, BlockPlace, Owner, read_block, same_file
from roq.shuffle.blocks import load_schema
from roq.shuffle.contract import Opened
from roq.shuffle.folder_table import Table, decode_table, encode_table, make_table, same_borders
from roq.shuffle.keys import KeyEncoder
from roq.wire.decoding import UNDECODABLE
from roq.wire.shuffle import Block, Description, Receipt, RunSample, RunSlice, ShuffleState, Spec

RUN, PART = ".run", ".part"
FILE_NAME_MAX = 240  # bytes of an encoded name
UNLOCKED_SECONDS = 60.0  # nobody takes so long between making a file and locking it
SUFFIX, NEW, REMOVED = ".shuffle", ".new", ".removed"
LEFTOVER_SECONDS = 600.0  # nobody takes so long between two steps of creating or removing
FILES_KEPT = 64  # indices of attempts' files in memory


def encoded(name: str, suffix: str) -> str:
    """Any name as that of a file. Raises InvalidName (too long)."""
    found = quote(name, safe=" ") + suffix
    if len(found) > FILE_NAME_MAX:
        raise InvalidName(f"{name!r} makes too long a file name: {len(found)} bytes, at most {FILE_NAME_MAX}")
    return found


def file_name(partition: int, attempt: str, suffix: str) -> str:
    """Of an attempt. Raises InvalidName (too long)."""
    return encoded(f"{partition}-{attempt}", suffix)


class FolderAttempt:
    """A contract.AttemptSink: one attempt, in a file of its own."""

    def __init__(self, disk: Disk, home: Path, owner: Owner) -> None:
        """Raises AttemptConflict, ShuffleNotFound, StorageFull, StorageFailed."""
        self._disk, self._home, self._owner = disk, home, owner
        self._part = home / "attempts" / file_name(owner.partition, owner.attempt, PART)
        self._run = home / "attempts" / file_name(owner.partition, owner.attempt, RUN)
        _sweep_dead(home)
        with storage_errors(self._part, InvalidAddress):
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

    def send(self, blocks: Sequence[Block]) -> None:
        """See the contract."""
        with storage_errors(self._part, InvalidAddress):
            self._file.send(blocks)

    def end(self, sample: RunSample) -> None:
        """See the contract."""
        with storage_errors(self._part, InvalidAddress):
            self._file.end(sample)

    def finish(self, receipt: Receipt) -> None:
        """See the contract."""
        with storage_errors(self._part, InvalidAddress):
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
        with storage_errors(path, InvalidAddress):
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


class _Made(msgspec.Struct, frozen=True):
    """The file `shuffle`."""

    format: int
    id: str
    name: str
    created: float
    spec: Spec


class FolderService:
    """A contract.Service over one folder."""

    def __init__(self, root: Path, disk: Disk | None = None) -> None:
        """Makes the folder. Raises InvalidAddress, StorageFailed."""
        self.root = root
        self._disk = disk or Disk()
        self._files: OrderedDict[tuple[str, Path], AttemptFile] = OrderedDict()
        self._lock = threading.Lock()
        self._open = True
        with storage_errors(root, InvalidAddress):
            _make_folder(self._disk, root)

    def create(self, name: str, spec: Spec) -> Description:
        """See the contract."""
        home = self._home(name)
        KeyEncoder(load_schema(spec.schema), spec.keys)
        self._sweep_root()
        with storage_errors(home, InvalidAddress):
            if not home.exists():
                self._make(home, name, spec)
        made = self._made(home)
        if made.spec != spec:
            raise ShuffleConflict(f"shuffle {name!r} exists with other keys, columns or settings")
        return self._description(home)

    def describe(self, name: str) -> Description:
        """See the contract."""
        return self._description(self._home(name))

    def list(self) -> list[Description]:
        """See the contract."""
        self._check_open()
        found = []
        with storage_errors(self.root, InvalidAddress):
            names = sorted(unquote(path.name.removesuffix(SUFFIX)) for path in self.root.glob(f"*{SUFFIX}"))
        for name in names:
            with contextlib.suppress(ShuffleNotFound):  # removed meanwhile
                found.append(self.describe(name))
        return found

    def remove(self, name: str) -> None:
        """See the contract."""
        self._sweep_root()
        with self._locked(name) as home, storage_errors(home, InvalidAddress):
            gone = self.root / (new_token() + REMOVED)
            self._disk.rename(home, gone)
        shutil.rmtree(gone, ignore_errors=True)

    def open_attempt(self, name: str, partition: int, attempt: str) -> FolderAttempt:
        """See the contract."""
        home = self._home(name)
        made = self._made(home)
        if (home / "table").exists():
            raise ShuffleSealed(f"shuffle {name!r} is sealed: nothing can be written any more")
        return FolderAttempt(self._disk, home, Owner(made.id, partition, attempt))

    def commit(self, name: str, receipts: Sequence[Receipt]) -> Description:
        """See the contract."""
        committed = {receipt.partition: receipt.attempt for receipt in receipts}
        if len(committed) != len(receipts):
            twice = sorted({each.partition for each in receipts if committed[each.partition] != each.attempt})
            raise AttemptConflict(f"partitions with several receipts: {twice or 'the same attempt is reported twice'}")
        with self._locked(name) as home, storage_errors(home, InvalidAddress):
            table = self._table(home)
            if table is None:
                files = [self._stored(home, receipt) for receipt in sorted(receipts, key=lambda each: each.partition)]
                made = self._made(home)
                self._write_table(home, make_table(self._disk, files, self._encoder(made.spec), made.spec.ranges, None))
            elif table.committed != committed:
                raise ShuffleSealed(f"shuffle {name!r} is sealed with other attempts")
            self._sweep(home, committed)
            return self._description(home)

    def rebalance(self, name: str, ranges: int = 0) -> Description:
        """See the contract."""
        with self._locked(name) as home, storage_errors(home, InvalidAddress):
            former = self._sealed(home)
            made = self._made(home)
            files = [self._winner(home, made.id, *winner) for winner in sorted(former.committed.items())]
            wanted = ranges or len(former.ranges)
            table = make_table(self._disk, files, self._encoder(made.spec), wanted, former)
            if not same_borders(table, former):
                self._write_table(home, table)
            self._sweep(home, former.committed)
            return self._description(home)

    def open_range(self, name: str, number: int) -> FolderRange:
        """See the contract."""
        home = self._home(name)
        with storage_errors(home, InvalidAddress):
            table = self._sealed(home)
            if not 0 <= number < len(table.ranges):
                raise CallError(f"shuffle {name!r} has the ranges 0 to {len(table.ranges) - 1}, not {number}")
            made = self._made(home)
            self._sweep_after_the_dead(home, table.committed)
            opened = Opened(made.id, table.ranges[number].interval)
            return FolderRange(self._disk, opened, [self._covering(home, made.id, piece) for piece in table.slices(number)])

    def close(self) -> None:
        """See the contract."""
        self._open = False

    # --- inside -------------------------------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if not self._open:
            raise Closed("these shuffles were closed")

    def _home(self, name: str) -> Path:
        self._check_open()
        return self.root / encoded(check_name(name, "shuffle"), SUFFIX)

    @contextlib.contextmanager
    def _locked(self, name: str) -> Iterator[Path]:
        """Alone with this shuffle, among those who change it. Raises ShuffleNotFound."""
        home = self._home(name)
        while True:
            self._made(home)
            with storage_errors(home, InvalidAddress):
                try:
                    lock = os.open(home / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, MODE)
                except FileNotFoundError:
                    continue
                try:
                    flock(lock, LOCK_EX)
                    if same_file(home / "lock", lock):  # else it was removed, and perhaps made again, while we waited
                        try:
                            yield home
                        finally:
                            flock(lock, LOCK_UN)  # a process forked meanwhile would hold it on
                        return
                finally:
                    os.close(lock)

    def _make(self, home: Path, name: str, spec: Spec) -> None:
        new = self.root / (new_token() + NEW)
        (new / "attempts").mkdir(parents=True)
        made = _Made(1, new_token(), name, time.time(), spec)
        self._disk.write_file(new / "shuffle", msgspec.json.encode(made))
        try:
            self._disk.rename(new, home)
        except OSError:
            shutil.rmtree(new, ignore_errors=True)
            if not home.exists():  # else somebody was faster
                raise

    def _made(self, home: Path) -> _Made:
        with storage_errors(home, InvalidAddress):
            try:
                data = (home / "shuffle").read_bytes()
            except FileNotFoundError as error:
                raise ShuffleNotFound(f"no shuffle {unquote(home.name.removesuffix(SUFFIX))!r} in {self.root}") from error
        try:
            return msgspec.json.decode(data, type=_Made)
        except UNDECODABLE as error:
            raise DataLost(f"{home / 'shuffle'} is damaged: {error}") from error

    def _encoder(self, spec: Spec) -> KeyEncoder:
        return KeyEncoder(load_schema(spec.schema), spec.keys)

    def _table(self, home: Path) -> Table | None:
        try:
            return decode_table((home / "table").read_bytes())
        except FileNotFoundError:
            return None

    def _sealed(self, home: Path) -> Table:
        made, table = self._made(home), self._table(home)
        if table is None:
            raise ShuffleNotSealed(f"shuffle {made.name!r} is not sealed yet: commit it before it is read")
        return table

    def _write_table(self, home: Path, table: Table) -> None:
        self._disk.write_file(home / "table", encode_table(table))

    def _description(self, home: Path) -> Description:
        made = self._made(home)
        with storage_errors(home, InvalidAddress):
            table = self._table(home)
            stored = sum(1 for _ in (home / "attempts").glob(f"*{RUN}")) if table is None else len(table.committed)
        state = ShuffleState.FILLING if table is None else ShuffleState.SEALED
        table = table or Table(0, {}, (), [], 0, 0)
        return Description(
            made.name, made.id, made.spec, state, made.created, table.epoch, table.ranges, (), table.committed,
            table.rows, table.size, stored, 0, 0,
        )  # fmt: skip

    def _stored(self, home: Path, receipt: Receipt) -> AttemptFile:
        made = self._made(home)
        try:
            file = self._file(home, made.id, receipt.partition, receipt.attempt)
        except FileNotFoundError as error:
            text = f"attempt {receipt.attempt!r} of partition {receipt.partition} was never stored here"
            raise AttemptNotFound(text) from error
        if file.receipt != receipt or file.owner.shuffle != made.id:
            raise AttemptNotFound(f"what is stored is {file.receipt}, not {receipt}")
        return file

    def _winner(self, home: Path, shuffle: str, partition: int, attempt: str) -> AttemptFile:
        try:
            return self._file(home, shuffle, partition, attempt)
        except FileNotFoundError as error:
            raise DataLost(f"attempt {attempt!r} of partition {partition} is gone from {home}") from error

    def _file(self, home: Path, shuffle: str, partition: int, attempt: str) -> AttemptFile:
        """Its index is read once, if that isn't long ago: files never change."""
        path = home / "attempts" / file_name(partition, attempt, RUN)
        with self._lock:
            known = self._files.get((shuffle, path))
            if known is not None:
                self._files.move_to_end((shuffle, path))
                return known
        file = AttemptFile(self._disk, path)
        with self._lock:
            self._files[shuffle, path] = file
            while len(self._files) > FILES_KEPT:
                self._files.popitem(last=False)
        return file

    def _covering(self, home: Path, shuffle: str, piece: RunSlice) -> tuple[RunSlice, Path, Sequence[BlockPlace]]:
        file = self._winner(home, shuffle, piece.partition, piece.attempt)
        return piece, file.path, file.runs[piece.run].covering(piece)

    def _litter(self, home: Path, committed: dict[int, str]) -> Sequence[Path]:
        """What a sealed shuffle has no use for: all attempts but the committed ones, and tables nobody has finished."""
        kept = {file_name(partition, attempt, RUN) for partition, attempt in committed.items()}
        attempts = home / "attempts"
        return [*(attempts / name for name in os.listdir(attempts) if name not in kept), *home.glob("table.*.tmp")]

    def _sweep(self, home: Path, committed: dict[int, str]) -> None:
        """Under its lock."""
        for path in self._litter(home, committed):
            self._disk.remove(path)

    def _sweep_after_the_dead(self, home: Path, committed: dict[int, str]) -> None:
        """Who sealed or cut it may have died before sweeping. Readers can do without, and may not be allowed to."""
        with contextlib.suppress(OSError):
            if not self._litter(home, committed):
                return
            lock = os.open(home / "lock", os.O_RDWR | os.O_CLOEXEC)
            try:
                flock(lock, LOCK_EX | LOCK_NB)  # else its owner is alive and sweeps
                try:
                    table = self._table(home) if same_file(home / "lock", lock) else None
                    if table is not None:
                        self._sweep(home, table.committed)
                finally:
                    flock(lock, LOCK_UN)
            finally:
                os.close(lock)

    def _sweep_root(self) -> None:
        """What was left by those who died while they created or removed."""
        with storage_errors(self.root, InvalidAddress):
            for path in [*self.root.glob(f"*{NEW}"), *self.root.glob(f"*{REMOVED}")]:
                with contextlib.suppress(FileNotFoundError):
                    if path.suffix == REMOVED or time.time() - path.stat().st_mtime > LEFTOVER_SECONDS:
                        shutil.rmtree(path, ignore_errors=True)


def _make_folder(disk: Disk, folder: Path) -> None:
    """With the folders above it, durably."""
    if not folder.is_dir():
        _make_folder(disk, folder.parent)
        folder.mkdir(exist_ok=True)
        disk.sync_folder(folder.parent)
