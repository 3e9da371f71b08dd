"""roq chaos for real: twenty seconds on loopback addresses, every fault shorter than the publishers' ring."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ARGUMENTS = {"--seconds": 20, "--seed": 3, "--every": 4, "--longest": 2, "--publishers": 2, "--subscribers": 2, "--rate": 200}


@pytest.mark.timeout(120)
async def test_twenty_seconds_without_a_message_lost(tmp_path: Path) -> None:
    picture = tmp_path / "timeline.svg"
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "roq.cli", "chaos", "--local", "--json", "--picture", str(picture)),
        *(str(part) for pair in ARGUMENTS.items() for part in pair),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    try:
        async with asyncio.timeout(110):
            output, errors = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    result = json.loads(output.splitlines()[-1])
    assert (result["lost"], result["duplicated"], result["reordered"], result["unknown"]) == (0, 0, 0, 0), errors.decode()
    assert result["delivered"] + result["reported_gaps"] == 2 * result["published"] > 4000
    assert result["acked"] == result["published"]
    assert (result["problems"], result["violations"], process.returncode) == ([], [], 0)
    assert result["administration"]["acked"] > 0
    seen = {life["name"].partition("/")[0] for life in result["resources"]["lives"]}
    assert seen >= {"client", "roq-gcm", "roq-hcm", "roq-template", "monitor", "exchange", "scaling"}
    assert {"t", "kind", "target", "seconds"} <= set(result["faults"][0])
    assert picture.read_text().startswith("<svg")
