"""The coordinator's journal: what was written is there again, whatever tore the end; damage is told; one process at a time.

kill -9 of a coordinator that serves is tests/integration/test_coordinator_crashes.py.
"""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import pytest

from roq.coordinator import journal as journal_module
from roq.coordinator.changes import FORMAT_ACL, encode
from roq.coordinator.journal import TreeJournal
from roq.coordinator.tree import Tree
from roq.errors import CallError, StorageFailed, StorageFull, UnknownFormat
from roq.log.local import LocalLog
from roq.log.local.layout import ENTRY_HEAD, HEAD
from roq.runtime.files import Disk, StrPath
from roq.wire.task import NewTask
from roq.wire.zookeeper import OPEN_ACL, CreateRequest, DataReply, GetData, Request, SetDataRequest
from roq.workqueue.log_queue import LogQueue

SESSION = 5


class Kept:
    """A tree and its journal."""

    def __init__(self, folder: Path, disk: Disk | None = None) -> None:
        self.journal = TreeJournal(folder, disk=disk)
        self.tree = self.journal.replay()

    def open_session(self) -> int:
        return self.journal.write([encode(self.tree.open_session(SESSION, b"p" * 16, 4000, 1))])

    def ask(self, request: Request) -> int:
        transaction = self.tree.handle(SESSION, 1, request, 2).transaction
        assert transaction is not None
        return self.journal.write([encode(transaction)])

    def close(self) -> None:
        self.journal.close()


def filled(folder: Path, nodes: int = 3) -> Tree:
    kept = Kept(folder)
    kept.open_session()
    for number in range(nodes):
        kept.ask(CreateRequest(f"/n{number}", b"%d" % number, OPEN_ACL, 1, False))
    kept.close()
    return kept.tree


def replayed(folder: Path) -> Tree:
    journal = TreeJournal(folder)
    try:
        tree = journal.replay()
        tree.check()
        return tree
    finally:
        journal.close()


def segment(folder: Path) -> Path:
    return max((folder / "journal").glob("*.segment"))


def forget_boot(folder: Path) -> None:
    """As after a power cut: what processes shared in memory is gone."""
    (folder / "journal" / "header").unlink()


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_module, "SEGMENT_BYTES", 16 * 1024)


def test_what_was_written_is_there_again(tmp_path: Path) -> None:
    tree = filled(tmp_path)
    assert replayed(tmp_path).image() == tree.image()
    forget_boot(tmp_path)
    again = replayed(tmp_path)
    assert again.image() == tree.image()
    assert list(again.sessions[SESSION].ephemerals) == ["/n0", "/n1", "/n2"]


def test_a_snapshot_takes_the_place_of_what_it_covers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_module, "SNAPSHOT_BYTES_MIN", 8 * 1024)
    kept = Kept(tmp_path)
    kept.open_session()
    kept.ask(CreateRequest("/n", b"", OPEN_ACL, 0, False))
    snapshots = 0
    for number in range(200):
        position = kept.ask(SetDataRequest("/n", b"%1000d" % number, -1))
        if kept.journal.wants_snapshot():
            kept.journal.snapshot(position, encode(kept.tree.image()))
            assert not kept.journal.wants_snapshot()
            snapshots += 1
    assert 10 < snapshots < 40
    assert len(list((tmp_path / "journal").glob("*.segment"))) <= 3
    kept.close()
    forget_boot(tmp_path)
    tree = replayed(tmp_path)
    assert tree.image() == kept.tree.image()
    reply = tree.handle(SESSION, 1, GetData("/n", False), 0).reply
    assert isinstance(reply, DataReply)
    assert reply.data == b"%1000d" % 199


