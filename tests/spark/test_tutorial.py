"""The program of docs/tutorials/spark.md prints what the page says."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from tests.harness.documented import block


@pytest.mark.quick
def test_the_tutorial(spark: SparkSession, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = block("docs/tutorials/spark.md", "A queue as a stream").replace("/tmp/", f"{tmp_path}/")
    exec(source, {})
    assert capsys.readouterr().out.strip() == block("docs/tutorials/spark.md", "A queue as a stream", 2).strip()
