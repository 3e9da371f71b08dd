"""Clusters of containers. The engine is started and the image built when they are missing; a cluster is shared by a module's
tests, which leave it as they found it (`whole`)."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

import roq
from roq.testing import DockerCluster
from roq.testing.plugin import running

ROOT = Path(__file__).parents[2]
WITHOUT = os.environ.get("ROQ_WITHOUT_DOCKER") == "1"
TEST_SECONDS = 150.0  # a test with its cluster; the first one may have to build the image
SESSION_SECONDS = 4.0  # what is killed must be able to be back within it, on two busy cores
PAUSE_SECONDS = 1.0  # no session ends in so short a pause


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Containers need longer than the other tests."""
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent) and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(TEST_SECONDS))


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
