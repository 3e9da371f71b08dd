"""Which instances of a folder died, and which closed in good order."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from roq.log.local import locks
from roq.log.local.locks import Lives, try_alone


def test_an_instance_that_dies_is_seen_until_its_death_is_told(tmp_path: Path) -> None:
    us, others = Lives(tmp_path / "lives"), Lives(tmp_path / "lives")
    assert us.look() == (0, [])
    us.begin(1)
    others.begin(2)
    assert us.look() == (2, [])
    os.unlink(tmp_path / "lives" / f"{2:016x}")
    (tmp_path / "lives" / f"{2:016x}").touch()  # whose file nobody has locked
    assert us.look() == (2, [2])
    us.forget(2)
    assert us.look() == (1, [])
    others.end()
    us.end()
    assert us.look() == (0, [])


def test_one_that_closes_while_it_is_looked_at_did_not_die(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its leases stay until they expire: it said goodbye."""
    us, closing = Lives(tmp_path), Lives(tmp_path)
    us.begin(1)
    closing.begin(2)

    def meanwhile(descriptor: int) -> bool:
        closing.end()
        return try_alone(descriptor)

    monkeypatch.setattr(locks, "try_alone", meanwhile)
    assert us.look() == (2, [])
    us.end()


def test_a_forked_child_that_closes_does_not_end_its_parents_life(tmp_path: Path) -> None:
    us, others = Lives(tmp_path), Lives(tmp_path)
    us.begin(1)
    child = os.fork()
    if child == 0:
        us.end()
        os._exit(0)
    os.waitpid(child, 0)
    assert others.look() == (1, [])
    us.end()
    assert others.look() == (0, [])
