"""DockerCluster: a cluster of containers, each with its own address, for tests that inject every kind of fault.

Programs of the test run on the machine itself and reach the containers' addresses through the network's bridge (so the engine
must run on this Linux machine, not in a virtual machine beside it).
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from roq.errors import CallError, DeadlineExceeded, ProcessFailed, RoqError
from roq.runtime.observe import logger
from roq.testing.cluster import CLIENT, FORK_SERVER, GCM, HCM, Cut, HostProcess, NotPossible, TestedCluster, names
from roq.testing.engine import STOP_SECONDS, Engine
from roq.testing.links import DELAY_QUEUE, Links
from roq.tools.local.cluster import GCM_BROADCAST_PORT, GCM_PORT, HCM_PORT, HCM_PORT_BASE
from roq.tools.local.zookeeper import server_status, takes_sessions

log = logger(__name__)

IMAGE = "roq-test:latest"
CHROOT = "/RoQ"
ZOOKEEPER_PORT = 2181
FIRST_ADDRESS = {"zookeeper": 11, "gcm": 31, "host": 51}  # last byte
MACHINES_MAX = 20  # of one role
USER_ID = 550  # docker/base.sh
STATE, CLOCK = Path("/var/lib/roq"), Path("/etc/roq/clock")
FILLER, ONCE = STATE / "filler", STATE / "once"
SHOW_LOGS = f"tail -q -c 200000 {STATE}/logs/*.log"
SYSTEM = ("zookeeper", "gcm", "host")
NANO = 1_000_000_000


@dataclass
class Container:
    """One container."""

    name: str
    role: str
    number: int  # from 1
    address: str
    container: Any = None


class DockerCluster(TestedCluster):
    """`async with DockerCluster(gcms=2, hcms=3) as cluster`.

    zookeepers: 1 or 3. state_megabytes: size of each host's state directory, which is then in memory and empty after a
    restart; 0: as large as the disk, and kept. host_cpus: processors that each host may use, 0.1 is a tenth of one; 0: all.
    image: as built by `make image`. logs: directory that gets every container's log when the cluster closes, and the end of
    those of its processes.
    """

    def __init__(
        self,
        *,
        zookeepers: int = 1,
        gcms: int = 2,
        hcms: int = 3,
        session_seconds: float = 4.0,
        exchanges_max: int = 8,
        state_megabytes: int = 0,
        host_cpus: float = 0.0,
        image: str = IMAGE,
        logs: Path | None = None,
        start_seconds: float = 60.0,
    ) -> None:
        if zookeepers not in (1, 3) or not 1 <= gcms <= MACHINES_MAX or not 0 <= hcms <= MACHINES_MAX:
            raise CallError(f"a cluster has 1 or 3 ZooKeepers, 1 to {MACHINES_MAX} GCMs and up to {MACHINES_MAX} hosts")
        self.session_seconds = session_seconds
        self._exchanges_max, self._state_megabytes, self._host_cpus = exchanges_max, state_megabytes, host_cpus
        self._image, self._logs, self._start_seconds = image, logs, start_seconds
        self.token = secrets.token_hex(4)
        self._counts = dict(zip(SYSTEM, (zookeepers, gcms, hcms), strict=True))
        self._machines: dict[str, Container] = {}
        self._engine: Engine | None = None
        self._network: Any = None
        self._subnet: Any = None
        self._links = Links({})
        self._delays: dict[str, tuple[float, float]] = {}  # seconds and jitter by name

    @property
    def zookeeper(self) -> str:
        """All ZooKeepers' addresses, and the chroot."""
        return ",".join(f"{self.address(name)}:{ZOOKEEPER_PORT}" for name in self.zookeepers) + CHROOT

    def address(self, name: str) -> str:
        """IP address of a machine, or of this one as the machines see it (CLIENT)."""
        self._check_names(name)
        return self._links.addresses[name]

    def hcm_port(self, host: str) -> int:
        """Port of a host's own interface."""
        return HCM_PORT

    # --- open and close ---------------------------------------------------------------------------------------------------

    async def open(self) -> None:
        """Sweep what crashed runs left, then make network and containers. Raises NotPossible without engine or image."""
        self._engine = engine = await asyncio.to_thread(Engine)
        try:
            await engine.sweep()
            if not await engine.image_there(self._image):
                raise NotPossible(f"the Docker engine has no image {self._image}: build it with `make image` in RoQ's sources")
            self._network, subnet = await engine.network(self.token)
            for role in SYSTEM:
                for number in range(1, self._counts[role] + 1):
                    name = f"{role}-{number}"
                    self._machines[name] = Container(name, role, number, str(subnet[FIRST_ADDRESS[role] + number - 1]))
            self._subnet = subnet
            self._links = Links({CLIENT: str(subnet[1])})
            self._named()
            await self._start_all()
        except BaseException:
            await self.close()
            raise

    def _named(self) -> None:
        """Machines have come or gone."""
        self.zookeepers, self.gcms, self.hosts = (self._of(role) for role in SYSTEM)
        self._links.addresses = {CLIENT: self.address(CLIENT)} | {name: each.address for name, each in self._machines.items()}

    def _of(self, role: str) -> tuple[str, ...]:
        return tuple(name for name, machine in self._machines.items() if machine.role == role)

    async def _start_all(self) -> None:
        until = time.monotonic() + self._start_seconds
        await asyncio.gather(*(self._create(machine) for machine in self._machines.values()))
        await asyncio.gather(*(self.start(name) for name in self.zookeepers))
        await asyncio.gather(*(self._serves(name, until) for name in self.zookeepers))
        await asyncio.gather(*(self.start(name) for name in (*self.gcms, *self.hosts)))
        await self.wait_hosts(len(self.hosts), timeout_seconds=max(1.0, until - time.monotonic()))

    async def _create(self, machine: Container) -> None:
        size = f"size={self._state_megabytes}m,mode=755,uid={USER_ID},gid={USER_ID}"
        tmpfs = {str(STATE): size} if self._state_megabytes and machine.role == "host" else {}
        limited = {"nano_cpus": int(self._host_cpus * NANO)} if self._host_cpus and machine.role == "host" else {}
        machine.container = await self._docker.container(
            self.token,
            machine.name,
            self._image,
            self._command(machine),
            network=self._network,
            address=machine.address,
            environment={},
            tmpfs=tmpfs,
            options=limited,
        )

    def _command(self, machine: Container) -> list[str]:
        if machine.role == "zookeeper":
            return ["zookeeper", str(machine.number), *(self.address(name) for name in self.zookeepers)]
        flags: dict[str, object] = {
            "--zookeeper": self.zookeeper,
            "--address": machine.address,
            "--security": "none",  # nobody else reaches these containers
            "--session-seconds": self.session_seconds,
        }
        if machine.role == "gcm":
            own = {"--name": machine.name, "--port": GCM_PORT, "--broadcast-port": GCM_BROADCAST_PORT}
            module, last = "gcm", []
        else:
            own = {"--host": machine.name, "--port": HCM_PORT, "--port-base": HCM_PORT_BASE, "--state-dir": STATE}
            own["--exchanges-max"] = self._exchanges_max
            module, last = "hcm", ["--no-keep-children"]  # a stopped container takes its processes with it anyway
        arguments = [str(part) for pair in {**flags, **own}.items() for part in pair]
        return ["supervise", "python3", "-m", module, *arguments, *last]

    async def _serves(self, name: str, until: float) -> None:
        async def serves() -> bool:
            try:
                return takes_sessions(await server_status(self.address(name), ZOOKEEPER_PORT))
            except OSError as error:
                raise ProcessFailed(f"{name} at {self.address(name)}: {error}") from error

        try:
            await self.wait_for(serves, f"{name} serves", max(1.0, until - time.monotonic()))
        except DeadlineExceeded as error:
            raise DeadlineExceeded(f"{error}\n{await self.log(name)}") from None

    async def close(self) -> None:
        """Save the logs, remove containers and network."""
        engine, self._engine = self._engine, None
        if engine is None:
            return
        try:
            if self._logs is not None:
                self._logs.mkdir(parents=True, exist_ok=True)
                for machine in self._machines.values():
                    await self._save_logs(engine, machine, self._logs / f"{machine.name}.log")
        except (OSError, RoqError) as error:
            log.warning("container logs could not be saved", extra={"fields": {"reason": str(error)}})
        finally:
            await asyncio.shield(engine.remove(self.token))
            await asyncio.to_thread(engine.close)
            self._machines.clear()

    async def _save_logs(self, engine: Engine, machine: Container, file: Path) -> None:
        if machine.container is None:
            return
        with file.open("wb") as saved:
            saved.write(await engine.call(machine.container.logs))
            if machine.role == "host":
                with suppress(RoqError):  # it was stopped
                    saved.write((await engine.run(machine.container, SHOW_LOGS)).encode())

    @property
    def _docker(self) -> Engine:
        if self._engine is None:
            raise CallError("this cluster is not open")
        return self._engine

    def _machine(self, name: str) -> Container:
        self._check_names(name)
        if name == CLIENT:
            raise CallError("the machine the test runs on is left alone")
        return self._machines[name]

    async def log(self, name: str, lines: int = 20) -> str:
        """The end of a machine's log."""
        text: bytes = await self._docker.call(self._machine(name).container.logs, tail=lines)
        return text.decode(errors="replace")

    async def run(self, name: str, script: str) -> str:
        """Run a shell script on a machine, as root; what it printed. Raises ProcessFailed if it fails."""
        return await self._docker.run(self._machine(name).container, script)

    # --- machines -------------------------------------------------------------------------------------------------------

    async def kill(self, name: str) -> None:
        """SIGKILL of the whole container."""
        await self._docker.call(self._machine(name).container.kill)

    async def stop(self, name: str) -> None:
        """SIGTERM; a host stops its processes first."""
        await self._docker.call(self._machine(name).container.stop, timeout=STOP_SECONDS)

    async def start(self, name: str) -> None:
        """Start a created, stopped or killed container; the partitions it belongs to hold again."""
        await self._docker.call(self._machine(name).container.start)
        if name in self._delays:
            await self._hold_back(name)
        if self._links.concern(name):
            await self._apply(name)

    async def add_host(self) -> str:
        """Start one more host, with a name and an address no host had before; its name. It joins when the leader sees it."""
        number = self._counts["host"] + 1
        if number > MACHINES_MAX:
            raise CallError(f"a cluster has up to {MACHINES_MAX} hosts in its life")
        self._counts["host"] = number
        machine = Container(f"host-{number}", "host", number, str(self._subnet[FIRST_ADDRESS["host"] + number - 1]))
        await self._create(machine)
        self._machines[machine.name] = machine
        self._named()
        await self.start(machine.name)
        return machine.name

    async def remove_host(self, name: str) -> None:
        """Take a host away for good with all it has, whatever state it is in."""
        machine = self._machine(name)
        if machine.role != "host":
            raise NotPossible(f"{name} is no host")
        await self._docker.call(machine.container.remove, force=True, v=True)
        self._delays.pop(name, None)
        self._links.forget(name)
        del self._machines[name]
        self._named()

    async def pause(self, name: str) -> None:
        """Freeze a container. Nothing else can be done to it until it is unpaused."""
        await self._docker.call(self._machine(name).container.pause)

    async def unpause(self, name: str) -> None:
        """Let it go on."""
        await self._docker.call(self._machine(name).container.unpause)

    async def clock(self, name: str, offset_seconds: float) -> None:
        """Stop a machine and start it again with another wall clock; 0: the true one."""
        machine = self._machine(name)
        if machine.role == "zookeeper":
            raise NotPossible("the clock of ZooKeeper's Java is not moved")
        await self.stop(name)
        await self._docker.write(machine.container, CLOCK, f"{offset_seconds:+g}" if offset_seconds else "")
        await self.start(name)

    async def disk_full(self, name: str) -> None:
        """Needs state_megabytes."""
        if not self._state_megabytes:
            raise NotPossible("disk_full needs DockerCluster(state_megabytes=…)")
        fill = f"dd if=/dev/zero of={FILLER} bs=4k 2>/dev/null; printf x >>{FILLER} 2>/dev/null && exit 1; exit 0"
        await self.run(name, fill)

    async def disk_free(self, name: str) -> None:
        """Remove what fills the disk."""
        await self.run(name, f"rm -f {FILLER}")

    # --- processes ------------------------------------------------------------------------------------------------------

    async def processes(self, name: str) -> list[HostProcess]:
        """See TestedCluster."""
        return await self._named_processes(name, await self._programs(name))

    async def _programs(self, name: str) -> dict[int, str]:
        """What RoQ's processes call themselves, by pid."""
        listing = await self.run(name, "ps -e -o pid=,stat=,comm=")
        found = {int(pid): comm for pid, stat, comm in (line.split(None, 2) for line in listing.splitlines()) if stat[0] != "Z"}
        return {pid: comm.strip() for pid, comm in found.items() if comm.startswith("roq-")}

    async def system_processes(self, name: str) -> list[HostProcess]:
        """By what they call themselves: names as only the HCM tells them are asked of it in the containers' own pids."""
        listing = await self._docker.call(self._machine(name).container.top, ps_args="-e -o pid,comm")
        found = ((int(pid), comm) for pid, comm in listing["Processes"] or ())  # None: it is just starting
        return [HostProcess(comm, pid) for pid, comm in found if comm.startswith("roq-")]

    async def kill_process(self, name: str, process: str) -> int:
        """SIGKILL one process, named as `processes` tells it."""
        return await self._signal(name, process, "KILL")

    async def restart_daemon(self, name: str, **environment: str) -> None:
        """End a GCM or HCM cleanly. Its successor, and only that one, has these environment variables besides."""
        daemon = GCM if self._machine(name).role == "gcm" else HCM
        lines = "".join(f"{key}={value}\\n" for key, value in environment.items())
        await self.run(name, f"printf '{lines}' >{ONCE}")
        ended = await self._signal(name, daemon, "TERM")

        async def again() -> bool:
            return any(program == daemon and pid != ended for pid, program in (await self._programs(name)).items())

        await self.wait_for(again, f"{daemon} on {name} is started again")

    async def pause_process(self, name: str, process: str) -> int:
        """SIGSTOP."""
        return await self._signal(name, process, "STOP")

    async def unpause_process(self, name: str, pid: int) -> None:
        """SIGCONT."""
        await self.run(name, f"kill -CONT {pid} 2>/dev/null || true")

    async def _signal(self, name: str, process: str, signal: str) -> int:
        if process in (HCM, GCM, FORK_SERVER):  # an HCM that hangs need not be asked
            there = [(program, pid) for pid, program in (await self._programs(name)).items()]
        else:
            there = [(found.name, found.pid) for found in await self.processes(name)]
        for pid in [pid for found, pid in there if found == process][:1]:
            await self.run(name, f"kill -{signal} {pid}")
            return pid
        raise ProcessFailed(f"no process {process} on {name}, but {there}")

    # --- network --------------------------------------------------------------------------------------------------------

    async def partition_one_way(self, source: str | Iterable[str], target: str | Iterable[str], *, how: Cut = Cut.DROP) -> None:
        """Machines must run; a paused one can't be told."""
        sources, targets = names(source), names(target)
        self._check_names(*sources, *targets)
        await self._apply(*self._links.block(sources, targets, how))

    async def delay(self, name: str, milliseconds: float, jitter_milliseconds: float = 0.0) -> None:
        """Holds packets back in a program inside the machine, so that the kernel needs no netem."""
        self._machine(name)
        self._delays[name] = (milliseconds / 1000, jitter_milliseconds / 1000)
        self._links.delayed.add(name)
        await self._hold_back(name)
        await self._apply(name)

    async def _hold_back(self, name: str) -> None:
        seconds, jitter = self._delays[name]
        end = "[ ! -f /run/delay ] || kill $(cat /run/delay) 2>/dev/null; rm -f /run/delay"
        begin = f"setsid delay {DELAY_QUEUE} {seconds:g} {jitter:g} </dev/null >/run/delay.log 2>&1 &"
        wait = "for try in $(seq 100); do [ -f /run/delay ] && exit 0; sleep 0.05; done; cat /run/delay.log; exit 1"
        await self.run(name, f"{end}; {begin} {wait}")

    async def heal(self) -> None:
        """Open all ways, end delays, free disks. Machines that are down have nothing to heal."""
        self._delays.clear()
        await self._apply(*self._links.heal())
        if self._state_megabytes:
            for name in self.hosts:
                if await self._runs(name):
                    await self.disk_free(name)

    async def _runs(self, name: str) -> bool:
        container = self._machine(name).container
        await self._docker.call(container.reload)
        return bool(container.status == "running")

    async def _apply(self, *changed: str) -> None:
        async def one(name: str) -> None:
            if await self._runs(name):
                rules = self._links.rules(name).replace("\n", "\\n")
                await self.run(name, f"printf '{rules}' | iptables-restore -w")

        await asyncio.gather(*(one(name) for name in changed))
