"""The console's pages as files: nothing from elsewhere, nothing parsed that a cluster says, all of it in the package.

Not covered: what they do (tests/integration/test_console_browser.py).
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from tests.integration.test_console_browser import PAGES

ROOT = Path(__file__).parents[2]
STATIC = ROOT / "roq" / "console" / "static"
FILES = sorted(path for path in STATIC.rglob("*") if path.is_file())
SCRIPTS = [path for path in FILES if path.suffix == ".js"]
LINE_CHARACTERS_MAX, FILE_LINES_MAX = 128, 500
IMPORT = re.compile(r"""(?:\bfrom|\bimport) ?\(?"(\.[^"]+)"\)?""")
LOADED = re.compile(r'(?:src|href)="(/static/[^"]+)"')
SVG_NAMES = "http://www.w3.org/2000/svg"
PARSED = re.compile(r"\b(innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|eval|new Function)\b")
INLINE = re.compile(r"""<script>|<style|\sstyle=|\son\w+="|setAttribute\("style""")


def names(path: Path) -> str:
    return str(path.relative_to(STATIC))


@pytest.mark.parametrize("path", FILES, ids=names)
def test_it_loads_nothing_from_elsewhere(path: Path) -> None:
    assert re.findall(r"(?:https?:)?//[a-z0-9][\w.-]*", path.read_text().replace(SVG_NAMES, "")) == []


@pytest.mark.parametrize("path", FILES, ids=names)
def test_it_is_no_longer_than_other_code(path: Path) -> None:
    lines = path.read_text().splitlines()
    assert len(lines) <= FILE_LINES_MAX
    if path.suffix != ".svg":
        assert [number for number, line in enumerate(lines, 1) if len(line) > LINE_CHARACTERS_MAX] == []


@pytest.mark.parametrize("path", SCRIPTS, ids=names)
def test_a_script_parses_nothing_as_html_or_as_code(path: Path) -> None:
    assert PARSED.findall(path.read_text()) == []


@pytest.mark.parametrize("path", FILES, ids=names)
def test_nothing_is_inline(path: Path) -> None:
    assert INLINE.findall(path.read_text()) == []


def test_every_file_is_reached_from_the_first_one() -> None:
    index = STATIC / "index.html"
    reached, waiting = {index}, [STATIC.parent / name.lstrip("/") for name in LOADED.findall(index.read_text())]
    while waiting:
        path = waiting.pop().resolve()
        assert path.is_file(), path
        if path not in reached:
            reached.add(path)
            waiting += [path.parent / name for name in IMPORT.findall(path.read_text())] if path.suffix == ".js" else []
    assert sorted(reached) == [path.resolve() for path in FILES]


def test_every_page_is_looked_at_in_a_browser() -> None:
    """The tests visit an address of each route; signing in has its own (test_console_sign_in.py)."""
    table = re.search(r"const ROUTES = \[\n(.*?)\n\];", (STATIC / "app.js").read_text(), re.DOTALL)
    assert table is not None
    routes = re.findall(r'\["([^"]*)", \w+\]', table[1])
    assert len(routes) == len(table[1].splitlines())
    visited = [next((route for route in routes if _leads(route, page.path)), None) for page in PAGES]
    assert set(routes) - set(visited) == {"sign-in"}


def _leads(route: str, path: str) -> bool:
    return re.fullmatch(re.sub(r":\w+", "[^/]+", route), path) is not None


def test_every_file_is_in_the_package() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    globs = settings["tool"]["setuptools"]["package-data"]["roq.console"]
    assert sorted({path for glob in globs for path in STATIC.parent.glob(glob) if path.is_file()}) == FILES
