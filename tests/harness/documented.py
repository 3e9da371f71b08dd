"""Programs and commands that the documents show, as their readers would copy them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
MARKS = re.compile(r"^(?:#{1,6} (?P<heading>[^\n]+)|```(?P<language>\w*)\n(?P<text>.*?)^```)$", re.DOTALL | re.MULTILINE)


class Block(NamedTuple):
    """Between two fences. number: from 1 under its heading. language: as beside the first fence, "" for a shell's."""

    document: str
    heading: str
    number: int
    language: str
    text: str


def blocks(document: str) -> list[Block]:
    """All of a document. document: path from the root of the project."""
    found, heading, counted = list[Block](), "", Counter[str]()
    for mark in MARKS.finditer((ROOT / document).read_text()):
        if mark["heading"] is not None:
            heading = mark["heading"]
            continue
        counted[heading] += 1
        found.append(Block(document, heading, counted[heading], mark["language"], mark["text"]))
    return found


def block(document: str, heading: str, number: int = 1) -> str:
    """The text of one."""
    (found,) = (each.text for each in blocks(document) if (each.heading, each.number) == (heading, number))
    return found


def run(source: str, folder: Path, *words: str, environment: Mapping[str, str] = {}, seconds: float = 60) -> str:
    """Run it with this interpreter, its environment activated, and this tree; what it printed. folder: in place of /tmp."""
    path = saved(source, folder)
    search = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    variables = {**os.environ, "PATH": search, "PYTHONPATH": str(ROOT), **environment}
    ended = subprocess.run(
        [sys.executable, str(path), *words], env=variables, capture_output=True, text=True, timeout=seconds, check=False
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    return ended.stdout


def saved(source: str, folder: Path) -> Path:
    """The program in a file. folder: where it is, and in place of /tmp."""
    path = folder / "program.py"
    path.write_text(source.replace("/tmp/", f"{folder}/"))
    return path
