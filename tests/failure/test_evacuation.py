"""A host is evacuated in containers under load, then removed with its disk: nothing stored or put is lost, and nobody waits.

Not covered: drained hosts, leaders that die meanwhile (tests/integration/test_evacuation.py), hosts that are lost without it
(test_runbooks.py).
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from roq.log.replicated.metadata import LogMeta
from roq.testing import DockerCluster
from roq.wire.assignment import from_json
from tests.failure.conftest import SESSION_SECONDS
from tests.failure.test_recorded import recorded
from tests.harness.task_scene import under_load
from tests.harness.traffic import Traffic

HOSTS = 4  # three copies, and one host more
LEAVE_SECONDS = 60.0
NO_QUICK_TEST = "an image and containers have to be made, and a host has to be emptied under load"
pytestmark = pytest.mark.timeout(300)


async def test_an_evacuated_host_is_removed_with_its_disk_and_nothing_is_lost(image: str, tmp_path: Path) -> None:
    machines = DockerCluster(image=image, gcms=1, hcms=HOSTS, session_seconds=SESSION_SECONDS, logs=tmp_path)
    async with machines, machines.connect() as client, recorded(client) as kept, under_load(machines, client) as scene:
        host = (await scene.info()).masters[0].host  # its store and its master are there, in any case
        await client.create_queue("live", overflow="block", replication=2, host=host)
        async with Traffic(client, "live") as traffic:
            await client.evacuate_host(host)
            async with asyncio.timeout(LEAVE_SECONDS):
                remains = [one async for one in client.remains(host)]
            assert remains[-1].left, remains[-1]
            await machines.remove_host(host)
            await asyncio.gather(traffic.flowing(), kept.flowing(), scene.flowing())
            metas = [from_json(view.meta, LogMeta) for view in (await client.tapes(kept.queue)).views]
            parts = [part for meta in metas for segment in meta.segments for part in segment.fragments]
            assert all(host not in part.nodes and len(part.nodes) == HOSTS - 1 for part in parts)
        assert traffic.lost == []
        traffic.check_order()
        await scene.judge("a host was evacuated and removed")