@pytest.mark.parametrize("junk", [b"\0", b"\xff", b"\x01"])
def test_a_torn_end_is_cut_at_every_byte(tmp_path: Path, junk: bytes) -> None:
    """The power failed while the last transaction was written: any part of it got to the disk."""
    whole = tmp_path / "whole"
    filled(whole, 2)
    before = replayed(whole).image()
    kept = Kept(whole)
    start = HEAD + kept.journal._log.end
    kept.ask(CreateRequest("/last", b"the last one", OPEN_ACL, 0, False))
    end = HEAD + kept.journal._log.end
    (*_, (_, entry)) = kept.journal._log.read(0)
    after = kept.tree.image()
    kept.close()
    whole_at = start + ENTRY_HEAD + len(entry)  # behind that is padding
    data = segment(whole).read_bytes()
    for size in range(start, end + 1):
        torn = tmp_path / "torn"
        shutil.copytree(whole, torn)
        forget_boot(torn)
        segment(torn).write_bytes(data[:size] + junk * (end - size) + data[end:])
        spoilt = segment(torn).read_bytes()[:whole_at] != data[:whole_at]
        assert replayed(torn).image() == (before if spoilt else after), size
        kept = Kept(torn)
        kept.ask(CreateRequest("/next", b"", OPEN_ACL, 0, False))
        kept.close()
        assert replayed(torn).image() == kept.tree.image()
        shutil.rmtree(torn)


class FullDisk(Disk):
    """Has no room for another file."""

    full = False

    def write_over(self, room: StrPath, path: StrPath, data: bytes) -> None:
        if self.full and Path(path).suffix == ".snapshot":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        super().write_over(room, path, data)


def test_a_snapshot_without_room_is_not_tried_with_every_transaction(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_module, "SNAPSHOT_BYTES_MIN", 8 * 1024)
    disk = FullDisk()
    kept = Kept(tmp_path, disk)
    kept.open_session()
    kept.ask(CreateRequest("/n", b"", OPEN_ACL, 0, False))
    disk.full, tries = True, 0
    for number in range(100):
        position = kept.ask(SetDataRequest("/n", b"%1000d" % number, -1))
        if kept.journal.wants_snapshot():
            tries += 1
            with pytest.raises(StorageFull):
                kept.journal.snapshot(position, encode(kept.tree.image()))
    assert 5 < tries < 15
    disk.full = False
    while not kept.journal.wants_snapshot():
        position = kept.ask(SetDataRequest("/n", b"%1000d" % 1, -1))
    kept.journal.snapshot(position, encode(kept.tree.image()))
    assert not kept.journal.wants_snapshot()
    kept.close()
    forget_boot(tmp_path)
    assert replayed(tmp_path).image() == kept.tree.image()


class Killed(BaseException):
    """The process ends here."""


class DyingDisk(Disk):
    """Ends the process within a write, when it is told so: `cut` bytes of it were written."""

    def __init__(self) -> None:
        self.cut: int | None = None

    def write(self, descriptor: int, data: bytes | memoryview, offset: int) -> int:
        if self.cut is None:
            return super().write(descriptor, data, offset)
        os.pwrite(descriptor, data[: self.cut], offset)
        raise Killed


def test_a_process_that_is_killed_at_any_byte_of_a_write_leaves_what_was_answered(tmp_path: Path) -> None:
    disk = DyingDisk()
    entry = encode(Tree().open_session(SESSION, b"p" * 16, 4000, 1))
    for size in range(ENTRY_HEAD + len(entry) + 1):
        folder = tmp_path / str(size)
        filled(folder, 1)
        before = replayed(folder).image()
        kept = Kept(folder, disk)
        disk.cut = size
        with pytest.raises(Killed):
            kept.journal.write([entry])  # not all of it was said to be written, so none of it is
        disk.cut = None
        kept.close()
        assert replayed(folder).image() == before, size
        kept = Kept(folder)
        kept.ask(CreateRequest("/next", b"", OPEN_ACL, 0, False))
        kept.close()
        assert replayed(folder).image() == kept.tree.image()


