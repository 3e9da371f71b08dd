"""The leading GCM killed in the middle of a queue's creation, an Exchange's creation and a host's recovery, in containers with
true hosts: its successor finishes, and exactly the right processes run, once.

One step of each, the one after which hosts act with nobody to lead them. tests/integration/test_gcm_crash_points.py kills it at
every step, with a test double for hosts, and looks at the metadata.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

import roq
from gcm.transactions import exchange_id
from roq.coordination.locate import GcmClient
from roq.errors import DeadlineExceeded
from roq.testing import DockerCluster
from roq.tools.chaos import invariants
from roq.tools.chaos.watch import Witness
from roq.wire import gcm
from roq.wire.assignment import QueueSettings
from tests.failure.conftest import SESSION_SECONDS
from tests.harness.arming import arm

CLUSTER = {"gcms": 2, "hcms": 3}
SETTLED_SECONDS = SESSION_SECONDS + 12.0
REPLICATION = 2


class Scene:
    """One GCM leads and will die at the point; the other one stands by."""

    def __init__(self, machines: DockerCluster, client: roq.Cluster, asking: GcmClient) -> None:
        self.machines, self.client, self.asking = machines, client, asking

    async def arm(self, point: str) -> None:
        self.armed, self.other = await arm(self.machines, point)
        self.pid = await self._pid()

    async def _pid(self) -> int:
        async def found() -> int:
            return next((one.pid for one in await self.machines.processes(self.armed) if one.name == "roq-gcm"), 0)

        return await self.machines.wait_for(found, f"roq-gcm runs on {self.armed}")

    async def leader_died(self) -> None:
        await self.machines.wait_leader([self.other])
        assert await self._pid() != self.pid, "the point was never reached"

    async def create(self, queue: str, host: str = "") -> gcm.QueueInfo:
        request = gcm.CreateQueue(queue, f"t-{queue}", QueueSettings(replication=REPLICATION), host)
        return await self.asking.request(request, gcm.QueueInfo, SETTLED_SECONDS)

    async def exchange(self, queue: str, host: str = "") -> gcm.ExchangeCreated:
        request = gcm.CreateExchange(queue, f"x-{queue}", host)
        return await self.asking.request(request, gcm.ExchangeCreated, SETTLED_SECONDS)

    async def ends_whole(self, *queues: str, without: str = "") -> None:
        """Exactly these queues; hosts run what the records say, once; nothing is under way. without: a host that is down."""
        problems: list[str] = []
        hosts = [host for host in self.machines.hosts if host != without]
        async with Witness(self.machines.zookeeper) as witness:

            async def right() -> bool:
                view = await self.client.view()
                processes = {host: await self.machines.processes(host) for host in hosts}
                now = [one for one in await witness.look() if getattr(one, "host", None) != without]
                found = [*invariants.violations(view, processes), *invariants.unsettled(now, await witness.transactions())]
                problems[:] = [text for text in found if text != f"C3: host {without} is not there"]
                names = sorted(info.record.name for info in view.queues)
                return names == sorted(queues) and not problems

            try:
                await self.machines.wait_for(right, f"{queues} are whole", SETTLED_SECONDS)
            except DeadlineExceeded as error:
                raise AssertionError(problems) from error


@pytest.fixture
async def scene(machines: DockerCluster, client: roq.Cluster) -> AsyncIterator[Scene]:
    asking = GcmClient(machines.zookeeper)
    yield Scene(machines, client, asking)
    asking.close()


@pytest.mark.quick
async def test_queue_creation(scene: Scene) -> None:
    await scene.arm("create_queue.recorded")
    info = await scene.create("q")
    await scene.leader_died()
    assert info.record.transaction == "t-q"
    assert len(info.record.exchanges) == 1
    assert (await scene.create("q")).record == info.record
    await scene.ends_whole("q")


async def test_exchange_creation(scene: Scene) -> None:
    await scene.create("q")
    await scene.arm("create_exchange.recorded")
    made = await scene.exchange("q")
    await scene.leader_died()
    assert made.exchange == exchange_id("q", "x-q")
    assert await scene.exchange("q") == made
    assert len((await scene.client.queue("q")).record.exchanges) == 2
    await scene.ends_whole("q")


async def test_host_recovery(scene: Scene) -> None:
    """host-1 has an active Monitor, a backup perhaps, and an Exchange of a queue that is led elsewhere."""
    before = (await scene.create("q1", "host-1")).record
    await scene.create("q2", "host-2")
    await scene.exchange("q2", "host-1")
    await scene.arm("recover_host.activated")
    await scene.machines.kill("host-1")
    try:
        await scene.leader_died()
        await scene.ends_whole("q1", "q2", without="host-1")
        after = await scene.client.queue("q1")
        assert (after.record.term, len(after.monitors)) == (before.term + 1, REPLICATION)
        assert after.monitors[0].host == after.record.monitor_host != "host-1"
        assert len((await scene.client.queue("q2")).record.exchanges) == 2
    finally:
        await scene.machines.start("host-1")
    await scene.machines.wait_hosts(len(scene.machines.hosts))
    await scene.ends_whole("q1", "q2")
