"""The list of keys in a real folder: whose list it is, and what other versions wrote into it."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from roq.workqueue.file_queue import dedup
from roq.workqueue.file_queue.dedup import Dedup, digest

WINDOW = 1000.0
NOW = 5000.0


def opened(folder: Path) -> Dedup:
    """As another process would."""
    return Dedup(str(folder), str(folder), threading.Lock(), lambda: NOW, lambda _: False)


def put(keys: Dedup, key: str, id: str) -> None:
    with keys.locked():
        keys.begin([(key, id)], NOW + WINDOW)
        keys.end([id])


def find(keys: Dedup, key: str) -> str | None:
    with keys.locked():
        return keys.find(key)


def rewritten_with_the_same_inode(folder: Path, keys: list[tuple[str, str]]) -> None:
    """What a reader meets after two rewrites whose second one was given the first list's inode number again."""
    path, inode = folder / "keys", (folder / "keys").stat().st_ino
    path.rename(folder / "old")
    other = opened(folder)
    for key, id in keys:
        put(other, key, id)
    data = path.read_bytes()
    path.unlink()
    (folder / "old").write_bytes(data)
    (folder / "old").rename(path)
    assert path.stat().st_ino == inode


def test_a_list_that_has_the_old_one_s_inode_number_is_read_from_its_beginning(tmp_path: Path) -> None:
    keys = opened(tmp_path)
    put(keys, "a", "id-a")
    assert find(keys, "a") == "id-a"
    rewritten_with_the_same_inode(tmp_path, [("new", "id-new"), ("a", "id-a"), ("b", "id-b"), ("c", "id-c")])
    assert [find(keys, key) for key in ("new", "a", "b", "c")] == ["id-new", "id-a", "id-b", "id-c"]


def test_two_rewrites_that_keep_the_first_key_make_another_list(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dedup, "REWRITE_BYTES", 1)
    keys = opened(tmp_path)
    with keys.locked():
        keys.begin([("kept", "id-kept")], NOW + WINDOW)
        keys.begin([(f"over {number}", f"id-{number}") for number in range(9)], NOW - 1)
        keys.end(["id-kept"])
    heads = set()
    for _ in range(2):
        heads.add((tmp_path / "keys").read_bytes().split(b"\n")[0])
        assert find(opened(tmp_path), "kept") == "id-kept"
        other = opened(tmp_path)
        with other.locked():
            other.begin([(f"more {number}", f"id-{number}") for number in range(9)], NOW - 1)
    heads.add((tmp_path / "keys").read_bytes().split(b"\n")[0])
    assert len(heads) >= 2


def test_a_list_0_1_wrote_is_read_and_written_on(tmp_path: Path) -> None:
    lines = f"{NOW + WINDOW:.3f} {digest('old')} id-old\ndone id-old\n"
    (tmp_path / "keys").write_text(lines)
    keys = opened(tmp_path)
    assert find(keys, "old") == "id-old"
    put(opened(tmp_path), "new", "id-new")
    assert [find(keys, key) for key in ("old", "new")] == ["id-old", "id-new"]
    assert (tmp_path / "keys").read_text().startswith(lines)


def test_a_first_line_cut_short_is_no_harm(tmp_path: Path) -> None:
    (tmp_path / "keys").write_bytes(b"list 12")
    keys = opened(tmp_path)
    put(keys, "a", "id-a")
    assert find(opened(tmp_path), "a") == find(keys, "a") == "id-a"
    os.truncate(tmp_path / "keys", 3)
    assert find(keys, "a") is None
