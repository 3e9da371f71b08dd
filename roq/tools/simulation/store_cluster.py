"""A simulated cluster whose hosts' stores matter: what is done to disks."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import roq
from roq.coordination.session import Session
from roq.errors import RoqError
from roq.log.store.identity import forget
from roq.tools.simulation.cluster import RESTART_SECONDS, ZOOKEEPER, SimulatedCluster
from roq.tools.simulation.faults import Fault, FaultKind
from roq.tools.simulation.machines import HostMachine

SLOW_SECONDS = 0.05  # of a sync of a slow disk
WRITES_SHARE = 0.3  # of disk errors; the others are of syncs


class StoreCluster(SimulatedCluster):
    """As a SimulatedCluster."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._swapped: HostMachine | None = None  # its new disk has not got everything yet
        self._rotten: HostMachine | None = None  # bytes of its disk rotted, and nobody may have noticed

    async def _told(self, label: str, program: Coroutine[Any, Any, None]) -> None:
        try:
            await program
        except RoqError as error:
            self.books.errors.append(f"{label}: {type(error).__name__}: {error}")

    def do(self, fault: Fault) -> None:
        """See SimulatedCluster."""
        host = self.hosts[int(fault.choice * len(self.hosts))]
        match fault.kind:
            case FaultKind.LOSE_ALL_POWER:
                for number, other in enumerate(self.hosts):  # the chosen one is the last to come back
                    part = 1.0 if other is host else 0.1 * number
                    self._lose_power(
                        Fault(fault.at, FaultKind.LOSE_POWER, fault.seconds * part, (number + 0.5) / len(self.hosts), 0.0)
                    )
            case FaultKind.DISK_ERROR:
                self._fail(host, fault.second)
            case FaultKind.DISK_FULL:
                self.told(f"the disk of {host.name} is full for {fault.seconds:.2f} s")
                host.disk.full = True
                self._later(fault.seconds, lambda: setattr(host.disk, "full", False))
            case FaultKind.SLOW_DISK:
                self.told(f"the disk of {host.name} is slow for {fault.seconds:.2f} s")
                before, host.disk.sync_seconds = host.disk.sync_seconds, SLOW_SECONDS
                self._later(fault.seconds, lambda: setattr(host.disk, "sync_seconds", min(before, host.disk.sync_seconds)))
            case _:
                super().do(fault)

    def _fail(self, host: HostMachine, drawn: float) -> None:
        host.disk.failing = "write" if drawn < WRITES_SHARE else "sync"
        self.told(f"the next {host.disk.failing} on {host.name} fails")

    def _swap(self, host: HostMachine, seconds: float) -> None:
        """Give it another disk, which is empty, if nothing is lost with the one it has."""

        async def program(stop: asyncio.Event) -> None:
            async with roq.connect(ZOOKEEPER) as cluster:
                if not await self._is_complete(cluster) or self._swapped or self._rotten not in (None, host):
                    return
                if not host.powered:
                    return
                self._swapped, self._rotten = host, None
                self.told(f"{host.name} is shut down, its disk is replaced by an empty one")
                host.lose_power()
                host.disk.replace()
                session = await Session.connect(ZOOKEEPER)
                await forget(session, host.name)
                await session.close()
                self._later(seconds + RESTART_SECONDS, lambda: self._back(host))
                while not (host.named("store") and await self._is_complete(cluster)):  # noqa: ASYNC110 - nobody tells of it
                    await asyncio.sleep(1.0)
                self._swapped = None
                self.told(f"all copies are there, with the new disk of {host.name}")

        self.admin.run("admin", program)

    async def _is_complete(self, cluster: roq.Cluster) -> bool:
        """Whether one disk may be lost now."""
        raise NotImplementedError

    def heal(self) -> None:
        """See SimulatedCluster."""
        for host in self.hosts:
            host.disk.failing = ""
        super().heal()
