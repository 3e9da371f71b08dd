"""A folder's shuffles with damaged files, failing disks, and what the dead have left."""

from __future__ import annotations

import multiprocessing
import os
import random
import time
from fcntl import LOCK_EX, flock
from pathlib import Path

import pyarrow as pa
import pytest

import roq.shuffle
from roq.errors import Closed, DataLost, RoqError, ShuffleNotFound, StorageFailed, StorageFull
from roq.runtime.files import Disk, StrPath
from roq.shuffle.folder import FolderService
from roq.shuffle.writer import MEMORY_BYTES_MIN
from roq.wire.shuffle import Receipt

SCHEMA = pa.schema([("k", pa.string()), ("id", pa.int64())])


def write(shuffles: roq.shuffle.Shuffles, partition: int, rows: int) -> Receipt:
    draw = random.Random(partition)
    with shuffles.writer("s", partition) as writer:
        keys = [f"{draw.random()}" for _ in range(rows)]
        writer.write(pa.table([keys, range(rows)], schema=SCHEMA))
        return writer.finish()


def filled(shuffles: roq.shuffle.Shuffles, count: int = 3) -> list[Receipt]:
    shuffles.create("s", ["k"], SCHEMA, ranges=4)
    return [write(shuffles, partition, 1000) for partition in range(count)]


def read(shuffles: roq.shuffle.Shuffles) -> list[tuple[str, int]]:
    return [
        row for batch in shuffles.read_all("s") for row in zip(batch["k"].to_pylist(), batch["id"].to_pylist(), strict=True)
    ]


# --- damage -----------------------------------------------------------------------------------------------------------


