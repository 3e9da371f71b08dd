"""A real ZooKeeper that tells what it did, real GCM processes, and programs with simulated hosts."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from time import monotonic

import msgspec
import psutil

from benchmarks.at_scale.decisions import cluster_of
from roq.coordination import paths
from roq.coordination.link import Create
from roq.coordination.locate import GcmClient, read_leader
from roq.coordination.parts import read_hosts
from roq.coordination.session import Session
from roq.errors import DeadlineExceeded, TemporaryError
from roq.tools.local.daemon import Daemon
from roq.tools.local.zookeeper import LocalZooKeeper
from roq.wire.assignment import to_json

Tell = Callable[[str], None]
READY_SECONDS = 120.0
HOSTS_IN_PROGRAM = 500  # each has a thread of kazoo's
ANSWER_SECONDS = 10.0
LOOK_SECONDS = 0.01
JVM_MEMORY = "-Xmx1g"
PLANTING_SECONDS, RECORDS_AT_ONCE = 30.0, 200
MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None  # ZooKeeper's files: what else the disk does is not measured
WORDS = "4lw.commands.whitelist="


class ZooKeeperCounters(msgspec.Struct, frozen=True):
    """requests: packets that came, pings and new sessions included. writes: transactions, of which a multi is one; beginnings
    and ends of sessions included. data_bytes: of all nodes, about."""

    requests: int
    writes: int
    watches: int
    nodes: int
    data_bytes: int
    sessions: int

    def since(self, before: ZooKeeperCounters) -> tuple[int, int]:
        """Requests and writes."""
        return self.requests - before.requests, self.writes - before.writes


class ProcessUse(msgspec.Struct, frozen=True):
    """Of one process, so far."""

    cpu_seconds: float
    resident_bytes: int


class MeteredZooKeeper(LocalZooKeeper):
    """Also answers `mntr`, and has memory for a large tree."""

    def _command(self) -> list[str]:
        command = [JVM_MEMORY if part.startswith("-Xmx") else part for part in super()._command()]
        configuration = Path(self.argument(self._data_dir))
        configuration.write_text(configuration.read_text().replace(WORDS, f"{WORDS}mntr,"))
        return command

    async def counters(self) -> ZooKeeperCounters:
        """As of now. Raises OSError."""
        told = dict(line.split("\t", 1) for line in (await self._word(b"mntr")).splitlines() if "\t" in line)
        zxid = re.search(r"^Zxid: 0x([0-9a-f]+)$", await self._word(b"srvr"), re.MULTILINE)
        assert zxid is not None, "srvr tells the zxid"

        def count(name: str) -> int:
            return int(float(told[f"zk_{name}"]))

        return ZooKeeperCounters(
            count("packets_received"),
            int(zxid[1], 16),
            count("watch_count"),
            count("znode_count"),
            count("approximate_data_size"),
            count("num_alive_connections"),
        )

    async def _word(self, word: bytes) -> str:
        reader, writer = await asyncio.open_connection(*self.connect_string.split(":"))
        try:
            writer.write(word)
            return (await reader.read()).decode()
        finally:
            writer.close()


class ScaleRig:
    """Made by `scale_rig`. client: asks whoever leads."""

    def __init__(self, directory: Path, zookeeper: MeteredZooKeeper, exchanges_max: int, session_seconds: float) -> None:
        self.zookeeper, self.session_seconds = zookeeper, session_seconds
        self._exchanges_max = exchanges_max
        self.address = f"{zookeeper.connect_string}/RoQ"
        self.client = GcmClient(self.address)
        self.gcms: dict[str, Daemon] = {}
        self.hosts: dict[str, Daemon] = {}
        self._directory = directory

    async def start_gcm(self, name: str) -> None:
        """Returns when it takes part in the election. Raises ProcessFailed, DeadlineExceeded."""
        where = ("--zookeeper", self.address, "--name", name, "--session-seconds", f"{self.session_seconds:g}")
        self.gcms[name] = self._daemon(name, "gcm", *where, "--security", "none", "--log-format", "json")
        await self.gcms[name].start(READY_SECONDS)

    async def restart_zookeeper(self, seconds: float) -> None:
        """It is away for so long. Raises ProcessFailed."""
        port = self.zookeeper.port
        os.killpg(self.zookeeper.pid, signal.SIGKILL)
        await self.zookeeper.stop()
        await asyncio.sleep(seconds)
        await self.zookeeper.start(self._directory / "zookeeper", port=port)

    async def start_hosts(self, name: str, first: int, count: int) -> None:
        """A program with hosts `host-<first>` and on, which live and die with it. Raises ProcessFailed, DeadlineExceeded."""
        where = ("--zookeeper", self.address, "--first", str(first), "--count", str(count))
        how = ("--exchanges-max", str(self._exchanges_max), "--session-seconds", f"{self.session_seconds:g}")
        self.hosts[name] = self._daemon(name, "benchmarks.at_scale.hosts", *where, *how)
        await self.hosts[name].start(READY_SECONDS)

    def _daemon(self, name: str, module: str, *flags: str) -> Daemon:
        command = [sys.executable, "-m", module, *flags]
        return Daemon(name, command, self._directory / f"{name}.log", os.environ)

    async def leader(self) -> Daemon:
        """The GCM that leads, as ZooKeeper says. Raises TemporaryError."""
        found = await read_leader(self.address)
        return next(gcm for gcm in self.gcms.values() if gcm.running and gcm.ready["port"] == found.port)

    async def use(self, daemon: Daemon) -> ProcessUse:
        """Of its process."""
        process = psutil.Process(daemon.pid)
        times = process.cpu_times()
        return ProcessUse(times.user + times.system, process.memory_info().rss)

    async def alive(self) -> int:
        """Hosts that the leader sees. Raises TemporaryError."""
        return sum(host.alive for host in await read_hosts(self.client, ANSWER_SECONDS))

    async def until_alive(self, count: int) -> None:
        """Raises DeadlineExceeded."""

        async def seen() -> bool:
            return await self.alive() == count

        await until(seen, READY_SECONDS)

    async def close(self) -> None:
        """End all of it."""
        self.client.close()
        await asyncio.gather(*(daemon.kill() for daemon in (*self.hosts.values(), *self.gcms.values())))


async def until(look: Callable[[], Awaitable[bool]], timeout_seconds: float) -> float:
    """Seconds until it says so; what it raises of TemporaryError means "not yet". Raises DeadlineExceeded."""
    begun, why = monotonic(), "no"
    while monotonic() - begun < timeout_seconds:
        try:
            if await look():
                return monotonic() - begun
            why = "no"
        except TemporaryError as error:
            why = str(error)
        await asyncio.sleep(LOOK_SECONDS)
    raise DeadlineExceeded(f"not so after {timeout_seconds:g} s: {why}")


async def plant(zookeeper: str, hosts: int, queues: int) -> None:
    """A tree as leaders before have left it: so many queues, evenly on the hosts, which are still away."""
    cluster = cluster_of(hosts, queues)
    records = [Create(paths.queue(name), to_json(record)) for name, record in cluster.queues.items()]
    parts = [records[first : first + RECORDS_AT_ONCE] for first in range(0, len(records), RECORDS_AT_ONCE)]
    for host in cluster.hosts.values():
        assignment = Create(paths.assignment(host.name), to_json(host.assignment(0)))
        parts.append([Create(paths.host_state(host.name)), assignment])
    session = await Session.connect(zookeeper, PLANTING_SECONDS)
    try:
        for path in paths.SKELETON:
            await session.ensure_path(path)
        for part in parts:
            await session.multi(part)
    finally:
        await session.close()


@contextlib.asynccontextmanager
async def scale_rig(hosts: int, queues: int, exchanges_max: int, session_seconds: float) -> AsyncIterator[ScaleRig]:
    """Two GCMs, of which one leads, sees all hosts, and finds so many queues. The last host is alone in its program, "last"."""
    with tempfile.TemporaryDirectory(prefix="roq-at-scale-", dir=MEMORY) as name:
        directory, zookeeper = Path(name), MeteredZooKeeper()
        await zookeeper.start(directory / "zookeeper")
        rig = ScaleRig(directory, zookeeper, exchanges_max, session_seconds)
        try:
            await plant(rig.address, hosts, queues)
            for number in (1, 2):
                await rig.start_gcm(f"gcm-{number}")
            parts = range(1, hosts, HOSTS_IN_PROGRAM)
            starts = (rig.start_hosts(f"hosts-{one}", one, min(HOSTS_IN_PROGRAM, hosts - one)) for one in parts)
            await asyncio.gather(*starts, rig.start_hosts("last", hosts, 1))
            await rig.until_alive(hosts)
            yield rig
        finally:
            await rig.close()
            await zookeeper.stop()
