"""What docs/simulation.md shows."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.harness.documented import block

COMMAND_SECONDS = 55
NO_QUICK_TEST = "fourteen runs; tests/simulation/test_simulation.py has quick ones of each kind"


def test_hunting_and_showing_a_run() -> None:
    search = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    told = []
    for command in block("docs/simulation.md", "The simulated cluster").splitlines():
        ended = subprocess.run(
            ["bash", "-c", command],
            env={**os.environ, "PATH": search},
            capture_output=True,
            text=True,
            timeout=COMMAND_SECONDS,
            check=False,
        )
        assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]
        told.append(ended.stdout)
    hunted, shown, tasks, shuffles = told
    assert hunted.startswith("10 runs, ")
    assert "seed 17:\n" in shown
    assert "everything is healed" in shown
    assert "its disk is replaced by an empty one" in tasks
    assert " acked; " in tasks
    assert " is to be cut anew" in shuffles
    assert " sealed; " in shuffles
