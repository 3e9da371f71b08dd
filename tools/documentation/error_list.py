"""The errors of one section of roq/errors.py, as autodoc's directives: an error's docstring is what it says."""

from __future__ import annotations

import ast
import inspect
import re

from roq import errors

SECTION = re.compile(r"^# --- (.+?) -+$")
FIRST = "any"


def page(*words: str) -> str:
    """Those under the comment line of these words; "any": what stands before the first one."""
    title = " ".join(words)
    names = sections()[title]
    lines = [line for name in names for line in (f".. autoexception:: roq.errors.{name}", "   :show-inheritance:", "")]
    return "\n".join(["```{eval-rst}", *lines, "```"])


def sections() -> dict[str, list[str]]:
    """Title -> names of its classes, in the order of the file."""
    source = inspect.getsource(errors)
    titles = {number: mark[1] for number, line in enumerate(source.splitlines(), 1) if (mark := SECTION.match(line))}
    found: dict[str, list[str]] = {FIRST: [], **{title: [] for title in titles.values()}}
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef):
            above = [title for number, title in titles.items() if number < node.lineno]
            found[above[-1] if above else FIRST].append(node.name)
    return found
