"""Simulated machines and what runs on them: GCMs, HCMs and their children, clients. The programs are the real ones.

In place of fork, exec and signals: a child is a task of its own process, started and watched as hcm/children.py does it. A
process that ends, or is killed, never runs again; its ports come free and its connections end.
"""

from __future__ import annotations

import asyncio
import contextvars
import itertools
import os
import signal
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import roq.log.store.process
import roq.pubsub.exchange.process
import roq.pubsub.monitor.process
import roq.pubsub.scaling.process
import roq.workqueue.master.process
from gcm.process import serve as serve_gcm
from hcm.process import HostManager
from hcm.supervisor import Event, Exited, Forked, ForkFailed, ProcessReady
from roq.config import GcmConfig, HcmConfig
from roq.errors import RoqError
from roq.groups.feed import feed
from roq.groups.outbox import forward
from roq.runtime.observe import Counters
from roq.shuffle.node.server import beside_store
from roq.tools.simulation.disks import SimulatedDisk
from roq.tools.simulation.loop import PROCESS, Fate, Process, SimulatedLoop
from roq.tools.simulation.network import Network
from roq.wire.assignment import ProcessKind
from roq.wire.process import ChildSpec
from roq.workqueue.master.process import BesidePrograms

FORK_SECONDS, FORK_SERVER_SECONDS, DATAGRAM_SECONDS = 0.004, 0.05, 0.0003
CLOCK_TICKS = os.sysconf("SC_CLK_TCK")
PROGRAMS: dict[ProcessKind, Callable[[ChildSpec, asyncio.Event], Awaitable[None]]] = {
    ProcessKind.MONITOR: roq.pubsub.monitor.process.serve,
    ProcessKind.EXCHANGE: roq.pubsub.exchange.process.serve,
    ProcessKind.SCALING: roq.pubsub.scaling.process.serve,
    ProcessKind.STORE: partial(roq.log.store.process.serve, beside=beside_store),
    ProcessKind.MASTER: partial(roq.workqueue.master.process.serve, programs=BesidePrograms(feed, forward)),
}

_pids = itertools.count(1)


class Machine:
    """One machine of the cluster: its address, its folder, its processes by pid."""

    def __init__(self, name: str, address: str, network: Network, folder: Path) -> None:
        self.name, self.address, self.network, self.folder = name, address, network, folder
        self.loop: SimulatedLoop = network.loop
        self.processes: dict[int, Process] = {}
        self.started: dict[int, int] = {}  # pid -> clock ticks
        self.stops: dict[int, asyncio.Event] = {}
        self.children: SimulatedChildren | None = None
        self.powered = True
        self.disk = SimulatedDisk(self.loop, network.random, folder / "store")
        self.ended: list[tuple[str, str]] = []  # processes that ended by themselves, and how
        self.on_gone: Callable[[Process], object] = lambda process: None

    def run(self, name: str, program: Callable[[asyncio.Event], Coroutine[Any, Any, None]]) -> Process:
        """Start a process; it runs until `program` returns or fails, or it is killed."""
        pid = next(_pids)
        process = Process(name, self.address, pid)
        stop = asyncio.Event()
        self.processes[pid], self.stops[pid] = process, stop
        self.started[pid] = round(self.loop.time() * CLOCK_TICKS)
        process.on_end.append(lambda: self._gone(process))
        context = contextvars.copy_context()
        context.run(PROCESS.set, process)
        self.loop.note("start", name)
        self.loop.create_task(self._body(process, program, stop), name=name, context=context)
        return process

    async def _body(
        self, process: Process, program: Callable[[asyncio.Event], Coroutine[Any, Any, None]], stop: asyncio.Event
    ) -> None:
        how = "ended"
        try:
            await program(stop)
        except RoqError as error:
            how = f"{type(error).__name__}: {error}"
        except Exception as error:  # noqa: BLE001 - a defect, which the run reports
            how = f"DEFECT {type(error).__name__}: {error}"
            self.ended.append((process.name, how))
        self.loop.call_soon(self._exit, process, context=self.network.context)

    def _exit(self, process: Process) -> None:
        self.network.killed(process)
        self.loop.kill(process)

    def _gone(self, process: Process) -> None:
        self.loop.note("end", process.name)
        self.on_gone(process)
        self.processes.pop(process.pid, None)
        self.stops.pop(process.pid, None)
        if self.children is not None:
            self.children.exited(process.pid)

    def kill(self, process: Process, *, silently: bool = False) -> None:
        """kill -9."""
        self.network.killed(process, silently=silently)
        self.loop.kill(process)

    def named(self, name: str) -> list[Process]:
        """Its living processes whose name begins like this."""
        return [process for process in self.processes.values() if process.name.startswith(name)]

    def lose_power(self) -> None:
        """Everything stops at once, and nobody is told."""
        self.powered = False
        self.network.lose_power(self.address)
        for process in list(self.processes.values()):
            self.kill(process, silently=True)
        self.disk.lose_power()

    def regain_power(self) -> None:
        """Nothing runs yet."""
        self.powered = True
        self.network.regain_power(self.address)


