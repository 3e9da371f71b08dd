"""Five minutes of the soak: random faults under 2,000 messages a second, and nothing grows. docs/soak.md has the hour."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path

import pytest

NO_QUICK_TEST = "a minute of load by itself"
ROOT = Path(__file__).parents[2]
ARGUMENTS = {"--seconds": 300, "--every": 12, "--seed": 11, "--publishers": 2, "--subscribers": 2, "--rate": 500}
JUDGED = {"client", "roq-gcm", "roq-hcm", "roq-template", "monitor", "scaling", "exchange"}


@pytest.mark.timeout(480)
async def test_five_minutes_of_faults_let_nothing_grow(tmp_path: Path) -> None:
    picture = tmp_path / "memory.svg"
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "roq.cli", "chaos", "--local", "--soak", "--json", "--memory-picture", str(picture)),
        *(str(part) for pair in ARGUMENTS.items() for part in pair),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    try:
        async with asyncio.timeout(450):
            output, errors = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert output, errors.decode()
    result = json.loads(output.splitlines()[-1])
    assert (result["problems"], result["violations"], process.returncode) == ([], [], 0), errors.decode()
    assert (result["lost"], result["duplicated"], result["reordered"], result["adds_up"]) == (0, 0, 0, True)
    assert result["published"] > 0.9 * 4 * 500 * 300
    judged = [life for life in result["resources"]["lives"] if life["judged"]]
    assert {life["name"].partition("/")[0] for life in judged} == JUDGED
    assert len(result["resources"]["znodes"]["windows"]) == 8
    assert picture.read_text().startswith("<svg")
