"""Docstrings are plain English with `code` and indented examples; this puts them into Sphinx's markup.

Names of errors become links to what the reader can do about them.
"""

from __future__ import annotations

import inspect
import re
from functools import cache

from roq import errors

LITERAL = re.compile(r"`([^`]+)`")
MARKUP = re.compile(r"([\\*|_`])")
EXAMPLE = "    "


def as_restructured(lines: list[str]) -> list[str]:
    """A docstring without its indentation, line by line."""
    found, example, blank = list[str](), False, True
    for line in lines:
        if not line.strip():
            found.append("")
            blank = True
            continue
        indented = line.startswith(EXAMPLE)
        if indented and blank and not example:
            found += ["::", ""]
        example = indented and (blank or example)
        if not example and line.startswith("- ") and not blank:
            found.append("")
        found.append(line if example else _prose(line.strip() if not line.startswith("  ") else line))
        blank = False
    return found


def _prose(line: str) -> str:
    parts = LITERAL.split(line)
    return "".join(f"\\ ``{part.strip()}``\\ " if number % 2 else _escaped(part) for number, part in enumerate(parts))


def _escaped(text: str) -> str:
    plain = MARKUP.sub(r"\\\1", text)
    return _error_names().sub(r":exc:`~roq.errors.\1`", plain)


@cache
def _error_names() -> re.Pattern[str]:
    names = [name for name, one in vars(errors).items() if inspect.isclass(one) and issubclass(one, errors.RoqError)]
    return re.compile(rf"(?<![\w.])({'|'.join(sorted(names))})(?!\w)")
