"""Scenarios of pure machines as text: commands, and below each what the machine does.

    # a comment
    assign B path=2
    welcomed path=2
    ----
    OpenLink(exchange=B/1, path=2)
    SendFin(path=1)
    SendOpen(path=2, left=A, finished=True)

A block is some lines of commands, a line `----` and the output, up to the next empty line; "ok" stands for no output. The
folder of a scenario names its machine: `tests/scenarios/<folder>/machine.py` has a class `Machine`, whose methods are the
commands, and whose `check` (the invariants) is called after each. A word `key=value` is an argument by name; numbers are
passed as numbers. What a method returns, or yields, is shown by `shown`; so is a RoqError that it raises.

`ROQ_REWRITE_SCENARIOS=1` writes the outputs as they are now into the files: read the diff before you commit it.
"""

from __future__ import annotations

import difflib
import importlib
import shlex
from collections.abc import Callable, Iterable, Iterator
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import msgspec

from roq.errors import RoqError
from roq.wire.monitor import ExchangeAddress

FOLDER = Path(__file__).parents[1] / "scenarios"
REWRITE = "ROQ_REWRITE_SCENARIOS"
FENCE = "----"


class Checked(Protocol):
    """A machine as its scenarios use it."""

    def check(self) -> None:
        """The invariants; AssertionError if one is broken."""


class Block(NamedTuple):
    """head: comments and empty lines before the commands. line: of the first command, from 1."""

    head: list[str]
    line: int
    commands: list[str]
    expected: list[str]


def blocks(text: str) -> Iterator[Block]:
    """All of a scenario, in order. Raises ValueError if it is none."""
    lines = text.splitlines()
    at = 0
    while at < len(lines):
        begin = at
        while at < len(lines) and (not lines[at].strip() or lines[at].startswith("#")):
            at += 1
        first = at
        while at < len(lines) and lines[at].strip() and lines[at] != FENCE:
            at += 1
        fence = at
        while at < len(lines) and lines[at].strip():
            at += 1
        if first < len(lines) and (fence == first or fence == len(lines) or lines[fence] != FENCE):
            raise ValueError(f"line {first + 1}: commands, a line {FENCE!r} and their output are wanted")
        yield Block(lines[begin:first], first + 1, lines[first:fence], lines[fence + 1 : at])


def shown(value: Any) -> str:
    """A value in one line: fields that are as by default are left out, an Exchange is its token."""
    match value:
        case ExchangeAddress():
            return value.token
        case Enum():
            return shown(value.value)
        case bytes():
            return value.decode()
        case float():
            return f"{value:g}"
        case str() if not value or " " in value:
            return repr(value)
        case tuple() | list() | set() | frozenset() | dict() if not hasattr(value, "_fields"):
            return _collection(value)
        case tuple() | msgspec.Struct() | RoqError():
            fields = ", ".join(f"{name}={shown(one)}" for name, one in _fields(value))
            return f"{type(value).__name__}({fields or (str(value) if isinstance(value, RoqError) else '')})"
        case _:
            return str(value)


def _collection(value: Any) -> str:
    if isinstance(value, dict):
        return f"{{{', '.join(f'{shown(key)}: {shown(one)}' for key, one in value.items())}}}"
    items = map(shown, value)
    return f"[{', '.join(items)}]" if isinstance(value, tuple | list) else f"{{{', '.join(sorted(items))}}}"


def _fields(value: Any) -> list[tuple[str, Any]]:
    """Names and values of a structure, as far as they are not as by default."""
    if isinstance(value, RoqError):
        return list(vars(value).items())
    if isinstance(value, msgspec.Struct):
        defaults = {field.name: field.default for field in msgspec.structs.fields(value)}
    else:
        defaults = {name: value._field_defaults.get(name, msgspec.NODEFAULT) for name in value._fields}
    return [(name, getattr(value, name)) for name, default in defaults.items() if getattr(value, name) != default]


def _argument(word: str) -> str | int | float:
    for kind in (int, float):
        try:
            return kind(word)
        except ValueError:
            continue
    return word


def perform(machine: Checked, command: str) -> list[str]:
    """What the machine does at this command, line by line."""
    name, *words = shlex.split(command)
    named = dict(word.split("=", 1) for word in words if "=" in word)
    method: Callable[..., Any] = getattr(machine, name)
    try:
        found = method(
            *[_argument(word) for word in words if "=" not in word], **{key: _argument(word) for key, word in named.items()}
        )
        out = [] if found is None else list(found) if isinstance(found, Iterable) and not isinstance(found, str) else [found]
    except RoqError as error:
        out = [error]
    machine.check()
    return [one if isinstance(one, str) else shown(one) for one in out]


def replayed(text: str, machine: Checked) -> str:
    """The scenario with the outputs as this machine gives them."""
    out: list[str] = []
    for block in blocks(text):
        out += block.head
        if block.commands:
            found = [line for command in block.commands for line in perform(machine, command)]
            out += [*block.commands, FENCE, *(found or ["ok"])]
    return "\n".join(out) + "\n"


def compare(path: Path, machine: Checked) -> None:
    """AssertionError if the machine does something else."""
    text = path.read_text()
    if (found := replayed(text, machine)) != text:
        diff = difflib.unified_diff(text.splitlines(), found.splitlines(), f"{path.name}, expected", "found", lineterm="")
        raise AssertionError("\n".join([f"the machine does something else ({REWRITE}=1 writes it down):", *diff]))


def rewrite(path: Path, machine: Checked) -> None:
    """Take what the machine does now for what is expected."""
    path.write_text(replayed(path.read_text(), machine))


def scenarios() -> list[Path]:
    """Every scenario there is."""
    return sorted(FOLDER.glob("*/*.txt"))


def machine_of(path: Path) -> Checked:
    """A machine of the kind that the scenario's folder names."""
    made: Checked = importlib.import_module(f"tests.scenarios.{path.parent.name}.machine").Machine()
    return made
