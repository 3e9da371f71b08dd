"""A simulated cluster whose hosts' stores matter: what is done to disks."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any

from roq.errors import RoqError
from roq.tools.simulation.cluster import SimulatedCluster
from roq.tools.simulation.faults import Fault, FaultKind
from roq.tools.simulation.machines import HostMachine

SLOW_SECONDS = 0.05  # of a sync of a slow disk
WRITES_SHARE = 0.3  # of disk errors; the others are of syncs


class StoreCluster(SimulatedCluster):
    """As a SimulatedCluster."""

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

    def heal(self) -> None:
        """See SimulatedCluster."""
        for host in self.hosts:
            host.disk.failing = ""
        super().heal()
