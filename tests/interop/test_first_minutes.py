"""A new user's first minutes, timed: install, a message through a folder, a cluster, a message through it, a chart of a queue.

The bound is on processor time, which a busy machine does not stretch; how long it took is printed (`pytest -s`) and stands in
docs/benchmarks.md. Not covered: what the network takes to bring the packages, which is a part of the install.
"""

from __future__ import annotations

import json
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.harness.documented import block, saved
from tests.interop.environments import Environment, Environments

pytestmark = pytest.mark.timeout(400)
CPU_SECONDS_MAX = 60.0  # of all of it, the install too
STOP_SECONDS = 30.0


class Watch:
    """What each step took: (wall seconds, processor seconds of the programs that were run), by its name."""

    def __init__(self) -> None:
        self.steps: dict[str, tuple[float, float]] = {}

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        began, cpu = time.monotonic(), _cpu_seconds()
        yield
        self.steps[name] = (time.monotonic() - began, _cpu_seconds() - cpu)

    def table(self) -> str:
        lines = [f"| {name} | {wall:.1f} | {cpu:.1f} |" for name, (wall, cpu) in self.steps.items()]
        wall, cpu = map(sum, zip(*self.steps.values(), strict=True))
        return "\n".join(["| step | seconds | of processor |", "|---|---|---|", *lines, f"| all | {wall:.1f} | {cpu:.1f} |"])


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@pytest.fixture
def environments(tmp_path: Path) -> Iterator[Environments]:
    yield Environments(tmp_path / "environments")
    shutil.rmtree(tmp_path / "environments")


def test_from_nothing_to_a_chart(environments: Environments, tmp_path: Path) -> None:
    watch = Watch()
    (tmp_path / "environments").mkdir()
    wheel = environments.wheel()  # a release has one: not timed
    with watch.step("a fresh environment, `pip install`"):
        fresh = environments.empty("fresh")
        environments.install(fresh, str(wheel))
    with watch.step("the README's worker: a task through a folder"):
        done = fresh.run("python", saved(block("README.md", "A folder is a queue"), tmp_path), cwd=tmp_path)
        assert done.stdout == block("README.md", "A folder is a queue", 2), done.stderr
    through_a_cluster(fresh, tmp_path, watch)
    with watch.step("a work queue, and a chart of it"):
        tasks, chart = str(tmp_path / "tasks"), str(tmp_path / "first.svg")
        for words in (["put", tasks, "one", "two"], ["watch", tasks, "--count", "2", "--every", "0.5", "--svg", chart]):
            done = fresh.run("roq", "task", *words, cwd=tmp_path)
            assert done.returncode == 0, done.stderr
        assert (tmp_path / "first.svg").read_text().startswith("<svg")
    sys.stdout.write(f"\n{watch.table()}\n")  # for people, with -s
    assert sum(cpu for _, cpu in watch.steps.values()) < CPU_SECONDS_MAX, watch.table()


def through_a_cluster(fresh: Environment, folder: Path, watch: Watch) -> None:
    """`roq up`, and the README's program at it; the processor time of the cluster is known when it has ended."""
    command = [str(fresh.folder / "bin/roq"), "up", "--dir", str(folder / "cluster"), "--json"]
    cpu = _cpu_seconds()
    with subprocess.Popen(command, env=fresh.activated(), cwd=folder, stdout=subprocess.PIPE, start_new_session=True) as up:
        try:
            assert up.stdout is not None
            with watch.step("`roq up` until it serves"):
                address = json.loads(up.stdout.readline())["cluster"]
            with watch.step("the README's ten lines: a message through a cluster"):
                source = block("README.md", "A cluster").replace("127.0.0.1:2181", address)
                done = fresh.run("python", saved(source, folder), cwd=folder)
                assert done.stdout == "eu.paris b'two croissants' 1\n", done.stderr
        finally:
            up.send_signal(signal.SIGTERM)
            up.wait(STOP_SECONDS)
    wall, _ = watch.steps["`roq up` until it serves"]
    used = _cpu_seconds() - cpu - watch.steps["the README's ten lines: a message through a cluster"][1]
    watch.steps["`roq up` until it serves"] = (wall, used)  # all that it used to its end
