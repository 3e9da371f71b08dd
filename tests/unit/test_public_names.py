"""What `import roq` gives: the same names to programs, to people and to type checkers, and nothing that isn't used yet."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import roq


def typed() -> dict[str, str]:
    """Public name -> the module that `__init__.pyi` has it from."""
    tree = ast.parse(Path(roq.__file__).with_suffix(".pyi").read_text())
    found = {
        alias.asname or alias.name: str(node.module)
        for node in tree.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    [written] = [node.value for node in tree.body if isinstance(node, ast.Assign)]
    assert ast.literal_eval(written) == sorted(found)
    return found


def test_type_checkers_see_what_programs_get() -> None:
    assert sorted(typed()) == roq.__all__
    assert set(roq.__all__) <= set(dir(roq))


@pytest.mark.parametrize("name", roq.__all__)
def test_each_name_is_where_it_is_said_to_be(name: str) -> None:
    home = sys.modules.get(typed()[name])
    found = getattr(roq, name)
    assert found is getattr(home or sys.modules[typed()[name]], name)
    assert getattr(roq, name) is found


def test_what_does_not_exist_is_told() -> None:
    with pytest.raises(AttributeError, match="module 'roq' has no attribute 'conect'"):
        _ = roq.conect  # type: ignore[attr-defined]


def test_a_program_loads_what_it_uses() -> None:
    program = "import sys, roq; roq.RoqError; print(sorted({'asyncio', 'zmq', 'kazoo', 'msgspec'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert done.stdout == "[]\n"
