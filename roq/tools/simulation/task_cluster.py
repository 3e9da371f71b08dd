"""A simulated cluster with a work queue: stores, masters, producers and workers; and what is done to disks.

Damage keeps within what the queue promises to bear: bytes rot on one disk only, a disk is replaced when `roq doctor` would
allow it, and nothing else is damaged until everything has its copies again. All else may happen to any disk at any time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from random import Random
from typing import Any

import roq
from roq.errors import TemporaryError
from roq.runtime.rpc import RpcClient
from roq.tools.simulation.cluster import COORDINATOR, ZOOKEEPER
from roq.tools.simulation.faults import Fault, FaultKind
from roq.tools.simulation.machines import HostMachine
from roq.tools.simulation.store_cluster import StoreCluster
from roq.tools.simulation.tasks import TaskBooks, TaskPace, judge_tasks, look, produce, work
from roq.wire import master as wire

WORK_QUEUE = "tasks"
ADDRESS = f"roq://{ZOOKEEPER}/{WORK_QUEUE}"
ASK_SECONDS = 5.0
READS_SHARE = 0.2  # of disk errors


class TaskCluster(StoreCluster):
    """As a SimulatedCluster, with other clients."""

    NEWCOMERS = ("worker", "producer")

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.tasks = TaskBooks(self.loop)
        self.pace = TaskPace(5.0, 3, 0.1, 0.2)

    def _program(self, what: str, label: str, random: Random, stop: asyncio.Event) -> Coroutine[Any, Any, None]:
        if what == "producer":
            return self._told(label, produce(self.tasks, ADDRESS, self.pace, random, stop))
        return self._told(label, work(self.tasks, ADDRESS, label, self.pace, random, stop))

    def verdict(self) -> tuple[list[str], tuple[int, int, int]]:
        """What is wrong, and what was given, got and settled."""
        return self.books.errors + judge_tasks(self.tasks), self.tasks.counts()

    async def look(self, seconds: float) -> None:
        """Wait until every task is done, for so long at most."""
        done: asyncio.Future[None] = self.loop.create_future()

        async def program(stop: asyncio.Event) -> None:
            await self._told("admin", look(self.tasks, ADDRESS, seconds))
            done.set_result(None)

        self.admin.run("admin", program)
        await done

    # --- faults -------------------------------------------------------------------------------------------------------

    def do(self, fault: Fault) -> None:
        """See SimulatedCluster."""
        host = self.hosts[int(fault.choice * len(self.hosts))]
        match fault.kind:
            case FaultKind.DISK_ERROR:
                self._fail(host, fault.second)
            case FaultKind.BIT_ROT:
                if self._may_lose(host) and (what := host.disk.rot(fault.second)):
                    self._rotten = host
                    self.told(f"bytes of {what} on {host.name} rot")
            case FaultKind.SWAP_DISK:
                self._swap(host, fault.seconds)
            case _:
                super().do(fault)
                stepped = self.wall.stepped
                self.tasks.clocks_stepped = COORDINATOR in stepped and any(one.address in stepped for one in self.hosts)

    def _fail(self, host: HostMachine, drawn: float) -> None:
        if drawn >= READS_SHARE:
            super()._fail(host, (drawn - READS_SHARE) / (1 - READS_SHARE))
        elif self._may_lose(host):
            self._rotten = host  # what can't be read is put aside
            host.disk.failing = "read"
            self.told(f"the next read on {host.name} fails")

    def _may_lose(self, host: HostMachine) -> bool:
        """Whether what is on its disk is on others, too."""
        return self._swapped in (None, host) and self._rotten in (None, host)

    async def _is_complete(self, cluster: roq.Cluster) -> bool:
        """Whether `roq doctor` would say that one disk may be replaced now."""
        try:
            info = (await cluster.work_queues())[0]
            if not info.ready or not info.masters:
                return False
            client = RpcClient(info.masters[0].endpoint(), wire.Reply)
            try:
                return not (await client.request(wire.GetCopies(), wire.Copies, ASK_SECONDS)).shortages
            finally:
                client.close()
        except TemporaryError:
            return False
