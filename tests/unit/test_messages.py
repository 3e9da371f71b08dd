"""What errors say is for people: no `<State.X: 3>`, no `State.X`, no names of our classes around values.

Not covered: whether the words help; see the tests of each error.
"""

from __future__ import annotations

import ast
from functools import cache

import pytest

from roq.wire.assignment import Overflow, QueueSettings
from roq.wire.recording import Record
from roq.wire.work_queue import TaskSettings
from tests.harness.syntax import PRODUCT, nodes

ENUMS = ("Enum", "StrEnum", "IntEnum")


@cache
def classes() -> list[tuple[str, ast.ClassDef, set[str]]]:
    return [
        (path, node, {ast.unparse(base) for base in node.bases})
        for path in PRODUCT
        for node in nodes(path)
        if isinstance(node, ast.ClassDef)
    ]


@cache
def fields_of_enums() -> frozenset[str]:
    """Names of fields that hold one."""
    enums = {node.name for _, node, bases in classes() if bases & set(ENUMS)}
    assert {"TaskState", "Overflow", "ProcessState"} <= enums
    return frozenset(
        line.target.id
        for _, node, _ in classes()
        for line in node.body
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name) and ast.unparse(line.annotation) in enums
    )


def test_every_enumeration_prints_as_its_value() -> None:
    """A plain Enum in an f-string is `State.X`; a StrEnum is its text, an IntEnum its number."""
    plain = [f"{path}: {node.name}" for path, node, bases in classes() if bases & {"Enum", "enum.Enum"}]
    assert not plain


def test_no_error_shows_the_repr_of_an_enumeration() -> None:
    assert {"state", "overflow", "kind"} <= fields_of_enums()
    shown = [
        f"{path}:{value.lineno}: {ast.unparse(value.value)}"
        for path in PRODUCT
        for error in nodes(path)
        if isinstance(error, ast.Raise)
        for value in ast.walk(error)
        if isinstance(value, ast.FormattedValue)
        and value.conversion == ord("r")
        and isinstance(value.value, ast.Attribute)
        and value.value.attr in fields_of_enums()
    ]
    assert shown == [one for one in shown if one.endswith(": request.state")], "that one is text of a stranger"


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        (QueueSettings(3, Overflow.BLOCK), "replication 3, overflow block, max_frame_bytes 1048576"),
        (Record(0.5, copies=2), "days 0.5, max_bytes 0, copies 2, ack 0"),
        (TaskSettings(7), "max_attempts 7, dedup_seconds 300.0, payload_bytes_max 1048576"),
    ],
)
def test_settings_read_as_they_are_given(settings: object, text: str) -> None:
    assert f"{settings}" == text
