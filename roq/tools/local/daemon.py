"""One daemon of a local cluster: started with its log in a file, ready when it prints its JSON ready line, ended by pid.

Not covered: what the daemons are and how they belong together (roq/tools/local/cluster.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from roq.errors import DeadlineExceeded, ProcessFailed

LOG_LINES_SHOWN = 8  # of a daemon that failed, in the error
LOG_BYTES_SHOWN = 64 * 1024  # read at most this much of the log's end
LINE_BYTES_MAX = 256 * 1024  # one line on a daemon's standard output
KILL_SECONDS = 5.0  # a process killed with SIGKILL is gone after this, or the kernel holds it


class Daemon:
    """A child process in a session of its own, so that Ctrl-C at the terminal reaches only its starter."""

    def __init__(self, name: str, command: Sequence[str], log: Path, environment: Mapping[str, str]) -> None:
        self.name, self.log = name, log
        self.ready: dict[str, Any] = {}  # what the ready line said
        self._command, self._environment = list(command), dict(environment)
        self._process: Process | None = None
        self._wanted = False

    @property
    def pid(self) -> int:
        """Process id, 0 while not started."""
        return self._process.pid if self._process else 0

    @property
    def command(self) -> tuple[str, ...]:
        """Program and arguments."""
        return tuple(self._command)

    @property
    def running(self) -> bool:
        """Started, and its end was not seen yet."""
        return self._process is not None and self._process.returncode is None

    @property
    def failed(self) -> bool:
        """Ended, and nobody here had asked for it."""
        return self._wanted and not self.running

    def dismiss(self) -> None:
        """It may end from now on."""
        self._wanted = False

    async def start(self, timeout_seconds: float) -> None:
        """Start and wait for the ready line. Raises ProcessFailed with the last log lines, or DeadlineExceeded."""
        if self.running:
            raise ProcessFailed(f"{self.name} runs already (pid {self.pid})")
        with self.log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *self._command,
                stdin=DEVNULL,
                stdout=PIPE,
                stderr=log,
                env=self._environment,
                start_new_session=True,
                limit=LINE_BYTES_MAX,
            )
        self._wanted = True
        try:
            async with asyncio.timeout(timeout_seconds):
                self.ready = await self._ready_line(self._process)
        except TimeoutError:
            await self.kill()
            raise DeadlineExceeded(f"{self.name} was not ready within {timeout_seconds:g} s{self._last_lines()}") from None
        except BaseException:
            await self.kill()
            raise

    async def _ready_line(self, process: Process) -> dict[str, Any]:
        assert process.stdout is not None
        ended = asyncio.ensure_future(process.wait())
        try:
            while True:
                line = asyncio.ensure_future(process.stdout.readline())
                await asyncio.wait({line, ended}, return_when=asyncio.FIRST_COMPLETED)
                if not line.done():  # its children may hold the pipe open
                    line.cancel()
                elif line.result():
                    with contextlib.suppress(ValueError):
                        told = json.loads(line.result())
                        if isinstance(told, dict):
                            return told
                    continue
                code = await process.wait()
                raise ProcessFailed(f"{self.name} ended with code {code} before it was ready{self._last_lines()}")
        finally:
            ended.cancel()

    def option(self, flag: str) -> str:
        """The value this daemon was given for a command-line flag."""
        return self._command[self._command.index(flag) + 1]

    def exit_reason(self) -> str:
        """How it ended, with its last log lines."""
        code = self._process.returncode if self._process else None
        return f"{self.name} ended with code {code}{self._last_lines()}"

    def _last_lines(self) -> str:
        lines = tail(self.log, LOG_LINES_SHOWN)
        return f"; log: {self.log}" + "".join(f"\n    {line}" for line in lines)

    async def wait(self, timeout_seconds: float | None) -> bool:
        """True when the process has ended within the time (None: for ever)."""
        if self._process is None:
            return True
        try:
            async with asyncio.timeout(timeout_seconds):
                await self._process.wait()
        except TimeoutError:
            return False
        return True

    async def terminate(self, timeout_seconds: float) -> bool:
        """SIGTERM, then wait; False if it still runs."""
        self.dismiss()
        if self._process is not None and self.running:
            with contextlib.suppress(ProcessLookupError):
                self._process.terminate()
        return await self.wait(timeout_seconds)

    async def kill(self) -> None:
        """SIGKILL, as a crash would; what it forked lives on."""
        self.dismiss()
        if self._process is not None and self.running:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self.wait(KILL_SECONDS)


def tail(path: Path, lines: int) -> list[str]:
    """The last lines of a log, [] if there is none. A JSON record is cut down to its level, message and extra fields."""
    try:
        with path.open("rb") as log:
            log.seek(0, 2)
            log.seek(max(0, log.tell() - LOG_BYTES_SHOWN))
            text = log.read().decode(errors="replace")
    except OSError:
        return []
    return [_short(line) for line in text.splitlines()[-lines:]]


def _short(line: str) -> str:
    try:
        record = json.loads(line)
        level, message = record.pop("level"), record.pop("message")
    except (ValueError, KeyError, AttributeError, TypeError):
        return line
    rest = " ".join(f"{key}={value}" for key, value in record.items() if key not in ("t", "process", "pid", "exception"))
    exception = str(record.get("exception", "")).strip().splitlines()
    return " ".join(part for part in (f"{level}:", message, rest, exception[-1] if exception else "") if part)
