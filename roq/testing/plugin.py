"""pytest fixtures for applications: `pytest_plugins = ["roq.testing.plugin"]` in the conftest.py at the top.

    roq_cluster            a TestedCluster for the whole session
    roq_cluster_options    override it (session-wide, returns a dict) to choose sizes, e.g. {"gcms": 1, "hcms": 3}

In containers where ROQ_TEST_IMAGE names an image, on loopback addresses otherwise.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from roq.runtime.installation import brought_by
from roq.testing.cluster import TestedCluster
from roq.testing.docker_cluster import DockerCluster
from roq.testing.loopback_cluster import LoopbackCluster

with brought_by("testing", __name__):
    import pytest

IMAGE_VARIABLE = "ROQ_TEST_IMAGE"


@pytest.fixture(scope="session")
def roq_cluster_options() -> dict[str, Any]:
    """Arguments of the cluster: zookeepers, gcms, hcms, session_seconds, exchanges_max, logs; zookeeper="java" for a real
    ZooKeeper on loopback addresses (containers always have one)."""
    return {"gcms": 2, "hcms": 2}  # so that any of them may be killed


@pytest.fixture(scope="session")
def roq_cluster(roq_cluster_options: dict[str, Any]) -> Iterator[TestedCluster]:
    """A running cluster; tests that inject faults start again what they killed, and heal() it."""
    image = os.environ.get(IMAGE_VARIABLE)
    cluster: TestedCluster
    if image:
        options = {name: value for name, value in roq_cluster_options.items() if name != "zookeeper"}
        cluster = DockerCluster(image=image, **options)
    else:
        cluster = LoopbackCluster(**roq_cluster_options)
    yield from running(cluster)


def running(cluster: TestedCluster) -> Iterator[TestedCluster]:
    """The body of a fixture of any scope: opened, yielded, closed, whatever loops tests have."""
    with ThreadPoolExecutor(1) as thread:  # a loop of its own: this thread may have one that runs

        def wait(work: Coroutine[Any, Any, None]) -> None:
            thread.submit(asyncio.run, work).result()

        wait(cluster.open())
        try:
            yield cluster
        finally:
            wait(cluster.close())