class HostMachine(Machine):
    """A machine with an HCM."""

    def __init__(self, name: str, address: str, network: Network, folder: Path, zookeeper: str, session_seconds: float) -> None:
        super().__init__(name, address, network, folder)
        self._config = HcmConfig(
            host=name,
            address=address,
            zookeeper=zookeeper,
            state_dir=folder,
            session_seconds=session_seconds,
            port=6000,
            control_port=6001,
        )

    def start_hcm(self) -> Process:
        """Its service manager does."""

        async def program(stop: asyncio.Event) -> None:
            manager = HostManager(self._config, stop)
            process = PROCESS.get()
            assert process is not None
            process.on_end.append(manager.release)
            await manager.run()

        return self.run("hcm", program)


class GcmMachine(Machine):
    """A machine with a GCM."""

    def __init__(self, name: str, address: str, network: Network, folder: Path, zookeeper: str, session_seconds: float) -> None:
        super().__init__(name, address, network, folder)
        self._config = GcmConfig(
            name=name, address=address, zookeeper=zookeeper, session_seconds=session_seconds, port=5000, broadcast_port=5001
        )

    def start_gcm(self) -> Process:
        """Its service manager does."""
        return self.run("gcm", lambda stop: serve_gcm(self._config, stop, lambda ready: None))


class SimulatedChildren:
    """In place of hcm.children.Children: the same face, with the machine's processes behind it."""

    machines: ClassVar[dict[str, Machine]] = {}  # by address

    def __init__(self, directory: Path, programs: str, counters: Counters, on_event: Callable[[str, Event], None]) -> None:
        process = PROCESS.get()
        assert process is not None
        self._machine, self._on_event, self._counters = self.machines[process.address], on_event, counters
        self._loop = self._machine.loop
        self._context = contextvars.copy_context()
        self.ready_path = process.address
        self._watched: dict[int, str] = {}
        self._early: set[int] = set()
        self._machine.children = self

    async def start(self) -> None:
        """The fork server comes up."""
        await asyncio.sleep(FORK_SERVER_SECONDS)

    def fork(self, spec: ChildSpec) -> None:
        """Forked or ForkFailed follows."""
        self._loop.call_later(FORK_SECONDS, self._fork, spec)

    def _fork(self, spec: ChildSpec) -> None:
        name, program = spec.process.name, PROGRAMS.get(spec.process.kind)
        if program is None:
            self._on_event(name, ForkFailed(f"no {spec.process.kind} in a simulation"))
            return
        if spec.process.kind is ProcessKind.STORE:
            Path(spec.data_dir).mkdir(parents=True, exist_ok=True)  # as the store's `main` does
        run = program
        process = self._machine.run(name, lambda stop: _coroutine(run(spec, stop)))
        self._watched[process.pid] = name
        self._counters["forks"] += 1
        self._on_event(name, Forked(process.pid))
        if process.pid in self._early:
            self._early.discard(process.pid)
            self._on_event(name, ProcessReady(process.pid))

    def adopt(self, name: str, pid: int, started: int, log_path: Path) -> bool:
        """Watch what an earlier HCM left."""
        if pid not in self._machine.processes or self._machine.started[pid] != started:
            return False
        self._watched[pid] = name
        return True

    def ready(self, pid: int, name: str) -> None:
        """Its datagram has come."""
        if pid in self._watched:
            self._on_event(name, ProcessReady(pid))
        else:
            self._early.add(pid)

    def exited(self, pid: int) -> None:
        """Any process of the machine."""
        if pid in self._watched:
            self._loop.call_later(DATAGRAM_SECONDS, self._tell_exit, pid, context=self._context)

    def _tell_exit(self, pid: int) -> None:
        name = self._watched.pop(pid, None)
        if name is not None:
            self._on_event(name, Exited(pid, "it ended"))

    def signal(self, pid: int, number: signal.Signals) -> None:
        """To a watched process."""
        process = self._machine.processes.get(pid)
        if process is None or pid not in self._watched:
            return
        if number == signal.SIGKILL:
            self._machine.kill(process)
        elif process.fate is Fate.ALIVE:
            self._machine.stops[pid].set()

    def tick(self, now: float) -> None:
        """Nothing hangs here by itself."""

    async def close(self) -> None:
        """Its children live on."""
        if self._machine.children is self:
            self._machine.children = None


async def _coroutine(awaitable: Awaitable[None]) -> None:
    await awaitable


def send_datagram(data: bytes, path: str) -> None:
    """In place of roq.runtime.liveness.send_datagram."""
    machine = SimulatedChildren.machines[path]
    words = data.decode().split(" ", 2)

    def arrive() -> None:
        if machine.children is not None:
            machine.children.ready(int(words[1]), words[2])

    context = machine.children._context if machine.children is not None else None
    machine.loop.call_later(DATAGRAM_SECONDS, arrive, context=context)


def start_time(pid: int) -> int | None:
    """In place of roq.runtime.liveness.start_time."""
    for machine in SimulatedChildren.machines.values():
        if pid in machine.processes:
            return machine.started[pid]
    return None
