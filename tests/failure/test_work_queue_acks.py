"""A work queue whose puts are acknowledged by three of three stores: two of them are gone at once and for good, with their
machines and disks, and nothing that was acknowledged is lost. Two of three acks: test_work_queues.py.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from roq.testing import DockerCluster
from tests.failure.conftest import SESSION_SECONDS
from tests.harness.task_scene import under_load

FLOWS_SECONDS = 60.0  # a session, a take-over, and the first repair


@pytest.mark.timeout(240)
@pytest.mark.parametrize("with_master", [False, True], ids=["the two others", "the master's and another"])
async def test_two_of_three_stores_are_gone_for_good(image: str, tmp_path: Path, with_master: bool) -> None:
    machines = DockerCluster(image=image, gcms=1, hcms=3, session_seconds=SESSION_SECONDS, logs=tmp_path / "logs")
    async with machines, machines.connect() as client, under_load(machines, client, ack_quorum=3) as scene:
        before = await scene.info()
        master = before.record.master_host
        others = [host for host in machines.hosts if host != master]
        gone = [master, others[0]] if with_master else others
        for _ in gone:
            await machines.add_host()  # what is written now is on the three of before; no put could go on without these
        await machines.wait_hosts(5)
        scene.calm()
        await asyncio.gather(*map(machines.remove_host, gone))
        took = await scene.flowing(FLOWS_SECONDS)
        assert (await scene.info()).record.master_host not in gone
        await scene.judge("two of three stores gone for good, three acks", put_seconds=round(took, 2), gone=gone)
