"""The jobs as people start them: `roq pipeline run`, spark-submit; exit codes, signals, what stands on the standard streams."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow.dataset as ds
import pyspark
import pytest

from roq.blocking import open_queue

ROOT = Path(__file__).parents[2]
SUBMIT = Path(pyspark.__file__).parent / "bin" / "spark-submit"
pytestmark = pytest.mark.timeout(400)
START_SECONDS = 120.0  # until Spark has started and done something
ROQ = (sys.executable, "-m", "roq.cli", "pipeline", "run")
Process = subprocess.Popen[str]


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Of a person who has installed RoQ: this interpreter, this tree."""
    python = {"PYSPARK_PYTHON": sys.executable, "PYSPARK_DRIVER_PYTHON": sys.executable, "PYTHONPATH": str(ROOT)}
    return {**os.environ, **python, "SPARK_LOCAL_IP": "127.0.0.1", "SPARK_LOCAL_DIRS": str(tmp_path)}


@pytest.fixture
def queue(tmp_path: Path) -> str:
    """With three tasks and a dead letter."""
    address = f"log://{tmp_path}/tasks"
    with open_queue(address) as tasks:
        tasks.put(b"bad")
        tasks.lease(60)[0].reject("ValueError: no")
        tasks.put_many([b"one", b"two", b"three"])
    return address


@contextmanager
def archiving(environment: dict[str, str], queue: str, folder: Path) -> Iterator[Process]:
    """`roq pipeline run archive`, for ever; killed at the end if it still runs."""
    command = [*ROQ, "archive", queue, "--into", str(folder), "--every", "0.2", "--master", "local[1]"]
    command += ["--batch-rows", "300", "--lease-seconds", "20"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, env=environment, cwd=folder.parent, stdout=pipe, stderr=pipe, text=True) as process:
        yield process
        process.kill()


def run(command: list[str], environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=START_SECONDS, check=False)


def archived(folder: Path) -> list[bytes]:
    files = sorted(map(str, folder.glob("day=*/part-*.parquet")))  # not what Spark is about to move or delete
    if not files:
        return []
    return sorted(ds.dataset(files, format="parquet").to_table(["payload"])["payload"].to_pylist())


def wait_for(process: Process, condition: Callable[[], bool]) -> None:
    """Returns when it is true."""
    deadline = time.monotonic() + START_SECONDS
    while not condition():
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.mark.timeout(500)
@pytest.mark.long
def test_a_job_that_is_killed_goes_on_where_it_was_and_ends_well_at_a_signal(
    environment: dict[str, str], queue: str, tmp_path: Path
) -> None:
    into = tmp_path / "archive"
    payloads = sorted([b"one", b"two", b"three", *(f"{number}".encode() for number in range(900))])
    with open_queue(queue) as tasks:
        tasks.put_many(payload for payload in payloads if payload.isdigit())
    with archiving(environment, queue, into) as process:
        wait_for(process, lambda: len(archived(into)) > 0)
        process.kill()
    assert 0 < len(archived(into)) < len(payloads)
    with archiving(environment, queue, into) as process:
        wait_for(process, lambda: len(archived(into)) == len(payloads))
        with open_queue(queue) as tasks:  # the rows are there before their tasks are acked
            wait_for(process, lambda: tasks.status().completed == len(payloads))
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert 0 < json.loads(out)["archived"] < len(payloads)
    assert "tasks archived so far" in err
    assert archived(into) == payloads
    with open_queue(queue) as tasks:
        assert tasks.status().ready == 0


def test_spark_submit(environment: dict[str, str], queue: str, tmp_path: Path) -> None:
    job = ROOT / "roq" / "spark" / "pipeline" / "dead_letters.py"
    done = run([str(SUBMIT), "--master", "local[1]", str(job), queue, "--out", f"{tmp_path}/out"], environment)
    assert done.returncode == 0, done.stdout
    assert json.loads(done.stdout.splitlines()[-1])["analysed"] == 1


def test_an_error_is_one_line_and_exit_code_1(environment: dict[str, str], tmp_path: Path) -> None:
    given = ["dead-letters", f"log://{tmp_path}/nowhere", "--out", f"{tmp_path}/out", "--master", "local[1]"]
    refused = run([*ROQ, *given], environment)
    assert (refused.returncode, refused.stdout) == (1, "")
    told = [line for line in refused.stderr.splitlines() if line.startswith("roq pipeline dead_letters: ")]
    assert len(told) == 1
    assert f"there is no work queue at log://{tmp_path}/nowhere" in told[0]


def test_a_write_that_fails_in_java_is_one_line_too(environment: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "in.csv").write_text("a\n2\n1\n")
    given = ["sort", f"{tmp_path}/in.csv", "--out", f"{tmp_path}/out", "--keys", "a", "--master", "local[1]"]
    failed = run([*ROQ, *given, "--conf", "spark.hadoop.parquet.writer.version=bogus"], environment)
    assert (failed.returncode, failed.stdout) == (1, "")
    last = failed.stderr.splitlines()[-1]
    assert last.startswith("roq pipeline sort: ")
    assert "bogus" in last
    assert "Traceback" not in failed.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("given", "partitions"), [((), "8"), (("--conf", "spark.sql.shuffle.partitions=17"), "17")])
def test_on_one_machine_few_partitions_whoever_chose_it(
    environment: dict[str, str], tmp_path: Path, given: tuple[str, ...], partitions: str
) -> None:
    job = tmp_path / "job.py"
    job.write_text(
        "from roq.spark.pipeline.job import arguments, run_job\n"
        "run_job('look', arguments('look', ''), lambda spark, _: spark.conf.get('spark.sql.shuffle.partitions'))\n"
    )
    done = run([str(SUBMIT), "--master", "local[1]", *given, str(job)], environment)
    assert done.stdout.splitlines()[-1:] == [f'"{partitions}"'], done.stderr


def test_usage_errors_are_exit_code_2(environment: dict[str, str]) -> None:
    found = run([*ROQ, "sort", "data"], environment)
    assert found.returncode == 2
    assert "the following arguments are required: --out, --keys" in found.stderr
    for every in ("nan", "inf", "-1"):
        found = run([*ROQ, "archive", "log:///nowhere", "--into", "out", "--every", every], environment)
        assert found.returncode == 2
        assert "seconds, 0 or more" in found.stderr
