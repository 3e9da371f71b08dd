"""kill -9 between any two steps of source and sink, of a Python process or of the whole Spark driver; the ids are counted.

One query lives through all of it: each life ends at another crash point (roq/spark/queue_crash.py), the next one goes on from
the checkpoint. The source promises at least once, and, as it is the queue's only reader here and the sink publishes a batch
once, each id comes out exactly once. Not covered: other readers of the same queue (test_queue_stream.py).
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

import roq.blocking
from roq.spark.queue_crash import POINTS, VARIABLE

ROOT = Path(__file__).parents[2]
ROWS, BATCH = 2_500, 250
LIFE_SECONDS = 200.0
# Each driver: the last point is where all of it is killed, at those before a Python process is.
DRIVERS = (
    ("source.leased", "source.planned", "source.manifest:2"),
    ("sink.staged", "sink.planned", "sink.published", "sink.half"),
    ("source.committed", "source.forgotten", "source.acked", "source.parts", "sink.noted"),
)


class Driver:
    """One driver, with everything it starts. program: in this folder."""

    def __init__(self, arguments: list[str], folder: Path, program: str = "queue_driver.py") -> None:
        self.wish = folder / "crash"
        self.reached = folder / "crash.reached"
        self.reached.unlink(missing_ok=True)
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        spark = {"PYSPARK_PYTHON": sys.executable, "PYTHONPATH": path, "SPARK_LOCAL_IP": "127.0.0.1"}
        environment = {**os.environ, **spark, VARIABLE: str(self.wish)}
        self.log = folder / "driver.log"
        command = [sys.executable, str(ROOT / "tests/spark" / program), *arguments]
        with self.log.open("ab") as log:
            self.process = psutil.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=log, cwd=folder)

    def run(self, last: str) -> list[str]:
        """The points it came to; with a `last` one, everything is killed there."""
        deadline = time.monotonic() + LIFE_SECONDS
        while time.monotonic() < deadline and self.process.poll() is None:
            if last and self.at() == last:
                self.kill()
                return [*self.told(), last]
            time.sleep(0.02)
        self.kill()
        assert not last, f"{last} was not come to: {self.tail()}"
        assert self.process.returncode == 0, self.tail()
        return self.told()

    def at(self) -> str:
        """The point where it waits to be killed; none is. (The driver itself takes the file away at those before the last.)"""
        with suppress(FileNotFoundError):
            return self.reached.read_text().split()[0]
        return ""

    def told(self) -> list[str]:
        with self.process.stdout as output:
            return bytes(output.read()).decode().split()

    def tail(self) -> str:
        return self.log.read_text()[-4000:]

    def kill(self) -> None:
        if self.process.poll() is None:
            everything = [self.process, *self.process.children(recursive=True)]
            for one in everything:
                with suppress(psutil.NoSuchProcess):
                    one.kill()
            psutil.wait_procs(everything, 10)


@pytest.mark.timeout(900)
@pytest.mark.long
def test_each_id_comes_out_once_whenever_the_driver_is_killed(tmp_path: Path) -> None:
    assert sorted(crash.split(":")[0] for crashes in DRIVERS for crash in crashes) == sorted(POINTS)
    source, target = f"log://{tmp_path}/in", f"log://{tmp_path}/out"
    with roq.blocking.open_queue(source) as queue:
        queue.put_many(b"%d" % number for number in range(ROWS))
    arguments = [source, target, str(tmp_path / "checkpoint"), str(BATCH)]
    for crashes in (*DRIVERS, ()):
        points = [crash.split(":")[0] for crash in crashes]
        driver = Driver([*arguments, *crashes], tmp_path)
        try:
            assert driver.run(points[-1] if points else "") == points
        finally:
            driver.kill()
    with roq.blocking.open_queue(target) as queue:
        seen = Counter(int(task.payload) for task in queue.leases(wait_seconds=0, count=1000))
    assert [number for number in range(ROWS) if not seen[number]] == [], "lost"
    assert [(number, times) for number, times in seen.items() if times > 1] == [], "more than once"
    with roq.blocking.open_queue(source) as queue:
        status = queue.status()
        assert (status.ready, status.leased, status.completed) == (0, 0, ROWS), "something was not acked"
