"""The specifications in docs/spec, checked by Spin: no error, and an error for every safeguard that is switched off.

Spin and gcc are installed by tools/setup.sh where it may; without them these tests are skipped, which is said loudly.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

SPEC = Path(__file__).parents[2] / "docs" / "spec" / "workqueue.pml"
SECONDS = 55.0
MISSING = [tool for tool in ("spin", "gcc") if shutil.which(tool) is None]
pytestmark = pytest.mark.skipif(
    bool(MISSING), reason=f"docs/spec is NOT CHECKED: {MISSING} missing (on Debian: apt-get install spin gcc libc6-dev)"
)
STATES_MIN = 50_000
HEALTHY = {
    "two producers, nothing goes wrong": "PRODUCERS=2 LAG=2",
    "an append is repeated": "PRODUCERS=2 LAG=1 REPEATS=1",
    "an append is repeated and a lease runs out": "PRODUCERS=1 LAG=2 REPEATS=1 REQUEUES=1",
    "two leases run out": "PRODUCERS=1 LAG=2 REQUEUES=2",
    "an instance crashes": "PRODUCERS=1 LAG=2 CRASHES=1",
}
NEEDED = {
    "NO_PUSH_NUMBERS": "PRODUCERS=1 REPEATS=1",
    "NO_POP_NUMBERS": "PRODUCERS=2 LAG=1 REPEATS=1",
    "NO_NONCES": "PRODUCERS=1",
    "NO_DELIVERY_NAMES": "PRODUCERS=1 REQUEUES=2",
    "NO_HAND_OVER": "PRODUCERS=1 REQUEUES=1",
    "NO_ORDER": "PRODUCERS=2 LAG=1 REQUEUES=1",
    "NO_DEATHS": "PRODUCERS=1 CRASHES=1",
}


def run(folder: Path, *command: str) -> str:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stdout[-2000:]}{done.stderr[-2000:]}"
    return done.stdout


def verify(folder: Path, choices: str) -> str:
    """What Spin's verifier says about the specification with these definitions."""
    defined = [f"-D{choice}" for choice in choices.split()]
    run(folder, "spin", "-a", *defined, str(SPEC))
    run(folder, "gcc", "-O1", "-w", "-DSAFETY", "-DCOLLAPSE", "-DMEMLIM=2000", "-o", "pan", "pan.c")
    said = run(folder, "./pan", "-m10000")
    assert "Search not completed" not in said or "errors: 1" in said, said
    return said


@pytest.mark.parametrize("name", HEALTHY)
def test_the_specification_holds(name: str, tmp_path: Path) -> None:
    said = verify(tmp_path, HEALTHY[name])
    assert "errors: 0" in said, said
    states = re.search(r"([0-9.e+]+) states, stored", said)
    assert states is not None, said
    assert float(states[1]) >= STATES_MIN, said
    checker = said.partition("unreached in proctype Checker")[2].partition("unreached in")[0]
    assert "assert" not in checker, "no run came to an end"


@pytest.mark.parametrize("switch", NEEDED)
def test_every_safeguard_is_needed(switch: str, tmp_path: Path) -> None:
    said = verify(tmp_path, f"{NEEDED[switch]} {switch}")
    assert "errors: 1" in said, said
    assert "assertion violated" in said, said


def test_every_switch_is_tried() -> None:
    assert set(re.findall(r"#if(?:n?def) (NO_\w+)", SPEC.read_text())) == set(NEEDED)
