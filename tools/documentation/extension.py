"""The extension of Sphinx behind `make docs`: fills in what is generated, and shows what is linked to.

A page says `<!-- generated: GENERATOR words -->` where something belongs that stands in the code: see GENERATORS.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Callable
from importlib import import_module
from typing import Any

from sphinx.application import Sphinx

from tools.documentation import api, commands, error_list, settings, source_pages
from tools.documentation.docstrings import as_restructured
from tools.documentation.trailing_comments import of_class

MESSAGE = "(message: str | None = None)"
PLACE = re.compile(r"^<!-- generated: (.+) -->$", re.MULTILINE)
GENERATORS: dict[str, Callable[..., str]] = {
    "api": api.page,
    "commands": commands.page,
    "errors": error_list.page,
    "pages": lambda pattern: f":::{{toctree}}\n:hidden:\n:glob:\n\n{pattern}\n:::",  # below this page, which lists them itself
    "settings": settings.page,
}


def fill_in(app: Sphinx, page: str, source: list[str]) -> None:
    """Before a page is read."""
    source[0] = PLACE.sub(lambda place: _generated(*place[1].split()), source[0])


def _generated(generator: str, *words: str) -> str:
    return GENERATORS[generator](*words)


def document(app: Sphinx, what: str, name: str, found: Any, options: Any, lines: list[str]) -> None:
    """A docstring as autodoc hands it over, to be changed in place."""
    if what in ("attribute", "property") and not any(lines):
        *path, field = name.split(".")
        owner: Any = import_module(path[0])
        for part in path[1:]:
            owner = getattr(owner, part)
        lines[:] = [of_class(owner).get(field, "")]
    if isinstance(found, enum.Enum):
        lines[:] = []
    lines[:] = as_restructured(lines)


def signature(
    app: Sphinx, what: str, name: str, found: Any, options: Any, arguments: str, returns: str
) -> tuple[str, str] | None:
    """Every error takes a message."""
    return ("", returns) if what == "exception" and arguments == MESSAGE else None


def setup(app: Sphinx) -> dict[str, bool]:
    """Called by Sphinx."""
    app.connect("source-read", fill_in)
    app.connect("autodoc-process-docstring", document)
    app.connect("autodoc-process-signature", signature)
    app.connect("build-finished", source_pages.write)
    app.add_transform(source_pages.FileLinks)
    app.config.linkcode_resolve = source_pages.code_page
    return {"parallel_read_safe": False, "parallel_write_safe": False}
