"""The Spark driver of spark_driver.py as a test sees it, and tasks put into a work queue while its stream runs."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from roq.errors import RoqError
from roq.wire.task import NewTask
from roq.workqueue.remote import RemoteQueue

ROOT = Path(__file__).parents[2]
ANSWER_SECONDS = 200.0  # of a start and of a job, on a machine that has other things to do; tests have bounds of their own
STOP_SECONDS = 20.0
PUT_ROWS, PUT_PAUSE_SECONDS = 20, 0.02  # the load: about 1000 tasks a second at most


class SparkDriver:
    """One at a time is asked. folder: for its own files; what it says beside is in FOLDER/log."""

    def __init__(self, folder: Path, rows_per_batch: int) -> None:
        self._log = (folder / "log").open("w")
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        environment = {**os.environ, "PYSPARK_PYTHON": sys.executable, "PYTHONPATH": path, "SPARK_LOCAL_IP": "127.0.0.1"}
        command = [sys.executable, "-m", "tests.harness.spark_driver", str(folder), str(rows_per_batch)]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self._log, "text": True}
        self._process = subprocess.Popen(command, cwd=ROOT, env=environment, **pipes)
        self._folder = folder

    async def started(self) -> None:
        """Until Spark runs."""
        await self._answer("start")

    async def ask(self, what: str, **arguments: object) -> dict[str, Any]:
        """Its answer. Raises AssertionError if Spark failed."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": what, **arguments}) + "\n")
        self._process.stdin.flush()
        return await self._answer(what)

    async def _answer(self, what: str) -> dict[str, Any]:
        assert self._process.stdout is not None
        async with asyncio.timeout(ANSWER_SECONDS):
            line = await asyncio.to_thread(self._process.stdout.readline)
        assert line, f"the driver ended during {what}: {(self._folder / 'log').read_text()[-3000:]}"
        answer: dict[str, Any] = json.loads(line)
        assert "error" not in answer, answer["error"]
        return answer

    def close(self) -> None:
        """End it."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._log.close()


class Producer:
    """Puts ids 0, 1, … until it is stopped. answered, doubtful: ids whose put was answered, and those that got an error."""

    def __init__(self, zookeeper: str, name: str) -> None:
        self.answered: set[int] = set()
        self.doubtful: set[int] = set()
        self._queue = RemoteQueue(zookeeper, name)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        first = 0
        while not self._over.wait(PUT_PAUSE_SECONDS):
            ids = range(first, first + PUT_ROWS)
            first += PUT_ROWS
            try:
                self._queue.put([NewTask(b"%d" % number) for number in ids])
                self.answered.update(ids)
            except RoqError:
                self.doubtful.update(ids)

    def stop(self) -> None:
        """Returns when the last put is answered."""
        self._over.set()
        self._thread.join(ANSWER_SECONDS)
        assert not self._thread.is_alive()
        self._queue.close()
