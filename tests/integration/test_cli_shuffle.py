"""Every `roq shuffle` command as a real process, on a folder and on a cluster: the same answers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import roq.shuffle
from tests.harness import commands
from tests.integration.running import RunningCluster
from tests.integration.test_cli import COMMAND_SECONDS, ROOT

pytestmark = pytest.mark.timeout(90)
SCHEMA = pa.schema([("k", pa.int64()), ("v", pa.string())])


def run(*arguments: str, code: int = 0, environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[bytes]:
    done = commands.run("shuffle", *arguments, environment={**os.environ, **(environment or {})}, timeout=COMMAND_SECONDS)
    assert done.returncode == code, (arguments, done.stdout[-2000:], done.stderr[-2000:])
    return done


def told(*arguments: str, environment: dict[str, str] | None = None) -> Any:
    return json.loads(run(*arguments, "--json", environment=environment).stdout)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    running = RunningCluster(tmp_path_factory.mktemp("cluster"), hosts=2, session_seconds=3.0)
    yield f"roq://{running.zookeeper}"
    running.stop()


@pytest.fixture(params=["folder", "cluster"])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return f"file://{tmp_path}/shuffles" if request.param == "folder" else request.getfixturevalue("cluster")


def filled(address: str) -> None:
    with roq.shuffle.open(address) as shuffles:
        shuffles.create("visits", ["k"], SCHEMA, 2, 5)
        with shuffles.writer("visits", 0) as writer:
            writer.write(pa.table({"k": [*range(2000)], "v": ["v" * 20] * 2000}, schema=SCHEMA))
            receipt = writer.finish()
        row = told("show", "visits", address)
        assert (row["state"], row["attempts"]) == ("filling", 1)
        shuffles.commit("visits", [receipt])


def test_a_shuffle_is_listed_shown_rebalanced_and_removed(address: str) -> None:
    filled(address)
    (row,) = told("ls", address)
    assert (row["name"], row["state"], row["rows"], row["ranges"]) == ("visits", "sealed", 2000, [])
    row = told("show", "visits", address)
    assert [each["rows"] for each in row["ranges"]] == [400] * 5
    assert row["imbalance"] == pytest.approx(1.0, abs=0.01)
    assert (row["keys"], row["moved"], row["moved_least"]) == (["k"], 0, 0)
    shown = run("show", "visits", address).stdout.decode()
    for part in ("sealed", "largest / mean", "2,000", "HOLDERS"):
        assert part in shown
    assert ("it is in a folder" in shown) == address.startswith("file:"), "a folder has one copy, whatever was asked for"
    assert "visits" in run("ls", address).stdout.decode()
    row = told("rebalance", "visits", address, "--ranges", "8")
    assert [each["rows"] for each in row["ranges"]] == [250] * 8
    assert told("rm", "visits", address) == {"shuffle": "visits", "removed": True}
    assert told("ls", address) == []
    missing = run("show", "visits", address, code=1).stderr.decode()
    assert missing.startswith("roq: ShuffleNotFound: ")
    assert missing.count("\n") == 1
    assert b"ShuffleNotFound" in run("rm", "visits", address, code=1).stderr


def test_the_cluster_may_be_left_out_and_a_folder_is_a_path(cluster: str, tmp_path: Path) -> None:
    assert told("ls", environment={"ROQ_CLUSTER": cluster.removeprefix("roq://")}) == []
    filled(f"file://{tmp_path}")
    assert [row["name"] for row in told("ls", str(tmp_path))] == ["visits"]
    assert b"InvalidAddress" in run("ls", "http://somewhere", code=1).stderr
    assert run("rebalance", "visits", str(tmp_path), "--ranges", "-1", code=2).stderr


def test_every_other_command_starts_without_pyarrow() -> None:
    check = "import sys, roq.cli.main; sys.exit(any(name in sys.modules for name in ('pyarrow', 'numpy', 'pandas', 'pyspark')))"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", check], check=True, timeout=COMMAND_SECONDS, env=environment)


def test_what_is_missing_is_said() -> None:
    code = "import sys; sys.modules['pyarrow'] = None; from roq.cli.main import app; app(['shuffle', 'ls', 'file:///tmp/none'])"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, timeout=COMMAND_SECONDS, env=environment, check=False
    )
    assert done.returncode == 1
    assert b'pip install "roq-messaging[shuffle]"' in done.stderr
