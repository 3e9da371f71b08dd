"""`roq chaos` as a process of its own, for tests of what it finds."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


async def roq_chaos(
    flags: tuple[str, ...], arguments: Mapping[str, object], seconds: float, where: str = "--local"
) -> tuple[dict[str, Any], int | None, str]:
    """(its JSON, its exit code, what it wrote to people). It ends within `seconds`."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "roq.cli", "chaos", where, "--json", *flags),
        *(str(part) for pair in arguments.items() for part in pair),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    try:
        async with asyncio.timeout(seconds):
            output, errors = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert output, errors.decode()
    return json.loads(output.splitlines()[-1]), process.returncode, errors.decode()
