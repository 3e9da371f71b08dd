"""`make docs`: the site builds without a warning and without a network, and whatever it links to is there."""

from __future__ import annotations

import html
import inspect
import posixpath
import re
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote

import pytest

import roq
from roq import errors
from tests.harness.documented import ROOT

NO_QUICK_TEST = "the whole documentation is built, which takes half a minute; `make docs` does that alone"
pytestmark = pytest.mark.timeout(180)
ID = re.compile(r'\s(?:id|name)="([^"]+)"')
LINK = re.compile(r'<a\s[^>]*?href="([^"]+)"')
LOADED = re.compile(r'<(?:script|img|iframe)\s[^>]*?src="([^"]+)"|<link\s[^>]*?href="([^"]+)"|url\("?(https?:[^)"]+)')
ELSEWHERE = ("http:", "https:", "mailto:")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built as `make docs` builds it."""
    folder = tmp_path_factory.mktemp("site")
    line = next(line for line in (ROOT / "Makefile").read_text().splitlines() if "-m sphinx" in line)
    words = line.replace("build/", f"{folder}/").split()
    done = subprocess.run([sys.executable, *words[1:]], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    return folder / "site"


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[str, str]:
    """Path from the site's root -> text."""
    return {path.relative_to(site).as_posix(): path.read_text() for path in site.rglob("*.html")}


def test_every_link_leads_to_a_page_and_a_place_of_it(site: Path, pages: dict[str, str]) -> None:
    places = {name: set(map(html.unescape, ID.findall(text))) for name, text in pages.items()}
    dead = set()
    for name, text in pages.items():
        for link in map(html.unescape, LINK.findall(text)):
            target, _, place = link.partition("#")
            if target.startswith(ELSEWHERE):
                continue
            page = posixpath.normpath(posixpath.join(posixpath.dirname(name), unquote(target))) if target else name
            whole = not place and (site / page).is_file()
            if not whole and unquote(place) not in places.get(page, ()):
                dead.add(f"{name}: {link}")
    assert sorted(dead) == []


def test_no_page_loads_anything_from_elsewhere(site: Path, pages: dict[str, str]) -> None:
    styles = {path.name: path.read_text() for path in site.rglob("*.css")}
    loaded = {(name, url) for name, text in {**pages, **styles}.items() for found in LOADED.findall(text) for url in found}
    assert sorted((name, url) for name, url in loaded if url.startswith((*ELSEWHERE, "//"))) == []


def test_everything_public_is_in_the_reference(pages: dict[str, str]) -> None:
    reference = {place for name, text in pages.items() if name.startswith("docs/reference/") for place in ID.findall(text)}
    names = [
        name for name in vars(errors) if inspect.isclass(one := getattr(errors, name)) and issubclass(one, errors.RoqError)
    ]
    wanted = {f"roq.errors.{name}" for name in names} | {f"roq.blocking.{name}" for name in roq.blocking.__all__}
    wanted |= {f"roq.{name}" for name in roq.__all__ if name != "blocking" and name not in names}
    assert sorted(wanted - reference) == []
