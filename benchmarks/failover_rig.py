"""A cluster of real processes under a light load into which faults are injected, and asked whether all is well again."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

from roq.client.cluster import Cluster, connect
from roq.errors import DeadlineExceeded, RoqError
from roq.runtime.rpc import RpcClient
from roq.tools.chaos.edn import EdnHistory
from roq.tools.chaos.load import PubSubLoad
from roq.tools.chaos.verdict import judge
from roq.tools.local.cluster import LocalCluster
from roq.tools.local.zookeeper import LocalZooKeeper
from roq.wire import hcm
from roq.wire.assignment import ProcessState, RunningProcess

QUEUE = "traffic"
PUBLISHERS, SUBSCRIBERS, RATE, SIZE = 2, 2, 500.0, 100  # messages/s of each publisher, bytes
SESSION_SECONDS = 2.0
LOOK_SECONDS = 0.002  # between two looks whether it serves again
ANSWER_SECONDS = 0.5
SETTLED_SECONDS = 60.0
DRAIN_SECONDS = 30.0


class Rig:
    """One queue, its load, and the cluster under it."""

    def __init__(self, zookeeper: LocalZooKeeper, data: Path, local: LocalCluster, client: Cluster, load: PubSubLoad) -> None:
        self.zookeeper, self.local, self.client, self.load = zookeeper, local, client, load
        self._data = data

    # --- what is -----------------------------------------------------------------------------------------------------------

    async def processes(self, host: str) -> dict[str, RunningProcess]:
        """What the HCM of a host says it runs. Raises DeadlineExceeded."""
        daemon = self.local.hosts[host]
        rpc = RpcClient(f"tcp://{daemon.option('--address')}:{daemon.option('--port')}", hcm.Reply)
        try:
            answer = await rpc.request(hcm.GetProcesses(), hcm.Processes, ANSWER_SECONDS)
        finally:
            rpc.close()
        return {one.name: one for one in answer.report.processes}

    def published(self) -> list[int]:
        """Messages of each publisher so far."""
        return [one.published for one in self.load.sent()]

    def past(self, mark: list[int]) -> bool:
        """Every subscriber has got a message of every publisher that is newer than the mark."""
        return all(
            runs and runs[-1][1] > number for heard in self.load.heard for runs, number in zip(heard.runs, mark, strict=True)
        )

    def silence(self) -> float:
        """Longest time without a message of any subscriber since this was asked last, seconds."""
        longest = max(heard.silence_seconds for heard in self.load.heard)
        for heard in self.load.heard:
            heard.silence_seconds = 0.0
        return longest

    # --- waits -------------------------------------------------------------------------------------------------------------

    async def flowing(self, begun: float, mark: list[int]) -> float:
        """Seconds from `begun` until messages published after the mark have come to every subscriber."""

        async def flows() -> bool:
            return self.past(mark)

        return await until(flows, begun)

    async def settled(self, hosts: int = 0) -> None:
        """Until every client is ready, every host alive, the queue ready and messages flow."""

        async def ready() -> bool:
            view = await self.client.view()
            info = await self.client.queue(QUEUE)
            alive = sum(host.alive for host in view.hosts)
            running = [one for host in view.hosts if host.report for one in host.report.processes]
            return (
                alive == (hosts or len(self.local.hosts))
                and info.ready
                and len(info.monitors) == info.record.settings.replication
                and all(one.state is ProcessState.RUNNING for one in running)
                and not self.load.unhealthy()
            )

        await until(ready, time.monotonic(), SETTLED_SECONDS)
        await self.flowing(time.monotonic(), self.published())

    # --- faults ------------------------------------------------------------------------------------------------------------

    async def kill_host(self, name: str) -> None:
        """SIGKILL of every process of a host at once."""
        for process in self.local.processes():
            if process.owner == name:
                os.kill(process.pid, signal.SIGKILL)
        await self.local.lose_host(name)

    async def kill_zookeeper(self) -> None:
        """SIGKILL."""
        os.killpg(self.zookeeper.pid, signal.SIGKILL)
        await self.zookeeper.stop()

    async def start_zookeeper(self) -> None:
        """At the same address, with what it had stored."""
        await self.zookeeper.start(self._data, port=self.zookeeper.port)

    async def verdict(self) -> list[str]:
        """Ends the load; what was lost, repeated, reordered or went wrong, empty if nothing."""
        await self.load.stop(DRAIN_SECONDS)
        await self.load.drain(DRAIN_SECONDS)
        found = judge(self.load.sent(), self.load.heard)
        told = [f"{found.reported_gaps} messages reported as lost"] if found.reported_gaps else []
        return [*found.problems(), *told, *self.load.failures]


async def until(look: Callable[[], Awaitable[bool]], begun: float, timeout_seconds: float = 60.0) -> float:
    """Seconds from `begun` until `look` says so; its RoqErrors mean "not yet". Raises DeadlineExceeded."""
    seen = "no"
    while time.monotonic() - begun < timeout_seconds:
        try:
            if await look():
                return time.monotonic() - begun
            seen = "no"
        except RoqError as error:
            seen = str(error)
        await asyncio.sleep(LOOK_SECONDS)
    raise DeadlineExceeded(f"not well again after {timeout_seconds:g} s: {seen}")


@contextlib.asynccontextmanager
async def rig(hosts: int, gcms: int, replication: int) -> AsyncIterator[Rig]:
    """A cluster with a queue (overflow "block") on host-1 and its load; all of it ends with the context."""
    with tempfile.TemporaryDirectory(prefix="roq-failover-") as name:
        directory, zookeeper = Path(name), LocalZooKeeper()
        await zookeeper.start(directory / "zookeeper")
        try:
            cluster = LocalCluster(
                directory / "cluster",
                gcms=gcms,
                hosts=hosts,
                zookeeper=zookeeper.connect_string,
                session_seconds=SESSION_SECONDS,
            )
            async with cluster as local, connect(local.zookeeper) as client:
                await client.create_queue(QUEUE, replication=replication, overflow="block", host="host-1")
                counts = {"publishers": PUBLISHERS, "subscribers": SUBSCRIBERS, "size": SIZE}
                async with PubSubLoad(client, EdnHistory(None), QUEUE, rate=RATE, **counts) as load:
                    made = Rig(zookeeper, directory / "zookeeper", local, client, load)
                    await made.settled()
                    yield made
        finally:
            await zookeeper.stop()
