"""The scenarios in tests/scenarios, and what runs them (tests/harness/scenarios.py)."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from roq.errors import NotReady
from tests.harness.scenarios import FOLDER, REWRITE, blocks, compare, machine_of, rewrite, scenarios

take = rewrite if os.environ.get(REWRITE) == "1" else compare  # looked at before the fixture that hides ROQ_*


@pytest.mark.parametrize("path", [pytest.param(path, id=f"{path.parent.name}/{path.stem}") for path in scenarios()])
def test_scenario(path: Path) -> None:
    assert [block for block in blocks(path.read_text()) if block.commands]
    take(path, machine_of(path))


def test_every_machine_has_a_scenario() -> None:
    assert {path.parent for path in FOLDER.glob("*/machine.py")} == {path.parent for path in scenarios()}


class Counter:
    """A machine: numbers are added; three is too much, and more breaks an invariant."""

    def __init__(self) -> None:
        self.sum = 0

    def check(self) -> None:
        assert self.sum < 4, "more than there may be"

    def add(self, number: int, times: int = 1) -> list[int]:
        self.sum += number * times
        if self.sum == 3:
            raise NotReady("three is too much")
        return [self.sum] if self.sum else []


SCENARIO = """# adds
add 0
----
ok

add 1
add 1 times=1
----
1
2


# and an error
add 1
----
NotReady(three is too much)
"""


def test_outputs_are_compared(tmp_path: Path) -> None:
    path = tmp_path / "counter.txt"
    path.write_text(SCENARIO)
    compare(path, Counter())
    path.write_text(SCENARIO.replace("2", "7"))
    with pytest.raises(AssertionError, match=r"(?s)-7.*\+2"):
        compare(path, Counter())
    assert "7" in path.read_text()


def test_outputs_are_rewritten_on_demand_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "counter.txt"
    path.write_text(SCENARIO.replace("----\n1\n2\n", "----\nanything\n").replace("NotReady(three is too much)\n", ""))
    rewrite(path, Counter())
    assert path.read_text() == SCENARIO


def test_a_broken_invariant_ends_a_scenario(tmp_path: Path) -> None:
    path = tmp_path / "counter.txt"
    path.write_text("add 5\n----\n5\n")
    with pytest.raises(AssertionError, match="more than there may be"):
        compare(path, Counter())


@pytest.mark.parametrize("text", ["add 1\n", "add 1\n\n----\n1\n", "----\n1\n"])
def test_a_scenario_without_its_outputs_is_none(text: str) -> None:
    with pytest.raises(ValueError, match="line 1"):
        list(blocks(text))
