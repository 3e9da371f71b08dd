"""Nemesis: performs a schedule of faults against a test cluster, one after the other, and writes down what it did."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import NamedTuple, Protocol

from roq.errors import CallError, RoqError
from roq.testing import TestedCluster
from roq.testing.cluster import CLIENT, HCM, Cut
from roq.tools.chaos.administration import PREFIX
from roq.tools.chaos.history import FaultDone
from roq.tools.chaos.schedule import LASTING, PROCESSES, SHORT_SECONDS, ChaosFault, ChaosKind, Role

Undo = Callable[[], Awaitable[object]]
Report = Callable[[FaultDone], None]
ACT_SECONDS = 30.0  # one act on a cluster; a daemon started again is ready within this
DELAY_MILLISECONDS = 20, 200  # of a machine's packets, at least and at most; they vary by half of it
CLOCK_SECONDS = 2.0  # hosts' clocks may differ by 5 s: docs/recorded-queues.md
KINDS = {Role.RECORDER: Role.EXCHANGE}  # as hosts call it


class Workers(Protocol):
    """Processes of the load that the nemesis may hit."""

    def names(self) -> Sequence[str]:
        """Those that run."""

    def kill(self, name: str) -> None:
        """SIGKILL; another one is started in its place. Raises ProcessLookupError if it has just ended."""

    def pause(self, name: str) -> int:
        """SIGSTOP; its pid. Raises ProcessLookupError if it has just ended."""

    def resume(self, pid: int) -> None:
        """SIGCONT, if it still lives."""


class Spared(NamedTuple):
    """What shall live through the whole run: these machines, and the processes of this queue on them. They are frozen for as
    long as nobody notices, and nothing else."""

    machines: frozenset[str] = frozenset()
    queue: str = ""

    def covers(self, machine: str, process: str) -> bool:
        """process: "" for the whole machine."""
        return machine in self.machines and ("/" not in process or process.split("/")[1] == self.queue)


NOTHING = Spared()


def _ignore(_: FaultDone) -> None:
    return


class Nemesis:
    """`await Nemesis(cluster, faults).run()`; `log` is the record."""

    def __init__(
        self,
        cluster: TestedCluster,
        faults: list[ChaosFault],
        workers: Workers,
        spared: Spared = NOTHING,
        recorded: Collection[str] = (),
    ) -> None:
        """recorded: queues whose Exchanges record."""
        self._cluster, self._faults, self._workers, self._spared = cluster, faults, workers, spared
        self._recorded = recorded
        self.log: list[FaultDone] = []
        self._unended: list[tuple[Undo, FaultDone]] = []

    async def run(self, started: float, begun: Report = _ignore, ended: Report = _ignore) -> None:
        """Every fault at its time after `started` (monotonic seconds). What was begun is ended, even when cancelled. begun: of
        one that lasts, ended: of any."""
        for fault in self._faults:
            await asyncio.sleep(started + fault.at - time.monotonic())
            await self._perform(fault, started, begun, ended)

    async def _perform(self, fault: ChaosFault, started: float, tell_begun: Report, tell_ended: Report) -> None:
        done = FaultDone(round(time.monotonic() - started, 3), str(fault.kind), str(fault.role), role=str(fault.role))
        self.log.append(done)
        undo: Undo | None = None
        begun = time.monotonic()
        try:
            async with asyncio.timeout(ACT_SECONDS):
                machine, process = await self._choose(fault)
                done.target = f"{machine}:{process}" if process else machine
                begun = time.monotonic()
                done.t = round(begun - started, 3)
                undo = await self._begin(fault, machine, process)
            if undo is not None:
                tell_begun(done)
                await asyncio.sleep(begun + fault.seconds - time.monotonic())
        except (RoqError, TimeoutError, ProcessLookupError) as error:  # the last: it had just ended
            done.error = f"{type(error).__name__}: {error}"
        finally:
            if undo is not None:
                await self._end(undo, done)
                done.seconds = round(time.monotonic() - begun, 3)
            tell_ended(done)

    async def _end(self, undo: Undo, done: FaultDone) -> None:
        try:
            async with asyncio.timeout(ACT_SECONDS):
                await undo()
        except (RoqError, TimeoutError, ProcessLookupError) as error:  # the last: it had just ended
            done.error = f"{type(error).__name__}: {error}"
            self._unended.append((undo, done))

    # --- whom ----------------------------------------------------------------------------------------------------------

    async def _choose(self, fault: ChaosFault) -> tuple[str, str]:
        """Machine and, for faults of processes, name of the process."""
        cluster, number = self._cluster, fault.number
        gentle = fault.kind is ChaosKind.PAUSE and fault.seconds <= SHORT_SECONDS[1]
        spared = NOTHING if gentle else self._spared
        match fault.role:
            case Role.WORKER:
                if not (workers := sorted(self._workers.names())):
                    raise CallError("no worker runs just now")
                return CLIENT, workers[number % len(workers)]
            case Role.GCM if number % 2 and not spared.machines:
                return await cluster.leader(ACT_SECONDS / 2), ""
            case _ if fault.role in LASTING:
                process = HCM if fault.role is Role.HCM else ""
                group = {Role.GCM: cluster.gcms, Role.ZOOKEEPER: cluster.zookeepers}.get(fault.role, cluster.hosts)
                machines = [name for name in group if not spared.covers(name, process)]
                if not machines:
                    raise CallError(f"every {fault.role} is spared")
                return machines[number % len(machines)], process
        machine, process = await self._find(fault.role, number, spared)
        return machine, process if fault.kind in (ChaosKind.KILL, ChaosKind.PAUSE) else ""

    async def _find(self, role: Role, number: int, spared: Spared) -> tuple[str, str]:
        """One of the loaded queues' processes of this kind that hosts report."""
        found: list[tuple[str, str]] = []
        kind = KINDS.get(role, role).value
        for host in self._cluster.hosts:
            try:
                reported = list(await self._cluster.reported(host))
            except RoqError:
                continue  # still coming back from the last fault
            reported = [one for one in reported if role is not Role.RECORDER or one.queue in self._recorded]
            found += [(host, one.name) for one in reported if one.kind == kind and not one.queue.startswith(PREFIX)]
        found = [one for one in found if not spared.covers(*one)]
        if not found:
            raise CallError(f"no {role} runs anywhere that is not spared")
        return sorted(found)[number % len(found)]

    # --- what ----------------------------------------------------------------------------------------------------------

    async def _begin(self, fault: ChaosFault, machine: str, process: str) -> Undo | None:
        """Do it; what ends it."""
        cluster = self._cluster
        match fault.kind:
            case ChaosKind.KILL if fault.role is Role.WORKER:
                self._workers.kill(process)
                return None
            case ChaosKind.PAUSE if fault.role is Role.WORKER:
                stopped = self._workers.pause(process)
                return lambda: self._resume(stopped)
            case ChaosKind.KILL if fault.role in PROCESSES:
                await cluster.kill_process(machine, process)
                return None
            case ChaosKind.KILL if fault.role is Role.HCM:  # away for a while: frozen, then killed and started again
                await cluster.pause_process(machine, process)
                return lambda: cluster.kill_process(machine, process)
            case ChaosKind.KILL:
                await cluster.kill(machine)
                return lambda: cluster.start(machine)
            case ChaosKind.PAUSE if process:
                pid = await cluster.pause_process(machine, process)
                return lambda: cluster.unpause_process(machine, pid)
            case ChaosKind.PAUSE:
                await cluster.pause(machine)
                return lambda: cluster.unpause(machine)
        return await self._begin_in_containers(fault, machine)

    async def _resume(self, pid: int) -> None:
        self._workers.resume(pid)

    async def _begin_in_containers(self, fault: ChaosFault, machine: str) -> Undo:
        """What needs machines with networks, disks and clocks of their own."""
        cluster, others = self._cluster, {CLIENT, *self._cluster.machines()} - {machine}
        match fault.kind:
            case ChaosKind.CUT_FROM_ZOOKEEPER:
                await cluster.partition_from_zookeeper(machine)
            case ChaosKind.MUTE:
                await cluster.partition_one_way(machine, others)
            case ChaosKind.REJECT:
                await cluster.partition(machine, others, how=Cut.REJECT)
            case ChaosKind.DELAY:
                least, most = DELAY_MILLISECONDS
                milliseconds = least + fault.number % (most - least)
                await cluster.delay(machine, milliseconds, milliseconds / 2)
            case ChaosKind.FILL_DISK:
                await cluster.disk_full(machine)
            case ChaosKind.MOVE_CLOCK:
                await cluster.clock(machine, CLOCK_SECONDS if fault.number % 4 < 2 else -CLOCK_SECONDS)
                return lambda: cluster.clock(machine, 0.0)
            case _:
                await cluster.partition(machine, others)
        return cluster.heal

    async def heal(self) -> None:
        """Open all ways; try again to end what could not be ended. The waits that follow tell what is still missing."""
        await self._cluster.heal()
        unended, self._unended = self._unended, []
        for undo, done in unended:
            done.error = ""
            await self._end(undo, done)
