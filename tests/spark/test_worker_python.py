"""`roq.spark.register` says so if Spark's workers run a Python that can't run RoQ, and what to set."""

from __future__ import annotations

import shutil
import sys
import venv
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.errors import PySparkValueError
from pyspark.sql import SparkSession

import roq.spark


@pytest.fixture
def workers(spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Sets what PYSPARK_PYTHON would have, had it been set before the session was made.

    In the end the formats are registered for this Python again.
    """
    monkeypatch.setattr(spark.sparkContext, "pythonExec", sys.executable)
    yield monkeypatch
    monkeypatch.undo()
    roq.spark.register(spark)


def refusal(spark: SparkSession, workers: pytest.MonkeyPatch, program: Path | str) -> str:
    workers.setattr(spark.sparkContext, "pythonExec", str(program))
    with pytest.raises(PySparkValueError, match=f"PYSPARK_PYTHON={sys.executable}") as refused:
        roq.spark.register(spark)
    assert refused.value.getCondition() == "ROQ_INVALID_CONFIGURATION"
    return str(refused.value)


def test_a_python_that_lacks_what_roq_needs(spark: SparkSession, workers: pytest.MonkeyPatch, tmp_path: Path) -> None:
    venv.create(tmp_path / "other", symlinks=True)
    other = tmp_path / "other/bin/python3"
    assert f"workers run {other}, which can't import roq: ModuleNotFoundError: No module" in refusal(spark, workers, other)
    workers.setenv("PATH", str(other.parent))
    assert f"workers run python3 ({other}), which can't import roq" in refusal(spark, workers, "python3")


@pytest.mark.quick
def test_another_version(spark: SparkSession, workers: pytest.MonkeyPatch, tmp_path: Path) -> None:
    old = tmp_path / "python3"
    old.write_text("#!/bin/sh\necho roq 3.9\nexit 1\n")
    old.chmod(0o755)
    assert f"workers run {old}, which is Python 3.9, and this program's is 3." in refusal(spark, workers, old)


def test_what_is_no_python(spark: SparkSession, workers: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert "/false, which is no Python: exit code 1" in refusal(spark, workers, "/bin/false")
    talking = tmp_path / "python3"
    talking.write_text(f'#!/bin/sh\necho Activating\nexec {sys.executable} "$@"\n')
    talking.chmod(0o755)
    workers.setattr(spark.sparkContext, "pythonExec", str(talking))
    roq.spark.register(spark)


def test_a_roq_that_the_session_ships(spark: SparkSession, workers: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """addPyFile and --py-files."""
    venv.create(tmp_path / "other", symlinks=True)
    workers.chdir(tmp_path)
    here = Path(roq.__file__).parents[1]
    rest = [path for path in sys.path if path and Path(path).resolve() != here]
    workers.setenv("PYTHONPATH", ":".join(rest))
    other = tmp_path / "other/bin/python3"
    assert "can't import roq" in refusal(spark, workers, other)
    shutil.make_archive(str(tmp_path / "shipped"), "zip", here, "roq")
    spark.sparkContext.addPyFile(str(tmp_path / "shipped.zip"))
    try:
        roq.spark.register(spark)
    finally:
        spark.sparkContext._python_includes.remove("shipped.zip")


def test_none(spark: SparkSession, workers: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert "python-nobody-has, which is not there" in refusal(spark, workers, "python-nobody-has")


def test_another_name_of_this_python_and_another_that_has_roq(
    spark: SparkSession, workers: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    venv.create(tmp_path / "other", symlinks=True)
    workers.setenv("PYTHONPATH", ":".join(filter(None, sys.path)))
    for program in (Path(sys.executable).with_name("python3"), tmp_path / "other/bin/python3"):
        workers.setattr(spark.sparkContext, "pythonExec", str(program))
        roq.spark.register(spark)
