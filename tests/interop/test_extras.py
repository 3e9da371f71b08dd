"""The wheel with each of its extras and nothing else: the programs of the documents run there as they stand."""

from __future__ import annotations

import ast
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness.documented import block, blocks, saved
from tests.interop.environments import Environment, Environments, copied_sources

pytestmark = pytest.mark.timeout(300)  # half a gigabyte of PySpark is installed
COUNTRIES = 200
TRIPS = [{"country": "be", "time": 1}, {"country": "fr", "time": 2}, {"country": "fr", "time": 3}]


@pytest.fixture(scope="module")
def environments(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Environments]:
    """For all tests here; they are too large to be kept afterwards."""
    folder = tmp_path_factory.mktemp("environments")
    yield Environments(folder)
    shutil.rmtree(folder)


def printed(environment: Environment, source: str, folder: Path, seconds: float = 60) -> str:
    """What a program printed. folder: in place of /tmp."""
    done = environment.run("python", saved(source, folder), cwd=folder, seconds=seconds)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def without_java(environment: Environment) -> dict[str, str]:
    """A PATH on which there is nothing but that environment."""
    return {"PATH": str(environment.folder / "bin")}


def test_a_work_queue_needs_no_extra(environments: Environments, tmp_path: Path) -> None:
    told = printed(environments[""], block("README.md", "A folder is a queue"), tmp_path)
    assert told == block("README.md", "A folder is a queue", 2)


def test_help_names_all_commands_without_any_extra(environments: Environments, tmp_path: Path) -> None:
    done = environments[""].run("roq", "--help", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert "metrics" in done.stdout


def test_what_an_extra_would_have_brought_is_told(environments: Environments, tmp_path: Path) -> None:
    lines = [
        ("import roq.spark", "spark"),
        ("import roq.spark.pipeline.sort", "spark"),
        ("import roq.testing.plugin", "testing"),
        (f"import roq.shuffle; roq.shuffle.open('file://{tmp_path}')", "shuffle"),
        ("import roq.blocking; roq.blocking.open_queue('postgresql://h/db?queue=q').open()", "postgresql"),
        ("import roq.blocking; roq.blocking.open_queue('jetstream://h/q').open()", "jetstream"),
    ]
    for line, extra in lines:
        done = environments[""].run("python", "-c", line, cwd=tmp_path)
        last = done.stderr.splitlines()[-1]
        assert last.endswith(f': pip install "roq-messaging[{extra}]"'), done.stderr
    path = without_java(environments[""])["PATH"]
    commands = [
        (("shuffle", "ls", tmp_path), "shuffle"),
        (("pipeline", "run", "sort", "x", "--out", "y", "--keys", "k"), "spark"),
        (("up", "--dir", tmp_path / "up", "--zookeeper", "java"), "local"),
        (("chaos", "--local", "--seconds", "1"), "local"),
        (("chaos", "--docker", "--seconds", "1"), "testing"),
        (("metrics", tmp_path), "metrics"),
    ]
    for words, extra in commands:
        done = environments[""].run("roq", *words, cwd=tmp_path, PATH=path)
        last = done.stderr.splitlines()[-1]
        assert (done.returncode, last.endswith(f': pip install "roq-messaging[{extra}]"')) == (1, True), done.stderr


def test_a_shuffle(environments: Environments, tmp_path: Path) -> None:
    told = printed(environments["shuffle"], block("docs/shuffle.md", "A program"), tmp_path)
    assert [row for line in told.splitlines() for row in ast.literal_eval(line)] == TRIPS


def test_a_cluster_on_this_machine_and_the_ten_lines(environments: Environments, tmp_path: Path) -> None:
    bare = environments[""]
    source = block("README.md", "A cluster")
    assert "127.0.0.1:2181" in source
    command = [str(bare.folder / "bin/roq"), "up", "--dir", str(tmp_path / "cluster"), "--json"]
    variables = bare.activated(**without_java(bare))
    with subprocess.Popen(command, env=variables, cwd=tmp_path, stdout=subprocess.PIPE, start_new_session=True) as up:
        try:
            assert up.stdout is not None
            address = json.loads(up.stdout.readline())["cluster"]
            told = printed(bare, source.replace("127.0.0.1:2181", address), tmp_path)
        finally:
            up.send_signal(signal.SIGTERM)
            up.wait(30)
    assert told == "eu.paris b'two croissants' 1\n"


def test_an_application_s_own_tests(environments: Environments, tmp_path: Path) -> None:
    testing = environments["testing"]
    for each in blocks("docs/howto/test-your-application.md"):
        if each.heading == "Test your application":
            name = each.text.splitlines()[0].removeprefix("# ")
            (tmp_path / name).write_text(each.text)
    assert sorted(os.listdir(tmp_path)) == ["conftest.py", "pytest.ini", "test_orders.py"]
    done = testing.run("pytest", "-q", cwd=tmp_path, seconds=120, **without_java(testing))
    assert done.returncode == 0, done.stdout[-3000:]
    assert "1 passed" in done.stdout
    assert "warning" not in (done.stdout + done.stderr).lower()


def test_a_spark_program_and_after_it_the_plain_one_in_the_same_folder(environments: Environments, tmp_path: Path) -> None:
    source = block("docs/spark.md", "A complete program").replace(".show()", f".show({COUNTRIES})")
    told = printed(environments["spark"], source, tmp_path, seconds=200)
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in told.splitlines() if line.startswith("|")]
    assert rows[0] == ["country", "min(time)"]
    assert sorted(country for country, _ in rows[1:]) == sorted(f"country {number}" for number in range(COUNTRIES))
    told = printed(environments["spark"], block("docs/shuffle.md", "A program"), tmp_path)
    assert [row for line in told.splitlines() for row in ast.literal_eval(line)] == TRIPS


def test_a_clone_in_a_folder_named_as_the_package(environments: Environments, tmp_path: Path) -> None:
    """`pip install -e`, and Python run beside the clone."""
    clone = copied_sources(tmp_path / "roq")
    build = "import setuptools.build_meta, sys; setuptools.build_meta.build_editable(sys.argv[1])"
    subprocess.run([sys.executable, "-c", build, str(tmp_path)], cwd=clone, capture_output=True, timeout=60, check=True)
    environment = environments.empty("editable")
    environments.install(environment, "--no-deps", *map(str, tmp_path.glob("*.whl")))
    told = environment.run("python", "-c", "from importlib.util import find_spec; print(find_spec('roq').origin)", cwd=tmp_path)
    assert told.stdout == f"{clone}/roq/__init__.py\n", told.stderr
