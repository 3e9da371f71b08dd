"""kill -9 of a whole Spark driver in the middle of a publication on a recorded queue, and behind its last row; run again.

Each row is on the queue once: the job is a producer, which skips what the life before has stored. Not covered: work queues, and
what lies between other steps (test_queue_crashes.py).
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import roq.blocking
from tests.integration.running import RunningCluster
from tests.spark.test_queue_crashes import Driver

NO_QUICK_TEST = "each test is several Spark drivers"
ROWS = 6_000
START_SECONDS, LIFE_SECONDS, KEPT_SECONDS = 60.0, 100.0, 20.0
LOOK_SECONDS = 0.05

pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[RunningCluster]:
    found = RunningCluster(tmp_path / "cluster", zookeeper=None, hosts=2)
    try:
        found.call(found.local.settled(START_SECONDS))
        yield found
    finally:
        left = found.stop()
    assert left == []


def come_to(driver: Driver, point: str) -> None:
    deadline = time.monotonic() + LIFE_SECONDS
    while driver.at() != point:
        assert driver.process.poll() is None, driver.tail()
        assert time.monotonic() < deadline, f"{point} was not come to: {driver.tail()}"
        time.sleep(LOOK_SECONDS)


def await_stored(connected: roq.blocking.Cluster, queue: str, number: int) -> None:
    """Its producer keeps once a second how far it got."""
    deadline = time.monotonic() + KEPT_SECONDS
    while [one.number for one in connected.producers(queue)] != [number]:
        assert time.monotonic() < deadline, f"not {number} stored: {connected.producers(queue)}"
        time.sleep(LOOK_SECONDS)


@pytest.mark.long
def test_each_row_comes_once_whenever_the_driver_is_killed(cluster: RunningCluster, tmp_path: Path) -> None:
    arguments = [cluster.zookeeper, "killed", str(tmp_path / "staging"), str(ROWS)]
    wish = tmp_path / "crash"
    with roq.blocking.connect(cluster.zookeeper) as connected:
        connected.create_queue("killed", record=roq.Record(days=1))
        for point, stored in (("sink.half", ROWS // 3), ("sink.published", ROWS)):
            wish.write_text(point)
            driver = Driver(arguments, tmp_path, "publication_driver.py")
            try:
                come_to(driver, point)
                await_stored(connected, "killed", stored)
            finally:
                driver.kill()
            assert driver.told() == []
        wish.unlink()
        driver = Driver(arguments, tmp_path, "publication_driver.py")
        try:
            assert driver.run("") == []
        finally:
            driver.kill()
        await_stored(connected, "killed", ROWS)
        with connected.subscriber("killed", start="earliest", follow=False) as reader:
            found = [(message.sequence, int(message.payload)) for message in reader]
    assert found == [(number + 1, number) for number in range(ROWS)]
