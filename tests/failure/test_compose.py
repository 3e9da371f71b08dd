"""docker/compose.yaml, started by Compose: a secured cluster that a host is killed in, and what was stored before is read."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.failure.conftest import ROOT
from tests.harness import commands
from tests.harness.documented import block

NO_QUICK_TEST = "it starts eight containers with three Javas"
SUBNET = "198.19.251"
HEALTHY_SECONDS = 90.0  # three Javas, two GCMs, three hosts on two busy cores
UNMOVED = "processes end that no other host has taken over"  # in the log of a host that stopped without handing over
GROUP, HOSTS = 1000, ("host-1", "host-2", "host-3")


class Project(NamedTuple):
    """One to be started. command: Compose with its project and file."""

    command: list[str]
    environment: dict[str, str]
    folder: Path

    def compose(self, *arguments: str) -> str:
        """What it prints."""
        command = [*self.command, *arguments]
        done = subprocess.run(command, capture_output=True, text=True, env=self.environment, check=False)
        assert done.returncode == 0, f"{' '.join(arguments)}: {done.stdout}{done.stderr}"
        return done.stdout

    def shell(self, script: str) -> str:
        """What lines of a document print, which call it `docker compose -p roq`, from the root of the project."""
        known = {**self.environment, "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])}
        ours = script.replace("docker compose -p roq -f docker/compose.yaml", " ".join(self.command)).replace(
            "198.19.250", SUBNET
        )
        done = subprocess.run(["bash", "-euc", ours], cwd=self.folder, capture_output=True, text=True, env=known, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def healths(self) -> dict[str, str]:
        """By service."""
        ids = self.compose("ps", "--quiet").split()
        told = subprocess.run(["docker", "inspect", *ids], capture_output=True, text=True, check=True).stdout
        labelled = {each["Config"]["Labels"]["com.docker.compose.service"]: each["State"] for each in json.loads(told)}
        return {service: state["Health"]["Status"] for service, state in labelled.items() if service != "cards"}

    def roq(self, *arguments: str, stdin: bytes = b"") -> bytes:
        """What `roq …` prints, as the administrator."""
        addresses = ",".join(f"{SUBNET}.{number}" for number in (11, 12, 13))
        known = {**os.environ, "ROQ_CLUSTER": addresses, "ROQ_CARD": str(self.folder / "admin.card")}
        done = commands.run(*arguments, stdin=stdin, environment=known, timeout=60.0)
        assert done.returncode == 0, done.stderr.decode()
        return done.stdout


def until(true: Callable[[], bool], what: Callable[[], object]) -> None:
    """What is seen only from outside has to be asked again and again."""
    deadline = time.monotonic() + HEALTHY_SECONDS
    while not true():
        assert time.monotonic() < deadline, f"not so after {HEALTHY_SECONDS:g} s: {what()}"
        time.sleep(0.25)


@pytest.fixture
def project(image: str, tmp_path: Path) -> Iterator[Project]:
    """Nothing of it is started; whatever is, is removed afterwards."""
    found = subprocess.run(["tools/docker.sh", "compose-command"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    options = ["-p", f"roqtest{uuid.uuid4().hex[:6]}", "-f", str(ROOT / "docker" / "compose.yaml")]
    environment = {**os.environ, "ROQ_SUBNET": SUBNET, "ROQ_IMAGE": "roq:latest", "ZOOKEEPER_IMAGE": image}
    made = Project([*found.stdout.split(), *options], environment, tmp_path)
    try:
        yield made
    finally:
        made.compose("down", "--volumes", "--timeout", "20")


@pytest.mark.timeout(300)
@pytest.mark.long
def test_a_secured_cluster_that_loses_a_host_and_nothing_else(project: Project) -> None:
    project.shell(block("docs/deployment.md", "Compose"))
    until(lambda: set(project.healths().values()) == {"healthy"}, project.healths)
    assert "nothing is wrong" in project.shell(block("docs/deployment.md", "Compose", 2))
    assert project.healths().keys() == {"zookeeper-1", "zookeeper-2", "zookeeper-3", "gcm-1", "gcm-2", *HOSTS}
    denied = commands.run("status", "-c", f"{SUBNET}.11", environment={**os.environ, "ROQ_CARD": ""}, timeout=60.0)
    assert denied.returncode == 1
    project.roq("queue", "create", "orders", "--record", "1d", "--replication", "2", "--overflow", "block")
    first, second = (b"".join(b"%d\n" % number for number in range(start, start + GROUP)) for start in (0, GROUP))
    project.roq("pub", "orders", "all", "--confirm", "stored", stdin=first)
    host = json.loads(project.roq("queue", "ls", "--json"))[0]["monitor_host"]
    project.compose("kill", host)
    project.roq("pub", "orders", "all", "--confirm", "stored", stdin=second)
    project.compose("up", "-d")
    until(lambda: set(project.healths().values()) == {"healthy"}, project.healths)
    lines = project.roq("queue", "read", "orders", "--json").splitlines()
    assert [json.loads(line)["payload"] for line in lines] == [str(number) for number in range(2 * GROUP)]
    host = json.loads(project.roq("queue", "ls", "--json"))[0]["monitor_host"]
    project.compose("stop", host)
    assert json.loads(project.roq("queue", "ls", "--json"))[0]["monitor_host"] != host
    assert UNMOVED not in project.compose("logs", host), "it did not hand over what it ran"
    project.compose("up", "-d")
    until(lambda: set(project.healths().values()) == {"healthy"}, project.healths)
    assert project.roq("queue", "read", "orders", "--json").splitlines() == lines
    project.roq("doctor")
