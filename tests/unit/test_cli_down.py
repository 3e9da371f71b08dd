"""`roq down`: which cluster it ends, and what it says. With processes: tests/integration/test_cli_down.py."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from roq.cli.local import chosen, outcome
from roq.errors import CallError
from roq.tools.local import starter
from roq.tools.local.leftovers import Leftover, Origin
from roq.tools.local.starter import FoundCluster, StarterRecord

A, B = Path("/tmp/a"), Path("/tmp/b")


ROOT, USER, OTHER = 0, 1000, 1001


def found(directory: Path, command: str = "roq up", *, orphan: bool = False, user: int = USER) -> FoundCluster:
    return FoundCluster(Origin(str(directory), 7, 8, command), "t", "127.0.0.1:2181/RoQ", orphan, user)


def test_the_only_cluster_of_up_is_chosen() -> None:
    assert chosen([], None, USER) is None
    assert chosen([found(A)], None, USER) == found(A)
    assert chosen([found(A), found(B, "a program")], None, USER) == found(A)
    assert chosen([found(A, "a program")], None, USER) is None
    assert chosen([found(A, "a program", orphan=True)], None, USER) == found(A, "a program", orphan=True)


def test_one_of_several_must_be_named() -> None:
    with pytest.raises(CallError, match=r"2 clusters run here.*/tmp/a \(127.0.0.1:2181/RoQ\); /tmp/b .*left by a killed"):
        chosen([found(A), found(B, orphan=True)], None, USER)
    assert chosen([found(A), found(B)], B, USER) == found(B)
    assert chosen([found(A)], B, USER) is None


def test_another_users_cluster_must_be_named() -> None:
    theirs = found(B, user=OTHER)
    assert chosen([theirs], None, ROOT) is None
    assert chosen([found(B, user=OTHER, orphan=True)], None, ROOT) is None
    assert chosen([found(A, user=ROOT), theirs], None, ROOT) == found(A, user=ROOT)
    assert chosen([theirs], B, ROOT) == theirs


def test_the_cluster_of_another_program_is_refused() -> None:
    with pytest.raises(CallError, match="started by roq demo, pid 7: stop that"):
        chosen([found(A, "roq demo")], A, USER)


def test_what_was_done_is_said() -> None:
    ended = [Leftover(1, "gcm-1", ""), Leftover(2, "host-1", ""), Leftover(3, "host-1", "")]
    assert outcome(found(A), []) == "stopped the cluster in /tmp/a, no process left"
    assert outcome(found(A), ended) == "stopped the cluster in /tmp/a; had to kill gcm-1, host-1 (2)"
    assert outcome(found(A, orphan=True), ended) == "ended what was left of the cluster in /tmp/a: gcm-1, host-1 (2)"


def test_the_record_of_an_older_version_and_a_damaged_one(tmp_path: Path) -> None:
    assert starter.read(tmp_path) is None
    (tmp_path / "cluster.lock").write_text("0123abcd")
    assert starter.read(tmp_path) == StarterRecord("0123abcd")
    (tmp_path / "cluster.lock").write_text('{"token": 1')
    assert starter.read(tmp_path) is None


@pytest.mark.parametrize("kind", [stat.S_IFIFO, stat.S_IFSOCK, stat.S_IFDIR, stat.S_IFLNK])
def test_what_was_put_in_place_of_the_record_is_not_waited_for(tmp_path: Path, kind: int) -> None:
    """Anybody may name a directory of theirs; `roq down` and `roq doctor` of root look there."""
    path = tmp_path / "cluster.lock"
    match kind:
        case stat.S_IFDIR:
            path.mkdir()
        case stat.S_IFLNK:
            path.symlink_to("/dev/zero")  # it would never end
        case _:
            os.mknod(path, kind | 0o600)
    assert starter.read(tmp_path) is None
    with pytest.raises(CallError, match=str(tmp_path)):
        starter.Claim(tmp_path)


def test_a_record_without_end_is_not_read_on(tmp_path: Path) -> None:
    with (tmp_path / "cluster.lock").open("wb") as file:
        file.write(b"{")
        file.truncate(1 << 40)
    assert starter.read(tmp_path) is None
