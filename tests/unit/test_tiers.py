"""Who is in the quick tier (`make test`): of every kind of test in the slow folders at least one, marked where it stands.

A kind is the first word of a file's name: test_cli.py and test_cli_task.py are of one kind. `@pytest.mark.quick` is on a test,
`quick_first` (tests/harness/tiers.py) on one case of a matrix. A file of a kind without any says why in a line that begins with
NO_QUICK_TEST. Unit and model tests run in `make test`, but for long searches of models (`but_long`); interop tests, which make
environments of their own, never do.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
TIERED = ("simulation", "integration", "spark", "failure")
WHOLE = ("unit", "model", "interop")
WHY_NOT = re.compile(r"^NO_QUICK_TEST = \".{20,}\"", re.MULTILINE)


def is_quick(path: Path) -> bool:
    """Is one of its tests, or one case, in the quick tier?"""
    text = path.read_text()
    return "quick" in text and any(
        (isinstance(node, ast.Attribute) and ast.unparse(node) == "pytest.mark.quick")
        or (isinstance(node, ast.Call) and ast.unparse(node.func) == "quick_first")
        for node in ast.walk(ast.parse(text))
    )


def kinds(folder: str) -> dict[str, list[Path]]:
    """The files of each kind."""
    found = defaultdict(list)
    for path in sorted((TESTS / folder).glob("test_*.py")):
        found[path.stem.split("_")[1]].append(path)
    return found


@pytest.mark.parametrize("folder", TIERED)
def test_every_kind_has_a_quick_test_or_says_why_not(folder: str) -> None:
    quick = {kind for kind, paths in kinds(folder).items() if any(map(is_quick, paths))}
    excused = {kind for kind, paths in kinds(folder).items() if any(WHY_NOT.search(path.read_text()) for path in paths)}
    assert sorted(kinds(folder).keys() - quick - excused) == [], "mark a test of each with @pytest.mark.quick"
    assert sorted(quick & excused) == [], "these have one: NO_QUICK_TEST is wrong"


@pytest.mark.parametrize("folder", WHOLE)
def test_where_all_or_none_are_quick_no_test_is_marked(folder: str) -> None:
    assert [path.name for path in (TESTS / folder).rglob("test_*.py") if is_quick(path)] == []
