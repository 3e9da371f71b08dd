"""A Spark cluster of this machine's own: a master and two workers that seem to be two hosts (127.0.0.1 and 127.0.0.2)."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pyspark

SPARK_HOME = Path(pyspark.__file__).parent
PARTS = "org.apache.spark.deploy"
START_SECONDS = 40


class Standalone:
    """Ends with stop(), executors included."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._processes: list[subprocess.Popen[bytes]] = []
        self.master = ""

    def start(self) -> None:
        """Returns when both workers are registered."""
        self._run("master", "master.Master", "--host", "127.0.0.1", "--port", "0", "--webui-port", "0")
        line = self._line("master", "Starting Spark master at spark://")
        self.master = line.split(" at ")[1].split()[0]
        for number in (1, 2):
            host = ("--host", f"127.0.0.{number}", "--webui-port", "0", "--cores", "2", "--memory", "600m")
            self._run(
                f"worker-{number}", "worker.Worker", *host, "--work-dir", str(self._folder / f"work-{number}"), self.master
            )
        for number in (1, 2):
            self._line(f"worker-{number}", "Successfully registered with master")

    def kill_an_executor(self) -> None:
        """kill -9 the executor of one host and all of its Python processes."""
        executors = [
            child
            for process in self._processes
            for child in psutil.Process(process.pid).children(recursive=True)
            if _is_executor(child)
        ]
        assert len(executors) >= 2
        victim = executors[0]
        for process in (*victim.children(recursive=True), victim):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()

    def stop(self) -> None:
        """Kill it all."""
        for process in reversed(self._processes):
            with contextlib.suppress(psutil.NoSuchProcess):
                for child in psutil.Process(process.pid).children(recursive=True):
                    with contextlib.suppress(psutil.NoSuchProcess):
                        child.kill()
            process.kill()
            process.wait()

    def _run(self, name: str, part: str, *words: str) -> None:
        environment = os.environ | {
            "SPARK_HOME": str(SPARK_HOME),
            "SPARK_LOCAL_IP": "127.0.0.1",
            "SPARK_DAEMON_MEMORY": "256m",
            "PYSPARK_PYTHON": sys.executable,
        }
        with (self._folder / f"{name}.log").open("wb") as log:
            command = [str(SPARK_HOME / "bin/spark-class"), f"{PARTS}.{part}", *words]
            self._processes.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log))

    def _line(self, name: str, words: str) -> str:
        """The first line of its log with these words."""
        end = time.monotonic() + START_SECONDS
        while time.monotonic() < end:
            for line in (self._folder / f"{name}.log").read_text(errors="replace").splitlines():
                if words in line:
                    return line
            time.sleep(0.1)
        raise AssertionError(f"{name} did not start: {(self._folder / f'{name}.log').read_text()[-2000:]}")


def _is_executor(process: psutil.Process) -> bool:
    try:
        return "org.apache.spark.executor.CoarseGrainedExecutorBackend" in process.cmdline()
    except psutil.NoSuchProcess:  # a Python worker that has just ended, reaped or not
        return False
