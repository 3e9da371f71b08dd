"""Work queues of a cluster whose disks get full under load, and have room again. What damages files: test_work_queues.py."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from roq.testing import DockerCluster
from roq.testing.docker_cluster import FILLER
from tests.failure.conftest import SESSION_SECONDS
from tests.harness.task_scene import under_load

FILL_SECONDS = 90.0  # for the load to use up what the stores have at hand; it depends on the machine


async def fill(machines: DockerCluster, host: str) -> None:
    """Take what room there is just now: a store that compacts its journal gives some back."""
    await machines.run(host, f"dd if=/dev/zero of={FILLER} bs=4k oflag=append conv=notrunc 2>/dev/null; true")


async def full_until(machines: DockerCluster, hosts: Sequence[str], reached: Callable[[], bool], what: str) -> None:
    """Keep disks full for so long; they stay so."""

    async def look() -> bool:
        await asyncio.gather(*(fill(machines, host) for host in hosts))
        return reached()

    await machines.wait_for(look, what, FILL_SECONDS)


async def programs(machines: DockerCluster, host: str) -> set[tuple[str, int]]:
    """RoQ's processes there, name and pid."""
    return {(found.name, found.pid) for found in await machines.processes(host)}


@pytest.mark.timeout(300)
@pytest.mark.long
async def test_disks_are_full_and_have_room_again(image: str, tmp_path: Path) -> None:
    """First one disk, which nobody feels; then all of them, which stops the puts with a clear error."""
    machines = DockerCluster(
        image=image, gcms=1, hcms=3, session_seconds=SESSION_SECONDS, state_megabytes=1000, logs=tmp_path / "logs"
    )
    busy: dict[str, Any] = {"payload_bytes": 60_000, "pause_seconds": 0.005, "big_every": 50, "patience_seconds": 4.0}
    async with machines, machines.connect() as client, under_load(machines, client, **busy) as scene:
        load, daemons = scene.load, {host: await programs(machines, host) for host in machines.hosts}
        grown = len(load.acked) + 1600  # 96 MB: more than the journal files that a store has at hand
        scene.calm()
        await full_until(machines, machines.hosts[:1], lambda: len(load.acked) >= grown, "puts go on with one full disk")
        assert not load.errors
        one = round(load.longest, 2)
        await machines.disk_free(machines.hosts[0])
        await scene.flowing()
        await full_until(machines, machines.hosts, lambda: load.errors["StorageFull"] > 0, "puts are refused")
        assert {host: await programs(machines, host) for host in machines.hosts} == daemons, "a full disk kills nobody"
        assert load.errors.keys() == {"StorageFull"}
        host, master = (await scene.info()).record.master_host, f"master/{scene.name}"
        killed = await machines.kill_process(host, master)
        await machines.wait_process(host, master, not_pid=killed)
        assert await programs(machines, host) - {(master, killed)} >= daemons[host] - {(master, killed)}
        for name in machines.hosts:
            await machines.disk_free(name)
        began = time.monotonic()
        await scene.flowing()
        figures = {"one_full_put_seconds": one, "flowing_again_seconds": round(time.monotonic() - began, 2)}
        await scene.judge("disks full", refused=dict(load.errors), **figures)
        assert load.errors.keys() <= {"StorageFull", "Unavailable"}, "the latter while the master was away"
