"""The program of docs/spark.md runs as it stands there."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness.documented import program, run

COUNTRIES = 200


@pytest.mark.timeout(240)
def test_the_complete_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = program("docs/spark.md", "A complete program")
    monkeypatch.delenv("PYSPARK_PYTHON", raising=False)  # that of the tests: readers have what is on their path
    surroundings = {"SPARK_LOCAL_IP": "127.0.0.1", "SPARK_LOCAL_DIRS": str(tmp_path)}
    printed = run(source.replace(".show()", f".show({COUNTRIES})"), tmp_path, environment=surroundings, seconds=200)
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in printed.splitlines() if line.startswith("|")]
    assert rows[0] == ["country", "min(time)"]
    assert sorted(country for country, _ in rows[1:]) == sorted(f"country {number}" for number in range(COUNTRIES))
