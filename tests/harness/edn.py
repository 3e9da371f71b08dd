"""A reader of EDN that knows nothing of the writer: what a history needs of it, after the specification of the format."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from roq.tools.chaos.edn import Keyword

_TOKEN = re.compile(r'[\s,]*("(?:[^"\\]|\\.)*"|#\{|[][{}]|[^\s,"\][{}]+)')
_ESCAPE = re.compile(r"\\(u[0-9a-fA-F]{4}|.)")
_PLAIN = {"n": "\n", "r": "\r", "t": "\t", "b": "\b", "f": "\f", '"': '"', "\\": "\\"}
_WORDS = {"nil": None, "true": True, "false": False}
_ENDS = {"[": "]", "{": "}", "#{": "}"}


def read_edn(text: str) -> Any:
    """The one value of a text."""
    tokens = [match[1] for match in _TOKEN.finditer(text)]
    assert "".join(tokens) == re.sub(r'("(?:[^"\\]|\\.)*")|[\s,]+', r"\1", text), f"not all of it is EDN: {text}"
    value, left = _value(tokens, 0)
    assert left == len(tokens), f"something follows: {tokens[left:]}"
    return value


def _value(tokens: list[str], at: int) -> tuple[Any, int]:
    token = tokens[at]
    if token in _ENDS:
        items, at = [], at + 1
        while tokens[at] != _ENDS[token]:
            item, at = _value(tokens, at)
            items.append(item)
        if token == "{":
            assert len(items) % 2 == 0, "a key without a value"
            return dict(zip(items[::2], items[1::2], strict=True)), at + 1
        return (items if token == "[" else frozenset(items)), at + 1
    if token.startswith('"'):
        return _ESCAPE.sub(lambda match: chr(int(match[1][1:], 16)) if match[1][1:] else _PLAIN[match[1]], token[1:-1]), at + 1
    if token.startswith(":"):
        return Keyword(token[1:]), at + 1
    if token in _WORDS:
        return _WORDS[token], at + 1
    return (float(token) if "." in token or "e" in token else int(token)), at + 1


def read_history(path: Path) -> list[dict[str, Any]]:
    """One map a line; their keys are keywords."""
    found = [read_edn(line) for line in path.read_text(encoding="utf-8").splitlines()]
    for one in found:
        assert all(type(key) is Keyword for key in one), one
        assert type(one["type"]) is type(one["f"]) is Keyword, one
        assert isinstance(one["process"], int | Keyword), one
    return found


def paired(history: list[dict[str, Any]]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Invocations with what came of them. Raises AssertionError if a process does two things at once, ends what it did not
    begin, or goes on after an :info."""
    open: dict[object, dict[str, Any]] = {}
    crashed = set[object]()
    pairs = []
    for one in history:
        process = one["process"]
        if process == "nemesis":
            assert one["type"] == "info", one
        elif one["type"] == "invoke":
            assert process not in open, f"{one} while it does {open.get(process)}"
            assert process not in crashed, f"{one} after an :info"
            open[process] = one
        else:
            begun = open.pop(process, None)
            assert begun is not None, f"{one} was never begun"
            assert begun["f"] == one["f"], (begun, one)
            pairs.append((begun, one))
            if one["type"] == "info":
                crashed.add(process)
    assert not open, f"never ended: {open}"
    return pairs
