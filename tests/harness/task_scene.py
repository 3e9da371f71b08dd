"""A work queue of a cluster of containers with a load on it: wait for what is to come of a fault, heal, drain, tell, judge."""

from __future__ import annotations

import asyncio
import secrets
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import roq
from roq.errors import DeadlineExceeded, WorkQueueNotFound
from roq.testing import DockerCluster
from roq.wire import gcm
from roq.wire.assignment import ProcessKind
from roq.wire.task import Status
from roq.workqueue.remote import RemoteQueue
from tests.harness.task_load import TaskLoad

PUTS_TO_FLOW = 20


class Scene:
    """A work queue and the load on it. Hosts are named as in the cluster."""

    def __init__(self, machines: DockerCluster, client: roq.Cluster, load: TaskLoad) -> None:
        self.machines, self.client, self.load = machines, client, load
        self.name = load.name

    async def info(self) -> gcm.WorkQueueInfo:
        return await self.client.work_queue(self.name)

    async def flowing(self, seconds: float = 30.0) -> float:
        """Until puts begun before and after now are answered; how long the slowest small put took since `calm`."""
        count = len(self.load.acked) + PUTS_TO_FLOW

        async def flows() -> bool:
            return len(self.load.acked) >= count

        try:
            await self.machines.wait_for(flows, "puts are answered", seconds)
        except DeadlineExceeded as error:
            raise DeadlineExceeded(f"{error}; refused so far: {dict(self.load.errors)}") from None
        return self.load.longest

    def calm(self) -> None:
        """Forget how long puts took until now."""
        self.load.longest = self.load.longest_big = 0.0

    async def taken_over(self, before: gcm.WorkQueueInfo, seconds: float) -> gcm.WorkQueueInfo:
        """Until another host's master serves in a later term."""

        async def later() -> gcm.WorkQueueInfo | None:
            info = await self.info()
            return info if info.ready and info.record.term > before.record.term else None

        info = await self.machines.wait_for(later, "another master is active", seconds)
        assert info.record.master_host != before.record.master_host
        await self.flowing()
        return info

    async def whole(self) -> None:
        """Until all hosts live and the queue has its master and its standby."""
        await self.machines.heal()
        await self.machines.wait_hosts(len(self.machines.hosts))

        async def ready() -> bool:
            info = await self.info()
            return info.ready and len(info.masters) == 2

        await self.machines.wait_for(ready, "master and standby run")

    async def judge(self, fault: str, **figures: object) -> None:
        """Heal, drain, tell, judge."""
        await self.whole()
        await self.flowing()
        verdict = await asyncio.to_thread(self.load.finish)
        sys.stdout.write(f"\nverdict {verdict.line(fault, **figures)}\n")
        verdict.check()
        if not figures.get("refused"):
            assert verdict.unknown == 0, f"every put is answered in the end: {dict(self.load.errors)}"
        status = await asyncio.to_thread(ask_status, self.machines.zookeeper, self.name)
        assert (status.ready, status.leased, status.delayed, status.dead) == (0, 0, 0, 0)


def ask_status(zookeeper: str, name: str) -> Status:
    queue = RemoteQueue(zookeeper, name)
    try:
        return queue.status()
    finally:
        queue.close()


@asynccontextmanager
async def under_load(
    machines: DockerCluster, client: roq.Cluster, ack_quorum: int = 2, **options: float
) -> AsyncIterator[Scene]:
    """A new work queue with a load that has begun to flow; removed at the end."""
    name = f"w-{secrets.token_hex(3)}"
    info = await client.create_work_queue(name, write_quorum=3, ack_quorum=ack_quorum, standbys=1)
    assert (info.record.spec.write_quorum, info.record.spec.ack_quorum, len(info.record.standby_hosts)) == (3, ack_quorum, 1)
    chosen = {"pause_seconds": 0.004, "big_every": 25, **options}
    load = TaskLoad(machines.zookeeper, name, **chosen)  # type: ignore[arg-type]
    load.start()
    try:
        scene = Scene(machines, client, load)
        await scene.flowing()
        await scene.whole()
        # four hosts, three copies: whole is not every host, and one that the test before had killed may just be starting
        await asyncio.gather(*(machines.wait_process(host, str(ProcessKind.STORE)) for host in machines.hosts))
        yield scene
    finally:
        load.stop()
        await machines.heal()
        with suppress(WorkQueueNotFound):
            await client.remove_work_queue(name)
