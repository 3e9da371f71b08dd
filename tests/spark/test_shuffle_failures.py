"""Tasks that fail, are killed, retried and speculated while a shuffle is written and read: the same rows as without."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import DataFrame, SparkSession

import roq.shuffle
from roq.errors import RoqError, ShuffleNotFound
from roq.wire.shuffle import ShuffleState
from tests.spark.comparing import load, rows_of, same_as_spark, save
from tests.spark.standalone import Standalone
from tests.spark.trouble import Function, dying, kills, raising, slowly

ROWS = 20_000
ROOT = Path(__file__).parents[2]
DRIVER = Path(__file__).with_name("driver.py")
DRIVER_SECONDS = 90


@pytest.fixture
def address(tmp_path: Path) -> str:
    return f"file://{tmp_path}/shuffles"


def rows(spark: SparkSession, count: int = ROWS) -> DataFrame:
    return spark.range(0, count, 1, 4).selectExpr("if(id % 10 < 3, 7, xxhash64(id)) as k", "id", "repeat('v', 50) as text")


def through(frame: DataFrame, function: Function) -> DataFrame:
    return frame.mapInArrow(function, frame.schema)


@pytest.mark.parametrize("trouble", [raising(1), raising(3), dying(2)], ids=["raise once", "raise thrice", "die twice"])
def test_attempts_that_fail_leave_no_rows(spark: SparkSession, address: str, trouble: Function) -> None:
    frame = rows(spark)
    save(through(frame, trouble), address, "visits", ["k"], 4)
    same_as_spark(frame, load(spark, address, "visits").to(frame.schema), ["k"], 4)


@pytest.mark.parametrize("seed", range(2))
def test_workers_killed_at_random_while_writing(spark: SparkSession, address: str, seed: int) -> None:
    """Of a task's two Python processes either one: that of the function or that of our writer."""
    frame = rows(spark)
    with kills(spark, 3, 0.15, seed) as killed:
        save(through(frame, slowly(0.05)), address, "visits", ["k"], 4)
    assert killed
    same_as_spark(frame, load(spark, address, "visits").to(frame.schema), ["k"], 4)


def test_workers_killed_at_random_while_reading(spark: SparkSession, address: str) -> None:
    frame = rows(spark)
    save(frame, address, "visits", ["k"], 6)
    found = load(spark, address, "visits")
    with kills(spark, 3, 0.15, seed=1) as killed:
        ours = rows_of(through(found, slowly(0.05)))
    assert killed
    assert ours == rows_of(found)
    same_as_spark(frame, found, ["k"], 6)


def test_a_save_that_fails_for_good_leaves_nothing_and_can_be_repeated(spark: SparkSession, address: str) -> None:
    frame = rows(spark)
    with pytest.raises(Exception, match="fails on purpose"):
        save(through(frame, raising(99)), address, "visits", ["k"], 4)
    with roq.shuffle.open(address) as shuffles, pytest.raises(ShuffleNotFound):
        shuffles.describe("visits")
    save(frame, address, "visits", ["k"], 4)
    same_as_spark(frame, load(spark, address, "visits"), ["k"], 4)


# --- drivers of their own ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def standalone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Standalone]:
    """A Spark cluster of two hosts, 127.0.0.1 and 127.0.0.2: Spark speculates only on another host."""
    cluster = Standalone(tmp_path_factory.mktemp("standalone"))
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


@contextlib.contextmanager
def driver(master: str, address: str, folder: Path, trouble: str) -> Iterator[subprocess.Popen[str]]:
    """Starts driver.py: one save of `ROWS` rows, with the trouble of this name. Ends with the context, whatever happened."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYSPARK_PYTHON": sys.executable, "SPARK_LOCAL_IP": "127.0.0.1"}
    words = [sys.executable, str(DRIVER), master, address, str(folder), trouble]
    process = subprocess.Popen(
        words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    with process:
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


@pytest.mark.timeout(180)
def test_speculated_tasks(standalone: Standalone, spark: SparkSession, address: str, tmp_path: Path) -> None:
    """The first attempt of one partition hangs after it has sent rows; another host's copy wins."""
    with driver(standalone.master, address, tmp_path, "hang") as process:
        printed, problems = process.communicate(timeout=DRIVER_SECONDS)
    assert process.returncode == 0, problems[-3000:]
    attempts = json.loads(printed.splitlines()[-1])
    assert len(attempts[0]) >= 2, "Spark did not speculate"
    same_as_spark(rows(spark), load(spark, address, "visits"), ["k"], 4)


@pytest.mark.timeout(180)
@pytest.mark.long
def test_executors_killed(standalone: Standalone, spark: SparkSession, address: str, tmp_path: Path) -> None:
    """A whole executor, with all its Python processes, while it writes; the other one goes on."""
    with driver(standalone.master, address, tmp_path, "slow") as process:
        wait_for_attempts(address, process, 1)
        standalone.kill_an_executor()
        _, problems = process.communicate(timeout=DRIVER_SECONDS)
    assert process.returncode == 0, problems[-3000:]
    same_as_spark(rows(spark), load(spark, address, "visits"), ["k"], 4)


@pytest.mark.timeout(180)
def test_a_driver_killed_before_its_commit(spark: SparkSession, address: str, tmp_path: Path) -> None:
    """What it wrote is not read, and does not stand in the way of the next one."""
    with driver("local[2]", address, tmp_path, "slow") as process:
        wait_for_attempts(address, process, 1)
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    with roq.shuffle.open(address) as shuffles:
        assert shuffles.describe("visits").state is ShuffleState.FILLING
    frame = rows(spark)
    save(frame, address, "visits", ["k"], 4)
    same_as_spark(frame, load(spark, address, "visits"), ["k"], 4)


def wait_for_attempts(address: str, process: subprocess.Popen[str], count: int) -> None:
    """Until so many attempts are stored, but the save is not over."""
    end = time.monotonic() + DRIVER_SECONDS
    with roq.shuffle.open(address) as shuffles:
        while time.monotonic() < end:
            assert process.poll() is None, process.communicate()[1][-3000:]
            try:
                now = shuffles.describe("visits")
            except RoqError:
                time.sleep(0.05)
                continue
            if now.stored >= count:
                assert now.state is ShuffleState.FILLING
                return
            time.sleep(0.02)
    pytest.fail("no attempt was stored")
