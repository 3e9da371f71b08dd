"""`roq pipeline` without Spark: what it lists, what it refuses, and that the command line never imports PySpark."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from roq.cli import pipeline
from roq.cli.main import app
from roq.runtime.installation import BRINGS

JOBS = Path(pipeline.__file__).parents[1] / "spark" / "pipeline"


def roq(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


def test_every_job_is_listed_and_every_listed_job_is_there() -> None:
    listed = [row["name"] for row in json.loads(roq("pipeline", "ls", "--json").stdout)]
    with_main = sorted(path.stem for path in JOBS.glob("*.py") if "main" in functions(path))
    assert listed == with_main


def functions(path: Path) -> set[str]:
    return {node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)}


def test_the_command_line_does_not_import_pyspark() -> None:
    every = "import sys; from roq.cli import main; all(map(main.command, [*main.COMMANDS, *main.GROUPS]))"
    told = f"{every}; print(sorted({{'pyspark', 'pyarrow', 'pandas', 'numpy'}} & sys.modules.keys()))"
    found = subprocess.run([sys.executable, "-c", told], capture_output=True, text=True, timeout=30, check=True)
    assert found.stdout == "[]\n"


def test_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    unknown = roq("pipeline", "run", "dance", "--fast")
    assert (unknown.exit_code, unknown.stdout) == (1, "")
    assert "there is no job 'dance'; there are archive, dead_letters, kpi, sort" in unknown.stderr
    assert roq("pipeline", "run").exit_code == 2
    assert "Run a job" in roq("pipeline", "run", "--help").stdout
    monkeypatch.setitem(BRINGS, "spark", ("json", "a_library_nobody_has", "another"))
    missing = roq("pipeline", "run", "dead-letters", "file:///nowhere")
    assert missing.exit_code == 1
    assert missing.stderr == (
        'roq: CallError: dead-letters needs a_library_nobody_has, another: pip install "roq-messaging[spark]"\n'
    )


def test_a_job_without_java_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    refused = roq("pipeline", "run", "sort", "--help")
    assert refused.exit_code == 1
    assert "Spark needs Java 17 or newer" in refused.stderr
    (tmp_path / "java").write_text("#!/bin/sh\n")
    (tmp_path / "java").chmod(0o755)
    assert pipeline.has_java({"PATH": str(tmp_path)})
    assert pipeline.has_java({"PATH": "", "JAVA_HOME": "/opt/java"})
