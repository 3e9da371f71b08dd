"""A simulated cluster: a coordinator, GCMs, hosts, clients; and how each fault is done to it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from random import Random
from typing import Any, TypeVar

import roq
from roq.errors import RoqError
from roq.tools.simulation.clocks import Wall
from roq.tools.simulation.coordination import SimulatedCoordinator
from roq.tools.simulation.faults import Fault, FaultKind
from roq.tools.simulation.load import Books, TrafficPattern, publish, subscribe
from roq.tools.simulation.loop import Fate, Process, SimulatedLoop
from roq.tools.simulation.machines import GcmMachine, HostMachine, Machine, SimulatedChildren
from roq.tools.simulation.network import Network

T = TypeVar("T")
COORDINATOR = "10.0.0.1"
ZOOKEEPER = f"{COORDINATOR}:2181"
QUEUE = "q"
RESTART_SECONDS = 0.3  # a service manager's
EXCHANGES_MAX = 4
ALL_CLOCKS_SHARE = 0.2  # of steps; the others are of one clock, half of them of a host's


class SimulatedCluster:
    """Everything of one run. Made in the loop's context; all else happens on its clock."""

    NEWCOMERS = ("subscriber", "publisher")
    LATE = 0  # hosts that are not there when it begins

    def __init__(
        self, loop: SimulatedLoop, network: Network, coordinator: SimulatedCoordinator, wall: Wall, folder: Path,
        random: Random, *, hosts: int, gcms: int, session_seconds: float,
    ) -> None:  # fmt: skip
        self.loop, self.network, self.coordinator, self.wall, self._random = loop, network, coordinator, wall, random
        self.books = Books(loop)
        self.gcms = [
            GcmMachine(f"gcm-{n}", f"10.0.1.{n}", network, folder / f"gcm-{n}", ZOOKEEPER, session_seconds)
            for n in range(1, gcms + 1)
        ]
        self.hosts = [
            HostMachine(f"host-{n}", f"10.0.2.{n}", network, folder / f"host-{n}", ZOOKEEPER, session_seconds)
            for n in range(1, hosts + 1)
        ]
        self.admin = Machine("admin", "10.0.4.1", network, folder)
        self.clients: list[Machine] = []
        self._client_of: dict[str, str] = {}  # machine -> publisher or subscriber
        self._folder = folder
        for host in self.hosts:
            host.on_gone = self._gone
        SimulatedChildren.machines = {machine.address: machine for machine in (*self.gcms, *self.hosts)}
        self.traffic = TrafficPattern(20.0, 1, 1)  # of each publisher
        self.trace: list[str] = []
        self._healing: list[Callable[[], None]] = []  # what still has to be undone
        self._began = loop.time()

    def _gone(self, process: Process) -> None:
        if process.name.startswith("monitor/"):
            self.books.monitors_ended.append(self.loop.time())

    def start(self) -> None:
        """GCMs and HCMs."""
        for gcm in self.gcms:
            gcm.start_gcm()
        for host in self.hosts[: len(self.hosts) - self.LATE]:
            host.start_hcm()

    def client(self, what: str) -> Machine:
        """One more publisher or subscriber, on a machine of its own."""
        number = len(self.clients) + 1
        label = f"{what}-{number}"
        machine = Machine(label, f"10.0.3.{number}", self.network, self._folder)
        self.clients.append(machine)
        self._client_of[machine.name] = what
        random = Random(self._random.getrandbits(64))
        machine.run(label, lambda stop: self._program(what, label, random, stop))
        return machine

    def _program(self, what: str, label: str, random: Random, stop: asyncio.Event) -> Coroutine[Any, Any, None]:
        if what == "publisher":
            return publish(self.books, ZOOKEEPER, QUEUE, label, self.traffic, random, stop)
        return subscribe(self.books, ZOOKEEPER, QUEUE, label, stop)

    async def administer(self, work: Callable[[roq.Cluster], Any]) -> None:
        """Do something as an administrator; returns when it is done. Raises TimeoutError, and what `work` raises."""
        done: asyncio.Future[None] = self.loop.create_future()

        async def program(stop: asyncio.Event) -> None:
            try:
                async with roq.connect(ZOOKEEPER, connect_seconds=60.0) as cluster:
                    await work(cluster)
            except RoqError as error:
                done.set_exception(error)
            else:
                done.set_result(None)

        self.admin.run("admin", program)
        async with asyncio.timeout(120):
            await done

    def told(self, what: str) -> None:
        """A line of the trace."""
        self.loop.note("fault", what)
        self.trace.append(f"{self.loop.time() - self._began:8.3f} s  {what}")

    # --- faults -------------------------------------------------------------------------------------------------------

    def _later(self, seconds: float, undo: Callable[[], None]) -> None:
        """Undo a fault then, or when everything is healed."""
        state = [undo]

        def run() -> None:
            if state:
                state.pop()()

        self._healing.append(run)
        self.loop.call_later(seconds, run)

    def heal(self) -> None:
        """Undo everything that lasts."""
        healing, self._healing = self._healing, []
        for undo in healing:
            undo()
        self.told("everything is healed")

    def do(self, fault: Fault) -> None:
        """Let it happen, if there is somebody it can happen to."""
        match fault.kind:
            case FaultKind.KILL_CHILD | FaultKind.STOP_CHILD:
                self._hurt_child(fault)
            case FaultKind.KILL_HCM:
                self._kill_daemon(fault, self.hosts, "hcm", lambda host: host.start_hcm())
            case FaultKind.KILL_GCM:
                self._kill_daemon(fault, self.gcms, "gcm", lambda gcm: gcm.start_gcm())
            case FaultKind.LOSE_POWER:
                self._lose_power(fault)
            case FaultKind.CUT_HOST | FaultKind.CUT_HOST_ONE_WAY | FaultKind.CUT_COORDINATOR | FaultKind.CUT_CLIENT:
                self._cut(fault)
            case FaultKind.EXPIRE:
                sessions = sorted(self.coordinator.tree.sessions)
                if sessions:
                    session = _one(sessions, fault.choice)
                    self.told(f"session {session:#x} expires")
                    self.coordinator.expire(session)
            case FaultKind.STOP_CLIENT | FaultKind.KILL_CLIENT:
                self._hurt_client(fault)
            case FaultKind.NEW_CLIENT:
                what = self.NEWCOMERS[0 if fault.choice < 0.6 else 1]
                self.told(f"{what}-{len(self.clients) + 1} comes")
                self.client(what)
            case FaultKind.SLOW_HOST:
                host = _one(self.hosts, fault.choice)
                self.told(f"{host.name}'s network is slow for {fault.seconds:.2f} s")
                self.network.slow(host.address, 0.3 * fault.second)
                self._later(fault.seconds, lambda: self.network.slow(host.address, 0.0))
            case FaultKind.ADD_EXCHANGE | FaultKind.MOVE_PUBLISHERS | FaultKind.REMOVE_EXCHANGE:
                self._administer(fault)
            case FaultKind.STEP_CLOCK:
                self._step_clock(fault)
            case FaultKind.LEAVE_HOST:
                self._leave(fault)
            case FaultKind.REJECT_CLIENTS:
                self._reject(fault)

    def _reject(self, fault: Fault) -> None:
        host = _one(self.hosts, fault.choice)
        ways = [way for one in self.clients for way in ((host.address, one.address), (one.address, host.address))]
        self.told(f"{host.name} and all clients reset each other's connections for {fault.seconds:.2f} s")
        for way in ways:
            self.network.reject(*way)

        def heal() -> None:
            for way in ways:
                self.network.accept(*way)

        self._later(fault.seconds, heal)

    def _leave(self, fault: Fault) -> None:
        """For some seconds, then it is taken back, however far that is. Refused where the others could not take it."""
        host, everything = _one(self.hosts, fault.choice), fault.second < 0.7
        self.told(f"{host.name} is {'evacuated' if everything else 'drained'}")

        async def program(stop: asyncio.Event) -> None:
            async with roq.connect(ZOOKEEPER) as cluster:
                await (cluster.evacuate_host if everything else cluster.drain_host)(host.name)

        async def take_back(stop: asyncio.Event) -> None:
            async with roq.connect(ZOOKEEPER) as cluster:
                remains = await cluster.host_remains(host.name)
                self.told(f"{host.name} is taken back, {'empty' if remains.left else 'not empty'}")
                await cluster.cordon_host(host.name, False)

        def end() -> None:
            self.admin.run("admin", take_back)

        self.admin.run("admin", program)
        self._later(3.0 + 2 * fault.seconds, end)

    def _step_clock(self, fault: Fault) -> None:
        """Of one machine, or of all."""
        machines = [(one.name, one.address) for one in (*self.hosts, *self.gcms, *self.clients, self.admin)]
        machines.append(("the coordinator", COORDINATOR))
        seconds, drawn = (fault.choice - 0.5) * 20, (fault.second - ALL_CLOCKS_SHARE) / (1 - ALL_CLOCKS_SHARE)
        if drawn < 0:
            self.told(f"all wall clocks step by {seconds:+.1f} s")
        else:
            machines = [_one(machines[: len(self.hosts)] if drawn < 0.5 else machines, drawn * 2 % 1)]
            self.told(f"the wall clock of {machines[0][0]} steps by {seconds:+.1f} s")
        for _, address in machines:
            self.wall.step(address, seconds)

    def _administer(self, fault: Fault) -> None:
        """Ask for it, once; whether it is done depends on what else happens."""
        self.told(str(fault.kind))

        async def work(cluster: roq.Cluster) -> None:
            info = await cluster.queue(QUEUE)
            exchanges = sorted(info.record.exchanges)
            match fault.kind:
                case FaultKind.ADD_EXCHANGE:
                    if len(exchanges) < EXCHANGES_MAX:
                        await cluster.create_exchange(QUEUE)
                case FaultKind.MOVE_PUBLISHERS:
                    target = _one(exchanges, fault.choice)
                    await cluster.move(QUEUE, [(one.id, target) for one in self.books.published if one.id and not one.closed])
                case _:
                    await cluster.remove_exchange(QUEUE, _one(exchanges, fault.choice))

        async def program(stop: asyncio.Event) -> None:
            async with roq.connect(ZOOKEEPER) as cluster:
                await work(cluster)

        self.admin.run("admin", program)

    def _children(self) -> list[tuple[HostMachine, Process]]:
        return [
            (host, process)
            for host in self.hosts
            for process in host.processes.values()
            if process.name != "hcm" and process.fate is Fate.ALIVE
        ]

    def _hurt_child(self, fault: Fault) -> None:
        children = self._children()
        if not children:
            return
        host, process = _one(children, fault.choice)
        if fault.kind is FaultKind.KILL_CHILD:
            self.told(f"{process.name} on {host.name} is killed")
            host.kill(process)
        else:
            self._stop(process, fault.seconds, f"{process.name} on {host.name}")

    def _stop(self, process: Process, seconds: float, name: str) -> None:
        self.told(f"{name} stands still for {seconds:.2f} s")
        self.loop.stop_process(process)
        self._later(seconds, lambda: self.loop.go_on(process))

    def _kill_daemon(self, fault: Fault, machines: Sequence[Any], name: str, start: Callable[[Any], object]) -> None:
        machine = _one(machines, fault.choice)
        found = machine.named(name)
        if not machine.powered or not found:
            return
        self.told(f"the {name.upper()} of {machine.name} is killed, back after {fault.seconds:.2f} s")
        machine.kill(found[0])
        self._restart(machine, name, fault.seconds, start)

    def _restart(self, machine: Any, name: str, seconds: float, start: Callable[[Any], object]) -> None:
        def again() -> None:
            if machine.powered and not machine.named(name):
                self.told(f"the {name.upper()} of {machine.name} is started")
                start(machine)

        self._later(seconds + RESTART_SECONDS, again)

    def _lose_power(self, fault: Fault) -> None:
        host = _one(self.hosts, fault.choice)
        if not host.powered:
            return
        self.told(f"{host.name} loses power for {fault.seconds:.2f} s")
        host.lose_power()

        self._later(fault.seconds + RESTART_SECONDS, lambda: self._back(host))

    def _back(self, host: HostMachine) -> None:
        self.told(f"{host.name} has power again")
        host.regain_power()
        host.start_hcm()

    def _cut(self, fault: Fault) -> None:
        host = _one(self.hosts, fault.choice)
        others = [machine.address for machine in (*self.hosts, *self.gcms, *self.clients) if machine is not host]
        match fault.kind:
            case FaultKind.CUT_CLIENT:
                if not self.clients:
                    return
                client = _one(self.clients, fault.second)
                ways = [(host.address, client.address), (client.address, host.address)]
                self.told(f"{client.name} and {host.name} don't hear each other for {fault.seconds:.2f} s")
            case FaultKind.CUT_COORDINATOR:
                ways = [(host.address, COORDINATOR), (COORDINATOR, host.address)]
                self.told(f"{host.name} is cut off from the coordinator for {fault.seconds:.2f} s")
            case FaultKind.CUT_HOST:
                ways = [way for other in (*others, COORDINATOR) for way in ((host.address, other), (other, host.address))]
                self.told(f"{host.name} is cut off from everybody for {fault.seconds:.2f} s")
            case _:
                ways = [(host.address, other) for other in (*others, COORDINATOR)]
                self.told(f"nobody hears {host.name} for {fault.seconds:.2f} s")
        for way in ways:
            self.network.cut(*way)

        def heal() -> None:
            for way in ways:
                self.network.heal(*way)

        self._later(fault.seconds, heal)

    def _hurt_client(self, fault: Fault) -> None:
        living = [
            (machine, process)
            for machine in self.clients
            for process in machine.processes.values()
            if process.fate is Fate.ALIVE
        ]
        if not living:
            return
        machine, process = _one(living, fault.choice)
        if fault.kind is FaultKind.STOP_CLIENT:
            self._stop(process, fault.seconds, machine.name)
            return
        what = self._client_of[machine.name]
        self.told(f"{machine.name} is killed, {what}-{len(self.clients) + 1} comes")
        machine.kill(process)
        for book in self.books.received:
            if book.label == machine.name:
                book.over = True
        for published in self.books.published:
            if published.label == machine.name:
                published.killed = self.loop.time()
        self.client(what)

    async def stop_clients(self, what: str, seconds: float) -> None:
        """Politely; returns when they have ended, or then."""
        chosen = [machine for machine in self.clients if self._client_of[machine.name] == what]
        ended = asyncio.Event()
        for machine in chosen:
            machine.on_gone = lambda process: ended.set()
            for stop in machine.stops.values():
                stop.set()
        try:
            async with asyncio.timeout(seconds):
                while any(machine.processes for machine in chosen):
                    ended.clear()
                    await ended.wait()
        except TimeoutError:
            self.books.errors.append(f"{what}s did not end within {seconds:g} s")

    def end(self) -> None:
        """The run is over."""
        for machine in (*self.gcms, *self.hosts, *self.clients, self.admin):
            for process in list(machine.processes.values()):
                machine.kill(process, silently=True)

    def defects(self) -> list[str]:
        """Programs that failed with what is no RoqError."""
        machines: list[Machine] = [*self.gcms, *self.hosts, *self.clients, self.admin]
        return [f"{machine.name}: {name}: {how}" for machine in machines for name, how in machine.ended]


def _one(those: Sequence[T], choice: float) -> T:
    return those[int(choice * len(those))]
