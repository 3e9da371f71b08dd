"""The programs of the README run as they stand there."""

from __future__ import annotations

import ast
from pathlib import Path

from tests.harness.documented import program, run
from tests.integration.running import RunningCluster


def test_publish_and_subscribe(cluster: RunningCluster, tmp_path: Path) -> None:
    source = program("README.md", "Ten lines")
    assert "127.0.0.1:2181" in source
    assert run(source.replace("127.0.0.1:2181", cluster.zookeeper), tmp_path) == "eu.paris b'two croissants' 1\n"


def test_a_work_queue(tmp_path: Path) -> None:
    *lines, last = run(program("README.md", "Work queues"), tmp_path).splitlines()
    assert lines[0] == "resizing cat.png attempt 1", "it has the highest priority"
    assert sorted(lines[1:]) == [f"resizing {number}.png attempt 1" for number in range(10)]
    assert last == "11 done, 0 dead"


def test_a_shuffle(tmp_path: Path) -> None:
    printed = run(program("README.md", "Shuffle"), tmp_path)
    rows = [{"country": "be", "time": 1}, {"country": "fr", "time": 2}, {"country": "fr", "time": 3}]
    assert [row for line in printed.splitlines() for row in ast.literal_eval(line)] == rows
