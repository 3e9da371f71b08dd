"""`roq host stop` through the real CLI: a host that serves a queue is stopped; the queue serves on, on another one."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from roq.client.cluster import connect
from roq.tools.local.cluster import LocalCluster
from roq.tools.local.daemon import Daemon
from tests.harness.lives import outlive

ROOT = Path(__file__).parents[2]
SECONDS = 60.0
pytestmark = pytest.mark.timeout(180)


async def command(zookeeper: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-m", "roq.cli", "host", *arguments, "-c", zookeeper],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        timeout=SECONDS,
        check=False,
    )


async def test_a_host_is_stopped_with_its_processes_and_its_queues_serve_on(chroot: str, tmp_path: Path) -> None:
    zookeeper, _, name = chroot.partition("/")
    async with (
        LocalCluster(tmp_path, hosts=2, zookeeper=zookeeper, chroot=f"/{name}") as local,
        connect(local.zookeeper) as client,
    ):
        await client.create_queue("orders", host="host-2")
        info = (await client.hosts())[1]
        assert info.report is not None
        pids = {process.pid for process in info.report.processes}
        assert len(pids) == 3
        daemon = local.hosts["host-2"]
        daemon.dismiss()
        done = await command(local.zookeeper, "stop", "host-2", "--json")
        assert (done.returncode, done.stderr) == (0, "")
        assert json.loads(done.stdout) == {"host": "host-2", "stopped": True, "processes": 3}
        assert outlive(pids | {daemon.pid}, 5.0) == set()
        async with asyncio.timeout(SECONDS):
            while not (found := await client.queue("orders")).ready or found.record.monitor_host == "host-2":
                await asyncio.sleep(0.05)
        again = await command(local.zookeeper, "stop", "host-2")
        assert again.returncode == 1
        assert "HostNotFound" in again.stderr
        disk = await command(local.zookeeper, "new-disk", "host-2", "--json")
        assert json.loads(disk.stdout) == {"host": "host-2", "forgotten": False}, disk.stderr  # it had no store
        await local.kill_hcm("host-1")  # as by a signal: its processes go on
        async with asyncio.timeout(SECONDS):
            while (await client.hosts())[0].alive:
                await asyncio.sleep(0.05)
        away = await command(local.zookeeper, "stop", "host-1")
        assert away.returncode == 1
        assert "start its `roq-hcm` once more, which adopts them, then stop it" in away.stderr
        supervise = ["sh", str(ROOT / "docker" / "test" / "scripts" / "supervise"), *daemon.command]
        again_and_again = Daemon("host-2", supervise, tmp_path / "supervise.log", local.environment("host-2"))
        await again_and_again.start(SECONDS)
        try:
            async with asyncio.timeout(SECONDS):
                while "host-2" not in {info.host for info in await client.hosts() if info.alive}:
                    await asyncio.sleep(0.05)
            comes_back = await command(local.zookeeper, "stop", "host-2")
        finally:
            await again_and_again.terminate(SECONDS)
        assert comes_back.returncode == 1
        assert "host-2 was stopped, and its service manager started it again" in comes_back.stderr
        assert "`roq host install`" in comes_back.stderr
