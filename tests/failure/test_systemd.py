"""`roq host install` where systemd is process 1: its units start, watch and restart the daemons, and messages flow on.

One container is a host with a GCM; ZooKeeper has one of its own.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

import roq
from roq.errors import ProcessFailed
from roq.testing import DockerCluster
from tests.failure.conftest import ROOT, SESSION_SECONDS
from tests.harness.traffic import Traffic

NO_QUICK_TEST = "an image with systemd has to be built first"
pytestmark = pytest.mark.timeout(400)  # also that
HOST, USER = "box", "messages"
ADDRESS_BYTE = 91
QUICK_KILLS = 7  # in a row: more than systemd restarts by default
WATCHDOG_SECONDS = 5.0  # of the unit
UNITS = ("roq-gcm", "roq-hcm")
# What `pip install` would have done, from what the image has.
INSTALL = """set -e
mkdir -p /usr/lib/python3/dist-packages
printf '%s\\n' /opt/roq/lib/python3*/site-packages /opt/packages >/usr/lib/python3/dist-packages/roq.pth
for name in roq roq-gcm roq-hcm; do
    sed '1s|.*|#!/usr/bin/python3|' /opt/roq/bin/$name >/usr/local/bin/$name
    chmod 755 /usr/local/bin/$name
done
systemctl is-system-running --wait"""
SYSTEMD_OPTIONS = {
    "init": False,
    "user": "root",
    "cap_add": ["SYS_ADMIN"],
    "security_opt": ["seccomp=unconfined", "apparmor=unconfined"],
    "cgroupns": "host",
    "volumes": {"/sys/fs/cgroup": {"bind": "/sys/fs/cgroup", "mode": "rw"}},
    "stop_signal": "SIGRTMIN+3",
}


class Box:
    """The machine with systemd."""

    def __init__(self, cluster: DockerCluster, container: Any, address: str) -> None:
        self._cluster, self._container, self.address = cluster, container, address

    async def run(self, script: str) -> str:
        """As root. Raises ProcessFailed."""
        return await self._cluster._docker.run(self._container, script)

    async def install(self, *flags: str) -> str:
        """`roq host install`."""
        zookeeper = self._cluster.zookeeper
        install = "unset PYTHONPATH; /usr/local/bin/roq host install --security none"
        command = f"{install} --zookeeper {zookeeper} --host {HOST} --user {USER}"
        return await self.run(f"{command} {' '.join(flags)} 2>&1")

    async def main_pid(self, unit: str) -> int:
        """Of a unit, 0 while it has none."""
        return int(await self.run(f"systemctl show -p MainPID --value {unit}"))

    async def restarts(self, unit: str) -> int:
        """How often systemd has restarted it."""
        return int(await self.run(f"systemctl show -p NRestarts --value {unit}"))

    async def children(self) -> dict[str, int]:
        """The queue's processes, by what they call themselves."""
        lines = (await self.run("ps -eo pid=,comm=")).splitlines()
        found = {name: int(pid) for pid, name in (line.split(None, 1) for line in lines)}
        return {name: pid for name, pid in found.items() if name in ("roq-monitor", "roq-exchange", "roq-scaling")}

    async def restarted(self, unit: str, old_pid: int, timeout_seconds: float) -> float:
        """Until systemd calls the unit active with another process; seconds that took."""
        begun = time.monotonic()

        async def active() -> bool:
            state = (await self.run(f"systemctl show -p ActiveState --value {unit}")).strip()
            return state == "active" and await self.main_pid(unit) not in (0, old_pid)

        await self._cluster.wait_for(active, f"{unit} is active again", timeout_seconds)
        return time.monotonic() - begun


