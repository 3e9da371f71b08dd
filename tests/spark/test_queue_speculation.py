"""A Spark cluster of two hosts that speculates: two attempts of a partition of one batch, and each row comes out once."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

import roq.blocking
from tests.spark.standalone import Standalone

ROOT = Path(__file__).parents[2]
ROWS = 6_000
DRIVER_SECONDS = 240


@pytest.fixture
def standalone(tmp_path: Path) -> Iterator[Standalone]:
    """Spark speculates only on another host."""
    cluster = Standalone(tmp_path)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


@pytest.mark.timeout(400)
@pytest.mark.long
def test_a_speculated_task_is_published_once(standalone: Standalone, tmp_path: Path) -> None:
    source, target = f"log://{tmp_path}/in", f"log://{tmp_path}/out"
    with roq.blocking.open_queue(source) as queue:
        queue.put_many(b"%d" % number for number in range(ROWS))
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYSPARK_PYTHON": sys.executable, "SPARK_LOCAL_IP": "127.0.0.1"}
    command = [sys.executable, "-m", "tests.spark.queue_speculation", standalone.master, source, target, str(tmp_path)]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=DRIVER_SECONDS, cwd=ROOT, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert int(done.stdout.split()[-1]) >= 2, "Spark did not speculate"
    with roq.blocking.open_queue(target) as queue:
        seen: Counter[bytes] = Counter()
        while tasks := queue.lease(60, 1000):
            seen.update(task.payload for task in tasks)
    assert seen == Counter(b"%d" % number for number in range(ROWS))