def test_damage_anywhere_is_told_and_never_read_short(tmp_path: Path) -> None:
    address = f"file://{tmp_path}/s"
    with roq.shuffle.open(address) as shuffles:
        (receipt,) = filled(shuffles, count=1)
        shuffles.commit("s", [receipt])
        good = read(shuffles)
    (path,) = (tmp_path / "s/s.shuffle/attempts").iterdir()
    whole = path.read_bytes()
    draw = random.Random(5)
    places = [*range(30), *range(len(whole) - 30, len(whole)), *(draw.randrange(len(whole)) for _ in range(100))]
    for place in places:
        path.write_bytes(whole[:place] + bytes([whole[place] ^ (1 << draw.randrange(8))]) + whole[place + 1 :])
        with roq.shuffle.open(address) as shuffles, pytest.raises(DataLost):
            read(shuffles)
    for length in (0, 1, 10, 100, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        with roq.shuffle.open(address) as shuffles, pytest.raises(DataLost):
            read(shuffles)
    path.unlink()
    with roq.shuffle.open(address) as shuffles, pytest.raises(DataLost, match="is gone"):
        read(shuffles)
    path.write_bytes(whole)
    with roq.shuffle.open(address) as shuffles:
        assert read(shuffles) == good


@pytest.mark.parametrize("name", ["shuffle", "table"])
def test_a_damaged_description_is_told(tmp_path: Path, name: str) -> None:
    with roq.shuffle.open(f"file://{tmp_path}/s") as shuffles:
        shuffles.commit("s", filled(shuffles))
        path = tmp_path / "s/s.shuffle" / name
        for data in (b"", path.read_bytes()[:-1], b"x" + path.read_bytes()[1:]):
            path.write_bytes(data)
            with pytest.raises(DataLost):
                shuffles.describe("s")


# --- disks --------------------------------------------------------------------------------------------------------------


class TracedDisk(Disk):
    """Notes what is written, synced and named, and fails when told to."""

    def __init__(self) -> None:
        self.unsynced: set[tuple[int, int]] = set()
        self.named: list[tuple[str, bool]] = []  # what was renamed; whether all of it was on stable storage
        self.folders: list[str] = []
        self.failing: tuple[str, int] | None = None

    def _fail(self, what: str) -> None:
        if self.failing and self.failing[0] == what:
            raise OSError(self.failing[1], os.strerror(self.failing[1]))

    def _inode(self, file: int | Path) -> tuple[int, int]:
        status = os.stat(file)
        return status.st_dev, status.st_ino

    def write(self, descriptor: int, data: bytes | memoryview, offset: int) -> int:
        self._fail("write")
        self.unsynced.add(self._inode(descriptor))
        return super().write(descriptor, data, offset)

    def sync(self, descriptor: int) -> None:
        self._fail("sync")
        inode = self._inode(descriptor)
        super().sync(descriptor)
        self.unsynced.discard(inode)

    def rename(self, old: StrPath, new: StrPath) -> None:
        self._fail("rename")
        self.named.append((Path(new).name, self._inode(Path(old)) not in self.unsynced))
        super().rename(old, new)

    def sync_folder(self, folder: StrPath) -> None:
        self._fail("sync_folder")
        super().sync_folder(folder)
        self.folders.append(Path(folder).name)


def test_what_is_named_is_on_stable_storage(tmp_path: Path) -> None:
    disk = TracedDisk()
    with roq.shuffle.Shuffles(FolderService(tmp_path, disk)) as shuffles:
        (receipt,) = filled(shuffles, count=1)
        shuffles.commit("s", [receipt])
    assert disk.named == [("shuffle", True), ("s.shuffle", True), (f"0-{receipt.attempt}.run", True), ("table", True)]
    assert disk.folders[-3:] == [tmp_path.name, "attempts", "s.shuffle"], "and so is each name"


@pytest.mark.parametrize(("number", "kind"), [(28, StorageFull), (5, StorageFailed)])
@pytest.mark.parametrize("what", ["write", "sync", "rename"])
def test_a_failing_disk(tmp_path: Path, what: str, number: int, kind: type[RoqError]) -> None:
    disk = TracedDisk()
    with roq.shuffle.Shuffles(FolderService(tmp_path, disk)) as shuffles:
        receipts = filled(shuffles)
        broken = shuffles.writer("s", 5, memory_bytes=MEMORY_BYTES_MIN)
        disk.failing = (what, number)
        with pytest.raises(kind):
            write(shuffles, 7, 1)
        if what == "write":
            with pytest.raises(kind):
                broken.write(pa.table([["x" * 1000] * 10_000, range(10_000)], schema=SCHEMA))
            with pytest.raises(Closed):
                broken.finish()  # it would lack rows
        with pytest.raises(kind):
            shuffles.commit("s", receipts)
        with pytest.raises(kind):
            broken.finish() if what != "write" else write(shuffles, 8, 1)
        with pytest.raises(kind):
            shuffles.create("t", ["k"], SCHEMA)
        disk.failing = None
        if what == "rename":
            receipts.append(broken.finish())  # nothing was lost but time
        elif what == "sync":
            with pytest.raises(kind):  # what the first sync could not write is gone
                broken.finish()
        shuffles.commit("s", receipts)
        assert len(read(shuffles)) == 3000
        assert [each.name for each in shuffles.list()] == ["s"]


def test_what_the_dead_left_is_taken_away(tmp_path: Path) -> None:
    shuffles = roq.shuffle.open(f"file://{tmp_path}/s")
    filled(shuffles)
    root, attempts = tmp_path / "s", tmp_path / "s/s.shuffle/attempts"
    living = shuffles.writer("s", 1, "living")
    (attempts / "1-dead.part").write_bytes(b"x")
    (attempts / "1-young.part").write_bytes(b"x")
    for name in ("a.new", "b.removed", "young.new"):
        (root / name / "attempts").mkdir(parents=True)
    long_ago = time.time() - 3600
    for path in (attempts / "1-dead.part", attempts / "1-living.part", root / "a.new"):
        os.utime(path, (long_ago, long_ago))
    shuffles.writer("s", 2).abandon()
    assert {path.name for path in attempts.glob("*.part")} == {"1-living.part", "1-young.part"}
    shuffles.create("t", ["k"], SCHEMA)
    assert {path.name for path in root.iterdir()} == {"s.shuffle", "t.shuffle", "young.new"}
    living.finish()


# --- two of one name ------------------------------------------------------------------------------------------------------


def test_a_writer_of_a_removed_shuffle_leaves_that_of_the_new_one_alone(tmp_path: Path) -> None:
    with roq.shuffle.open(f"file://{tmp_path}/s") as shuffles:
        for end in ("finish", "abandon"):
            shuffles.create("s", ["k"], SCHEMA)
            late = shuffles.writer("s", 0, "task-0")
            late.write(pa.table([["late"], [1]], schema=SCHEMA))
            shuffles.remove("s")
            shuffles.create("s", ["k"], SCHEMA)
            new = shuffles.writer("s", 0, "task-0")
            new.write(pa.table([["new"], [2]], schema=SCHEMA))
            if end == "finish":
                with pytest.raises(ShuffleNotFound):
                    late.finish()
            late.abandon()
            shuffles.commit("s", [new.finish()])
            assert read(shuffles) == [("new", 2)]
            shuffles.remove("s")


# --- one more try ---------------------------------------------------------------------------------------------------------


def test_finishing_again_when_only_the_name_was_not_durable(tmp_path: Path) -> None:
    disk = TracedDisk()
    with roq.shuffle.Shuffles(FolderService(tmp_path, disk)) as shuffles:
        shuffles.create("s", ["k"], SCHEMA)
        writer, other = shuffles.writer("s", 0, "a"), shuffles.writer("s", 1, "b")
        for each in (writer, other):
            each.write(pa.table([["x"], [1]], schema=SCHEMA))
            disk.failing = ("sync_folder", 5)
            with pytest.raises(StorageFailed):
                each.finish()
            with pytest.raises(StorageFailed):
                each.finish()
            disk.failing = None
        other.abandon()
        with shuffles.writer("s", 2, "c") as third:
            third.write(pa.table([["x"], [1]], schema=SCHEMA))
            third.finish()
        attempts = tmp_path / "s.shuffle/attempts"
        disk.folders.clear()
        receipt = writer.finish()
        assert (attempts / "0-a.run").stat().st_size == (attempts / "2-c.run").stat().st_size, "with one index"
        shuffles.commit("s", [receipt])
        assert disk.folders == ["attempts", "s.shuffle"]
        assert read(shuffles) == [("x", 1)]
        assert [path.name for path in attempts.iterdir()] == ["0-a.run"]


def test_an_attempt_that_could_not_begin_can_begin_again(tmp_path: Path) -> None:
    disk = TracedDisk()
    with roq.shuffle.Shuffles(FolderService(tmp_path, disk)) as shuffles:
        shuffles.create("s", ["k"], SCHEMA)
        before = len(os.listdir("/proc/self/fd"))
        disk.failing = ("write", 28)
        for _ in range(3):
            with pytest.raises(StorageFull):
                shuffles.writer("s", 0, "a")
        disk.failing = None
        assert len(os.listdir("/proc/self/fd")) == before
        with shuffles.writer("s", 0, "a") as writer:
            shuffles.commit("s", [writer.finish()])


# --- the dead -------------------------------------------------------------------------------------------------------------


def die_before_sweeping(address: str) -> None:
    """In a process: seal or cut anew as far as the table."""
    FolderService._sweep = lambda self, home, committed: os._exit(9)  # type: ignore[method-assign]
    with roq.shuffle.open(address) as shuffles:
        shuffles.commit("s", [write(shuffles, 0, 10)])


def test_readers_take_away_what_a_dead_committer_left(tmp_path: Path) -> None:
    address = f"file://{tmp_path}/s"
    with roq.shuffle.open(address) as shuffles:
        filled(shuffles)
        process = multiprocessing.get_context("spawn").Process(target=die_before_sweeping, args=(address,))
        process.start()
        process.join(60)
        assert process.exitcode == 9
        home = tmp_path / "s/s.shuffle"
        (home / "table.1.tmp").write_bytes(b"half a table")
        assert len(list((home / "attempts").iterdir())) == 4
        holder = os.open(home / "lock", os.O_RDWR)
        flock(holder, LOCK_EX)
        assert len(read(shuffles)) == 10, "somebody seals or sweeps: readers do not wait"
        assert len(list((home / "attempts").iterdir())) == 4
        os.close(holder)
        assert len(read(shuffles)) == 10
        assert len(list((home / "attempts").iterdir())) == 1
        assert sorted(path.name for path in home.iterdir()) == ["attempts", "lock", "shuffle", "table"]
