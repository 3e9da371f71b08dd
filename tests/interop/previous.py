"""Version 0.1, installed from a wheel of its own that is built from the last commit of that version, and programs of either
version.
"""

from __future__ import annotations

import asyncio
import io
import shutil
import signal
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.interop.environments import ROOT, Environment, Environments

COMMIT = "77ca1048e3fe221949149fd290654cb658927e33"
MEMBER = Path(__file__).with_name("member.py")
VERSIONS = ("0.1", "this version")
BOUND_SECONDS = 60


@pytest.fixture(scope="session")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Environment]]:
    """An environment of each version."""
    found = subprocess.run(["git", "archive", COMMIT], cwd=ROOT, capture_output=True, check=False)
    if found.returncode:
        pytest.skip(f"the history of this clone does not reach back to version 0.1: {found.stderr.decode().strip()}")
    folder = tmp_path_factory.mktemp("versions")
    with tarfile.open(fileobj=io.BytesIO(found.stdout)) as archive:
        archive.extractall(folder / "0.1", filter="data")
    environments = Environments(folder)
    old = environments.empty("with-0.1")
    environments.install(old, str(environments.built(folder / "0.1")))
    yield {VERSIONS[0]: old, VERSIONS[1]: environments[""]}
    shutil.rmtree(folder)


class Process:
    """A program and its lines."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        assert process.stdin is not None
        self.process, self._lines, self._input = process, process.stdout, process.stdin

    async def line(self) -> str:
        """The next one; "" at the end."""
        async with asyncio.timeout(BOUND_SECONDS):
            return (await self._lines.readline()).decode().rstrip()

    def tell(self, *lines: str) -> None:
        self._input.write("".join(f"{line}\n" for line in lines).encode())

    async def done(self, *lines: str) -> None:
        """Told, and all of it answered."""
        self.tell(*lines)
        assert [await self.line() for _ in lines] == list(lines)

    async def end(self) -> list[str]:
        """What it says until it ends: its input is over, and it is interrupted if it has none."""
        self._input.close()
        async with asyncio.timeout(BOUND_SECONDS):
            return (await self._lines.read()).decode().splitlines()


async def ended(process: asyncio.subprocess.Process) -> None:
    """By SIGINT, which `roq up` and members end well on."""
    if process.returncode is None:
        if process.stdin is not None:
            process.stdin.close()
        process.send_signal(signal.SIGINT)
        try:
            async with asyncio.timeout(20):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()
