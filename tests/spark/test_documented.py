"""The fragments and commands of docs/spark.md run as they stand there, in one session; a folder of the test's is their /data.

Not covered: the complete program (tests/interop), what needs a cluster (test_pipeline_cluster.py), and how a job is started
(test_pipeline_run.py).
"""

from __future__ import annotations

import subprocess
from importlib import import_module
from pathlib import Path
from typing import Any

import msgspec
import pyarrow.dataset as ds
import pytest
from pyspark.sql import SparkSession
from pyspark.sql.streaming import StreamingQuery

from roq.blocking import open_queue
from tests.harness.documented import block
from tests.spark.test_pipeline_kpi import STRICT, record

DOCUMENT = "docs/spark.md"


def commands(heading: str, folder: Path, cluster: str = "") -> list[list[str]]:
    """Words of each `roq pipeline run` as a shell in `folder` gives them to the job; `folder` in place of /data and /shared."""
    found = []
    text = block(DOCUMENT, heading).replace("/data/", f"{folder}/").replace("/shared/", f"{folder}/")
    for line in text.replace("zk1:2181", cluster or "zk1:2181").splitlines():
        said = subprocess.run(["bash", "-c", f"printf '%s\\n' {line}"], cwd=folder, capture_output=True, text=True, check=True)
        roq, pipeline, run, job, *words = said.stdout.splitlines()
        assert (roq, pipeline, run) == ("roq", "pipeline", "run")
        assert job == heading
        found.append(words)
    return found


def do(spark: SparkSession, job: str, words: list[str]) -> Any:
    """The job's result."""
    module = import_module(f"roq.spark.pipeline.{job}")
    return module.work(spark, module.parser().parse_args(words))


def rows(folder: Path) -> list[dict[str, Any]]:
    """In the order of the files."""
    return [row for part in sorted(folder.rglob("part-*.parquet")) for row in ds.dataset(part).to_table().to_pylist()]


@pytest.mark.quick
def test_a_session_knows_the_formats(spark: SparkSession, tmp_path: Path) -> None:
    exec(block(DOCUMENT, "RoQ and Spark"), {"spark": spark})
    with open_queue(f"log://{tmp_path}/tasks"):
        assert spark.read.format("roq").option("address", f"log://{tmp_path}/tasks").load().count() == 0


@pytest.mark.quick
def test_a_stream_from_one_queue_to_another(spark: SparkSession, tmp_path: Path) -> None:
    source = block(DOCUMENT, 'format("roq")').replace("/data/", f"{tmp_path}/")
    with open_queue(f"log://{tmp_path}/tasks") as tasks:
        tasks.put_many([b"one", b"two"])
    names: dict[str, Any] = {"spark": spark}
    exec(source, names)
    query: StreamingQuery = names["query"]
    try:
        query.processAllAvailable()
    finally:
        query.stop()
    with open_queue(f"log://{tmp_path}/done") as done:
        assert sorted(task.payload for task in done.lease(60, 10)) == [b"one done", b"two done"]


def test_archive(spark: SparkSession, tmp_path: Path) -> None:
    with open_queue(f"log://{tmp_path}/tasks") as tasks:
        tasks.put_many([b"one", b"two"])
    once, _ = commands("archive", tmp_path)
    assert do(spark, "archive", once).archived == 2
    assert sorted(row["payload"] for row in rows(tmp_path / "archive")) == [b"one", b"two"]


def test_kpi(spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "recorded").mkdir()
    for number in range(2):
        lines = [msgspec.json.encode(record(second)).decode() for second in range(number * 5, number * 5 + 5)]
        (tmp_path / f"recorded/{number}.jsonl").write_text("\n".join(lines) + "\n")
    (tmp_path / "stricter.toml").write_text(STRICT)
    (tmp_path / "cheaper.toml").write_text(STRICT.replace("500", "900"))
    monkeypatch.chdir(tmp_path)
    _, recorded, report = commands("kpi", tmp_path)
    assert recorded[-1] == "recorded/*.jsonl", "quoted, so that Spark spreads it out"
    recorded[-1] = f"{tmp_path}/{recorded[-1]}"  # the session's folder is another one
    assert do(spark, "kpi", recorded).added == 10
    assert Path(do(spark, "kpi", report).report).name == "capacity.json"


def test_sort(spark: SparkSession, tmp_path: Path) -> None:
    (tmp_path / "visits").mkdir()
    (tmp_path / "visits/1.csv").write_text("country,time,user\nfr,3,ann\nbe,1,bob\n")
    (tmp_path / "visits/2.csv").write_text("country,time,user\nfr,2,ann\nbe,1,bob\n")
    by_country, latest, clean = ([_placed(word, tmp_path) for word in words] for words in commands("sort", tmp_path))
    assert do(spark, "sort", by_country).rows_out == 4
    assert [(row["country"], row["time"]) for row in rows(tmp_path / "sorted")] == [("be", 1), ("be", 1), ("fr", 2), ("fr", 3)]
    assert do(spark, "sort", latest).rows_out == 2
    assert [(row["user"], row["time"]) for row in rows(tmp_path / "latest")] == [("ann", 3), ("bob", 1)]
    assert do(spark, "sort", clean).rows_out == 3


def _placed(word: str, folder: Path) -> str:
    """The session's folder is another one than that of the commands."""
    return f"{folder}/{word}" if word.startswith("visits") or word in ("sorted", "latest", "clean") else word
