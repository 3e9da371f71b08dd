"""A short soak: random faults under 2,000 messages a second, and nothing grows. docs/soak.md has the hour.

A minute and a half by default, ROQ_SOAK_SECONDS=300 for a nightly run. With much less a process would have fewer readings than
there are windows to judge it by (roq/tools/chaos/resources.py).
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.harness.chaos_run import roq_chaos

NO_QUICK_TEST = "one and a half minutes of load by itself"
SECONDS = int(os.environ.get("ROQ_SOAK_SECONDS", "90"))
END_SECONDS = 150  # to start, to heal and to come to an end
ARGUMENTS = {"--seconds": SECONDS, "--every": 12, "--seed": 11, "--publishers": 2, "--subscribers": 2, "--rate": 500}
JUDGED = {"client", "roq-gcm", "roq-hcm", "roq-fork-server", "monitor", "scaling", "exchange", "store"}


@pytest.mark.timeout(SECONDS + END_SECONDS + 30)
@pytest.mark.long
async def test_a_while_of_faults_lets_nothing_grow(tmp_path: Path) -> None:
    picture = tmp_path / "memory.svg"
    result, code, errors = await roq_chaos(("--soak", "--memory-picture", str(picture)), ARGUMENTS, SECONDS + END_SECONDS)
    assert (result["problems"], result["violations"], code) == ([], [], 0), errors
    assert (result["lost"], result["duplicated"], result["reordered"], result["adds_up"]) == (0, 0, 0, True)
    assert result["published"] > 0.9 * 4 * 500 * SECONDS
    judged = [life for life in result["resources"]["lives"] if life["judged"]]
    assert {life["name"].partition("/")[0] for life in judged} >= JUDGED
    assert len(result["resources"]["znodes"]["windows"]) == 8
    assert picture.read_text().startswith("<svg")
