"""The programs of docs/tutorials and docs/howto print what their pages say. Not covered: Spark's (tests/spark)."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import roq
from tests.harness.documented import block, run, saved
from tests.integration.running import RunningCluster
from tests.integration.test_documented import printed, running

pytestmark = pytest.mark.timeout(120)
FOLDER, CLUSTER, TAPE = (f"docs/tutorials/{name}.md" for name in ("folder", "cluster", "recorded-queue"))
LETTERS, MIGRATE = "docs/howto/dead-letters.md", "docs/howto/migrate.md"
DEFAULT = "127.0.0.1:2181"


@pytest.fixture
def removed(cluster: RunningCluster) -> Iterator[set[str]]:
    """Names of queues that the test makes."""
    names = set[str]()
    yield names
    with roq.blocking.connect(cluster.zookeeper) as connected:
        for name in names:
            connected.remove_queue(name)


@contextmanager
def started(source: str, folder: Path) -> Iterator[subprocess.Popen[str]]:
    """The program runs; it is killed if it has not ended by then."""
    with subprocess.Popen([sys.executable, saved(source, folder)], stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.quick
def test_a_folder(tmp_path: Path) -> None:
    assert run(block(FOLDER, "Put"), tmp_path) == block(FOLDER, "Put", 2)
    assert run(block(FOLDER, "Work"), tmp_path) == block(FOLDER, "Work", 2)
    status, letters, again, watch = block(FOLDER, "Look").replace("/tmp/", f"{tmp_path}/").splitlines()
    assert json.loads(printed(f"{status} --json", tmp_path))["status"]["completed"] == 3
    assert "invalid literal" in printed(letters, tmp_path)
    printed(again, tmp_path)
    with running(f"{watch} --json", tmp_path, signal.SIGINT) as watching:
        assert watching.stdout is not None
        assert b'"ready":1' in watching.stdout.readline()


@pytest.mark.quick
def test_dead_letters(tmp_path: Path) -> None:
    assert run(block(LETTERS, "Decide when"), tmp_path) == block(LETTERS, "Decide when", 2)
    show, again, remove = block(LETTERS, "From the shell").replace("/tmp/", f"{tmp_path}/").splitlines()
    with roq.blocking.open_queue(f"file://{tmp_path}/payments") as payments:
        for command in (again, remove):
            (task,) = payments.lease()
            task.reject("a reason")
            assert "a reason" in printed(show, tmp_path)
            printed(command, tmp_path)
            assert payments.status().dead == 0
            payments.put(b"another")


@pytest.mark.quick
def test_coming_from_celery(tmp_path: Path) -> None:
    assert run(block(MIGRATE, "From Celery"), tmp_path) == block(MIGRATE, "From Celery", 2)


@pytest.mark.quick
def test_coming_from_rabbitmq(tmp_path: Path) -> None:
    assert run(block(MIGRATE, "From RabbitMQ"), tmp_path) == block(MIGRATE, "From RabbitMQ", 2)


def test_coming_from_kafka(cluster: RunningCluster, removed: set[str], tmp_path: Path) -> None:
    removed.add("payments")
    source = block(MIGRATE, "From Kafka").replace(DEFAULT, cluster.zookeeper)
    assert run(source, tmp_path) == block(MIGRATE, "From Kafka", 2)


def test_exchanges_come_and_go(cluster: RunningCluster, removed: set[str], tmp_path: Path) -> None:
    removed.add("prices")
    here = {"ROQ_CLUSTER": cluster.zookeeper}
    listening, publishing = (block(CLUSTER, name).replace(DEFAULT, cluster.zookeeper) for name in ("Subscribe", "Publish"))
    count = 20_000
    assert f"range({count:_})" in publishing
    folders = [tmp_path / name for name in ("subscriber", "publisher")]
    for folder in folders:
        folder.mkdir()
    add, show = block(CLUSTER, "Scale, while it runs").splitlines()
    with started(listening, folders[0]) as subscriber:
        assert subscriber.stdout is not None
        assert subscriber.stdout.readline() == "listening\n"
        with started(publishing.replace(f"{count:_}", "4_000"), folders[1]) as publisher:
            with roq.blocking.connect(cluster.zookeeper) as connected:
                while not (first := connected.inspect("prices").exchanges[0]).publishers:
                    assert publisher.poll() is None
                printed(add, tmp_path, **here)
                assert first.exchange.id in printed(show, tmp_path, **here)
                printed(f"roq queue drain-exchange prices {first.exchange.id}", tmp_path, **here)
                (left,) = (one for one in connected.inspect("prices").exchanges if one.state == "active")
                assert (left.publishers, left.exchange.id != first.exchange.id) == (1, True)
            assert publisher.wait(60) == 0
        told = subscriber.communicate(timeout=60)[0]
    assert told == block(CLUSTER, "Scale, while it runs", 2).replace(str(count // 2), "2000")


def test_a_queue_that_remembers(cluster: RunningCluster, removed: set[str], tmp_path: Path) -> None:
    here = {"ROQ_CLUSTER": cluster.zookeeper}
    printed(block(TAPE, "Store").strip(), tmp_path, **here)
    removed.add("trades")

    def output(heading: str, number: int = 1) -> str:
        return run(block(TAPE, heading, number).replace(DEFAULT, cluster.zookeeper), tmp_path)

    assert output("Store", 2) == block(TAPE, "Store", 3)
    assert output("Come late") == block(TAPE, "Come late", 2)
    assert output("Come back") + output("Come back") == block(TAPE, "Come back", 2)
    assert output("Share") == block(TAPE, "Share", 2)
    status, groups, read = block(TAPE, "Share", 3).replace(DEFAULT, cluster.zookeeper).splitlines()
    assert json.loads(printed(f"{status} --json", tmp_path))["status"]["completed"] == 3
    assert "billing" in printed(groups, tmp_path, **here)
    assert len(re.findall("price", printed(read, tmp_path, **here))) == 3