def test_damage_in_the_middle_is_told_with_file_and_place(tmp_path: Path) -> None:
    filled(tmp_path, 5)
    path = segment(tmp_path)
    data = bytearray(path.read_bytes())
    at = data.index(b"/n1")
    data[at] ^= 1
    path.write_bytes(data)
    for _ in range(2):
        with pytest.raises(StorageFailed, match=rf"{path.name} is damaged at byte \d+") as told:
            replayed(tmp_path)
        assert str(tmp_path) in str(told.value)
        assert path.read_bytes() == data  # nothing is changed
        (tmp_path / "journal" / "header").unlink(missing_ok=True)  # the same after a restart of the machine
    data[at] ^= 1
    path.write_bytes(data)
    assert len(replayed(tmp_path)) == 9


def test_a_damaged_snapshot_is_told(tmp_path: Path) -> None:
    kept = Kept(tmp_path)
    position = kept.open_session()
    kept.journal.snapshot(position, encode(kept.tree.image()))
    kept.close()
    (path,) = (tmp_path / "journal").glob("*.snapshot")
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(StorageFailed, match=path.name):
        replayed(tmp_path)


def test_entries_of_another_version_or_of_nothing_are_not_guessed_at(tmp_path: Path) -> None:
    for name, entry, error in (
        ("new", bytes([FORMAT_ACL + 1]) + b"abc", UnknownFormat),
        ("odd", b"\x01abc", StorageFailed),
        ("none", b"", UnknownFormat),
    ):
        log = LocalLog(tmp_path / name / "journal", segment_bytes=16 * 1024)
        log.sync(log.append([entry]))
        log.close()
        with pytest.raises(error):
            replayed(tmp_path / name)


def test_one_coordinator_has_a_folder(tmp_path: Path) -> None:
    first = TreeJournal(tmp_path)
    with pytest.raises(CallError, match=f"process {os.getpid()}.*{tmp_path}"):
        TreeJournal(tmp_path)
    first.close()
    TreeJournal(tmp_path).close()


def test_a_folder_that_is_no_journal_is_refused_and_let_go(tmp_path: Path) -> None:
    (tmp_path / "journal").mkdir()
    (tmp_path / "journal" / "thesis.tex").write_text("mine")
    for _ in range(2):
        with pytest.raises(CallError, match="not empty and not a log"):
            TreeJournal(tmp_path)


@pytest.mark.parametrize(
    "names", [("thesis.tex",), ("lock", "x"), ("journal/journal-1", "cookie"), ("FORMAT", "settings.json")]
)
def test_a_folder_of_somebody_else_is_refused_and_nothing_is_written_there(tmp_path: Path, names: tuple[str, ...]) -> None:
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("theirs")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(CallError, match=f"{tmp_path} is no coordinator's: it has '"):
        TreeJournal(tmp_path)
    assert sorted(tmp_path.rglob("*")) == before


def test_an_empty_folder_and_its_own_are_taken(tmp_path: Path) -> None:
    (tmp_path / "lost+found").mkdir()  # the folder is a file system of its own
    filled(tmp_path)
    (tmp_path / "coordinator.log").write_text("beside it")
    tree = replayed(tmp_path)
    copy = tmp_path / "copy"
    shutil.copytree(tmp_path / "journal", copy / "journal")
    assert replayed(copy).image() == tree.image()
    begun = tmp_path / "begun"
    begun.mkdir()
    (begun / "lock").touch()  # it was killed before it had a journal
    filled(begun)


def test_a_work_queues_log_is_not_taken_for_a_journal(tmp_path: Path) -> None:
    queue = LogQueue(tmp_path / "journal", log=LocalLog(tmp_path / "journal", segment_bytes=4 * 1024 * 1024))
    queue.put([NewTask(b"task")])
    queue.close()
    with pytest.raises(StorageFailed, match=str(tmp_path)):
        replayed(tmp_path)
    queue = LogQueue(tmp_path / "journal")
    assert [task.payload for task in queue.lease(10.0, 5, 0.0)[1]] == [b"task"]
    queue.close()
