"""What kind of error a text tells of: its class, and its pattern without what differs from case to case. Pure."""

from __future__ import annotations

import re

NO_ERROR = "(no error told)"
NO_CLASS = "(other)"
PATTERN_CHARACTERS_MAX = 200
_CLASS = re.compile(r"\s*((?:[A-Za-z_]\w*\.)*[A-Z]\w*)\s*(?::|$)")  # pkg.Class: message
_VARIABLE = (  # in this order: what is longer comes first
    (re.compile(r"\b[a-z][a-z0-9+.-]*://\S+", re.IGNORECASE), "<address>"),
    (re.compile(r"\b[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\b", re.IGNORECASE), "<id>"),
    (re.compile(r"\b\d{4}-\d\d-\d\d(?:[T ]\d\d:\d\d(?::\d\d(?:\.\d+)?)?(?:Z|[+-]\d\d:?\d\d)?)?"), "<time>"),
    (re.compile(r"\b\d{1,3}(?:\.\d{1,3}){3}(?::\d+)?\b"), "<address>"),
    (re.compile(r"(?<![\w.])(?:/[\w.@%+~-]+)+/?"), "<path>"),
    (re.compile(r"b?'(?:[^'\\\n]|\\.)*'(?!\w)"), "<text>"),
    (re.compile(r'"(?:[^"\\\n]|\\.)*"'), "<text>"),
    (re.compile(r"\b0x[0-9a-f]+\b", re.IGNORECASE), "<id>"),
    (re.compile(r"\b(?=[0-9a-f]*\d)(?=[0-9a-f]*[a-f])[0-9a-f]{8,}\b", re.IGNORECASE), "<id>"),
    (re.compile(r"(?<![A-Za-z_])[+-]?\d+(?:[.,]\d+)*(?:e[+-]?\d+)?", re.IGNORECASE), "#"),
    (re.compile(r"\s+"), " "),
)


def error_class(text: str) -> str:
    """`ValueError: no such thing` → ValueError. Without an error NO_ERROR, without a class NO_CLASS."""
    if not text.strip():
        return NO_ERROR
    found = _CLASS.match(_first_line(text))
    return found[1] if found else NO_CLASS


def error_pattern(text: str) -> str:
    """The first line with ids, numbers, times, paths, addresses and quoted texts replaced by what they are."""
    line = _first_line(text)
    for variable, name in _VARIABLE:
        line = variable.sub(name, line)
    line = line.strip()
    return line[:PATTERN_CHARACTERS_MAX] or NO_ERROR


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0]
