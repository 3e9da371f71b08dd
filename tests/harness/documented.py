"""Programs that the documents show, as their readers would copy them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def program(document: str, heading: str) -> str:
    """The first Python block under this heading. document: path from the root of the project."""
    text = (ROOT / document).read_text()
    found = BLOCK.search(text, text.index(f"\n## {heading}\n"))
    assert found is not None, f"{document} shows no program under {heading!r}"
    return found[1]


def run(source: str, folder: Path, *words: str, environment: Mapping[str, str] = {}, seconds: float = 60) -> str:
    """Run it with this interpreter, its environment activated, and this tree; what it printed. folder: in place of /tmp."""
    path = folder / "program.py"
    path.write_text(source.replace("/tmp/", f"{folder}/"))
    search = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    surroundings = {**os.environ, "PATH": search, "PYTHONPATH": str(ROOT), **environment}
    ended = subprocess.run(
        [sys.executable, str(path), *words], env=surroundings, capture_output=True, text=True, timeout=seconds, check=False
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    return ended.stdout
