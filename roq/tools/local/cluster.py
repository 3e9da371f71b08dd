"""A whole cluster on this machine: a coordinator or ZooKeeper (unless given), GCMs, and hosts on loopback addresses of
their own.

For `roq up`, the demo, tests and the benchmark. Daemons are separate processes; every one is marked, so that stop() can
prove that nothing is left, forked children of a killed daemon included. A keeper ends them all if the starter dies without
stopping them. Nothing here is meant for production.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import subprocess
import sys
from pathlib import Path
from types import TracebackType

from roq.client.cluster import connect
from roq.coordination.link import DEFAULT_CHROOT, parse_address
from roq.errors import CallError, DeadlineExceeded, HostNotFound, PortTaken, ProcessFailed, RoqError, TemporaryError
from roq.runtime.backoff import delays
from roq.runtime.observe import logger
from roq.runtime.rpc import RpcClient
from roq.runtime.security import drop_card, known_card, use_card, write_secret
from roq.tools.authority import Authority
from roq.tools.local import elastic, leftovers, starter
from roq.tools.local.daemon import Daemon
from roq.tools.local.leftovers import Leftover
from roq.tools.local.loopback import LoopbackSubnet, port_free
from roq.tools.local.starter import ZOOKEEPER
from roq.tools.local.zookeeper import LocalCoordinator, LocalZooKeeper
from roq.wire import hcm as hcm_wire
from roq.wire.card import CardRole, Grant, Right

log = logger(__name__)

GCM_PORT, GCM_BROADCAST_PORT, HCM_PORT, HCM_PORT_BASE = 5500, 5501, 5510, 7000  # every daemon has an address of its own
FIRST_GCM, FIRST_HOST, HOSTS_MAX, GCMS_MAX = 1, 11, 240, 9  # last byte of the loopback addresses
HOST_STOP_SECONDS = 8.0  # a host stops its children cleanly
GCM_STOP_SECONDS = 4.0
JAVA = "java"
PASSED_ON = (
    "ROQ_LOG_LEVEL",
    "ROQ_SHUFFLE_MEMORY_BYTES",
)  # of the caller's ROQ_* settings; the others configure one daemon, not all of ours


class LocalCluster:
    """`async with LocalCluster(directory, gcms=2, hosts=2) as cluster: roq.connect(cluster.zookeeper)`.

    zookeeper: None: start RoQ's coordinator; "java": start a real ZooKeeper; else the address of a running ensemble
    ("h:p,h:p[/chroot]"). Logs and state go to `directory`, and the next cluster there goes on with it; what an earlier one
    left running is ended first. `leftovers` tells, after the stop, what had to be killed. command: what people would
    call the program that starts it. If this process dies, the cluster ends. secured: with an authority of its own in
    `directory`, and cards for all; until the stop this process uses the one at `card`, which has every right. elastic_hosts:
    the GCMs may start so many more, when Exchanges find no slot.
    """

    def __init__(  # noqa: PLR0913 - all by name
        self,
        directory: Path,
        *,
        gcms: int = 1,
        hosts: int = 1,
        zookeeper: str | None = None,
        zookeeper_port: int = 0,
        chroot: str | None = None,
        exchanges_max: int = 8,
        session_seconds: float = 6.0,
        start_seconds: float = 30.0,
        command: str = "a program",
        secured: bool = False,
        metrics_port: int = 0,
        elastic_hosts: int = 0,
    ) -> None:
        if not 1 <= gcms <= GCMS_MAX or not 0 <= hosts <= HOSTS_MAX:
            raise CallError(f"a local cluster has 1 to {GCMS_MAX} GCMs and up to {HOSTS_MAX} hosts, not {gcms} and {hosts}")
        self.directory = directory
        self.gcms: dict[str, Daemon] = {}
        self.hosts: dict[str, Daemon] = {}
        self.leftovers: list[Leftover] = []
        self._wanted_gcms, self._wanted_hosts = gcms, hosts
        self._given = parse_address(zookeeper) if zookeeper not in (None, JAVA) else None
        self._kind = LocalZooKeeper if zookeeper == JAVA else LocalCoordinator
        self._zookeeper_port = zookeeper_port
        self._chroot = chroot or (self._given.chroot if self._given else "") or DEFAULT_CHROOT
        self._exchanges_max, self._session_seconds = exchanges_max, session_seconds
        self._start_seconds = start_seconds
        self._secured = secured
        self._metrics_port, self._elastic = metrics_port, elastic_hosts
        self._token = secrets.token_hex(8)
        self._origin = starter.origin(directory, command)
        self._own_zookeeper: LocalZooKeeper | None = None
        self._ensemble = self._given.hosts if self._given else ""
        self._subnet: LoopbackSubnet | None = None
        self._claim: starter.Claim | None = None
        self._keeper: subprocess.Popen[bytes] | None = None

    @property
    def zookeeper(self) -> str:
        """What `roq.connect` takes: ZooKeeper's addresses and the chroot."""
        return self._ensemble + self._chroot

    @property
    def card(self) -> Path | None:
        """Of whoever started the cluster, with every right; None: no security."""
        return self._card("owner") if self._secured else None

    def _card(self, name: str) -> Path:
        return self.directory / "cards" / f"{name}.card"

    def _security(self, name: str, role: CardRole) -> dict[str, object]:
        """Flags of a daemon."""
        return {"--card": self._issued(name, role)} if self._secured else {"--security": "none"}

    def _issued(self, name: str, role: CardRole) -> Path:
        """The card of this name, made if there is none yet."""
        path, place = self._card(name), self.directory / "authority.json"
        if not path.exists():
            authority = Authority.load(place) if place.exists() else Authority.init(place)
            grants = [Grant(right, "*") for right in Right] if role is CardRole.CLIENT else []
            write_secret(path, authority.issue(name, role, grants))
        return path

    @property
    def metrics(self) -> dict[str, str]:
        """Where each host serves metrics, HOST:PORT by its name; empty if they don't."""
        return {name: daemon.option("--metrics") for name, daemon in self.hosts.items()} if self._metrics_port else {}

    @property
    def zookeeper_pid(self) -> int:
        """Process id of the ZooKeeper or coordinator started here, 0 if one was given."""
        return self._own_zookeeper.pid or 0 if self._own_zookeeper else 0

    @property
    def zookeeper_name(self) -> str:
        """What has the cluster's tree: "coordinator" or "ZooKeeper" started here, "given ZooKeeper"."""
        return self._kind.name if self._given is None else "given ZooKeeper"

    async def zookeeper_ended(self) -> str:
        """Return when the ZooKeeper or coordinator that was started here has ended by itself: how. Never, if one was given."""
        if self._own_zookeeper is None:
            await asyncio.get_running_loop().create_future()
        assert self._own_zookeeper is not None
        return await self._own_zookeeper.wait()

    # --- start ---------------------------------------------------------------------------------------------------------

    async def __aenter__(self) -> LocalCluster:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.stop()

    async def start(self) -> None:
        """Start everything; on any failure what was started is stopped again. Raises RoqError with the reason."""
        try:
            self._take_directory()
            if self._secured:
                use_card(self._issued("owner", CardRole.CLIENT))
            self._subnet = LoopbackSubnet()
            await self._start_zookeeper()
            for number in range(self._wanted_gcms):
                self.gcms[f"gcm-{number + 1}"] = self._gcm(number)
            for number in range(self._wanted_hosts):
                self.hosts[f"host-{number + 1}"] = self._host(number)
            await self._start_daemons()
            await self.settled(self._start_seconds)
            if self._elastic:
                await elastic.allow(self.zookeeper, self._elastic)
        except BaseException:
            await self.stop()
            raise

    def _take_directory(self) -> None:
        earlier = starter.read(self.directory)
        self._claim = starter.Claim(self.directory)
        for process in leftovers.end(earlier.token) if earlier else []:
            log.warning("ended what an earlier cluster left", extra={"fields": process._asdict()})
        self._claim.write(starter.StarterRecord(self._token))
        with (self.directory / "keeper.log").open("ab") as output:
            self._keeper = subprocess.Popen(
                [sys.executable, "-I", "-S", leftovers.__file__, self._token, str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=output,
                start_new_session=True,  # what kills the starter's process group shall not kill its keeper
            )

    async def _start_zookeeper(self) -> None:
        """Its address is known afterwards. A coordinator may not serve yet, but takes connections."""
        if self._given is None:
            self._refuse_other_tree()
            self._own_zookeeper = self._kind(self.environment(ZOOKEEPER))
            port = self._zookeeper_port
            port = port if port and port_free("127.0.0.1", port) else 0
            try:
                await self._own_zookeeper.begin(self.directory / self._kind.folder, port=port)
            except PortTaken:  # meanwhile
                if not port:
                    raise
                await self._own_zookeeper.begin(self.directory / self._kind.folder)
            self._ensemble = self._own_zookeeper.connect_string
            with contextlib.suppress(OSError):
                known_card(self.zookeeper).unlink(missing_ok=True)  # of a cluster that was killed
        assert self._claim is not None
        self._claim.write(starter.StarterRecord(self._token, self.zookeeper))

    def _refuse_other_tree(self) -> None:
        """A cluster that had its tree elsewhere would find none of its queues."""
        other, how = (LocalCoordinator, "without") if self._kind is LocalZooKeeper else (LocalZooKeeper, "with")
        if (self.directory / other.tree).exists():
            raise CallError(
                f"{self.directory} has an earlier cluster's tree in {other.folder}/: start it {how} --zookeeper {JAVA}, "
                "or take another directory"
            )

    async def _start_daemons(self) -> None:
        """All at once: hosts wait for the first GCM to lead, which makes the chroot. The first failure is the one reported."""
        try:
            async with asyncio.TaskGroup() as group:
                if self._own_zookeeper is not None:
                    group.create_task(self._own_zookeeper.ready())
                for daemon in self._daemons():
                    group.create_task(daemon.start(self._start_seconds))
        except BaseExceptionGroup as failed:
            raise failed.exceptions[0] from None

    def _daemons(self) -> list[Daemon]:
        return [*self.gcms.values(), *self.hosts.values()]

    def environment(self, process: str) -> dict[str, str]:
        """Of a process that belongs to this cluster and ends with it."""
        source = str(Path(__file__).resolve().parents[2])
        path = os.environ.get("PYTHONPATH", "")
        kept = {key: value for key, value in os.environ.items() if not key.startswith("ROQ_") or key in PASSED_ON}
        return {
            **kept,
            **leftovers.mark(self._token, process, self._origin),
            "PYTHONPATH": f"{source}{os.pathsep}{path}" if path else source,
            "PYTHONUNBUFFERED": "1",
        }

    def _gcm(self, number: int) -> Daemon:
        name = f"gcm-{number + 1}"
        assert self._subnet is not None
        flags = {
            "--zookeeper": self.zookeeper,
            "--address": self._subnet.address(FIRST_GCM + number),
            "--port": GCM_PORT,
            "--broadcast-port": GCM_BROADCAST_PORT,
            "--name": name,
            "--session-seconds": self._session_seconds,
            **self._security(name, CardRole.GCM),
        }
        if self._elastic:
            authority = self.directory / "authority.json" if self._secured else None
            flags["--fleet"] = elastic.fleet_file(self.directory, self._exchanges_max, authority)
        return self._daemon("gcm", name, flags)

    def _host(self, number: int) -> Daemon:
        name = f"host-{number + 1}"
        assert self._subnet is not None
        flags = {
            "--zookeeper": self.zookeeper,
            "--host": name,
            **self._security(name, CardRole.HOST),
            "--address": self._subnet.address(FIRST_HOST + number),
            "--state-dir": self.directory / name,
            "--port": HCM_PORT,
            "--port-base": HCM_PORT_BASE,
            "--exchanges-max": self._exchanges_max,
            "--session-seconds": self._session_seconds,
        }
        if self._metrics_port:
            flags["--metrics"] = f"{flags['--address']}:{self._metrics_port}"
        (self.directory / name).mkdir(parents=True, exist_ok=True)
        return self._daemon("hcm", name, flags)

    def _daemon(self, module: str, name: str, flags: dict[str, object]) -> Daemon:
        arguments = [str(part) for pair in flags.items() for part in pair]
        command = [sys.executable, "-m", module, *arguments]
        return Daemon(name, command, self.directory / f"{name}.log", self.environment(name))

    async def settled(self, timeout_seconds: float) -> None:
        """Returns when a leader answers and sees every running host alive; raises DeadlineExceeded."""
        expected = {name for name, daemon in self.hosts.items() if daemon.running}
        problem = "no GCM answered"
        try:
            async with asyncio.timeout(timeout_seconds), connect(self.zookeeper) as cluster:
                for delay in delays(0.02, 0.2):
                    try:
                        view = await cluster.view()
                    except TemporaryError as error:
                        problem = str(error)
                    else:
                        missing = expected - {host.host for host in view.hosts if host.alive}
                        if not missing:
                            return
                        problem = f"the leader does not see {', '.join(sorted(missing))}"
                    self._check_alive()
                    await asyncio.sleep(delay)
        except TimeoutError:
            raise DeadlineExceeded(f"the cluster is not ready after {timeout_seconds:g} s: {problem}") from None

    def _check_alive(self) -> None:
        for daemon in self._daemons():
            if daemon.failed:
                raise ProcessFailed(daemon.exit_reason())

    # --- one daemon at a time (tests) -----------------------------------------------------------------------------------

    async def kill_gcm(self, name: str) -> None:
        """SIGKILL one GCM."""
        await self._named(self.gcms, name).kill()

    async def start_gcm(self, name: str) -> None:
        """Start a GCM that was killed again, at the same address."""
        await self._named(self.gcms, name).start(self._start_seconds)

    async def kill_hcm(self, name: str) -> None:
        """SIGKILL one HCM; the processes of its host go on."""
        await self._named(self.hosts, name).kill()

    async def start_hcm(self, name: str) -> None:
        """Start an HCM that was killed again, at the same address; it adopts what runs."""
        await self._named(self.hosts, name).start(self._start_seconds)

    async def lose_host(self, name: str) -> None:
        """SIGKILL an HCM and every process of its host, as a power cut would."""
        await self._named(self.hosts, name).kill()
        for process in leftovers.find(self._token):
            if process.owner == name:
                leftovers.kill(process, self._token)

    async def stop_host(self, name: str) -> None:
        """Stop one host cleanly, its processes included."""
        await self._stop_host(self._named(self.hosts, name))

    async def add_host(self) -> str:
        """One more host; its name."""
        number = len(self.hosts)
        if number >= HOSTS_MAX:
            raise CallError(f"a local cluster has at most {HOSTS_MAX} hosts")
        daemon = self._host(number)
        self.hosts[daemon.name] = daemon
        await daemon.start(self._start_seconds)
        return daemon.name

    def processes(self) -> list[Leftover]:
        """Every live process of this cluster except ZooKeeper or the coordinator."""
        return [process for process in leftovers.find(self._token) if process.owner != ZOOKEEPER]

    @staticmethod
    def _named(daemons: dict[str, Daemon], name: str) -> Daemon:
        try:
            return daemons[name]
        except KeyError:
            raise HostNotFound(f"this local cluster has {', '.join(daemons)}, not {name}") from None

    # --- stop ----------------------------------------------------------------------------------------------------------

    async def stop(self) -> list[Leftover]:
        """Stop hosts, GCMs, ZooKeeper, in this order and each within a bound; kill what is left, and tell it."""
        stopping = asyncio.ensure_future(self._stop())
        try:
            return await asyncio.shield(stopping)
        except asyncio.CancelledError:
            await stopping  # bounded: a cancelled caller still leaves nothing behind
            raise

    async def _stop(self) -> list[Leftover]:
        await asyncio.gather(*(self._stop_host(daemon) for daemon in self.hosts.values()))
        await asyncio.gather(*(daemon.terminate(GCM_STOP_SECONDS) for daemon in self.gcms.values()))
        if self._elastic:
            await elastic.stop(self._token)
        self.leftovers = self.processes()
        for process in self.leftovers:
            log.warning("killing what did not stop by itself", extra={"fields": process._asdict()})
            leftovers.kill(process, self._token)
        for daemon in [*self.hosts.values(), *self.gcms.values()]:
            await daemon.wait(GCM_STOP_SECONDS)
        if self._own_zookeeper is not None:
            await self._own_zookeeper.stop()
            self._own_zookeeper = None
        if self._secured:
            drop_card()
        if self._subnet is not None:
            self._subnet.close()
            self._subnet = None
        if self._keeper is not None:
            self._keeper.kill()
            self._keeper.wait()
            self._keeper = None
        if self._claim is not None:
            self._claim.close()
            self._claim = None
        return self.leftovers

    async def _stop_host(self, daemon: Daemon) -> None:
        if not daemon.running:
            return
        daemon.dismiss()
        address, port = daemon.option("--address"), int(daemon.option("--port"))
        client = RpcClient(f"tcp://{address}:{port}", hcm_wire.Reply)
        try:
            with contextlib.suppress(RoqError):  # one that does not answer is ended below
                await client.request(hcm_wire.ShutdownHost("local cluster stops"), hcm_wire.OrderTaken, HOST_STOP_SECONDS)
        finally:
            client.close()
        if not await daemon.wait(HOST_STOP_SECONDS):
            log.warning("host did not stop in time", extra={"fields": {"host": daemon.name}})
            await daemon.kill()
