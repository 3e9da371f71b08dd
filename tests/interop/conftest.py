"""python-task-queue in an environment of its own (`tools/setup.sh interop`): it brings thirty packages ours should not see."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PROGRAM = Path(__file__).with_name("upstream.py")
PYTHON = Path(os.environ.get("TASK_QUEUE_PYTHON", ROOT / ".venv-interop/bin/python"))
ANSWER_SECONDS = 40


class Upstream:
    """One process of python-task-queue working a folder."""

    def __init__(self, python: Path, folder: Path) -> None:
        self.process = subprocess.Popen(
            [python, PROGRAM, folder], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        self.answer()

    def __call__(self, *command: object) -> Any:
        """Give a command and wait for its answer."""
        self.tell(*command)
        return json.loads(self.answer())

    def tell(self, *command: object) -> None:
        """Give a command."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()

    def answer(self) -> str:
        """The next answer, as it came."""
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        line = self.process.stdout.readline()
        if not line:
            raise AssertionError(f"python-task-queue ended: {self.process.stderr.read()[-2000:]}")
        return line

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture(scope="session")
def python() -> Path:
    """The interpreter that has python-task-queue."""
    found = (
        PYTHON.exists() and subprocess.run([PYTHON, "-c", "import taskqueue"], check=False, capture_output=True).returncode == 0
    )
    if not found:
        if os.environ.get("CI"):
            pytest.fail("python-task-queue is not installed: run tools/setup.sh interop")
        pytest.skip("python-task-queue is not installed: run tools/setup.sh interop")
    return PYTHON


@pytest.fixture
def upstream(python: Path) -> Iterator[Callable[[Path], Upstream]]:
    """Starts processes of python-task-queue; they end with the test."""
    started: list[Upstream] = []

    def start(folder: Path) -> Upstream:
        started.append(Upstream(python, folder))
        return started[-1]

    yield start
    for one in started:
        one.close()


@pytest.fixture
def ptq(python: Path) -> Callable[..., str]:
    """Runs its command line tool; what it printed."""

    def run(*words: object) -> str:
        program = python.with_name("ptq")
        environment = os.environ | {"PYTHONPATH": str(PROGRAM.parent)}
        done = subprocess.run(
            [program, *map(str, words)], check=False, capture_output=True, text=True, timeout=ANSWER_SECONDS, env=environment
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


@pytest.fixture
def our_worker() -> Iterator[Callable[[Path, float], subprocess.Popen[str]]]:
    """Starts our workers: each runs mark tasks until nothing came for some seconds, then prints how many."""
    started: list[subprocess.Popen[str]] = []

    def start(folder: Path, seconds: float) -> subprocess.Popen[str]:
        program = Path(__file__).with_name("our_worker.py")
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        process = subprocess.Popen(
            [sys.executable, program, folder, str(seconds)], stdout=subprocess.PIPE, text=True, env=environment
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()