@pytest.fixture(scope="module")
def systemd_image(image: str) -> str:
    """The image, with systemd in it."""
    command = [sys.executable, "tools/image.py", "systemd", "dbus"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


@pytest.fixture
async def box(systemd_image: str, image: str, tmp_path: Path) -> AsyncIterator[tuple[DockerCluster, Box]]:
    """systemd has started, RoQ is installed on it; ZooKeeper is up, and nobody leads."""
    cluster = DockerCluster(image=image, gcms=1, hcms=0, session_seconds=SESSION_SECONDS, logs=tmp_path)
    async with cluster:
        await cluster.stop("gcm-1")  # ours shall lead
        address = f"{cluster.address('gcm-1').rpartition('.')[0]}.{ADDRESS_BYTE}"
        container = await cluster._docker.container(
            cluster.token,
            HOST,
            systemd_image,
            ["/lib/systemd/systemd"],
            network=cluster._network,
            address=address,
            environment={"container": "docker"},
            tmpfs={"/run": "", "/run/lock": "", "/tmp": ""},
            options=SYSTEMD_OPTIONS,
        )
        await cluster._docker.call(container.start)
        made = Box(cluster, container, address)

        async def up() -> bool:
            return "running" in await made.run(INSTALL)

        await cluster.wait_for(up, "systemd is up")
        yield cluster, made


@pytest.mark.long
async def test_the_units_keep_a_host_serving(box: tuple[DockerCluster, Box]) -> None:
    cluster, machine = box
    told = await machine.install("--gcm", "--enable")
    assert "running" in told
    for unit in UNITS:
        assert (await machine.run(f"ps -o user= -p {await machine.main_pid(unit)}")).strip() == USER
    await machine.run("systemd-analyze verify /etc/systemd/system/roq-*.service")
    async with cluster.connect() as client:
        await client.create_queue("orders", overflow="block")
        async with Traffic(client, "orders") as traffic:
            await _killed_hcms(machine, traffic)
            await _hung_hcm(machine, traffic)
            await _killed_gcm(cluster, machine, client)
            assert await traffic.flowing() < SESSION_SECONDS / 2
        assert traffic.received == list(range(1, len(traffic.received) + 1)), "lost, repeated or reordered"
        assert not traffic.lost
    before = await machine.run("cat /etc/roq/hcm.toml")
    assert "kept /etc/roq/hcm.toml" in await machine.install("--address", "192.0.2.1")
    assert await machine.run("cat /etc/roq/hcm.toml") == before
    await machine.install("--address", "192.0.2.1", "--force")
    assert 'address = "192.0.2.1"' in await machine.run("cat /etc/roq/hcm.toml")


async def _killed_hcms(machine: Box, traffic: Traffic) -> None:
    """Again and again: it is restarted every time, and adopts what runs."""
    children = await machine.children()
    assert children.keys() == {"roq-monitor", "roq-exchange", "roq-scaling"}
    for _ in range(QUICK_KILLS):
        pid = await machine.main_pid("roq-hcm")
        await machine.run(f"kill -KILL {pid}")
        assert await traffic.flowing() < SESSION_SECONDS / 2
        await machine.restarted("roq-hcm", pid, 10.0)
        assert await machine.children() == children
    assert await machine.restarts("roq-hcm") == QUICK_KILLS


async def _hung_hcm(machine: Box, traffic: Traffic) -> None:
    """The watchdog ends it."""
    children, pid = await machine.children(), await machine.main_pid("roq-hcm")
    await machine.run(f"kill -STOP {pid}")
    took = await machine.restarted("roq-hcm", pid, WATCHDOG_SECONDS + 10.0)
    assert took > WATCHDOG_SECONDS / 3, "it was not the watchdog"
    assert "watchdog" in (await machine.run("journalctl --no-pager -u roq-hcm")).lower()
    assert await traffic.flowing() < SESSION_SECONDS / 2
    assert await machine.children() == children


async def _killed_gcm(cluster: DockerCluster, machine: Box, client: roq.Cluster) -> None:
    """It leads again; the host is the same."""
    children, pid = await machine.children(), await machine.main_pid("roq-gcm")
    await machine.run(f"kill -KILL {pid}")
    await machine.restarted("roq-gcm", pid, 10.0)
    await client.create_queue("bills")
    assert [host.host for host in (await cluster.wait_hosts(1)).hosts] == [HOST]
    await client.remove_queue("bills")
    assert (await machine.children()).items() >= children.items()


async def test_stopping_the_unit_leaves_the_processes_and_a_wrong_configuration_is_told(box: tuple[DockerCluster, Box]) -> None:
    cluster, machine = box
    await machine.install("--gcm", "--enable")
    async with cluster.connect() as client:
        await client.create_queue("orders")
        children = await machine.children()
        await machine.run("systemctl stop roq-hcm")
        assert await machine.children() == children
        await machine.run("systemctl start roq-hcm")
        assert await machine.children() == children
    await machine.run("echo 'prot = 1' >>/etc/roq/gcm.toml")
    with pytest.raises(ProcessFailed, match="systemctl restart"):
        await machine.install("--gcm", "--enable")
    assert "prot" in await machine.run("journalctl --no-pager -u roq-gcm")
