"""A cluster in containers whose GCM, on this machine, makes further hosts as containers of the same engine."""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import docker

from gcm.providers.docker import FLEET_LABEL
from roq.testing import DockerCluster
from roq.testing.cluster import CLIENT
from roq.tools.local.daemon import Daemon

START_SECONDS, STOP_SECONDS = 30.0, 10.0
FILE = """provider = "docker"
exchanges_max = {exchanges_max}
[docker]
image = "{image}"
network = "{network}"
"""


@asynccontextmanager
async def with_fleet(
    machines: DockerCluster, folder: Path, exchanges_max: int = 1, image: str = "roq:latest"
) -> AsyncIterator[DockerCluster]:
    """The cluster, led by another GCM than its own; in the end that one again, and what was made is removed."""
    network = f"roq-{machines.token}"
    path = folder / "fleet.toml"
    path.write_text(FILE.format(exchanges_max=exchanges_max, image=image, network=network))
    path.chmod(0o600)
    await machines.kill(machines.gcms[0])
    flags = ["--zookeeper", machines.zookeeper, "--address", machines.address(CLIENT), "--fleet", str(path)]
    command = [sys.executable, "-m", "gcm", *flags, "--security", "none", "--session-seconds", "4", "--name", "with-fleet"]
    gcm = Daemon("gcm", command, folder / "gcm.log", os.environ)
    await gcm.start(START_SECONDS)
    try:
        yield machines
    finally:
        await gcm.terminate(STOP_SECONDS)
        engine = docker.from_env(timeout=int(START_SECONDS))
        try:
            filters = {"label": FLEET_LABEL, "network": network}
            for left in engine.containers.list(all=True, filters=filters, ignore_removed=True):
                left.remove(force=True, v=True)
        finally:
            engine.close()
        await machines.start(machines.gcms[0])
