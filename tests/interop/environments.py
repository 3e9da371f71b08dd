"""Environments as users have them: the wheel of this tree, installed with the extras they name and nothing else.

One per extra for all tests of a run. One that has more than another begins as its copy (hard links), since PySpark alone has
half a gigabyte. Packages come from the index that pip is set to; versions are those of constraints.txt.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCES = ("roq", "gcm", "hcm", "pyproject.toml", "README.md", "LICENSE")
BUILD_SECONDS = 60
INSTALL_SECONDS = 200
# extra -> the one whose packages it has too
UPON = {"spark": "shuffle"}


@dataclass(frozen=True)
class Environment:
    """A virtual environment."""

    folder: Path

    @property
    def python(self) -> Path:
        """Its interpreter."""
        return self.folder / "bin/python"

    def activated(self, **more: str) -> dict[str, str]:
        """The variables of a shell that has activated it, and has nothing of ours or of the tests'."""
        ours = ("PYTHON", "PYSPARK", "SPARK", "ROQ_", "VIRTUAL_ENV", "JAVA_HOME")
        kept = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
        return {**kept, "PATH": f"{self.folder / 'bin'}{os.pathsep}{os.environ['PATH']}", **more}

    def run(self, *words: object, cwd: Path, seconds: float = 60, **variables: str) -> subprocess.CompletedProcess[str]:
        """A program of it, by its name; variables: beside those of `activated`."""
        program, *arguments = map(str, words)
        command, environment = [str(self.folder / "bin" / program), *arguments], self.activated(**variables)
        return subprocess.run(command, env=environment, cwd=cwd, capture_output=True, text=True, timeout=seconds, check=False)


def copied_sources(folder: Path) -> Path:
    """What a wheel is built from, in a folder of its own: the build leaves files beside its sources."""
    folder.mkdir()
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, folder / name)
    return folder


class Environments:
    """Made when they are asked for."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._made: dict[str, Environment] = {}
        self._wheel: Path | None = None

    def __getitem__(self, extra: str) -> Environment:
        """That of one extra; "": of none."""
        if extra not in self._made:
            self._made[extra] = self._make(extra)
        return self._made[extra]

    def _make(self, extra: str) -> Environment:
        made = self.empty(f"with-{extra or 'nothing'}")
        if (upon := UPON.get(extra)) is not None:
            shutil.copytree(_packages(self[upon]), _packages(made), copy_function=os.link, dirs_exist_ok=True)
        wheel = self.wheel()
        self.install(made, f"{wheel}[{extra}]" if extra else str(wheel))
        return made

    def empty(self, name: str) -> Environment:
        """One without packages, pip included."""
        venv.create(self._folder / name, symlinks=True)
        return Environment(self._folder / name)

    def wheel(self) -> Path:
        """Of this tree."""
        if self._wheel is None:
            self._wheel = self.built(copied_sources(self._folder / "sources"))
        return self._wheel

    def built(self, sources: Path) -> Path:
        """The wheel of these; beside them."""
        folder = sources.with_name(f"wheel-of-{sources.name}")
        command = ["wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder), str(sources)]
        _pip(*command, seconds=BUILD_SECONDS)
        (found,) = folder.glob("*.whl")
        return found

    def install(self, environment: Environment, *wanted: str) -> None:
        """With what it needs, from the index."""
        command = ["--python", str(environment.python), "install", "--no-compile", "-c", str(ROOT / "constraints.txt")]
        _pip(*command, *wanted, seconds=INSTALL_SECONDS)


def _packages(environment: Environment) -> Path:
    (found,) = (environment.folder / "lib").glob("python*/site-packages")
    return found


def _pip(*words: str, seconds: float) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pip", *words, "--quiet"], capture_output=True, text=True, timeout=seconds, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
