"""Links to files and folders of the repository that are no pages lead to pages that show them."""

from __future__ import annotations

import ast
import html
import inspect
import sys
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from docutils import nodes
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import get_lexer_for_filename
from pygments.lexers.special import TextLexer
from pygments.util import ClassNotFound
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.transforms import SphinxTransform
from sphinx.util.osutil import relative_uri

ROOT = Path(__file__).parents[2]
FOLDER = "source"  # of the site
BYTES_MAX = 400_000  # of a file that is shown
HIDDEN = ("__pycache__", ".")
API_FOLDER = "docs/reference/page.html"  # linkcode is not told which page asks; all that have code are there
PAGE = """<!DOCTYPE html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>{name}</title>
<link rel="stylesheet" href="{up}_static/pygments.css">
<style>body {{ font: 15px sans-serif; margin: 1.5em; color-scheme: light dark }} pre {{ line-height: 1.4 }}</style>
<p><a href="{up}docs/index.html">RoQ</a> / <code>{name}</code></p>
{body}
</html>
"""
_linked: set[str] = set()


class FileLinks(SphinxTransform):
    """MyST makes a download of a link to a file, and a warning of one to a folder."""

    default_priority = 4  # before downloads are collected

    def apply(self, **kwargs: Any) -> None:
        """Put ordinary links in their place."""
        here = Path(self.env.doc2path(self.env.docname)).parent
        found = [*self.document.findall(addnodes.download_reference), *self.document.findall(addnodes.pending_xref)]
        for node in found:
            path = (here / unquote(str(node.get("reftarget", "")))).resolve()
            if node.get("reftype") == "myst" and not node.get("refdomain") and path.exists() and path.is_relative_to(ROOT):
                uri = relative_uri(f"{self.env.docname}.html", page_of(path))
                node.replace_self(nodes.reference("", "", *node.children, internal=True, refuri=uri))


def page_of(path: Path) -> str:
    """Where the site shows this file or folder."""
    name = path.relative_to(ROOT).as_posix()
    _linked.add(name)
    return f"{FOLDER}/{name}.html"


def code_page(domain: str, info: dict[str, str]) -> str | None:
    """For sphinx.ext.linkcode: the page and the line of what autodoc describes."""
    found: Any = import_module(info["module"]) if info["module"] else None
    try:
        for part in info["fullname"].split("."):
            found = getattr(found, part)
    except AttributeError:
        return None
    if isinstance(found, property):
        found = found.fget
    found = inspect.unwrap(found)
    path = getattr(sys.modules.get(getattr(found, "__module__", None) or ""), "__file__", None)
    if path is None or not Path(path).is_relative_to(ROOT / "roq"):
        return None
    line = _lines(Path(path)).get(getattr(found, "__qualname__", ""))
    return f"{relative_uri(API_FOLDER, page_of(Path(path)))}#L-{line}" if line else None


@cache
def _lines(path: Path) -> dict[str, int]:
    """Of each class and function of a file, by its qualified name."""
    found = dict[str, int]()

    def look(body: list[ast.stmt], above: str) -> None:
        for node in body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                found[above + node.name] = node.lineno
                if isinstance(node, ast.ClassDef):
                    look(node.body, f"{above}{node.name}.")

    look(ast.parse(path.read_text()).body, "")
    return found


def write(app: Sphinx, failed: Exception | None) -> None:
    """A page for everything that is linked to, and for what the folders among it hold. Plain ones: Sphinx takes half a minute
    for the contents beside two hundred pages."""
    waiting = sorted(_linked) if failed is None else []
    for name in waiting:
        path, page = ROOT / name, app.outdir / FOLDER / f"{name}.html"
        if path.is_dir():
            inside = sorted(one for one in path.iterdir() if not one.name.startswith(HIDDEN))
            waiting += [new for one in inside if (new := one.relative_to(ROOT).as_posix()) not in waiting]
            body = _listing(path, inside)
        else:
            body = _shown(path)
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text(PAGE.format(name=html.escape(name), up="../" * (name.count("/") + 1), body=body))


def _listing(path: Path, inside: list[Path]) -> str:
    links = [
        f'<li><a href="{html.escape(path.name)}/{html.escape(one.name)}.html">{html.escape(one.name)}</a>' for one in inside
    ]
    return f"<ul>{''.join(links)}</ul>"


def _shown(path: Path) -> str:
    if path.stat().st_size > BYTES_MAX:
        return f"<p>{path.stat().st_size:,} bytes: look at it in the repository.</p>"
    try:
        lexer = get_lexer_for_filename(path.name)
    except ClassNotFound:
        lexer = TextLexer()
    return str(highlight(path.read_text(errors="replace"), lexer, HtmlFormatter(linenos="inline", lineanchors="L")))
