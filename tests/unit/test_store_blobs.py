"""Blobs of a store: what happens to an upload that is deleted or begun again while a part is being written."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from zlib import crc32

import pytest

from roq.errors import CallError, TemporaryError
from roq.log.store.blobs import BlobFolder
from roq.runtime.files import DISK

DATA = b"0123456789" * 100
CRC = crc32(DATA)


def descriptors() -> set[str]:
    return {os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if os.path.islink(f"/proc/self/fd/{fd}")}


@pytest.mark.parametrize("meanwhile", ["deleted", "begun again"])
def test_an_upload_that_is_over_while_its_last_part_is_synced_closes_its_file_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, meanwhile: str
) -> None:
    """The descriptor must not be used or closed a second time: its number may be another file's by then."""
    blobs = BlobFolder(tmp_path, 0)
    syncing, go_on = threading.Event(), threading.Event()
    sync, synced, closed = os.fdatasync, list[int](), list[int]()

    def slow_sync(file: int) -> None:
        synced.append(file)
        if len(synced) == 1:
            syncing.set()
            assert go_on.wait(10)
        sync(file)

    def close(file: int) -> None:
        closed.append(file)
        real_close(file)

    real_close = os.close
    monkeypatch.setattr(os, "fdatasync", slow_sync)
    errors: list[BaseException] = []

    def put() -> None:
        try:
            blobs.put("b", 0, len(DATA), CRC, DATA)
        except TemporaryError as error:
            errors.append(error)

    thread = threading.Thread(target=put)
    thread.start()
    assert syncing.wait(10)
    monkeypatch.setattr(os, "close", close)
    if meanwhile == "deleted":
        blobs.delete("b")
    else:
        blobs.put("b", 0, len(DATA), CRC, DATA[:10])
    assert synced[0] not in closed
    go_on.set()
    thread.join(10)
    assert len(errors) == 1
    assert not any(path.endswith("(deleted)") and str(tmp_path) in path for path in descriptors())
    assert closed.count(synced[0]) == 1
    if meanwhile == "deleted":
        with pytest.raises(CallError, match="deleted"):
            blobs.put("b", 0, len(DATA), CRC, DATA)
    else:
        blobs.put("b", 10, len(DATA), CRC, DATA[10:])
        assert blobs.get("b", 0, len(DATA)) == (len(DATA), CRC, DATA)


def test_what_a_killed_process_renamed_and_did_not_sync_is_durable_before_it_is_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """kill -9 between the rename and the sync of its directory: the next process says "it is here already"."""
    synced: list[Path] = []
    monkeypatch.setattr(
        DISK, "sync_folder", lambda path: synced.append(Path(path))
    )  # a power cut leaves the names that were synced
    blobs = BlobFolder(tmp_path, 0)
    synced.clear()

    def killed(path: Path) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(DISK, "sync_folder", killed)
        with pytest.raises(KeyboardInterrupt):
            blobs.put("b", 0, len(DATA), CRC, DATA)
    (here,) = [path.parent for path in tmp_path.glob("??/*")]
    assert not synced
    again = BlobFolder(tmp_path, 0)
    assert again.names() == ["b"]
    assert here in synced
    assert len(synced) < 5, "only directories with something in them"


@pytest.mark.parametrize(("offset", "count"), [(0, -1), (-1, 10), (-24, 1 << 40)])
def test_no_more_than_a_part_is_read_at_once(tmp_path: Path, offset: int, count: int) -> None:
    blobs = BlobFolder(tmp_path, 0)
    blobs.put("b", 0, len(DATA), CRC, DATA)
    with pytest.raises(CallError):
        blobs.get("b", offset, count)
    assert blobs.check("b"), "nothing is put aside for that"


def test_a_blob_put_aside_stays_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blobs = BlobFolder(tmp_path, 0)
    blobs.put("b", 0, len(DATA), CRC, DATA)
    (path,) = tmp_path.glob("??/*")
    path.write_bytes(path.read_bytes()[:-1])
    synced: list[Path] = []
    monkeypatch.setattr(DISK, "sync_folder", lambda path: synced.append(Path(path)))
    assert not blobs.check("b")
    assert set(synced) == {path.parent, tmp_path / "bad"}


def test_how_many_there_are_and_their_bytes(tmp_path: Path) -> None:
    blobs = BlobFolder(tmp_path, 0)
    told = []
    steps: tuple[Callable[[], None], ...] = (
        lambda: blobs.put("a", 0, len(DATA), CRC, DATA),
        lambda: blobs.put("a", 0, len(DATA), CRC, DATA),  # it is there already
        lambda: blobs.put("b", 0, 3, crc32(b"xyz"), b"xyz"),
        lambda: blobs.put("a", 0, 3, crc32(b"xyz"), b"xyz"),  # another one of that name
        lambda: blobs.put_aside("a"),
        lambda: blobs.put_aside("a"),
        lambda: blobs.put("c", 0, 5, crc32(b"uvwxy"), b"uvwxy"),
    )
    for step in steps:
        step()
        told.append((blobs.count, blobs.bytes))
    assert told == [(1, 1000), (1, 1000), (2, 1003), (2, 6), (1, 3), (1, 3), (2, 8)]
    again = BlobFolder(tmp_path, 0)
    assert (again.count, again.bytes) == (2, 8)
    again.delete("b")
    again.delete("b")
    assert (again.count, again.bytes) == (1, 5)
