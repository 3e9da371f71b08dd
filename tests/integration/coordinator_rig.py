"""A coordinator in a process of its own, that can be killed and started again on its folder and port."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

START_SECONDS = 30.0  # a loaded machine
STOP_SECONDS = 10.0


class RunningCoordinator:
    """start(), then `address`; kill() or stop(); start() again."""

    def __init__(self, folder: Path, *flags: str) -> None:
        self.folder, self._flags = folder, flags
        self._process: subprocess.Popen[str] | None = None
        self.port = 0

    @property
    def address(self) -> str:
        """ "address:port" """
        return f"127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        """Returns when it serves; AssertionError with its log if it does not."""
        options = ["--data-dir", str(self.folder), "--port", str(self.port), "--session-seconds-max", "60", *self._flags]
        with (self.folder.parent / f"{self.folder.name}.log").open("a") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "roq.coordinator", *options], stdout=subprocess.PIPE, stderr=log, text=True
            )
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], START_SECONDS)
        line = self._process.stdout.readline() if ready else ""
        if not line:
            self.kill()
            raise AssertionError(f"the coordinator did not start: {self.log()}")
        self.port = int(json.loads(line)["port"])

    def log(self) -> str:
        """What it has said."""
        return (self.folder.parent / f"{self.folder.name}.log").read_text()

    def kill(self) -> None:
        """kill -9."""
        self._end(signal.SIGKILL)

    def stop(self) -> int:
        """SIGTERM; its exit code."""
        return self._end(signal.SIGTERM)

    def _end(self, number: int) -> int:
        process, self._process = self._process, None
        if process is None:
            return 0
        os.kill(process.pid, number)
        try:
            return process.wait(STOP_SECONDS)
        finally:
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()
