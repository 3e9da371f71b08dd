"""Clusters of containers. The engine is started and the image built when they are missing; a cluster is shared by a module's
tests, which leave it as they found it (`whole`)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

import roq
from roq.testing import DockerCluster
from roq.testing.plugin import running

ROOT = Path(__file__).parents[2]
WITHOUT = os.environ.get("ROQ_WITHOUT_DOCKER") == "1"
TEST_SECONDS = 150.0  # a test with its cluster; the first one may have to build the image
SESSION_SECONDS = 4.0  # what is killed must be able to be back within it, on two busy cores
PAUSE_SECONDS = 1.0  # no session ends in so short a pause
TOLD_LINES, TOLD_LETTERS = 40, 400  # of a failed test's cluster, the newest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Containers need longer than the other tests."""
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent) and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(TEST_SECONDS))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A test whose cluster saves its logs (in `tmp_path`) shows what that said last when it fails."""
    report = yield
    logs = getattr(item, "funcargs", {}).get("tmp_path")
    if report.when == "call" and report.failed and logs is not None and (told := last_told(logs)):
        report.sections.append(("What the cluster's processes said last", "\n".join(told)))
    return report


def last_told(logs: Path) -> list[str]:
    """The newest lines of all of a cluster's logs but those about details, oldest first."""
    found = list[tuple[float, str]]()
    for file in logs.glob("*.log"):
        for line in file.read_text(errors="replace").splitlines():
            try:
                entry: dict[str, Any] = json.loads(line)
                told = float(entry.pop("t")), entry.pop("level"), entry.pop("message")
            except (ValueError, KeyError, AttributeError, TypeError):
                continue  # not a line of the log
            if told[1] != "debug" and "session" not in entry:
                found.append((told[0], f"{told[0]:.2f} {file.stem} {told[1]}: {told[2]} {entry}"[:TOLD_LETTERS]))
    return [text for _, text in sorted(found)[-TOLD_LINES:]]


@pytest.fixture(scope="session")
def image() -> str:
    """Name of the image for tests that holds this source tree; RoQ's own, with the same in it, is roq:latest."""
    for command in (["tools/docker.sh", "start"], [sys.executable, "tools/image.py"]):
        done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
        if done.returncode and WITHOUT:
            pytest.skip("no Docker here, and ROQ_WITHOUT_DOCKER=1")
        if done.returncode:
            pytest.fail(f"tests/failure needs Docker (ROQ_WITHOUT_DOCKER=1 goes without):\n{done.stdout}", pytrace=False)
    return done.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def whole_cluster(
    image: str, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[DockerCluster]:
    """One cluster for a module; its sizes stand in the module's CLUSTER."""
    options = {"session_seconds": SESSION_SECONDS, **request.module.CLUSTER}
    cluster = DockerCluster(image=image, logs=tmp_path_factory.mktemp("logs"), **options)
    for _ in running(cluster):
        yield cluster


@pytest.fixture
async def machines(whole_cluster: DockerCluster) -> AsyncIterator[DockerCluster]:
    """The module's cluster, whole before and after: all hosts alive, no queue, nothing cut."""
    yield whole_cluster
    await whole_cluster.heal()
    async with whole_cluster.connect() as client:
        for info in await client.queues():
            await client.remove_queue(info.record.name)
    await whole_cluster.wait_hosts(len(whole_cluster.hosts))
    for host in whole_cluster.hosts:
        assert not [found for found in await whole_cluster.processes(host) if found.orphan], f"an orphan on {host}"


@pytest.fixture
async def client(machines: DockerCluster) -> AsyncIterator[roq.Cluster]:
    """A connection to it."""
    async with machines.connect() as connected:
        yield connected
